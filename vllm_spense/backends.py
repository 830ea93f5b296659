"""How a loaded layer runs: our sparse op, or dense through vLLM where no sparse path can run.

Each backend takes the verified planes of a layer, leaves on the layer the parameters that its
kernels read, and applies it. Choosing happens once per layer, at load, and is logged with its
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from vllm_spense import compat
from vllm_spense.format.fp8 import FP8
from vllm_spense.format.partition import RegionKind
from vllm_spense.format.planes import expand_region
from vllm_spense.fused import FusedLayer
from vllm_spense.kernels import dispatch, ops
from vllm_spense.kernels.problem import Layout
from vllm_spense.log import debug, info_once, warn_once

__all__ = ["Backend", "DenseFp8", "DenseUnquantized", "SparseOp", "choose"]


class Backend(Protocol):
    """One way to run a layer. `identity` tells compiled graphs apart that different ones traced."""

    identity: str

    def load(self, layer: nn.Module, fused: FusedLayer, planes: Mapping[str, Tensor]) -> None:
        """Put on `layer` the parameters that `apply` reads."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Y[M, N] of X[M, K], or the same with more leading dimensions."""


class DenseUnquantized:
    """Expanded to a dense weight in the model's dtype; vLLM's own linear."""

    identity = "dense unquantized"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._method = UnquantizedLinearMethod()

    def load(self, layer: nn.Module, fused: FusedLayer, planes: Mapping[str, Tensor]) -> None:
        layer.weight = Parameter(fused.decode(planes, self._dtype), requires_grad=False)
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._method.apply(layer, x, bias)


class DenseFp8:
    """Expanded to dense FP8 (the same numbers); vLLM's own FP8 kernel for this GPU."""

    def __init__(self, fused: FusedLayer, dtype: torch.dtype) -> None:
        self._kernel = compat.dense_fp8_kernel(
            sum(fused.rows), fused.cols, dtype, "vllm-spense's dense FP8 layers"
        )
        self.identity = f"dense fp8 {type(self._kernel).__name__}"

    def load(self, layer: nn.Module, fused: FusedLayer, planes: Mapping[str, Tensor]) -> None:
        weight = fused.decode_fp8(planes)
        layer.weight = Parameter(weight.t(), requires_grad=False)  # vLLM's kernels take [K, N]
        layer.weight.input_dim, layer.weight.output_dim = 0, 1
        layer.weight_scale = Parameter(fused.row_scale(planes), requires_grad=False)
        layer.input_scale = None
        layer.logical_widths = list(fused.rows)
        self._kernel.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernel.apply_weights(layer, x, bias)


class SparseOp:
    """Our opaque op: 2:4 and dense regions, the path chosen inside by M.

    Compiled graphs get the unscaled product and multiply by the scales afterwards, where the
    compiler folds the multiplication into whatever reads Y; eager mode applies them inside the op.
    The order of channels is restored in torch too (`FusedLayer.slices`), for the same reason.
    """

    def __init__(
        self, layout: Layout, slices: tuple[tuple[int, int], ...], dtype: torch.dtype
    ) -> None:
        self._layout = layout
        self._slices = slices
        self._regions = layout.encode()
        self._dtype = dtype
        self._quantize = compat.token_quantizer() if layout.weight_dtype == FP8 else None
        self._compiled = compat.compiled()
        self._alpha = ops.alpha_for(layout.weight_dtype, dtype)
        self.identity = f"sparse {layout} {slices} {self._compiled}"

    def load(self, layer: nn.Module, fused: FusedLayer, planes: Mapping[str, Tensor]) -> None:
        regions = _as_planned(fused.layout(), self._layout, fused.region_planes(planes))
        tensors = ops.prepare(self._layout, regions)
        self._names = [f"weight_region_{i}" for i in range(len(tensors))]
        self._names[0] = "weight_packed"  # the name by which LoRA finds a layer's device
        for name, tensor in zip(self._names, tensors, strict=True):
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))
        scale = fused.op_scale(planes)
        if scale is not None:
            layer.weight_scale = Parameter(scale / self._alpha, requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        weights = [getattr(layer, name) for name in self._names]
        rows = x.view(-1, x.shape[-1])
        if self._quantize is None:
            y = self._raw(rows, weights)
        else:
            y = self._apply_fp8(layer, rows, weights)
        if self._slices:
            y = torch.cat([y.narrow(1, start, size) for start, size in self._slices], 1)
        y = (y if bias is None else y + bias).to(self._dtype)
        return y.view(*x.shape[:-1], self._layout.n)

    def _raw(self, rows: Tensor, weights: list[Tensor]) -> Tensor:
        return torch.ops.spense.linear_raw(
            rows, weights, self._regions, self._layout.n, self._dtype, self._alpha
        )

    def _apply_fp8(self, layer: nn.Module, rows: Tensor, weights: list[Tensor]) -> Tensor:
        """The scaled product: float32 in a compiled graph, rounded already in eager mode."""
        quantized, x_scale = self._quantize(rows)
        if self._compiled:
            return self._raw(quantized, weights).float() * x_scale * layer.weight_scale.t()
        return torch.ops.spense.linear(
            quantized, x_scale, layer.weight_scale, None, weights, self._regions, self._layout.n,
            self._dtype, self._alpha,
        )  # fmt: skip


def choose(fused: FusedLayer, dtype: torch.dtype, device: torch.device) -> Backend:
    """The backend for a layer on this device, logged once per reason.

    Raises:
        ValueError: float32 activations on a GPU, which no FP8 or 2:4 kernel takes.
    """
    fp8 = fused.weight_dtype == FP8
    name = fused.modules[0]
    if not current_platform.is_cuda():
        info_once(
            f"spense: no sparse kernels on this device ({device.type}): layers are expanded to "
            f"dense {_short(dtype)} at load and run through vLLM's own linear"
        )
        return DenseUnquantized(dtype)
    if dtype == torch.float32:
        raise ValueError(f"{name}: float32 activations on a GPU; use --dtype bfloat16 or float16")
    if not fp8 and dtype != fused.weight_dtype:
        raise ValueError(
            f"{name}: {_short(fused.weight_dtype)} weights with --dtype {_short(dtype)}; "
            f"serve this checkpoint with --dtype {_short(fused.weight_dtype)}"
        )
    layout, reasons = _plan_regions(fused.layout(), dtype, device)
    for reason in reasons:
        warn_once(f"spense: some regions do not run as stored: {reason}")
        debug(f"spense: {name}: {reason}")
    if layout is not None:
        info_once(f"spense: {_short(fused.weight_dtype)} layers run through the sparse op")
        debug(f"spense: {name} runs through the sparse op: {layout.regions}")
        return SparseOp(layout, fused.slices(), dtype)
    return DenseFp8(fused, dtype) if fp8 else DenseUnquantized(dtype)


def _plan_regions(
    layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[Layout | None, list[str]]:
    """The layout with refused regions made dense (None if that is refused too), and why."""
    capability = torch.cuda.get_device_capability(device)
    refusals = dispatch.region_refusals(layout, dtype, capability)
    reasons = [reason for reason in refusals if reason]
    regions = tuple(
        replace(region, kind=RegionKind.DENSE, tiles=None) if refusal else region
        for region, refusal in zip(layout.regions, refusals, strict=True)
    )
    planned = replace(layout, regions=regions)
    if any(dispatch.region_refusals(planned, dtype, capability)):
        return None, [*reasons, "the whole layer is expanded to dense, run by vLLM's own kernel"]
    if planned.regions == layout.regions:
        return layout, []
    return planned, [f"{reason} (expanded to a dense region)" for reason in reasons]


def _as_planned(
    stored: Layout, planned: Layout, planes: list[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Expand the planes of regions that are sparse on disk and dense in the plan."""
    return [
        (expand_region(before.kind, parts, before.tiles),) if before != after else parts
        for before, after, parts in zip(stored.regions, planned.regions, planes, strict=True)
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
