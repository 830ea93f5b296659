"""The library paths on a GPU: every combination against float64, slices, accumulation, sizes.

pytest -m gpu tests/test_gpu_library.py tests/test_gpu_concurrency.py -s
"""

import pytest
import torch
from gpu_cases import (
    BF16,
    CUDA,
    DTYPES,
    LAYERS,
    ROWS,
    check,
    poisoned_memory,
    raw,
)
from layers import (
    DENSE,
    FP8,
    NAMES,
    SPARSE,
    input_split,
    make_layer,
    output_split,
    random_input,
)

from vllm_spense.kernels import cusparselt, dispatch, ops, scaled_mm
from vllm_spense.kernels.cusparselt_api import missing
from vllm_spense.kernels.layouts import Blob24
from vllm_spense.kernels.problem import Layout, Problem, Region

__all__ = ["poisoned_memory"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{NAMES[d[0]]}-{NAMES[d[1]]}")
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name, dtypes):
    n, k, regions = LAYERS[name]
    layer = make_layer(n, k, regions, dtypes[0], CUDA)
    weights = layer.kernel_tensors()
    for m in ROWS:
        x = random_input(m, k, dtypes[0], CUDA, seed=m)
        check(raw(layer, weights, x, dtypes[1]), layer.product(x))


def test_sparse_regions_run_through_cusparselt():
    assert not missing()
    layout = Layout(1024, 512, output_split(1024, 512, 256), FP8)
    capability = torch.cuda.get_device_capability()
    plan = dispatch.make_plan(Problem.whole(layout, 300, BF16, capability))
    assert [step.path for step in plan.steps] == ["scaled_mm", "cusparselt"]
    assert plan.rows == 304


@pytest.mark.parametrize("shape", [(64, 128), (512, 1024), (10240, 5120)])
def test_own_metadata_order_is_the_library_s(shape):
    assert cusparselt.order_is_known(torch.device(CUDA, torch.cuda.current_device()))
    rows, cols = shape
    layer = make_layer(rows, cols, output_split(rows, cols, 0), FP8, CUDA)
    blob = Blob24(rows, cols, FP8)
    assert blob.ordered
    handle = cusparselt._plans(layer.weight.device).handle
    assert torch.equal(blob.pack(*layer.planes[0]), handle.compress(layer.weight))
    values, meta = blob.unpack(layer.kernel_tensors()[0])
    assert torch.equal(values.view(torch.uint8), layer.planes[0][0].view(torch.uint8))
    assert torch.equal(meta, layer.planes[0][1])


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=NAMES.get)
@pytest.mark.parametrize("kind", [SPARSE, DENSE], ids=lambda kind: kind.value)
def test_a_step_writes_its_channels_only(kind, dtype):
    n, k, m = 512, 256, 48
    sparse, dense = output_split(n, k, 192)
    index = (sparse, dense).index(sparse if kind is SPARSE else dense)
    layer = make_layer(n, k, (sparse, dense), dtype, CUDA)
    weights = layer.kernel_tensors()
    x = random_input(m, k, dtype, CUDA)
    problem = Problem.whole(layer.layout, m, BF16, torch.cuda.get_device_capability()).only(index)
    path = cusparselt if kind is SPARSE else scaled_mm
    region = problem.region
    for config in path.candidates(problem)[:3]:
        y = torch.full((m, n), 7.0, dtype=BF16, device=CUDA)
        path.run(*(problem, x, [weights[index]], y), alpha=1.0, accumulate=False, config=config)
        inside = slice(region.y_start, region.y_stop)
        check(y[:, inside].double(), layer.product(x)[:, inside])
        y[:, inside] = 7.0
        assert bool((y == 7.0).all()), config


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=NAMES.get)
def test_accumulate_in_place(dtype):
    n, k, m = 256, 512, 32
    layer = make_layer(n, k, input_split(n, k, 256), dtype, CUDA)
    weights = layer.kernel_tensors()
    x = random_input(m, k, dtype, CUDA)
    whole = Problem.whole(layer.layout, m, BF16, torch.cuda.get_device_capability())
    for index, path in ((0, cusparselt), (1, scaled_mm)):
        region = layer.layout.regions[index]
        columns = slice(region.x_start, region.x_stop)
        start = random_input(m, n, BF16, CUDA, seed=5) * 20
        y = start.clone()
        problem = whole.only(index)
        config = path.candidates(problem)[0]
        path.run(*(problem, x, [weights[index]], y), alpha=1.0, accumulate=True, config=config)
        part = x[:, columns].double() @ layer.weight[:, columns].double().t()
        check(y.double(), start.double() + part)


def test_sizes_that_no_fp8_gemm_takes_are_upcast():
    layer = make_layer(40, 72, output_split(40, 72, 40), FP8, CUDA)
    x = random_input(5, 72, FP8, CUDA)
    check(raw(layer, layer.kernel_tensors(), x, BF16), layer.product(x))


def test_refusal_names_the_size():
    layout = Layout(40, 64, (Region(SPARSE, 0, 40, 0, 64),), FP8)
    (reason,) = dispatch.region_refusals(layout, BF16, torch.cuda.get_device_capability())
    assert "[40, 64]: cuSPARSELt wants multiples of 32" in reason


def test_padding_in_the_storage_of_x_saves_the_copy(monkeypatch):
    layer = make_layer(256, 512, output_split(256, 512, 0), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(48, 512, FP8, CUDA)[:33]
    expected = layer.product(x)
    monkeypatch.setattr(torch, "empty", _one_empty_only(torch.empty))
    check(ops.linear_raw(x, weights, ints, 256, BF16).double(), expected)


def _one_empty_only(empty):
    """Y and a library workspace may be allocated, an FP8 copy of X may not."""

    def allocate(*args, **kwargs):
        assert kwargs.get("dtype") != FP8
        return empty(*args, **kwargs)

    return allocate


def test_no_tokens():
    layer = make_layer(256, 256, output_split(256, 256, 64), FP8, CUDA)
    x = random_input(0, 256, FP8, CUDA)
    y = ops.linear_raw(x, layer.kernel_tensors(), layer.layout.encode(), 256, BF16)
    assert y.shape == (0, 256) and y.dtype == BF16


def test_scales_times_three_give_three_times_y():
    layer = make_layer(256, 512, input_split(256, 512, 128), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(9, 512, FP8, CUDA)
    x_scale, w_scale = torch.rand(9, 1, device=CUDA) + 0.5, torch.rand(256, 1, device=CUDA) + 0.5
    bias = random_input(1, 256, BF16, CUDA).view(-1) * 30
    for factor in (1.0, 3.0):
        y = ops.linear(x, x_scale * factor, w_scale, bias, weights, ints, 256, BF16)
        check(y.double(), layer.product(x) * factor * x_scale * w_scale.t() + bias)


def test_cutlass_is_given_whole_rows_only():
    layout = Layout(512, 1024, input_split(512, 1024, 256), FP8)
    problem = Problem.whole(layout, 4096, BF16, torch.cuda.get_device_capability()).only(1)
    assert (("gemm", "cutlass"),) not in scaled_mm.candidates(problem)


def test_opcheck_on_the_gpu():
    # Not FP8: opcheck compares its inputs with arithmetic that torch lacks for it.
    layer = make_layer(256, 256, output_split(256, 256, 64), BF16, CUDA)
    x = random_input(16, 256, BF16, CUDA)
    arguments = (x, layer.kernel_tensors(), layer.layout.encode(), 256, BF16)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.spense.linear_raw.default, arguments, test_utils=utilities)
