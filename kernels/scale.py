"""The scales of an eager layer in one pass.

    Y ← Y · x_scale · w_scaleᵀ + bias

    Y        [M, N]  BF16 or FP16, rows contiguous, in place; arithmetic in float32, one rounding
    x_scale  [M, 1] or [1, 1]  float32
    w_scale  [N] elements  float32
    bias     [N]  any float, or none

Torch would take three or four launches with float32 intermediates. Bytes: Y twice, all else is
small. Compiled models do without: Inductor folds the product into what reads Y.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["scale_in_place"]

_BLOCK_N = 1024


@triton.jit(do_not_specialize=["N"])
def _scale_kernel(
    y: tl.tensor,
    x_scale: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    N: tl.tensor,
    y_stride: tl.tensor,
    x_scale_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    at = y + row * y_stride + columns
    scaled = tl.load(at, inside).to(tl.float32) * tl.load(x_scale + row * x_scale_stride)
    scaled *= tl.load(w_scale + columns, inside)
    if HAS_BIAS:
        scaled += tl.load(bias + columns, inside).to(tl.float32)
    tl.store(at, scaled.to(y.dtype.element_ty), inside)


def scale_in_place(y: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Scale `y` [M, N] where it stands; returns it."""
    m, n = y.shape
    if not m:
        return y
    stride = 0 if x_scale.numel() == 1 else x_scale.stride(0)
    w_scale = w_scale.reshape(-1).contiguous()
    _scale_kernel[(m, triton.cdiv(n, _BLOCK_N))](
        *(y, x_scale, w_scale, w_scale if bias is None else bias, n, y.stride(0), stride),
        HAS_BIAS=bias is not None,
        BLOCK_N=_BLOCK_N,
    )
    return y
