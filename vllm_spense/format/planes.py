"""One linear layer as planes that tensor parallelism may slice, and back.

    module         planes (row-major)                              scales (FP8 only), float32
    one dense      weight [N, K]                                   weight_scale [N, 1]
    one 2:4        weight_values [N, K/2], weight_meta [N, K/8]    weight_scale [N, 1]
    output-split   weight_values [Ns, K/2], weight_meta [Ns, K/8]  weight_values_scale [Ns, 1]
                   weight_dense [Nd, K]                            weight_dense_scale [Nd, 1]
    input-split    weight_values [N, Ks/2], weight_meta [N, Ks/8]  weight_scale [N, 1]
                   weight_dense [N, Kd]
    zero tiles     weight_tiles [N, kept · c],                     weight_scale [N, 1], or
                   weight_tile_index [N / r, kept] int16           weight_tiles_scale [Nt, 1]

A region of zero tiles (r × c each, `tiles.py`) may stand for the 2:4 one or beside the others.

A scale belongs to the rows of a plane: in an output-split module a rank's rows are a slice of each
plane and not a slice of the whole. In an input-split module both regions of a row share one scale,
so that they add up in one accumulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spense.format import sparse24
from vllm_spense.format import tiles as tiled
from vllm_spense.format.fp8 import FP8, quantize_rows, row_scales
from vllm_spense.format.partition import META_GROUP, Partition, RegionKind, Segment

__all__ = [
    "WEIGHT_DTYPES",
    "TensorSpec",
    "decode",
    "dense_planes",
    "encode",
    "expand_region",
    "plane_names",
    "row_scale",
    "specs",
    "verify",
]

WEIGHT_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DENSE, SPARSE_24, ZERO_TILES = RegionKind.DENSE, RegionKind.SPARSE_24, RegionKind.ZERO_TILES


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def _region_shape(
    partition: Partition, kind: RegionKind, shape: tuple[int, int]
) -> tuple[int, int]:
    rows, cols = shape
    size = partition.size_of(kind)
    return (size, cols) if partition.split == "output" else (rows, size)


def _scale_names(partition: Partition) -> dict[RegionKind, str]:
    """Which plane holds the scales of a region."""
    if partition.split == "input" or partition.single:
        return {segment.kind: "weight_scale" for segment in partition.segments}
    return {
        DENSE: "weight_dense_scale",
        SPARSE_24: "weight_values_scale",
        ZERO_TILES: "weight_tiles_scale",
    }


def _dense_name(partition: Partition) -> str:
    return "weight" if partition.single is DENSE else "weight_dense"


def specs(
    partition: Partition, shape: tuple[int, int], weight_dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Plane name → shape and dtype, for a module [N, K].

    Raises:
        ValueError: the segments do not add up to the split dimension, a 2:4 region whose columns
            are not a multiple of 8, or a region that its tiles do not cut evenly.
    """
    along = shape[0] if partition.split == "output" else shape[1]
    if partition.total != along:
        raise ValueError(
            f"segments add up to {partition.total}, the {partition.split} dimension has {along}"
        )
    planes = {}
    for segment in partition.segments:
        rows, cols = _region_shape(partition, segment.kind, shape)
        if segment.kind is DENSE:
            planes[_dense_name(partition)] = TensorSpec((rows, cols), weight_dtype)
        elif segment.kind is SPARSE_24:
            if cols % META_GROUP:
                raise ValueError(f"a 2:4 region of {cols} columns: not a multiple of {META_GROUP}")
            planes["weight_values"] = TensorSpec((rows, cols // 2), weight_dtype)
            planes["weight_meta"] = TensorSpec((rows, cols // META_GROUP), torch.uint8)
        else:
            tiles = segment.tiles
            tiles.check(rows, cols)
            index = (rows // tiles.rows, tiles.kept)
            planes["weight_tiles"] = TensorSpec((rows, tiles.stored_columns), weight_dtype)
            planes["weight_tile_index"] = TensorSpec(index, tiled.INDEX_DTYPE)
        if weight_dtype == FP8:
            planes[_scale_names(partition)[segment.kind]] = TensorSpec((rows, 1), torch.float32)
    return planes


def _view(weight: Tensor, partition: Partition, kind: RegionKind) -> Tensor:
    start, size = partition.spans()[kind]
    return weight.narrow(0 if partition.split == "output" else 1, start, size)


def encode(
    weight: Tensor, partition: Partition, weight_dtype: torch.dtype, name: str = "weight"
) -> dict[str, Tensor]:
    """Planes of a pruned weight.

    Args:
        weight: [N, K] float; at most two of four consecutive k are nonzero inside 2:4 regions, and
            no more tiles than are kept inside regions of zero tiles.
        weight_dtype: FP8 quantises per output channel (`fp8.py`), otherwise a cast.

    Raises:
        ValueError: naming `name`, when the weight is not finite, does not fit the partition, or is
            not sparse where it should be.
    """
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name}: the weight holds NaN or infinity")
    try:
        expected = specs(partition, tuple(weight.shape), weight_dtype)
        scales = _encode_scales(weight, partition) if weight_dtype == FP8 else {}
        planes = dict(scales)
        for segment in partition.segments:
            part = _view(weight, partition, segment.kind)
            if scales:
                part = quantize_rows(part, scales[_scale_names(partition)[segment.kind]])
            part = part.to(weight_dtype).contiguous()
            names = plane_names(partition, segment.kind)
            planes |= zip(names, _compress(segment, part), strict=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {plane: planes[plane] for plane in expected}


def plane_names(partition: Partition, kind: RegionKind) -> tuple[str, ...]:
    """The planes that hold the weights of a region, without scales."""
    if kind is DENSE:
        return (_dense_name(partition),)
    if kind is SPARSE_24:
        return "weight_values", "weight_meta"
    return "weight_tiles", "weight_tile_index"


def _compress(segment: Segment, part: Tensor) -> tuple[Tensor, ...]:
    if segment.kind is DENSE:
        return (part,)
    if segment.kind is SPARSE_24:
        return sparse24.compress(part)
    return tiled.compress(part, segment.tiles)


def expand_region(
    kind: RegionKind, parts: tuple[Tensor, ...], tiles: tiled.Tiles | None = None
) -> Tensor:
    """The dense weight of a region from its planes, as `plane_names` orders them."""
    if kind is DENSE:
        return parts[0]
    if kind is SPARSE_24:
        return sparse24.expand(*parts)
    return tiled.expand(*parts, tiles)


def _encode_scales(weight: Tensor, partition: Partition) -> dict[str, Tensor]:
    if partition.split == "input" or partition.single:
        return {"weight_scale": row_scales(weight)}
    names = _scale_names(partition)
    return {names[s.kind]: row_scales(_view(weight, partition, s.kind)) for s in partition.segments}


def dense_planes(planes: Mapping[str, Tensor], partition: Partition) -> dict[str, Tensor]:
    """The same numbers as one dense region: weight [N, K] and, for FP8, weight_scale [N, 1]."""
    dim = 0 if partition.split == "output" else 1
    parts = []
    for segment in partition.segments:
        stored = tuple(planes[name] for name in plane_names(partition, segment.kind))
        parts.append(expand_region(segment.kind, stored, segment.tiles))
    bits = torch.cat([part.view(_integer(part.dtype)) for part in parts], dim)
    dense = {"weight": bits.view(parts[0].dtype)}
    scale = row_scale(planes, partition)
    return dense if scale is None else {**dense, "weight_scale": scale}


def row_scale(planes: Mapping[str, Tensor], partition: Partition) -> Tensor | None:
    """The scale of every output channel, float32 [N, 1]; None without scales."""
    names = _scale_names(partition)
    in_order = dict.fromkeys(names[segment.kind] for segment in partition.segments)
    scales = [planes[name] for name in in_order if name in planes]
    return torch.cat(scales) if scales else None


def _integer(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def decode(
    planes: Mapping[str, Tensor], partition: Partition, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dense weight [N, K], scales applied in float32, then rounded to `dtype`."""
    dense = dense_planes(planes, partition)
    weight = dense["weight"].float()
    if "weight_scale" in dense:
        weight = weight * dense["weight_scale"]
    return weight.to(dtype)


def verify(
    planes: Mapping[str, Tensor],
    partition: Partition,
    shape: tuple[int, int],
    weight_dtype: torch.dtype,
    name: str,
) -> None:
    """Refuse planes that a kernel would turn into a wrong answer.

    Raises:
        ValueError: naming `name.plane`: missing, unknown, wrong shape or dtype, metadata that is
            not two ascending positions, a tile index out of range or order, a value that is not
            finite, a scale that is not finite and positive.
    """
    expected = specs(partition, shape, weight_dtype)
    verify_specs({plane: _spec(tensor) for plane, tensor in planes.items()}, expected, name)
    for plane, tensor in planes.items():
        verify_contents(plane, tensor, name, partition)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def verify_specs(
    found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], name: str
) -> None:
    """Compare shapes and dtypes alone (a safetensors header is enough)."""
    for plane in expected.keys() - found.keys():
        raise ValueError(f"{name}.{plane} is missing; needed: {expected[plane]}")
    for plane in found.keys() - expected.keys():
        raise ValueError(f"{name}.{plane} is not expected; this module has {sorted(expected)}")
    for plane, spec in expected.items():
        if found[plane] != spec:
            raise ValueError(f"{name}.{plane} is {found[plane]}; needed: {spec}")


def _verify_index(tensor: Tensor, tiles: tiled.Tiles, name: str) -> None:
    bad = tiled.invalid_index(tensor, tiles)
    if bad:
        raise ValueError(
            f"{name}: index {tensor[bad].item()} at row block {bad[0]}, slot {bad[1]}; needed: "
            f"0 … {tiles.shard_total - 1}, ascending inside each of {tiles.k_shards} K-shards"
        )


def verify_contents(plane: str, tensor: Tensor, name: str, partition: Partition) -> None:
    """Check the numbers of one plane of a module (`plane` tells what they must be)."""
    if plane == "weight_tile_index":
        _verify_index(tensor, partition.tiles, f"{name}.{plane}")
        return
    if plane == "weight_meta":
        bad = sparse24.invalid_metadata(tensor)
        if bad:
            row, column = bad
            raise ValueError(
                f"{name}.{plane}: byte {tensor[bad].item():#04x} at row {row}, column {column} "
                "is not two groups of two ascending positions"
            )
        return
    as_float = tensor.float()
    finite = torch.isfinite(as_float)
    if not finite.all():
        where = (~finite).nonzero()[0].tolist()
        raise ValueError(f"{name}.{plane}: not a finite number at {where}")
    if plane.endswith("_scale") and not (as_float > 0).all():
        where = (as_float <= 0).nonzero()[0].tolist()
        raise ValueError(
            f"{name}.{plane}: scale {tensor[tuple(where)].item()} at {where} is not positive"
        )
