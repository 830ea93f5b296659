"""The linear method: planes in, verified, handed to the backend that runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)

from vllm_spense import backends, compat
from vllm_spense.dummy import fill_dummy
from vllm_spense.format.partition import Partition
from vllm_spense.format.planes import verify_contents
from vllm_spense.fused import FusedLayer
from vllm_spense.parameters import PlaneParameter, poisoned

__all__ = ["SpenseLinearMethod"]


@register_weight_loader_v2_supported_method
class SpenseLinearMethod(LinearMethodBase):
    """Serves one (possibly fused) linear layer; vLLM makes one instance per layer."""

    def __init__(
        self,
        modules: tuple[str, ...],
        partitions: tuple[Partition, ...],
        weight_dtype: torch.dtype,
    ) -> None:
        self._modules = modules
        self._partitions = partitions
        self._weight_dtype = weight_dtype

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
        """Register the planes of this rank, poisoned until they are loaded."""
        self._check_bias(layer)
        self._fused = FusedLayer.divide(
            self._modules,
            self._partitions,
            tuple(output_partition_sizes),
            input_size_per_partition,
            self._weight_dtype,
        )
        self._dtype = params_dtype
        self._dummy = compat.dummy_weights()
        self._vllm_config = get_current_vllm_config()
        row_parallel = isinstance(layer, RowParallelLinear)
        for name, plane in self._fused.planes().items():
            parameter = PlaneParameter(
                data=poisoned(plane.shape, plane.dtype),
                weight_loader=extra_weight_attrs["weight_loader"],
                name=f"{self._modules[0]}.{name}",
                shard_rows=plane.shard_rows,
                split_input=row_parallel and not name.endswith("_scale"),
            )
            layer.register_parameter(name, parameter)
        self._backend = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse what was not loaded or is not valid, then let the backend take over."""
        planes = {name: getattr(layer, name).data for name in self._fused.planes()}
        if self._dummy:
            fill_dummy(planes, self._fused.tiles)
        fused = self._fused
        parts = zip(self._modules, fused.module_planes(planes), fused.partitions, strict=True)
        for module, views, partition in parts:
            for name, tensor in views.items():
                verify_contents(name, tensor, module, partition)
        if self._backend is None:
            self._backend = backends.choose(self._fused, self._dtype, layer_device(planes))
            compat.remember_choice(self._vllm_config, self._modules[0], self._backend.identity)
        for name in planes:
            delattr(layer, name)
        self._backend.load(layer, self._fused, planes)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._backend.apply(layer, x, bias)

    def _check_bias(self, layer: nn.Module) -> None:
        """vLLM shards a bias as a slice of the whole N, which an output-split rank is not."""
        split = any(p.split == "output" and p.single is None for p in self._partitions)
        if split and getattr(layer, "has_bias", False) and compat.tensor_parallel(layer) > 1:
            raise ValueError(
                f"{self._modules[0]}: a bias on an output-split module cannot be divided over "
                f"{compat.tensor_parallel(layer)} ranks in format version 1; serve with tensor "
                "parallel size 1"
            )


def layer_device(planes: dict[str, Tensor]) -> torch.device:
    """Where the planes were loaded."""
    return next(iter(planes.values())).device
