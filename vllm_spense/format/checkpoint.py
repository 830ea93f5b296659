"""Checkpoint folders: ordinary Hugging Face folders whose linear layers are planes.

Reading checks every header before any tensor is used; writing goes to `OUT.partial` and ends with
one rename, so that a half-written folder is never taken for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_spense.format.partition import Partition
from vllm_spense.format.planes import TensorSpec, specs, verify_contents, verify_specs
from vllm_spense.format.schema import SpenseQuantization
from vllm_spense.format.shards import INDEX, SINGLE, read_headers, read_json

__all__ = ["INTERMEDIATE_ORDER", "Checkpoint", "CheckpointWriter"]

INTERMEDIATE_ORDER = "spense/intermediate_order.safetensors"
_SIDE_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json",
               "added_tokens.json", "generation_config.json", "chat_template*", "preprocessor*",
               "processor_config.json")  # fmt: skip


class Checkpoint:
    """A spense checkpoint on disk, its headers checked."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        quantization: SpenseQuantization,
        headers: dict[str, tuple[str, TensorSpec]],
    ) -> None:
        self.folder = folder
        self.config = config
        self.quantization = quantization
        self._headers = headers
        self._modules = _modules(quantization, headers)

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config and headers.

        Raises:
            ValueError: naming the file, tensor or key that is wrong.
        """
        folder = Path(folder)
        config = read_json(folder / "config.json")
        if not isinstance(config.get("quantization_config"), dict):
            raise ValueError(
                f"{folder / 'config.json'} has no 'quantization_config': not pruned yet?"
            )
        quantization = SpenseQuantization.parse(config["quantization_config"])
        return cls(folder, config, quantization, read_headers(folder))

    @property
    def modules(self) -> dict[str, tuple[Partition, tuple[int, int]]]:
        """Module name → partition and shape (N, K)."""
        return self._modules

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._headers)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        if name not in self._headers:
            raise ValueError(f"{self.folder} holds no tensor {name}")
        with safe_open(self.folder / self._headers[name][0], framework="pt") as shard:
            return shard.get_tensor(name)

    def planes(self, module: str) -> dict[str, Tensor]:
        """Plane name → tensor of one module (without its bias and input scale)."""
        partition, shape = self._modules[module]
        return {
            plane: self.tensor(f"{module}.{plane}")
            for plane in specs(partition, shape, self.quantization.dtype)
        }

    def others(self) -> Iterator[str]:
        """Names of tensors that are no planes: norms, embeddings, biases, ignored modules."""
        planes = {
            f"{module}.{plane}"
            for module, (partition, shape) in self._modules.items()
            for plane in specs(partition, shape, self.quantization.dtype)
        }
        return (name for name in self._headers if name not in planes)

    def verify(self, progress: Callable[[str], None] = lambda module: None) -> None:
        """Check the numbers of every plane; `progress` is called with each module."""
        for module in self._modules:
            progress(module)
            self.verified_planes(module)

    def verified_planes(self, module: str) -> dict[str, Tensor]:
        """`planes`, refused if a number in them is not valid."""
        planes, (partition, _) = self.planes(module), self._modules[module]
        for plane, tensor in planes.items():
            verify_contents(plane, tensor, module, partition)
        return planes


_PLANES = ("weight_values", "weight_meta", "weight_dense", "weight_scale", "weight_values_scale",
           "weight_dense_scale", "weight", "weight_tiles", "weight_tile_index",
           "weight_tiles_scale")  # fmt: skip


def _modules(
    quantization: SpenseQuantization, headers: Mapping[str, tuple[str, TensorSpec]]
) -> dict[str, tuple[Partition, tuple[int, int]]]:
    """Group headers by module and compare them with what the config says."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for name, (_, spec) in headers.items():
        module, _, plane = name.rpartition(".")
        if plane in _PLANES:
            found.setdefault(module, {})[plane] = spec
    modules = {}
    for module, planes in found.items():
        partition = _partition(quantization, module, planes)
        if partition is not None:
            shape = _shape(partition, planes, module)
            verify_specs(planes, _specs(partition, shape, quantization.dtype, module), module)
            modules[module] = (partition, shape)
    for group in quantization.groups.values():
        for target in group.targets:
            if not target.startswith("re:") and target not in modules:
                raise ValueError(f"{target} is named in quantization_config but has no tensors")
    return modules


def _specs(
    partition: Partition, shape: tuple[int, int], dtype: torch.dtype, module: str
) -> dict[str, TensorSpec]:
    try:
        return specs(partition, shape, dtype)
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from None


def _partition(
    quantization: SpenseQuantization, module: str, planes: Mapping[str, TensorSpec]
) -> Partition | None:
    """Norms and embeddings have a `weight` too: only what the config names is a linear layer."""
    if set(planes) == {"weight"} and not quantization.names(module):
        return None
    return quantization.partition_of(module)


def _shape(partition: Partition, planes: Mapping[str, TensorSpec], module: str) -> tuple[int, int]:
    """(N, K): the split dimension from the config, the other from any plane."""
    factors = {"weight_values": 2, "weight_meta": 8, "weight_dense": 1, "weight": 1}
    for plane, factor in factors.items():
        if plane in planes and len(planes[plane].shape) == 2:
            rows, cols = planes[plane].shape
            if partition.split == "output":
                return partition.total, cols * factor
            return rows, partition.total
    tiles = partition.tiles
    if tiles and "weight_tiles" in planes and len(planes["weight_tiles"].shape) == 2:
        if partition.split == "output":
            return partition.total, tiles.columns
        return planes["weight_tiles"].shape[0], partition.total
    raise ValueError(f"{module} has no weight plane; found: {sorted(planes)}")


class CheckpointWriter:
    """Streams tensors into shards under `OUT.partial`; `finish` makes it a checkpoint."""

    def __init__(self, out: Path | str, max_shard_bytes: int = 5 << 30) -> None:
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        if self.out.exists():
            raise ValueError(f"{self.out} exists; choose another output folder or remove it")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, dict[str, int]]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Append tensors (full names). A name that comes twice is an error."""
        for name, tensor in tensors.items():
            if name in self._pending or any(name in sizes for _, sizes in self._shards):
                raise ValueError(f"{name} was written twice")
            if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous()
            self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}"
        _save(self._pending, self.partial / name)
        self._shards.append((name, {key: t.nbytes for key, t in self._pending.items()}))
        self._pending, self._pending_bytes = {}, 0

    def finish(
        self,
        config: Mapping[str, Any],
        quantization: SpenseQuantization | dict[str, Any] | None,
        copy_from: Path | str | None = None,
        intermediate_order: Mapping[str, Tensor] | None = None,
        extra_files: Mapping[str, str] | None = None,
    ) -> Path:
        """Write index, config and side files, then rename to `out`.

        Args:
            config: the model's config.json; its `quantization_config` is replaced (or dropped if
                None).
            copy_from: folder whose tokenizer, chat template and generation files are copied.
            intermediate_order: MLP module → int32 [intermediate]: original index of each channel.
            extra_files: path inside the folder → text.
        """
        self._flush()
        self._name_shards()
        config = {k: v for k, v in config.items() if k != "quantization_config"}
        if quantization is not None:
            is_ours = isinstance(quantization, SpenseQuantization)
            config["quantization_config"] = quantization.to_dict() if is_ours else quantization
        if copy_from is not None:
            _copy_side_files(Path(copy_from), self.partial)
        if intermediate_order:
            path = self.partial / INTERMEDIATE_ORDER
            path.parent.mkdir(exist_ok=True)
            _save({k: v.to(torch.int32).contiguous() for k, v in intermediate_order.items()}, path)
        for name, text in {
            "config.json": json.dumps(config, indent=2) + "\n",
            **(extra_files or {}),
        }.items():
            (self.partial / name).parent.mkdir(parents=True, exist_ok=True)
            (self.partial / name).write_text(text)
        if self.out.exists():
            raise ValueError(
                f"{self.out} appeared while the checkpoint was written; it was not touched"
            )
        os.replace(self.partial, self.out)
        return self.out

    def _name_shards(self) -> None:
        total = len(self._shards)
        if total == 1:
            (self.partial / self._shards[0][0]).rename(self.partial / SINGLE)
            return
        weight_map, size = {}, 0
        for i, (temporary, sizes) in enumerate(self._shards, 1):
            name = f"model-{i:05d}-of-{total:05d}.safetensors"
            (self.partial / temporary).rename(self.partial / name)
            weight_map |= dict.fromkeys(sizes, name)
            size += sum(sizes.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors makes files that only their owner can read; a checkpoint follows the umask."""
    save_file(tensors, path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _copy_side_files(source: Path, target: Path) -> None:
    for pattern in _SIDE_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
