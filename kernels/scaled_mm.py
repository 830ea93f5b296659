"""Dense regions through the GEMMs that vLLM and torch bring.

    Y[:, y_start : y_start+rows] (+)= alpha · X[:, x_start : x_start+cols] · Wᵀ     W [rows, cols]

FP8 has three ways:
    cublaslt   torch._scaled_mm, per-tensor scales, fast accumulation; slices of X and Y are leading
               dimensions
    cutlass    vLLM's `_C::cutlass_scaled_mm`; it ignores strides of X and Y (it computes packed
               ones), so a slice of Y costs a copy, and a slice of X is refused
    upcast     BF16 matmul of the same operands, for sizes that neither takes; products are exact,
               it is slow and reads and writes W twice more
BF16 and FP16 have one, `mm` (cuBLAS).

On H200 cuBLASLt is the faster one below M = 2048, CUTLASS above on most shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels.problem import Config, Problem

__all__ = ["can_implement", "candidates", "run"]

NAME = "scaled_mm"
WHOLE_LAYER = False
PADS_ROWS = False

FP8 = torch.float8_e4m3fn
_CUTLASS_FROM = 2048  # M
_STEP = 16  # sizes and leading dimensions that FP8 GEMMs take


def can_implement(problem: Problem) -> tuple[bool, str]:
    """Whether this path can run `problem`, and if not, why."""
    if len(problem.indices) != 1 or problem.region.kind is not RegionKind.DENSE:
        return False, "dense GEMMs take one dense region at a time"
    if problem.layout.weight_dtype == FP8 and problem.capability < (8, 9):
        return False, "FP8 GEMMs need compute capability 8.9"
    return True, ""


def candidates(problem: Problem) -> tuple[Config, ...]:
    """Configurations to measure; the first one runs where nothing has been measured."""
    if problem.layout.weight_dtype != FP8:
        return ((("gemm", "mm"),),)
    found = ["cublaslt"] if not _cublaslt_refuses(problem) else []
    if not _cutlass_refuses(problem):
        found.insert(0 if problem.m >= _CUTLASS_FROM else 1, "cutlass")
    return tuple((("gemm", name),) for name in found or ["upcast"])


def _cublaslt_refuses(problem: Problem) -> str:
    region, k = problem.region, problem.layout.k
    if any(size % _STEP for size in (region.rows, region.cols, region.x_start, k)):
        return f"{region} of K = {k}: not in steps of {_STEP}"
    return ""


def _cutlass_refuses(problem: Problem) -> str:
    region = problem.region
    if cutlass_op() is None:
        return "torch.ops._C.cutlass_scaled_mm is not loaded"
    if region.cols != problem.layout.k:
        return "CUTLASS takes X as a whole"
    if region.rows % _STEP or region.cols % _STEP:
        return f"{region}: not in steps of {_STEP}"
    return ""


def cutlass_op() -> Callable | None:
    """vLLM's FP8 GEMM, if vLLM's extension is loaded in this process."""
    return getattr(torch.ops._C, "cutlass_scaled_mm", None)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)


def _scale(value: float, device: torch.device) -> Tensor:
    """`value` as a float32 tensor [1]. One made during capture belongs to that graph alone."""
    if torch.cuda.is_current_stream_capturing():
        return torch.full((1,), value, device=device)
    return _constant(value, device)


def run(
    problem: Problem,
    x: Tensor,
    weights: list[Tensor],
    y: Tensor,
    *,
    alpha: float,
    accumulate: bool,
    config: Config,
) -> None:
    """Write (or add to) the region's channels of `y`.

    Args:
        x: [M, K] contiguous, in the weight dtype.
        weights: the kernel tensor of the region, [rows, cols].
        y: [M, N], rows contiguous.
    """
    region = problem.layout.regions[problem.indices[0]]
    weight = weights[0].t()
    xs = x if region.cols == x.shape[1] else x.narrow(1, region.x_start, region.cols)
    out = y if region.rows == y.shape[1] else y.narrow(1, region.y_start, region.rows)
    _WAYS[config[0][1]](xs, weight, out, alpha, accumulate)


def _mm(x: Tensor, weight: Tensor, out: Tensor, alpha: float, accumulate: bool) -> None:
    torch.addmm(out, x, weight, beta=1.0 if accumulate else 0.0, alpha=alpha, out=out)


def _cublaslt(x: Tensor, weight: Tensor, out: Tensor, alpha: float, accumulate: bool) -> None:
    aligned = out.data_ptr() % 16 == 0 and out.stride(0) * out.element_size() % 16 == 0
    target = out if aligned and not accumulate else out.new_empty(out.shape)
    torch._scaled_mm(
        *(x, weight, _scale(alpha, x.device), _scale(1.0, x.device)),
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=target,
    )
    _deliver(target, out, accumulate)


def _cutlass(x: Tensor, weight: Tensor, out: Tensor, alpha: float, accumulate: bool) -> None:
    target = out if out.is_contiguous() and not accumulate else out.new_empty(out.shape)
    torch.ops._C.cutlass_scaled_mm(
        target, x, weight, _scale(alpha, x.device), _scale(1.0, x.device), None
    )
    _deliver(target, out, accumulate)


def _upcast(x: Tensor, weight: Tensor, out: Tensor, alpha: float, accumulate: bool) -> None:
    product = torch.mm(x.to(torch.bfloat16), weight.to(torch.bfloat16), out_dtype=torch.float32)
    _deliver(product * alpha, out, accumulate)


def _deliver(target: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(target)
    elif target is not out:
        out.copy_(target)


_WAYS = {"mm": _mm, "cublaslt": _cublaslt, "cutlass": _cutlass, "upcast": _upcast}
