"""Which partition every linear layer of a model gets, and how many bytes the result takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from vllm_spense.format.partition import Partition, RegionKind, Segment, hybrid_segments
from vllm_spense.format.planes import specs
from vllm_spense.format.tiles import K_SHARDS, TILE_SHAPES, choose_tiles
from vllm_spense.pruning.architecture import ATTENTION, MLP, Decoder
from vllm_spense.pruning.experts import ROUTERS
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
        return self._down.size_of(RegionKind.DENSE)

    @property
    def dense_share(self) -> float:
        """The share that came out after rounding."""
        return self._down.dense_share

    @property
    def _down(self) -> Partition:
        """Of the MLP, or of any expert: they are divided alike."""
        return next(p for child, p in self.partitions.items() if child.endswith(".down_proj"))

    def ignored(self, decoder: Decoder) -> list[str]:
        """Names of linear layers that keep their weights, for the quantization config."""
        ignored = [] if "self_attn.q_proj" in self.partitions else [r"re:.*\.self_attn\..*"]
        routers = [ROUTERS] if len(decoder.mlps) > 1 else []
        return [*ignored, *routers, "lm_head"]


def make_plan(decoder: Decoder, settings: PruneSettings) -> PrunePlan:
    """Divide the layers of a decoder as the settings ask.

    Raises:
        ValueError: naming the projection and the sizes that do not fit.
    """
    if settings.method == "blocks":
        partitions, warnings = _tiled_mlp(decoder, settings)
    else:
        partitions, warnings = _hybrid_mlp(decoder, settings)
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
    return PrunePlan(partitions, warnings)


def _hybrid_mlp(
    decoder: Decoder, settings: PruneSettings
) -> tuple[dict[str, Partition], tuple[str, ...]]:
    """gate, up and down with one segment list, and what was rounded."""
    size, share = decoder.intermediate_size, settings.dense_share
    segments = hybrid_segments(size, share)
    up, down = Partition("output", segments), Partition("input", segments)
    partitions = {
        f"{mlp}.{child}": part
        for mlp in decoder.mlps
        for child, part in zip(MLP, (up, up, down), strict=True)
    }
    if abs(down.dense_share - share) <= 1e-9:
        return partitions, ()
    return partitions, (
        f"dense share {share:g} became {down.dense_share:.6g}: "
        f"{round(down.dense_share * size)} of {size} channels, rounded so that regions stay "
        "aligned",
    )


def _tiled_mlp(
    decoder: Decoder, settings: PruneSettings
) -> tuple[dict[str, Partition], tuple[str, ...]]:
    """gate, up and down as one region of zero tiles each; K-shards where ranks divide K."""
    partitions: dict[str, Partition] = {}
    warnings = []
    for child in MLP:
        linear = decoder.layers[0].get_submodule(f"{decoder.mlps[0]}.{child}")
        row_parallel = child == MLP[2]
        try:
            tiles = choose_tiles(
                settings.tile_shape, linear.in_features, settings.sparsity,
                K_SHARDS if row_parallel else 1,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"mlp.{child}: {error}; other tiles: {TILE_SHAPES}") from None
        size = linear.in_features if row_parallel else linear.out_features
        segment = Segment(RegionKind.ZERO_TILES, size, tiles)
        partition = Partition("input" if row_parallel else "output", (segment,))
        partitions |= {f"{mlp}.{child}": partition for mlp in decoder.mlps}
        if abs(tiles.sparsity - settings.sparsity) > 1e-9:
            warnings.append(
                f"mlp.{child}: sparsity {settings.sparsity:g} became {tiles.sparsity:.4g}: "
                f"{tiles.kept} of {tiles.total} tiles are kept, equally many in each of "
                f"{tiles.k_shards} parts of K"
            )
    return partitions, tuple(warnings)


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
