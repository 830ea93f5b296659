"""The custom ops of `torch.ops.spense`, and the kernel tensors they take.

    linear_raw(x, weights, regions, n, out_dtype, alpha=1)
        Y = alpha · X · Wᵀ
    linear(x, x_scale, w_scale, bias, weights, regions, n, out_dtype, alpha=1)
        Y = (alpha · X · Wᵀ) · x_scale · w_scaleᵀ + bias

x [M, K] in the weight dtype (2-D, any M including 0); x_scale float32 [M, 1] (or [1, 1]); w_scale
float32 [n, 1] or [1, n]; bias [n]; Y [M, n] BF16 or FP16. `weights` holds one tensor per region and
`regions` five integers per region, as `Layout.encode` writes them. One tensor more than regions is
the dense weight [n, K], for where one dense GEMM is faster.

Compiled models call `linear_raw` and multiply by the scales in torch, where Inductor fuses the
product into what reads Y; eager ones call `linear`. With FP16 outputs raw FP8 sums overflow
(448 · 448 · K): pass alpha = 2⁻ᵏ and fold 2ᵏ into w_scale, for either op. BF16 needs no alpha.

The choice of kernel is made inside, by M, and no graph sees it. On the CPU both ops are the
reference: right, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.planes import expand_region
from vllm_spense.kernels import cusparselt, dispatch, execution, reference
from vllm_spense.kernels.layouts import Blob24
from vllm_spense.kernels.problem import Layout
from vllm_spense.kernels.tile_layout import TileBlob

__all__ = ["alpha_for", "can_run", "linear", "linear_raw", "prepare", "register"]

_SCHEMAS = {
    "linear_raw": (
        "linear_raw(Tensor x, Tensor[] weights, int[] regions, int n, ScalarType out_dtype, "
        "float alpha=1.0) -> Tensor"
    ),
    "linear": (
        "linear(Tensor x, Tensor x_scale, Tensor w_scale, Tensor? bias, Tensor[] weights, "
        "int[] regions, int n, ScalarType out_dtype, float alpha=1.0) -> Tensor"
    ),
}
_FP8_MAX = 448.0
_FP16_FACTOR = 2.0**-12


def alpha_for(weight_dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    """The factor 2⁻ᵏ that keeps raw sums inside the range of `out_dtype`; fold 2ᵏ into w_scale.

    Per-token activations and per-channel weights both reach 448, so a product reaches 2¹⁷·⁶ and
    FP16 ends at 2¹⁶. Sums of real layers are about √K · 2¹³; 2⁻¹² puts them near 2⁸, with room for
    a hundred times more, and sums a million times smaller are still normal numbers.
    """
    fp8_to_fp16 = weight_dtype == torch.float8_e4m3fn and out_dtype == torch.float16
    return _FP16_FACTOR if fp8_to_fp16 else 1.0


def prepare(
    layout: Layout,
    planes: Sequence[tuple[Tensor, ...]],
    device: torch.device | str | None = None,
    dense_copy: bool = False,
) -> list[Tensor]:
    """Kernel tensors of a layer, one per region.

    Args:
        planes: per region (values [rows, cols/2], meta [rows, cols/8]), (tiles, tile index) as
            `format/tiles.py` has them, or (weight [rows, cols],).
        device: where they shall be; by default where the planes are.
        dense_copy: append the dense weight [N, K] as well, which the op then uses where that is
            faster; tensors of dense regions with whole rows are views of it.

    Returns:
        2:4 regions and zero tiles: a flat uint8 buffer (`layouts.Blob24`, `tile_layout.TileBlob`);
        dense ones: [rows, cols] contiguous.
    """
    if len(planes) != len(layout.regions):
        raise ValueError(f"{len(planes)} sets of planes for {len(layout.regions)} regions")
    if dense_copy:
        return _prepare_with_copy(layout, planes, device)
    weights = []
    for region, parts in zip(layout.regions, planes, strict=True):
        on_device = [part.to(device or part.device) for part in parts]
        if region.kind is RegionKind.SPARSE_24:
            blob = Blob24(region.rows, region.cols, layout.weight_dtype)
            weights.append(_prepare_sparse(blob, *on_device))
        elif region.kind is RegionKind.DENSE:
            weights.append(_prepare_dense(region.rows, region.cols, layout, *on_device))
        else:
            blob = TileBlob(region.rows, region.tiles, layout.weight_dtype)
            weights.append(blob.pack(*on_device))
    return weights


def _prepare_with_copy(
    layout: Layout, planes: Sequence[tuple[Tensor, ...]], device: torch.device | str | None
) -> list[Tensor]:
    weights = prepare(layout, planes, device)
    copy = torch.empty((layout.n, layout.k), dtype=layout.weight_dtype, device=weights[0].device)
    for i, (region, parts) in enumerate(zip(layout.regions, planes, strict=True)):
        part = copy[region.y_start : region.y_stop, region.x_start : region.x_stop]
        if region.kind is RegionKind.DENSE:
            part.copy_(weights[i])
            if part.is_contiguous():
                weights[i] = part
        else:
            part.copy_(expand_region(region.kind, parts, region.tiles))
    return [*weights, copy]


def _prepare_sparse(blob: Blob24, values: Tensor, meta: Tensor) -> Tensor:
    if values.device.type == "cuda":
        with torch.cuda.device(values.device):
            return cusparselt.prepare(blob, values, meta)
    return blob.pack(values, meta)


def _prepare_dense(rows: int, cols: int, layout: Layout, weight: Tensor) -> Tensor:
    if tuple(weight.shape) != (rows, cols) or weight.dtype != layout.weight_dtype:
        raise ValueError(
            f"dense plane is {list(weight.shape)} {weight.dtype}; "
            f"needed: [{rows}, {cols}] {layout.weight_dtype}"
        )
    return weight.contiguous()


def can_run(layout: Layout, out_dtype: torch.dtype, device: torch.device | str) -> tuple[bool, str]:
    """Whether a kernel on `device` takes every region of `layout`, and if not, why."""
    device = torch.device(device)
    if device.type != "cuda":
        return False, f"there are no kernels for {device.type}"
    capability = torch.cuda.get_device_capability(device)
    reason = next(filter(None, dispatch.region_refusals(layout, out_dtype, capability)), "")
    return not reason, reason


def _check(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; needed: [M, K]")


def _linear_raw_cpu(
    x: Tensor,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    _check(x)
    layout = Layout.decode(n, x.shape[1], regions, x.dtype)
    of_regions = weights[: len(layout.regions)]  # a dense copy may follow
    return reference.linear_raw(x, reference.expand(layout, of_regions), out_dtype, alpha)


def _linear_raw_cuda(
    x: Tensor,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    _check(x)
    if x.shape[0] == 0:
        return x.new_empty((0, n), dtype=out_dtype)
    x = x.contiguous()
    if x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return execution.execute(x, weights, regions, n, out_dtype, alpha)
    return execution.execute(x, weights, regions, n, out_dtype, alpha)


def _linear_raw_fake(
    x: Tensor,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _linear_cpu(
    x: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    y = _linear_raw_cpu(x, weights, regions, n, torch.float32, alpha)
    return reference.apply_scales(y, x_scale, w_scale, bias).to(out_dtype)


def _linear_cuda(
    x: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    from vllm_spense.kernels.scale import scale_in_place  # Triton: not needed on the CPU

    y = _linear_raw_cuda(x, weights, regions, n, out_dtype, alpha)
    return scale_in_place(y, x_scale, w_scale, bias)


def _linear_fake(
    x: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weights: list[Tensor],
    regions: list[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


_IMPLEMENTATIONS = {
    "linear_raw": (_linear_raw_cpu, _linear_raw_cuda, _linear_raw_fake),
    "linear": (_linear_cpu, _linear_cuda, _linear_fake),
}


def register() -> torch.library.Library | None:
    """Define the ops, once. The result must be kept alive: dropping it removes them."""
    if hasattr(torch.ops.spense, "linear_raw"):
        return None
    library = torch.library.Library("spense", "FRAGMENT")
    for name, (cpu, cuda, fake) in _IMPLEMENTATIONS.items():
        library.define(_SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, cpu, "CPU")
        library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"spense::{name}", fake, lib=library)
    return library


_LIBRARY = register() or globals().get("_LIBRARY")  # a reload keeps the one that is alive

linear_raw = torch.ops.spense.linear_raw
linear = torch.ops.spense.linear
