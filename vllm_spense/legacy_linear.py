"""The linear method for legacy 2:4 checkpoints: their tensors in, our planes out.

The tensors of `format/legacy.py` are all proportional to N and K, so that vLLM's loaders divide
them as they divide planes. After loading, this rank's part is turned into planes and handed to
`SpenseLinearMethod`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ReplicatedLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import BasevLLMParameter

from vllm_spense import compat
from vllm_spense.format.fp8 import FP8
from vllm_spense.format.legacy import Stored
from vllm_spense.format.legacy_planes import channel_scale, to_planes
from vllm_spense.format.partition import META_GROUP, Partition, RegionKind
from vllm_spense.fused import FusedLayer
from vllm_spense.linear import SpenseLinearMethod
from vllm_spense.log import debug, warn_once
from vllm_spense.parameters import PlaneParameter, poisoned

__all__ = ["LegacyLinearMethod"]

_SCALE = "weight_scale"


class LegacyParameter(PlaneParameter):
    """A tensor of a legacy layer. `one_scale`: the checkpoint has one scale for a whole module."""

    def __init__(self, *, one_scale: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.one_scale = one_scale

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        super().load_row_parallel_weight(self._converted(loaded_weight, len(self.data)))

    def _load_shard(self, loaded: Tensor, shard: int, rank: int, parts: int) -> None:
        rows = self.shard_rows[shard] * parts
        super()._load_shard(self._converted(loaded, rows), shard, rank, parts)

    def _converted(self, loaded: Tensor, rows: int) -> Tensor:
        """Floats in the dtype that is served, as vLLM loads dense weights; FP8 stays as it is."""
        if self.one_scale and loaded.numel() == 1:
            loaded = channel_scale(loaded, rows, self.plane_name.removesuffix(f".{_SCALE}"))
        floats = loaded.is_floating_point() and self.data.is_floating_point()
        return (
            loaded.to(self.data.dtype)
            if floats and FP8 not in (loaded.dtype, self.dtype)
            else loaded
        )

    def load_whole(self, loaded: Tensor) -> None:
        """Load a module that every rank has whole."""
        self._load_shard(loaded, 0, 0, 1)


class UnusedParameter(BasevLLMParameter):
    """Takes a tensor that the checkpoint has and serving does not need."""

    def _drop(self, loaded_weight: Tensor, **kwargs: Any) -> None:
        """Other tensors say the same (`shape`), or it has no use (`input_scale`)."""

    load_column_parallel_weight = load_row_parallel_weight = _drop
    load_merged_column_weight = load_qkv_weight = load_whole = _drop


def load_whole(parameter: LegacyParameter | UnusedParameter, loaded: Tensor) -> None:
    """The weight loader of layers that are not divided."""
    parameter.load_whole(loaded)


@register_weight_loader_v2_supported_method
class LegacyLinearMethod(SpenseLinearMethod):
    """Serves one (possibly fused) linear layer of a legacy checkpoint."""

    def __init__(self, modules: tuple[str, ...], stored: tuple[Stored, ...]) -> None:
        scaled = [bool(module.scale) for module in stored]
        if any(scaled) and not all(scaled):
            plain = [m for m, is_scaled in zip(modules, scaled, strict=True) if not is_scaled]
            raise ValueError(
                f"{plain} are not quantised but the rest of the fused layer is; expected are "
                "layers that are fused to be stored alike"
            )
        super().__init__(modules, (), FP8 if scaled[0] else torch.float32)
        self._stored = stored
        self._names: list[str] = []

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the tensors of this rank, poisoned until they are loaded."""
        if len(output_partition_sizes) != len(self._modules):
            raise ValueError(
                f"{self._modules[0]} is stored fused, as {len(output_partition_sizes)} projections "
                "in one; legacy checkpoints of such models cannot be served"
            )
        if not self._stored[0].scale:
            self._weight_dtype = params_dtype  # as vLLM does with dense weights
        self._rows, self._cols = tuple(output_partition_sizes), input_size_per_partition
        self._check_columns(input_size)
        self._dtype = params_dtype
        self._dummy = compat.dummy_weights()
        self._vllm_config = get_current_vllm_config()
        self._fused = self._backend = None
        self._register(layer, extra_weight_attrs["weight_loader"])

    def _check_columns(self, input_size: int) -> None:
        bitmask = any(stored.bitmask for stored in self._stored)
        if bitmask and self._cols % META_GROUP:
            possible = [n for n in range(1, 65) if input_size % (n * META_GROUP) == 0]
            raise ValueError(
                f"{self._modules[0]}: a bitmask of {input_size} columns does not divide over "
                f"{input_size // self._cols} ranks in steps of {META_GROUP}; tensor parallel sizes "
                f"that work here: {', '.join(map(str, possible)) or 'none'}"
            )

    def _register(self, layer: nn.Module, loader: Any) -> None:
        """One parameter per kind of tensor; a module without that kind has 0 rows in it."""
        per_module = [
            stored.specs(rows, self._cols, self._weight_dtype)
            for stored, rows in zip(self._stored, self._rows, strict=True)
        ]
        if isinstance(layer, ReplicatedLinear):  # its loader knows no parameters like ours
            loader = load_whole
        self._shard_rows: dict[str, tuple[int, ...]] = {}
        for name in dict.fromkeys(name for specs in per_module for name in specs):
            spec = next(specs[name] for specs in per_module if name in specs)
            rows = tuple(specs[name].shape[0] if name in specs else 0 for specs in per_module)
            self._add(layer, name, rows, spec.shape[1], spec.dtype, loader)
        if self._weight_dtype == FP8:
            self._add(layer, _SCALE, self._rows, 1, torch.float32, loader)
        unused = {
            "shape": any(stored.bitmask for stored in self._stored),
            "input_scale": any(stored.static for stored in self._stored),
        }
        for name in (name for name, stored in unused.items() if stored):
            parameter = UnusedParameter(data=torch.empty(1), weight_loader=loader)
            layer.register_parameter(name, parameter)
        self._names = [*self._shard_rows, *(name for name, stored in unused.items() if stored)]

    def _add(
        self, layer: nn.Module, name: str, rows: tuple[int, ...], cols: int, dtype: torch.dtype,
        loader: Any,
    ) -> None:  # fmt: skip
        self._shard_rows[name] = rows
        parameter = LegacyParameter(
            data=poisoned((sum(rows), cols), dtype),
            weight_loader=loader,
            name=f"{self._modules[0]}.{name}",
            shard_rows=rows,
            split_input=isinstance(layer, RowParallelLinear) and name != _SCALE,
            one_scale=name == _SCALE and any(s.scale == "tensor" for s in self._stored),
        )
        layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Turn what was loaded into planes, which `SpenseLinearMethod` verifies and runs."""
        loaded = {name: getattr(layer, name).data for name in self._shard_rows}
        fused, planes = self._dummy_planes(loaded) if self._dummy else self._planes(loaded)
        if self._fused is not None and fused != self._fused:
            raise ValueError(
                f"{self._modules[0]}: the new weights are not 2:4 where the ones before were (or "
                "the reverse), which a running engine cannot change to; restart it"
            )
        self._fused = fused
        for name in self._names:
            delattr(layer, name)
        for name, plane in planes.items():
            layer.register_parameter(name, Parameter(plane, requires_grad=False))
        super().process_weights_after_loading(layer)

    def _planes(self, loaded: Mapping[str, Tensor]) -> tuple[FusedLayer, dict[str, Tensor]]:
        """The layer that the loaded tensors make up, and its planes."""
        partitions, parts = [], []
        for i, (module, stored) in enumerate(zip(self._modules, self._stored, strict=True)):
            partition, planes, reason = to_planes(self._module(loaded, i), stored.sparse, module)
            if reason:
                warn_once("spense: some layers are announced as 2:4 and are dense: they run dense")
                warn_once(f"spense: {module} is announced as 2:4 but dense: {reason}")
            partitions.append(partition)
            parts.append(planes)
            debug(f"spense: {module}: {partition.single.value}")
        fused = self._fuse(partitions)
        joined = {name: [part[name] for part in parts if name in part] for name in fused.planes()}
        return fused, {n: t[0] if len(t) == 1 else torch.cat(t) for n, t in joined.items()}

    def _module(self, loaded: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """Views of the tensors of one of the fused modules."""
        views = {}
        for name, tensor in loaded.items():
            rows = self._shard_rows[name]
            if rows[index]:
                views[name] = tensor.narrow(0, sum(rows[:index]), rows[index])
        return views

    def _dummy_planes(self, loaded: Mapping[str, Tensor]) -> tuple[FusedLayer, dict[str, Tensor]]:
        """What the config announces, to be filled by the caller."""
        fits = self._cols % META_GROUP == 0
        kinds = [
            RegionKind.SPARSE_24 if stored.sparse and fits else RegionKind.DENSE
            for stored in self._stored
        ]
        fused = self._fuse([Partition.whole(k, n) for k, n in zip(kinds, self._rows, strict=True)])
        device = next(iter(loaded.values())).device
        return fused, {
            name: torch.empty(plane.shape, dtype=plane.dtype, device=device)
            for name, plane in fused.planes().items()
        }

    def _fuse(self, partitions: list[Partition]) -> FusedLayer:
        return FusedLayer(
            self._modules, tuple(partitions), self._rows, self._cols, self._weight_dtype
        )
