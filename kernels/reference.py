"""The plain-torch twin of the ops: expand W and multiply, from the same quantised operands.

    linear_raw   Y = alpha · X · Wᵀ
    linear       Y = alpha · X · Wᵀ · x_scale · w_scaleᵀ + bias

X [M, K], W [N, K] in the weight dtype; scales float32 [M, 1] and [N, 1] (or [1, N]). Products and
sums are in float32; Y is rounded once, at the end. It defines what every path must compute, and it
is slow: W is expanded at every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.planes import expand_region
from vllm_spense.kernels.layouts import Blob24
from vllm_spense.kernels.problem import Layout
from vllm_spense.kernels.tile_layout import TileBlob

__all__ = ["apply_scales", "expand", "expand_planes", "linear_raw"]

Planes = tuple[Tensor, ...]


def expand_planes(
    layout: Layout, planes: Sequence[Planes], dtype: torch.dtype = torch.float32
) -> Tensor:
    """W [n, k] in `dtype`, unscaled, from each region's planes."""
    weight = torch.zeros(layout.n, layout.k, dtype=dtype, device=planes[0][0].device)
    for region, parts in zip(layout.regions, planes, strict=True):
        dense = expand_region(region.kind, parts, region.tiles)
        weight[region.y_start : region.y_stop, region.x_start : region.x_stop] = dense.to(dtype)
    return weight


def expand(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """W [n, k] in `dtype`, unscaled, from kernel tensors (one per region)."""
    planes = []
    for region, weight in zip(layout.regions, weights, strict=True):
        if region.kind is RegionKind.SPARSE_24:
            planes.append(Blob24(region.rows, region.cols, layout.weight_dtype).unpack(weight))
        elif region.kind is RegionKind.ZERO_TILES:
            blob = TileBlob(region.rows, region.tiles, layout.weight_dtype)
            planes.append(blob.unpack(weight))
        else:
            planes.append((weight,))
    return expand_planes(layout, planes, dtype)


def linear_raw(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    """Y [M, N] = alpha · X · Wᵀ; `weight` [N, K] is expanded and its dtype is the accumulator's."""
    return (x.to(weight.dtype) @ weight.t() * alpha).to(out_dtype)


def apply_scales(y: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Y · x_scale · w_scaleᵀ + bias, in float32, rounded once to the dtype of `y` [M, N]."""
    scaled = y.float() * x_scale * w_scale.reshape(1, -1)
    if bias is not None:
        scaled = scaled + bias.float()
    return scaled.to(y.dtype)
