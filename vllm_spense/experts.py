"""The experts of one layer: planes in, verified, expanded to dense; vLLM's own fused MoE runs them.

FP8 experts on a GPU stay FP8 and run through the fused MoE that vLLM chooses for compressed-tensors
checkpoints of per-channel scales; elsewhere, and for 16-bit experts, through its unquantised one.
The names that vLLM gives the three projections: w1 gate, w3 up (both in w13), w2 down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from vllm_spense import compat
from vllm_spense.dummy import fill_dummy
from vllm_spense.expert_planes import PlaneLoader, StoredExperts
from vllm_spense.format.fp8 import FP8
from vllm_spense.format.planes import verify_contents
from vllm_spense.fused import FusedLayer
from vllm_spense.log import info_once
from vllm_spense.parameters import poisoned

__all__ = ["Fp8Experts", "UnquantizedExperts", "experts_method"]


class _ExpertPlanes:
    """Creates, verifies and expands the planes; the class after it in the MRO is vLLM's."""

    identity: str

    def __init__(self, stored: StoredExperts, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stored = stored

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def supports_pre_processed_weights(self) -> bool:
        return False

    @supports_pre_processed_weights.setter
    def supports_pre_processed_weights(self, value: bool) -> None:
        """vLLM's methods set it; what they mean does not hold for planes."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the planes of this rank's experts, poisoned until they are loaded.

        Args:
            hidden_size, intermediate_size_per_partition: as vLLM's kernel wants them, which may be
                more than the model has.
        """
        config = layer.moe_config
        hidden = config.hidden_dim_unpadded or hidden_size
        self._local = self._stored.local(hidden, config.tp_size)
        self._check(layer, params_dtype)
        self._padded = {
            "w13": ((intermediate_size_per_partition,) * 2, hidden_size),
            "w2": ((hidden_size,), intermediate_size_per_partition),
        }
        self._dtype, self._dummy = params_dtype, compat.dummy_weights()
        for shard, fused in self._local.items():
            for name, plane in fused.planes().items():
                split = shard == "w2" and not name.endswith("_scale")
                parameter = Parameter(
                    poisoned((num_experts, *plane.shape), plane.dtype), requires_grad=False
                )
                parameter.weight_loader = PlaneLoader(layer, self._stored.layer, plane, split)
                layer.register_parameter(f"{shard}_{name}", parameter)
        compat.remember_choice(get_current_vllm_config(), self._stored.layer, self.identity)

    def _check(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Refuse what would be served wrong.

        Raises:
            ValueError: naming the layer.
        """
        config, name = layer.moe_config, self._stored.layer
        inner = config.intermediate_size_per_partition_unpadded
        stored = self._stored.partitions[0].total // config.tp_size
        if inner is not None and inner != stored:
            raise ValueError(
                f"{name}: the checkpoint divides {self._stored.partitions[0].total} intermediate "
                f"channels, config.json states {inner * config.tp_size}"
            )
        if not config.is_act_and_mul or config.has_bias:
            kind = "a bias" if config.has_bias else "no gate projection"
            raise ValueError(f"{name}: experts with {kind} cannot be served sparse")
        if current_platform.is_cuda() and dtype == torch.float32:
            raise ValueError(f"{name}: float32 activations on a GPU; use --dtype bfloat16")
        if current_platform.is_cuda() and self._stored.weight_dtype not in (FP8, dtype):
            raise ValueError(
                f"{name}: {self._stored.weight_dtype} weights with {dtype} activations; serve this "
                "checkpoint with its own --dtype"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse what was not loaded or is not valid, expand expert by expert, hand over."""
        for shard, fused in self._local.items():
            planes = {name: getattr(layer, f"{shard}_{name}").data for name in fused.planes()}
            dense: dict[str, Tensor] = {}
            for local, index in enumerate(_held_experts(layer)):
                views = {name: tensor[local] for name, tensor in planes.items()}
                if self._dummy:
                    fill_dummy(views, fused.tiles, seed=index)
                self._verify(index, shard, fused, views)
                for name, part in self._expand(fused, views).items():
                    if name not in dense:
                        dense[name] = self._allocate(shard, part, layer.local_num_experts)
                    self._place(dense[name][local], part, shard, fused)
            for name in planes:
                delattr(layer, f"{shard}_{name}")
            for name, tensor in dense.items():
                setattr(layer, f"{shard}_{name}", Parameter(tensor, requires_grad=False))
        super().process_weights_after_loading(layer)

    def _verify(
        self, index: int, shard: str, fused: FusedLayer, views: Mapping[str, Tensor]
    ) -> None:
        names = self._stored.names[:2] if shard == "w13" else self._stored.names[2:]
        parts = zip(names, fused.module_planes(views), fused.partitions, strict=True)
        for name, planes, partition in parts:
            for plane, tensor in planes.items():
                module = f"{self._stored.layer}.{index}.{name}"
                verify_contents(plane, tensor, module, partition)

    def _expand(self, fused: FusedLayer, planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`weight` [rows, cols] and what else vLLM's kernel reads of it, for one expert."""
        raise NotImplementedError

    def _allocate(self, shard: str, part: Tensor, experts: int) -> Tensor:
        """[experts, padded rows, padded columns]; channels that only pad are 0, with scale 1."""
        rows, cols = self._padded[shard]
        is_scale = part.shape[1] == 1
        shape = (experts, sum(rows), 1 if is_scale else cols)
        empty = torch.ones if is_scale else torch.zeros
        return empty(shape, dtype=part.dtype, device=part.device)

    def _place(self, target: Tensor, part: Tensor, shard: str, fused: FusedLayer) -> None:
        """Copy gate and up (or down) to where their padded halves begin."""
        start = padded_start = 0
        for rows, padded in zip(fused.rows, self._padded[shard][0], strict=True):
            target[padded_start : padded_start + rows, : part.shape[1]] = part[start : start + rows]
            start, padded_start = start + rows, padded_start + padded


class UnquantizedExperts(_ExpertPlanes, UnquantizedFusedMoEMethod):
    """Expanded to the model's dtype."""

    identity = "experts dense unquantized"

    def _expand(self, fused: FusedLayer, planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": fused.decode(planes, self._dtype)}

    def apply(
        self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any,
        **named: Any,
    ) -> Tensor:  # fmt: skip
        if current_platform.is_cpu() and layer.expert_map is not None:
            # vLLM's CPU kernel takes ids of this rank's experts and knows no map.
            local = layer.expert_map.to(topk_ids.device)[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp_min(0).to(topk_ids.dtype)
        return super().apply(layer, x, topk_weights, topk_ids, *rest, **named)


class Fp8Experts(_ExpertPlanes, compat.DenseFp8Experts):
    """The same FP8 numbers, dense, with per-channel scales and per-token activations."""

    identity = "experts dense fp8"

    def create_weights(self, layer: nn.Module, *sizes: Any, **named: Any) -> None:
        super().create_weights(layer, *sizes, **named)
        compat.describe_fp8_experts(layer, self._dtype)

    def _expand(self, fused: FusedLayer, planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": fused.decode_fp8(planes), "weight_scale": fused.row_scale(planes)}


def experts_method(stored: StoredExperts, layer: nn.Module) -> _ExpertPlanes:
    """The method for this device, logged once.

    Raises:
        ValueError: redundant experts, whose copies vLLM moves about while it serves.
    """
    if layer.moe_config.moe_parallel_config.enable_eplb:
        raise ValueError(
            f"{stored.layer}: expert load balancing (--enable-eplb) moves dense experts; sparse "
            "ones are served without it"
        )
    if current_platform.is_cuda() and stored.weight_dtype == FP8:
        info_once(
            "spense: experts are expanded to dense FP8 at load and run through vLLM's own fused "
            "MoE: there is no sparse kernel for them yet"
        )
        return Fp8Experts(stored, *compat.fp8_expert_arguments(), layer.moe_config)
    info_once(
        f"spense: no sparse kernels for experts on this device ({current_platform.device_type}): "
        "they are expanded to dense at load and run through vLLM's own fused MoE"
    )
    return UnquantizedExperts(stored, layer.moe_config)


def _held_experts(layer: nn.Module) -> list[int]:
    """Global indices of this rank's experts, in their local order."""
    local = {
        layer._map_global_expert_id_to_local_expert_id(index): index
        for index in range(layer.global_num_experts)
    }
    return [local[i] for i in range(layer.local_num_experts)]
