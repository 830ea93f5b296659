"""Folders of 2:4 checkpoints that compressed-tensors wrote: their headers checked, and converted.

Which tensors belong to linear layers is not written down anywhere: a type such as "Linear" in the
config means the layers inside numbered blocks (`model.layers.3.…`); embeddings and heads stand
outside and stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_spense.format.checkpoint import CheckpointWriter
from vllm_spense.format.fp8 import FP8
from vllm_spense.format.legacy import METHOD, LegacyQuantization, Stored, claims
from vllm_spense.format.legacy_planes import to_planes
from vllm_spense.format.partition import META_GROUP, Partition, RegionKind
from vllm_spense.format.planes import (
    WEIGHT_DTYPES,
    TensorSpec,
    decode,
    verify,
    verify_specs,
)
from vllm_spense.format.schema import make_quantization
from vllm_spense.format.shards import read_headers, read_json

__all__ = ["Conversion", "LegacyCheckpoint", "convert_legacy", "legacy_config"]

_DROPPED = {"shape", "input_scale"}  # told by other tensors; not needed with dynamic scales
_WEIGHTS = {"weight", "compressed", "bitmask"}
_QUANTIZED = {*_WEIGHTS, "weight_scale", *_DROPPED}
_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class LegacyModule:
    """A linear layer of the checkpoint: how it is stored, [N, K], and the dtype of its weight."""

    stored: Stored
    shape: tuple[int, int]
    dtype: torch.dtype


def legacy_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The compressed-tensors dict of a config.json, where vLLM looks for it too; or None."""
    for holder in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), Mapping):
                return holder[key]
    return None


class LegacyCheckpoint:
    """A folder with its config and headers read and compared."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        quantization: LegacyQuantization,
        headers: dict[str, tuple[str, TensorSpec]],
    ) -> None:
        self.folder = folder
        self.config = config
        self.quantization = quantization
        self._headers = headers
        self.modules = _modules(quantization, headers)

    @classmethod
    def open(cls, folder: Path | str) -> LegacyCheckpoint:
        """Read config and headers.

        Raises:
            ValueError: naming the file, tensor or key that is wrong or cannot be read.
        """
        folder = Path(folder)
        config = read_json(folder / "config.json")
        described = legacy_config(config)
        if not claims(described):
            raise ValueError(
                f"{folder / 'config.json'} describes no 2:4 checkpoint: needed is a "
                f"'quantization_config' of {METHOD} with a 'sparsity_config'"
            )
        return cls(folder, config, LegacyQuantization.parse(described), read_headers(folder))

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with safe_open(self.folder / self._headers[name][0], framework="pt") as shard:
            return shard.get_tensor(name)

    def weights(self, module: str) -> dict[str, Tensor]:
        """The tensors that carry one module's weight, and its scale."""
        names = [*self.modules[module].stored.specs(0, 0, FP8), "weight_scale"]
        return {n: self.tensor(f"{module}.{n}") for n in names if f"{module}.{n}" in self._headers}

    def others(self) -> Iterator[str]:
        """Names of tensors that belong to no linear layer, and of biases."""
        for name in self._headers:
            module, _, kind = name.rpartition(".")
            if module not in self.modules or kind not in _QUANTIZED:
                yield name

    def kept(self) -> list[str]:
        """Modules with a matrix that are no linear layers here: embeddings, heads."""
        return [
            name.removesuffix(".weight") for name in self.others()
            if name.endswith(".weight") and len(self._headers[name][1].shape) > 1
        ]  # fmt: skip


def _modules(
    quantization: LegacyQuantization, headers: Mapping[str, tuple[str, TensorSpec]]
) -> dict[str, LegacyModule]:
    grouped: dict[str, dict[str, TensorSpec]] = {}
    for name, (_, spec) in headers.items():
        module, _, kind = name.rpartition(".")
        grouped.setdefault(module, {})[kind] = spec
    modules = {}
    for name, tensors in grouped.items():
        if _is_linear(name, tensors):
            modules[name] = _module(quantization, name, tensors)
    return modules


def _is_linear(name: str, tensors: Mapping[str, TensorSpec]) -> bool:
    weight = tensors.get("weight")
    matrix = weight is not None and len(weight.shape) == 2
    inside = bool(_BLOCK.search(name))
    if inside:
        return matrix or "compressed" in tensors
    if "compressed" in tensors or "weight_scale" in tensors:
        raise ValueError(
            f"{name} is compressed but stands outside the numbered blocks; only linear layers "
            "inside them can be served"
        )
    return False


def _module(
    quantization: LegacyQuantization, name: str, tensors: Mapping[str, TensorSpec]
) -> LegacyModule:
    """Compare the tensors of one module with what the config says."""
    stored = quantization.stored_as(name)
    unknown = tensors.keys() - _QUANTIZED - {"bias"}
    if unknown and stored != Stored():
        raise ValueError(f"{name}.{min(unknown)} is not expected in a 2:4 FP8, BF16 or FP16 layer")
    if stored.bitmask != ("compressed" in tensors):
        says = "is" if stored.bitmask else "is not"
        raise ValueError(
            f"{name}: quantization_config says that it {says} stored as compressed and bitmask, "
            f"the file holds {sorted(tensors)}"
        )
    carrier = tensors["compressed" if stored.bitmask else "weight"]
    rows, cols = carrier.shape if len(carrier.shape) == 2 else (0, 0)
    cols *= 2 if stored.bitmask else 1
    if stored.bitmask and cols % META_GROUP:
        raise ValueError(f"{name}: {cols} columns; needed: a multiple of {META_GROUP}")
    dtype = FP8 if stored.scale else carrier.dtype
    weights = {kind: spec for kind, spec in tensors.items() if kind in _WEIGHTS}
    verify_specs(weights, stored.specs(rows, cols, dtype), name)
    if dtype not in WEIGHT_DTYPES.values() or (dtype == FP8) != bool(stored.scale):
        raise ValueError(
            f"{name}: its weight is {carrier}; needed: bfloat16 or float16, or float8_e4m3fn with "
            "a group in config_groups"
        )
    if stored.scale and "weight_scale" not in tensors:
        raise ValueError(f"{name}.weight_scale is missing; needed: [{rows}, 1] or [1]")
    return LegacyModule(stored, (rows, cols), dtype)


@dataclass
class Conversion:
    """What a conversion found and did."""

    out: Path
    sparse: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_legacy(
    folder: Path | str, out: Path | str, progress: Callable[[str], None] = lambda name: None
) -> Conversion:
    """Write a legacy checkpoint as a spense one, module by module; the numbers stay what they are.

    Args:
        progress: called with the name of every linear layer.

    Raises:
        ValueError: `out` exists, or the checkpoint cannot be read or is not valid.
    """
    checkpoint = LegacyCheckpoint.open(folder)
    dtype = _common_dtype(checkpoint)
    regions = _stored_as_regions(checkpoint, dtype)
    writer = CheckpointWriter(out)
    done = Conversion(Path(out), kept=checkpoint.kept())
    if checkpoint.quantization.static:
        done.warnings.append("activations: static scales dropped; they become dynamic by token")
    for name in checkpoint.others():
        writer.add({name: checkpoint.tensor(name)})
    partitions: dict[str, Partition] = {}
    for name in checkpoint.modules:
        progress(name)
        partition, planes = _convert(checkpoint, name, name in regions, done)
        if name in regions:
            partitions[name] = partition
        writer.add({f"{name}.{plane}": tensor for plane, tensor in planes.items()})
    ignore = sorted({*done.kept, "lm_head"})
    quantization = make_quantization(dtype, partitions, ignore, _provenance(checkpoint))
    writer.finish(_without_quantization(checkpoint.config), quantization, copy_from=folder)
    return done


def _convert(
    checkpoint: LegacyCheckpoint, name: str, as_region: bool, done: Conversion
) -> tuple[Partition, dict[str, Tensor]]:
    """One module's partition and tensors, noted in `done`."""
    module = checkpoint.modules[name]
    partition, planes, reason = to_planes(checkpoint.weights(name), module.stored.sparse, name)
    verify(planes, partition, module.shape, module.dtype, name)
    if not as_region:
        if module.stored.sparse:
            done.warnings.append(f"{name}: {module.dtype} in an FP8 model; kept dense")
        done.kept.append(name)
        return partition, {"weight": decode(planes, partition, module.dtype)}
    is_sparse = partition.single is RegionKind.SPARSE_24
    (done.sparse if is_sparse else done.dense).append(name)
    if reason:
        done.warnings.append(f"{name}: announced as 2:4, stored dense: {reason}")
    return partition, planes


def _common_dtype(checkpoint: LegacyCheckpoint) -> torch.dtype:
    """The weight dtype of the result: FP8 if anything is, else that of the layers."""
    dtypes = {module.dtype for module in checkpoint.modules.values()}
    if FP8 in dtypes:
        return FP8
    if len(dtypes) != 1:
        names = sorted(str(dtype) for dtype in dtypes)
        raise ValueError(f"{checkpoint.folder}: linear layers in {names}; needed: one dtype")
    return dtypes.pop()


def _stored_as_regions(checkpoint: LegacyCheckpoint, dtype: torch.dtype) -> set[str]:
    """Modules that become regions: pruned or quantised ones, and what vLLM may fuse with them."""
    described = {
        name for name, module in checkpoint.modules.items()
        if module.dtype == dtype and module.stored != Stored()
    }  # fmt: skip
    parents = {name.rpartition(".")[0] for name in described}
    return described | {
        name for name, module in checkpoint.modules.items()
        if module.dtype == dtype and name.rpartition(".")[0] in parents
    }  # fmt: skip


def _provenance(checkpoint: LegacyCheckpoint) -> dict[str, Any]:
    quantization = checkpoint.quantization
    return {
        "converted_from": METHOD,
        "compressed_tensors_version": quantization.version,
        "sparsity_format": quantization.sparsity_config.format,
        "static_activations_dropped": quantization.static,
    }


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("quantization_config", "compression_config")
    config = {key: value for key, value in config.items() if key not in keys}
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k not in keys}
    return config
