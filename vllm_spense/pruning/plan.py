"""Which partition every linear layer of a model gets, and how many bytes the result takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments
from vllm_spense.format.planes import specs
from vllm_spense.pruning.architecture import ATTENTION, MLP, Decoder
from vllm_spense.pruning.settings import PruneSettings

__all__ = ["PrunePlan", "make_plan"]


@dataclass(frozen=True)
class PrunePlan:
    """Partitions of one decoder layer (all layers are alike).

    Attributes:
        partitions: name below the layer, such as `mlp.gate_proj` → partition. Layers that are left
            as they are do not appear.
        warnings: what differs from the request.
    """

    partitions: dict[str, Partition]
    warnings: tuple[str, ...] = field(default=())

    @property
    def mlp_dense(self) -> int:
        """Dense channels of the intermediate dimension."""
        return self.partitions["mlp.down_proj"].size_of(RegionKind.DENSE)

    @property
    def dense_share(self) -> float:
        """The share that came out after rounding."""
        return self.partitions["mlp.down_proj"].dense_share

    def ignored(self, decoder: Decoder) -> list[str]:
        """Names of linear layers that keep their weights, for the quantization config."""
        ignored = [] if "self_attn.q_proj" in self.partitions else [r"re:.*\.self_attn\..*"]
        return [*ignored, "lm_head"]


def make_plan(decoder: Decoder, settings: PruneSettings) -> PrunePlan:
    """Divide the layers of a decoder as the settings ask.

    Raises:
        ValueError: naming the projection and the sizes that do not fit.
    """
    size, share = decoder.intermediate_size, settings.dense_share
    segments = hybrid_segments(size, share)
    partitions = {f"mlp.{child}": Partition("output", segments) for child in MLP[:2]}
    partitions["mlp.down_proj"] = Partition("input", segments)
    quantised = settings.weight_dtype == torch.float8_e4m3fn
    kinds = {
        "dense": RegionKind.DENSE if quantised else None,
        "2:4": RegionKind.SPARSE_24,
        "keep": None,
    }
    kind = kinds[settings.attention]
    if kind is not None:
        attention = decoder.layers[0].self_attn
        for child in ATTENTION:
            rows = attention.get_submodule(child).out_features
            partitions[f"self_attn.{child}"] = Partition.whole(kind, rows)
    for child, partition in partitions.items():
        _check(decoder, child, partition, settings)
    came_out = partitions["mlp.down_proj"].dense_share
    warnings = ()
    if abs(came_out - share) > 1e-9:
        warnings = (
            f"dense share {share:g} became {came_out:.6g}: {round(came_out * size)} of {size} "
            "channels, rounded so that regions stay aligned",
        )
    return PrunePlan(partitions, warnings)


def _check(decoder: Decoder, child: str, partition: Partition, settings: PruneSettings) -> None:
    for index, layer in enumerate(decoder.layers):
        linear = layer.get_submodule(child)
        try:
            specs(partition, (linear.out_features, linear.in_features), settings.weight_dtype)
        except ValueError as error:
            raise ValueError(f"{decoder.layer_name(index)}.{child}: {error}") from None


def output_bytes(model: nn.Module, decoder: Decoder, plan: PrunePlan, dtype: torch.dtype) -> int:
    """Bytes of all tensors of the checkpoint; tied tensors count once."""
    counted: set[int] = set()
    total = 0
    for tensor in model.state_dict().values():
        if tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            total += tensor.nbytes
    for layer in decoder.layers:
        for child, partition in plan.partitions.items():
            linear = layer.get_submodule(child)
            shape = (linear.out_features, linear.in_features)
            planes = specs(partition, shape, dtype).values()
            total += sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in planes)
            total -= linear.weight.nbytes
    return total
