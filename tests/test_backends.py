"""How a loaded layer runs: the sparse op (on the CPU it computes the reference) and the choices."""

import dataclasses

import pytest
import torch

pytest.importorskip("vllm")

from test_fused import CASES, stacked
from test_linear import ranks
from torch import nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from vllm_spense import backends, compat, log
from vllm_spense.format.partition import RegionKind
from vllm_spense.fused import FusedLayer
from vllm_spense.kernels.problem import Layout

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def forget_what_was_said():
    log._said.clear()


def make(case, weight_dtype=FP8):
    partitions, rows, cols = CASES[case]
    _, planes = stacked(partitions, rows, cols)
    if weight_dtype != FP8:
        planes = {
            n: p.to(weight_dtype) if p.dtype == FP8 else p
            for n, p in planes.items()
            if "scale" not in n
        }
    modules = tuple(f"m{i}" for i in range(len(partitions)))
    return FusedLayer.divide(modules, partitions, rows, cols, weight_dtype), planes


def sparse_op(monkeypatch, fused, planes, dtype, mode):
    layer = nn.Module()
    with ranks(monkeypatch, 0, 1):
        monkeypatch.setattr("vllm_spense.compat.compiled", lambda: mode == "compiled")
        backend = backends.SparseOp(fused.layout(), fused.slices(), dtype)
        backend.load(layer, fused, planes)
    return layer, backend


def expected(fused, planes, x, bias, scale=1.0):
    """From the definition, in float64: vLLM's FP8 of X, FP8 weights, scales and bias."""
    weight = fused.decode_fp8(planes).double() * fused.row_scale(planes).double() * scale
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        quantized, x_scale = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)(x)
    y = (quantized.double() * x_scale.double()) @ weight.t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_scales_are_applied_exactly_once(monkeypatch, mode, case, dtype, with_bias):
    """Weight scales times three give three times the product: neither never nor twice."""
    fused, planes = make(case)
    x = torch.randn(5, fused.cols, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.linspace(-1, 1, sum(fused.rows)).to(dtype) if with_bias else None
    for factor in (1.0, 3.0):
        scaled = {n: p * factor if n.endswith("_scale") else p for n, p in planes.items()}
        layer, backend = sparse_op(monkeypatch, fused, scaled, dtype, mode)
        y = backend.apply(layer, x, bias)
        assert y.dtype == dtype
        reference = expected(fused, planes, x, bias, factor)
        error = (y.double() - reference).norm() / reference.norm()
        assert error < 4e-3, f"factor {factor}: {error}"


def test_large_sums_in_float16(monkeypatch):
    """Raw FP8 sums reach 448 · 448 · K; half precision ends at 65504."""
    fused, planes = make("down")
    x = torch.full((2, fused.cols), 3.0, dtype=torch.float16)
    planes = dict(planes)
    for name in ("weight_values", "weight_dense"):
        planes[name] = torch.full(planes[name].shape, 448.0).to(FP8)
    planes["weight_scale"] = torch.full(planes["weight_scale"].shape, 1e-3)
    for mode in ("compiled", "eager"):
        layer, backend = sparse_op(monkeypatch, fused, planes, torch.float16, mode)
        y = backend.apply(layer, x, None)
        reference = expected(fused, planes, x, None)
        assert torch.isfinite(y).all()
        assert ((y.double() - reference) / reference).abs().max() < 2e-3


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_unscaled_dtypes(monkeypatch, weight_dtype):
    fused, planes = make("gate_up hybrid", weight_dtype)
    layer, backend = sparse_op(monkeypatch, fused, planes, weight_dtype, "compiled")
    x = torch.randn(2, 3, fused.cols).to(weight_dtype)
    y = backend.apply(layer, x, None)
    reference = x.double() @ fused.decode(planes, torch.float64).t()
    assert y.shape == (2, 3, sum(fused.rows))
    assert (y.double() - reference).norm() / reference.norm() < 4e-3


def test_kernel_tensors_are_parameters(monkeypatch):
    """Reload, sleep mode and graph pointers work on parameters only; LoRA wants `weight_packed`."""
    fused, planes = make("gate_up hybrid")
    layer, _ = sparse_op(monkeypatch, fused, planes, torch.bfloat16, "compiled")
    assert set(dict(layer.named_parameters())) == {
        "weight_packed", "weight_region_1", "weight_scale",
    }  # fmt: skip
    assert not [n for n, v in vars(layer).items() if isinstance(v, torch.Tensor)]


def test_choices_change_the_graph_cache_key():
    """Two devices that run a layer differently must not share compiled graphs."""
    keys = set()
    for choice in ("sparse", "dense fp8"):
        config = VllmConfig(device_config=DeviceConfig(device="cpu"))
        before = config.compute_hash()
        compat.remember_choice(config, "m0", choice)
        keys |= {before, config.compute_hash()}
    assert len(keys) == 3


def on_gpu(monkeypatch, refuses):
    """A GPU whose dispatcher refuses the regions for which `refuses(region)` gives a reason."""

    def refusals(layout: Layout, out_dtype, capability):
        return tuple(refuses(region) for region in layout.regions)

    monkeypatch.setattr(type(backends.current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("vllm_spense.kernels.dispatch.region_refusals", refusals)
    monkeypatch.setattr(
        "vllm_spense.compat.dense_fp8_kernel", lambda rows, cols, dtype, module: (rows, cols)
    )


def choose(monkeypatch, case, refuses, dtype=torch.bfloat16, weight_dtype=FP8):
    fused, _ = make(case, weight_dtype)
    with ranks(monkeypatch, 0, 1):
        on_gpu(monkeypatch, refuses)
        return backends.choose(fused, dtype, torch.device("cuda"))


def test_choice_where_everything_runs(monkeypatch, caplog):
    backend = choose(monkeypatch, "gate_up hybrid", lambda region: "")
    assert isinstance(backend, backends.SparseOp)
    assert "run through the sparse op" in caplog.text


def test_choice_where_a_sparse_region_cannot_run(monkeypatch, caplog):
    """It becomes a dense region of the same op, and the log says why."""
    backend = choose(
        monkeypatch, "down", lambda r: "48 columns are too few" if r.kind == "sparse_24" else ""
    )
    assert isinstance(backend, backends.SparseOp)
    assert {region.kind.value for region in backend._layout.regions} == {"dense"}
    assert "48 columns are too few (expanded to a dense region)" in caplog.text


def test_expanded_regions_compute_the_same(monkeypatch):
    fused, planes = make("down")
    x = torch.randn(3, fused.cols).bfloat16()
    stored = fused.layout()
    dense_regions = tuple(dataclasses.replace(r, kind=RegionKind.DENSE) for r in stored.regions)
    dense = dataclasses.replace(stored, regions=dense_regions)
    layer = nn.Module()
    with ranks(monkeypatch, 0, 1):
        backend = backends.SparseOp(dense, fused.slices(), torch.bfloat16)
        backend.load(layer, fused, planes)
    y = backend.apply(layer, x, None).double()
    reference = expected(fused, planes, x, None)
    assert (y - reference).norm() / reference.norm() < 4e-3


def test_choice_where_nothing_runs(monkeypatch, caplog):
    backend = choose(monkeypatch, "down", lambda region: "no library")
    assert isinstance(backend, backends.DenseFp8)
    assert "no library" in caplog.text
    assert "run by vLLM's own kernel" in caplog.text


def test_float32_on_a_gpu_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="m0: float32 activations on a GPU; use --dtype"):
        choose(monkeypatch, "down", lambda region: "", dtype=torch.float32)


def test_bf16_weights_with_fp16_activations_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="m0: bfloat16 weights with --dtype float16"):
        choose(monkeypatch, "down", lambda region: "", torch.float16, weight_dtype=torch.bfloat16)
