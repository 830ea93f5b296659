"""Which layers keep a dense copy of their weight beside the sparse one.

At some M one dense GEMM beats every plan with 2:4 regions. A layer that has a dense weight as well
is then never slower than dense, for rows × cols bytes of its sparse regions. The default budget is
what sparsity saves, so that a model never needs more memory than its dense FP8 form (the weights
alone; `max_extra_bytes` of the user replaces it).

Gain of a copy: the share of the model's dense GEMM time that it saves, averaged over the powers of
two of M. Copies are chosen by gain per byte until the budget is full. A layer that was not measured
gets none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels.dispatch import DENSE_COPY, named_plan
from vllm_spense.kernels.layouts import Blob24
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Layout, Problem, Region
from vllm_spense.kernels.tile_layout import TileBlob
from vllm_spense.kernels.tuning import GRID

__all__ = ["Copy", "choose_copies", "copy_bytes", "saved_bytes"]


@dataclass(frozen=True)
class Copy:
    """A dense copy of one kind of layer: bytes over the whole model, share of GEMM time saved."""

    layer: str
    bytes: int
    gain: float


def copy_bytes(layout: Layout) -> int:
    """What a dense copy adds: dense regions with whole rows become views of it."""
    whole = (r for r in layout.regions if r.kind is RegionKind.DENSE and r.cols == layout.k)
    added = layout.n * layout.k - sum(r.rows * r.cols for r in whole)
    return added * layout.weight_dtype.itemsize


def saved_bytes(layout: Layout) -> int:
    """What the sparse regions of a layer save against a dense weight."""
    sparse = [r for r in layout.regions if r.kind is not RegionKind.DENSE]
    stored = sum(_stored_bytes(r, layout.weight_dtype) for r in sparse)
    return sum(r.rows * r.cols for r in sparse) * layout.weight_dtype.itemsize - stored


def _stored_bytes(region: Region, dtype: torch.dtype) -> int:
    if region.tiles is not None:
        return TileBlob(region.rows, region.tiles, dtype).storage_shape[0]
    return Blob24(region.rows, region.cols, dtype).storage_shape[0]


def choose_copies(
    layers: Mapping[str, tuple[Layout, int]],
    table: Table,
    out_dtype: torch.dtype,
    capability: tuple[int, int],
    max_extra_bytes: int | None = None,
) -> tuple[Copy, ...]:
    """The copies to make, best first.

    Args:
        layers: name → layout and how often the model has it.
        max_extra_bytes: budget; None is what sparsity saves in these layers.
    """
    if max_extra_bytes is None:
        max_extra_bytes = sum(saved_bytes(layout) * count for layout, count in layers.values())
    gains = _gains(layers, table, out_dtype, capability)
    offers = [
        Copy(name, copy_bytes(layout) * count, gains[name])
        for name, (layout, count) in layers.items()
        if gains.get(name, 0.0) > 0
    ]
    chosen = []
    for offer in sorted(offers, key=lambda copy: copy.gain / copy.bytes, reverse=True):
        if offer.bytes <= max_extra_bytes:
            chosen.append(offer)
            max_extra_bytes -= offer.bytes
    return tuple(chosen)


def _gains(
    layers: Mapping[str, tuple[Layout, int]],
    table: Table,
    out_dtype: torch.dtype,
    capability: tuple[int, int],
) -> dict[str, float]:
    """Name → share of the dense time of all measured layers that a copy saves, mean over M."""
    gains: dict[str, float] = dict.fromkeys(layers, 0.0)
    for m in GRID:
        saved, total = {}, 0.0
        for name, (layout, count) in layers.items():
            problem = Problem.whole(layout, m, out_dtype, capability)
            times = table.layer(problem)
            if DENSE_COPY not in times:
                continue
            sparse = [us for plan, us in times.items() if named_plan(problem, plan, table, False)]
            total += times[DENSE_COPY] * count
            saved[name] = max(0.0, min(sparse, default=0.0) - times[DENSE_COPY]) * count
        for name, us in saved.items():
            gains[name] += us / total / len(GRID)
    return gains
