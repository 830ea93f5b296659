"""The custom ops on the CPU: numbers, shapes, registration, what they refuse."""

import importlib

import pytest
import torch
from layers import (
    DENSE,
    FP8,
    NAMES,
    gate_up,
    input_split,
    make_layer,
    output_split,
    random_input,
    relative_error,
)

from vllm_spense.kernels import ops
from vllm_spense.kernels.problem import Layout, Region

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2**-8, FP16: 2**-11}  # half a unit in the last place
CASES = {
    "sparse": (64, 128, output_split(64, 128, 0)),
    "dense": (24, 40, output_split(24, 40, 24)),
    "output_split": (128, 64, output_split(128, 64, 32)),
    "input_split": (48, 192, input_split(48, 192, 64)),
    "gate_up": (128, 64, gate_up(128, 64, 32)),
    "odd_sizes": (37, 72, output_split(37, 72, 5)),
}


@pytest.fixture(params=CASES)
def layer(request):
    n, k, regions = CASES[request.param]
    return lambda dtype: make_layer(n, k, regions, dtype, "cpu")


@pytest.mark.parametrize("m", [0, 1, 7, 16])
@pytest.mark.parametrize("out_dtype", [BF16, FP16], ids=NAMES.get)
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=NAMES.get)
def test_linear_raw(layer, dtype, out_dtype, m):
    layer = layer(dtype)
    x = random_input(m, layer.layout.k, dtype, "cpu")
    y = ops.linear_raw(
        *(x, layer.kernel_tensors(), layer.layout.encode(), layer.layout.n, out_dtype, 0.5)
    )
    assert y.shape == (m, layer.layout.n) and y.dtype == out_dtype and y.is_contiguous()
    if m:
        assert relative_error(y, layer.product(x) * 0.5) <= ROUNDING[out_dtype]


@pytest.mark.parametrize("scale_shape", ["column", "row"])
def test_linear_applies_scales_once(scale_shape):
    layer = make_layer(128, 64, gate_up(128, 64, 32), FP8, "cpu")
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(9, 64, FP8, "cpu")
    x_scale, w_scale = torch.rand(9, 1) + 0.5, torch.rand(128, 1) + 0.5
    bias = random_input(1, 128, BF16, "cpu").view(-1)
    given = w_scale if scale_shape == "column" else w_scale.view(1, -1)
    for factor in (1.0, 3.0):
        y = ops.linear(x, x_scale * factor, given, bias, weights, ints, 128, BF16)
        expected = layer.product(x) * factor * x_scale * w_scale.t() + bias
        assert relative_error(y, expected) <= ROUNDING[BF16]


def test_fp16_factor_keeps_sums_of_fp8_finite():
    layer = make_layer(64, 1024, output_split(64, 1024, 0), FP8, "cpu")
    x = torch.full((2, 1024), 400.0).to(FP8)
    weights = ops.prepare(
        layer.layout, [(torch.full((64, 512), 400.0).to(FP8), layer.planes[0][1])]
    )
    alpha = ops.alpha_for(FP8, FP16)
    for factor, finite in ((1.0, False), (alpha, True)):
        y = ops.linear_raw(x, weights, layer.layout.encode(), 64, FP16, factor)
        assert bool(torch.isfinite(y).all()) is finite
    assert ops.alpha_for(FP8, BF16) == ops.alpha_for(FP16, FP16) == 1.0


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=NAMES.get)
def test_opcheck(dtype):
    layer = make_layer(64, 128, input_split(64, 128, 32), dtype, "cpu")
    x, scale = random_input(5, 128, dtype, "cpu"), torch.rand(5, 1)
    rest = (layer.kernel_tensors(), layer.layout.encode(), 64, BF16)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    if dtype != FP8:  # torch compares inputs with arithmetic that it lacks for FP8
        checks += ("test_schema",)
    torch.library.opcheck(torch.ops.spense.linear_raw.default, (x, *rest), test_utils=checks)
    torch.library.opcheck(
        torch.ops.spense.linear.default,
        (x, scale, torch.rand(64, 1), None, *rest),
        test_utils=checks,
    )


def test_compiled_with_a_symbolic_number_of_tokens():
    layer = make_layer(64, 128, output_split(64, 128, 32), BF16, "cpu")
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def function(x):
        return torch.ops.spense.linear_raw(x, weights, ints, 64, BF16) * 2

    for m in (3, 8, 21):
        x = random_input(m, 128, BF16, "cpu")
        assert relative_error(function(x), layer.product(x) * 2) <= ROUNDING[BF16]
    assert len(seen) == 1


def test_registration_may_be_repeated():
    assert ops.register() is None
    importlib.reload(ops)
    layer = make_layer(32, 64, output_split(32, 64, 0), BF16, "cpu")
    x = random_input(2, 64, BF16, "cpu")
    y = ops.linear_raw(x, layer.kernel_tensors(), layer.layout.encode(), 32, BF16)
    assert relative_error(y, layer.product(x)) <= ROUNDING[BF16]


def test_three_dimensions_are_refused():
    layer = make_layer(32, 64, output_split(32, 64, 0), BF16, "cpu")
    x = random_input(2, 64, BF16, "cpu").view(1, 2, 64)
    with pytest.raises(ValueError, match=r"x has shape \[1, 2, 64\]; needed: \[M, K\]"):
        ops.linear_raw(x, layer.kernel_tensors(), layer.layout.encode(), 32, BF16)


def test_planes_that_do_not_fit():
    layout = Layout(32, 64, (Region(DENSE, 0, 32, 0, 64),), FP8)
    with pytest.raises(ValueError, match="0 sets of planes for 1 regions"):
        ops.prepare(layout, [])
    with pytest.raises(ValueError, match=r"dense plane is \[32, 32\].*needed: \[32, 64\]"):
        ops.prepare(layout, [(torch.zeros(32, 32).to(FP8),)])
    with pytest.raises(ValueError, match=r"planes are \[32, 16\].*needed: \[32, 32\]"):
        sparse = Layout(32, 64, output_split(32, 64, 0), FP8)
        meta = torch.zeros(32, 8, dtype=torch.uint8)
        ops.prepare(sparse, [(torch.zeros(32, 16).to(FP8), meta)])


def test_no_kernels_on_the_cpu():
    layout = Layout(32, 64, output_split(32, 64, 0), FP8)
    assert ops.can_run(layout, BF16, "cpu") == (False, "there are no kernels for cpu")
