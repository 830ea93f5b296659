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
from vllm_spense.format.planes import TensorSpec, decode, dense_planes, row_scale, specs
from vllm_spense.kernels.problem import Layout, Region

__all__ = ["FusedLayer", "LocalPlane"]


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
            ValueError: a segment does not divide evenly; names the module and sizes that do.
        """
        local = tuple(
            _divide(partition, n if partition.split == "output" else cols, module)
            for module, partition, n in zip(modules, partitions, rows, strict=True)
        )
        return cls(modules, local, rows, cols, weight_dtype)

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
        """Regions in the order of Y. Neighbours of one kind (gate and up of a fully 2:4 model)
        become one."""
        return Layout(
            sum(self.rows), self.cols, tuple(r for r, _ in self._joined()), self.weight_dtype
        )

    def region_planes(self, planes: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
        """The planes of each region of `layout`, joined where regions were."""
        views = self.module_planes(planes)
        found = []
        for region, modules in self._joined():
            parts = [_region_planes(views[i], region.kind) for i in modules]
            if len(parts) == 1:
                found.append(parts[0])
            else:
                found.append(tuple(torch.cat(same) for same in zip(*parts, strict=True)))
        return found

    def _joined(self) -> list[tuple[Region, list[int]]]:
        """Regions, each with the modules that it comes from."""
        found: list[tuple[Region, list[int]]] = []
        y_start = 0
        for i, (partition, rows) in enumerate(zip(self.partitions, self.rows, strict=True)):
            for kind, (start, size) in partition.spans().items():
                if partition.split == "output":
                    region = Region(kind, y_start + start, size, 0, self.cols)
                else:
                    region = Region(kind, y_start, rows, start, size)
                last = found[-1][0] if found else None
                if last and _continues(last, region):
                    found[-1] = (replace(last, rows=last.rows + region.rows), [*found[-1][1], i])
                else:
                    found.append((region, [i]))
            y_start += rows
        return found


def _continues(last: Region, region: Region) -> bool:
    """Whether `region` is of the same kind and columns, right below `last`."""
    same = (last.kind, last.x_start, last.cols) == (region.kind, region.x_start, region.cols)
    return same and last.y_start + last.rows == region.y_start


def _region_planes(views: Mapping[str, Tensor], kind: RegionKind) -> tuple[Tensor, ...]:
    if kind is RegionKind.SPARSE_24:
        return views["weight_values"], views["weight_meta"]
    return (views["weight_dense"] if "weight_dense" in views else views["weight"],)


def _divide(partition: Partition, local: int, module: str) -> Partition:
    """Shrink a partition of the whole dimension to `local` channels."""
    total = partition.total
    parts = total // local
    for segment in partition.segments:
        step = META_GROUP if _packs_input(partition, segment) else 1
        if total % local or segment.size % (parts * step):
            raise ValueError(
                f"{module}: {segment.size} channels of kind {segment.kind.value} do not divide "
                f"over {parts} ranks in steps of {step}; tensor parallel sizes that work here: "
                f"{_possible(partition)}"
            )
    return Partition(
        partition.split, tuple(Segment(s.kind, s.size // parts) for s in partition.segments)
    )


def _packs_input(partition: Partition, segment: Segment) -> bool:
    return partition.split == "input" and segment.kind is RegionKind.SPARSE_24


def _possible(partition: Partition) -> str:
    sizes = [
        size
        for size in range(1, 65)
        if all(
            s.size % (size * (META_GROUP if _packs_input(partition, s) else 1)) == 0
            for s in partition.segments
        )
    ]
    return ", ".join(map(str, sizes))
