"""What one rank holds of a (possibly fused) layer: its planes, and where its regions stand in Y and
X.

A fused layer (gate_up, qkv) is several modules of the checkpoint, stacked along N; each brings its
own partition. Tensor parallelism divides N of every module (column-parallel) or K (row-parallel),
and each plane by itself, so a rank has the same kinds in the same order, only smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_spense.format.partition import META_GROUP, Partition, RegionKind, Segment
from vllm_spense.format.planes import (
    TensorSpec,
    decode,
    dense_planes,
    plane_names,
    row_scale,
    specs,
)
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels.problem import Layout, Region

__all__ = ["FusedLayer", "LocalPlane"]

_OP_ORDER = (RegionKind.SPARSE_24, RegionKind.ZERO_TILES, RegionKind.DENSE)


@dataclass(frozen=True)
class LocalPlane:
    """A plane of the fused layer on this rank: rows per module, columns, dtype."""

    shard_rows: tuple[int, ...]
    cols: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.shard_rows), self.cols


@dataclass(frozen=True)
class FusedLayer:
    """Modules stacked along N, as one rank sees them.

    `partitions` are local (already divided by the tensor parallel size), `rows` the local N of each
    module, `cols` the local K.
    """

    modules: tuple[str, ...]
    partitions: tuple[Partition, ...]
    rows: tuple[int, ...]
    cols: int
    weight_dtype: torch.dtype

    @classmethod
    def divide(
        cls,
        modules: tuple[str, ...],
        partitions: tuple[Partition, ...],
        rows: tuple[int, ...],
        cols: int,
        weight_dtype: torch.dtype,
    ) -> FusedLayer:
        """From partitions of the whole modules and this rank's sizes.

        Raises:
            ValueError: a segment does not divide evenly; names the module and sizes that do. Or
                modules whose zero tiles are cut differently.
        """
        local = tuple(
            _divide(partition, n if partition.split == "output" else cols, cols, module)
            for module, partition, n in zip(modules, partitions, rows, strict=True)
        )
        cuts = {module: p.tiles for module, p in zip(modules, local, strict=True) if p.tiles}
        if len(set(cuts.values())) > 1:
            found = ", ".join(f"{module}: {tiles}" for module, tiles in cuts.items())
            raise ValueError(f"a fused layer has one cut into tiles; found: {found}")
        return cls(modules, local, rows, cols, weight_dtype)

    @property
    def tiles(self) -> Tiles | None:
        """How regions of zero tiles are cut, if there are any."""
        return next((p.tiles for p in self.partitions if p.tiles), None)

    def _module_specs(self) -> list[dict[str, TensorSpec]]:
        return [
            specs(partition, (n, self.cols), self.weight_dtype)
            for partition, n in zip(self.partitions, self.rows, strict=True)
        ]

    def planes(self) -> dict[str, LocalPlane]:
        """Plane name → its local extent; a module without that plane has 0 rows in it."""
        per_module = self._module_specs()
        planes = {}
        for name in dict.fromkeys(name for module in per_module for name in module):
            found = [module[name] for module in per_module if name in module]
            rows = tuple(module[name].shape[0] if name in module else 0 for module in per_module)
            planes[name] = LocalPlane(rows, found[0].shape[1], found[0].dtype)
        return planes

    def module_planes(self, planes: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Views of the fused planes, module by module."""
        local = self.planes()
        views: list[dict[str, Tensor]] = []
        for i, wanted in enumerate(self._module_specs()):
            starts = {name: sum(local[name].shard_rows[:i]) for name in wanted}
            views.append(
                {n: planes[n].narrow(0, starts[n], spec.shape[0]) for n, spec in wanted.items()}
            )
        return views

    def decode(self, planes: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The dense weight [N, K] of this rank."""
        parts = zip(self.module_planes(planes), self.partitions, strict=True)
        return torch.cat([decode(views, partition, dtype) for views, partition in parts])

    def decode_fp8(self, planes: Mapping[str, Tensor]) -> Tensor:
        """The dense weight [N, K] of this rank, unscaled FP8."""
        parts = zip(self.module_planes(planes), self.partitions, strict=True)
        return torch.cat([dense_planes(views, partition)["weight"] for views, partition in parts])

    def row_scale(self, planes: Mapping[str, Tensor]) -> Tensor | None:
        """Scale of every output channel in the order of Y, float32 [N, 1]; None without scales."""
        parts = zip(self.module_planes(planes), self.partitions, strict=True)
        scales = [row_scale(views, partition) for views, partition in parts]
        return None if scales[0] is None else torch.cat(scales)

    def layout(self) -> Layout:
        """What the op computes. All sparse rows come before all dense ones, so that gate and up
        take one call of each kind; `slices` brings the product back into the order of Y."""
        regions = tuple(region for region, _ in self._joined())
        return Layout(sum(self.rows), self.cols, regions, self.weight_dtype)

    def region_planes(self, planes: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
        """The planes of each region of `layout`, joined where regions were."""
        views = self.module_planes(planes)
        found = []
        for _, pieces in self._joined():
            parts = [self._region_planes(views, piece) for piece in pieces]
            if len(parts) == 1:
                found.append(parts[0])
            else:
                found.append(tuple(torch.cat(same) for same in zip(*parts, strict=True)))
        return found

    def _region_planes(self, views: list[dict[str, Tensor]], piece: _Piece) -> tuple[Tensor, ...]:
        names = plane_names(self.partitions[piece.module], piece.region.kind)
        return tuple(views[piece.module][name] for name in names)

    def slices(self) -> tuple[tuple[int, int], ...]:
        """(first, size) of channels of the op's product that make up Y in order; () if it is Y."""
        pieces = self._in_op_order()
        if pieces == self._pieces():
            return ()
        starts, start = {}, 0
        for piece in pieces:
            starts[piece], start = start, start + piece.region.rows
        in_y = sorted(starts, key=lambda piece: piece.region.y_start)
        return tuple((starts[piece], piece.region.rows) for piece in in_y)

    def op_scale(self, planes: Mapping[str, Tensor]) -> Tensor | None:
        """`row_scale` in the order of the op's product."""
        scale = self.row_scale(planes)
        if scale is None or not self.slices():
            return scale
        rows = [piece.region for piece in self._in_op_order()]
        return torch.cat([scale[region.y_start : region.y_stop] for region in rows])

    def _pieces(self) -> list[_Piece]:
        """Regions of every module, in the order of Y."""
        found = []
        y_start = 0
        for module, (partition, rows) in enumerate(zip(self.partitions, self.rows, strict=True)):
            for kind, (start, size) in partition.spans().items():
                tiles = partition.tiles if kind is RegionKind.ZERO_TILES else None
                if partition.split == "output":
                    region = Region(kind, y_start + start, size, 0, self.cols, tiles)
                else:
                    region = Region(kind, y_start, rows, start, size, tiles)
                found.append(_Piece(module, region))
            y_start += rows
        return found

    def _in_op_order(self) -> list[_Piece]:
        pieces = self._pieces()
        if any(p.split == "output" and p.single is None for p in self.partitions):
            pieces.sort(key=lambda piece: _OP_ORDER.index(piece.region.kind))
        return pieces

    def _joined(self) -> list[tuple[Region, list[_Piece]]]:
        """The op's regions, each with the pieces that it is made of."""
        found: list[tuple[Region, list[_Piece]]] = []
        reordered = bool(self.slices())
        y_start = 0
        for piece in self._in_op_order():
            region = replace(piece.region, y_start=y_start) if reordered else piece.region
            y_start += region.rows
            last = found[-1][0] if found else None
            if last and _continues(last, region):
                grown = replace(last, rows=last.rows + region.rows)
                found[-1] = (grown, [*found[-1][1], piece])
            else:
                found.append((region, [piece]))
        return found


@dataclass(frozen=True)
class _Piece:
    """A region of one module, with its place in Y."""

    module: int
    region: Region


def _continues(last: Region, region: Region) -> bool:
    """Whether `region` is of the same kind and columns, right below `last`."""
    same = replace(last, y_start=0, rows=0) == replace(region, y_start=0, rows=0)
    return same and last.y_start + last.rows == region.y_start


def _divide(partition: Partition, local: int, cols: int, module: str) -> Partition:
    """Shrink a partition of the whole dimension to `local` channels, of a K of `cols`."""
    total = partition.total
    parts = total // local
    for segment in partition.segments:
        step = _step(partition, segment)
        if total % local or segment.size % (parts * step):
            raise ValueError(
                f"{module}: {segment.size} channels of kind {segment.kind.value} do not divide "
                f"over {parts} ranks in steps of {step}; tensor parallel sizes that work here: "
                f"{_possible(partition)}"
            )
    along = parts if partition.split == "input" else None
    return Partition(
        partition.split,
        tuple(
            Segment(s.kind, s.size // parts, _local_tiles(s.tiles, along, cols, module))
            for s in partition.segments
        ),
    )


def _step(partition: Partition, segment: Segment) -> int:
    """Channels along the split that must stay together."""
    if segment.tiles is not None:
        by_input = segment.tiles.shard_total * segment.tiles.cols
        return by_input if partition.split == "input" else segment.tiles.rows
    packed = partition.split == "input" and segment.kind is RegionKind.SPARSE_24
    return META_GROUP if packed else 1


def _local_tiles(tiles: Tiles | None, parts: int | None, cols: int, module: str) -> Tiles | None:
    """Tiles of one of `parts` ranks; None: of as many as a K of `cols` is a part of the whole."""
    if tiles is None:
        return None
    try:
        return tiles.divide_columns(parts or max(1, tiles.columns // cols))
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from None


def _possible(partition: Partition) -> str:
    sizes = [
        size
        for size in range(1, 65)
        if all(s.size % (size * _step(partition, s)) == 0 for s in partition.segments)
    ]
    return ", ".join(map(str, sizes))
