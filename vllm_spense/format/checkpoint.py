"""Checkpoint folders: ordinary Hugging Face folders whose linear layers are planes.

Reading checks every header before any tensor is used (writing: `writer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_spense.format.experts import check_mlps
from vllm_spense.format.partition import Partition
from vllm_spense.format.planes import TensorSpec, specs, verify_contents, verify_specs
from vllm_spense.format.schema import SpenseQuantization
from vllm_spense.format.shards import read_headers, read_json
from vllm_spense.format.writer import INTERMEDIATE_ORDER, CheckpointWriter

__all__ = ["INTERMEDIATE_ORDER", "Checkpoint", "CheckpointWriter"]


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
        check_mlps(self._modules, config)

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
