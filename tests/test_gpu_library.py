"""The library paths on a GPU: every combination against float64, slices, graphs, streams, threads.

`pytest -m gpu tests/test_gpu_library.py -s` prints the host time of a call as well.
"""

import threading
import time

import pytest
import torch
from layers import (
    DENSE,
    FP8,
    NAMES,
    SPARSE,
    gate_up,
    input_split,
    make_layer,
    output_split,
    random_input,
    relative_error,
)

from vllm_spense.kernels import cusparselt, dispatch, execution, ops, scaled_mm
from vllm_spense.kernels.cusparselt_api import missing
from vllm_spense.kernels.layouts import Blob24
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Layout, Problem, Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
MAX_NORM_ERROR = 3e-3  # ‖y − ref‖ / ‖ref‖
MAX_POINT_ERROR = 2e-2  # largest |y − ref| / rms(ref)

LAYERS = {
    "all_sparse": (768, 1024, output_split(768, 1024, 0)),
    "output_split_25": (1024, 512, output_split(1024, 512, 256)),
    "output_split_50": (1024, 512, output_split(1024, 512, 512)),
    "input_split_25": (512, 2048, input_split(512, 2048, 512)),
    "input_split_50": (512, 2048, input_split(512, 2048, 1024)),
    "gate_up_25": (2048, 512, gate_up(2048, 512, 512)),
    "all_dense": (768, 1024, output_split(768, 1024, 768)),
    # SmolLM2-135M: 576 is no multiple of 128, so the library compresses
    "smollm_gate_up": (3072, 576, gate_up(3072, 576, 768)),
    "smollm_down": (576, 1536, input_split(576, 1536, 384)),
}
DTYPES = ((FP8, BF16), (FP8, FP16), (BF16, BF16), (FP16, FP16))
ROWS = (1, 7, 16, 33, 128, 300)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty` returns NaN, so that an output that nobody wrote cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.dtype in (BF16, FP16) else out

    monkeypatch.setattr(torch, "empty", poisoned)


def raw(layer, weights, x, out_dtype):
    alpha = ops.alpha_for(layer.layout.weight_dtype, out_dtype)
    y = ops.linear_raw(x, weights, layer.layout.encode(), layer.layout.n, out_dtype, alpha)
    return y.double() / alpha


def check(y, reference):
    assert y.shape == reference.shape
    error = relative_error(y, reference)
    point = ((y - reference).abs().max() / reference.pow(2).mean().sqrt()).item()
    assert error <= MAX_NORM_ERROR, f"norm error {error:.2e}"
    assert point <= MAX_POINT_ERROR * 4, f"point error {point:.2e}"
    return error


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


@pytest.mark.parametrize("m", [1, 40, 100])
@pytest.mark.parametrize("name", ["gate_up_25", "input_split_25", "smollm_down"])
def test_graph_replay_follows_the_input(name, m):
    n, k, regions = LAYERS[name]
    layer = make_layer(n, k, regions, FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(m, k, FP8, CUDA)
    ops.linear_raw(x, weights, ints, n, BF16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_raw(x, weights, ints, n, BF16)
    for seed in (3, 4):
        x.copy_(random_input(m, k, FP8, CUDA, seed))
        y.fill_(float("nan"))
        graph.replay()
        check(y.double(), layer.product(x))


def test_graph_captured_without_warm_up():
    scaled_mm._constant.cache_clear()
    layer = make_layer(768, 512, output_split(768, 512, 256), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(24, 512, FP8, CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_raw(x, weights, ints, 768, BF16, 0.5)
    # The scale tensors of the capture must not have become the cached ones.
    eager = ops.linear_raw(x, weights, ints, 768, BF16, 0.5)
    check(eager.double() * 2, layer.product(x))
    graph.replay()
    check(y.double() * 2, layer.product(x))


def test_graph_outlives_the_eviction_of_its_plan(monkeypatch):
    monkeypatch.setattr(cusparselt, "_MAX_PLANS", 2)
    layer = make_layer(512, 512, output_split(512, 512, 0), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    x = random_input(32, 512, FP8, CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_raw(x, weights, ints, 512, BF16)
    for m in range(48, 480, 16):
        other = random_input(m, 512, FP8, CUDA, seed=m)
        check(raw(layer, weights, other, BF16), layer.product(other))
    y.fill_(float("nan"))
    graph.replay()
    check(y.double(), layer.product(x))


def test_two_streams_share_nothing():
    n, k, m = 2048, 4096, 72
    layer = make_layer(n, k, input_split(n, k, 1024), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    inputs = [random_input(m, k, FP8, CUDA, seed) for seed in (1, 2)]
    expected = [ops.linear_raw(x, weights, ints, n, BF16) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for x, stream, found in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(ops.linear_raw(x, weights, ints, n, BF16))
    torch.cuda.synchronize()
    for found, y in zip(results, expected, strict=True):
        for other in found:
            assert relative_error(other, y.double()) <= MAX_NORM_ERROR


@pytest.mark.parametrize("captured", [False, True])
def test_forked_regions(captured):
    n, k, m = 2048, 1024, 40
    layer = make_layer(n, k, gate_up(n, k, 512), FP8, CUDA)
    weights = layer.kernel_tensors()
    problem = Problem.whole(layer.layout, m, BF16, torch.cuda.get_device_capability())
    plan = dispatch.named_plan(problem, dispatch.FORKED, Table(), False)
    x = random_input(m, k, FP8, CUDA)

    def run():
        return execution.run_plan(plan, x, weights, n, BF16, 1.0)

    check(run().double(), layer.product(x))
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
    for seed in range(20):
        x.copy_(random_input(m, k, FP8, CUDA, seed))
        if captured:
            graph.replay()
        else:
            y = run()
        check(y.double(), layer.product(x))


def test_threads_have_their_own_handles():
    layer = make_layer(1024, 1024, output_split(1024, 1024, 256), FP8, CUDA)
    weights, ints = layer.kernel_tensors(), layer.layout.encode()
    inputs = [random_input(m, 1024, FP8, CUDA) for m in range(1, 200, 23)]
    expected = [ops.linear_raw(x, weights, ints, 1024, BF16).double() for x in inputs]
    torch.cuda.synchronize()
    errors = []

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            for x, y in zip(inputs, expected, strict=True):
                found = ops.linear_raw(x, weights, ints, 1024, BF16)
                errors.append(relative_error(found, y))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 27 and max(errors) == 0.0


def test_opcheck_on_the_gpu():
    # Not FP8: opcheck compares its inputs with arithmetic that torch lacks for it.
    layer = make_layer(256, 256, output_split(256, 256, 64), BF16, CUDA)
    x = random_input(16, 256, BF16, CUDA)
    arguments = (x, layer.kernel_tensors(), layer.layout.encode(), 256, BF16)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.spense.linear_raw.default, arguments, test_utils=utilities)


def host_microseconds(function, calls=300):
    function()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls // 5):
            function()
        best = min(best, (time.perf_counter() - start) / (calls // 5) * 1e6)
        torch.cuda.synchronize()
    return best


def test_host_time_of_a_call(monkeypatch, capsys):
    monkeypatch.undo()  # no poisoning while the clock runs
    rows = []
    for name in ("all_sparse", "all_dense", "output_split_25", "input_split_25", "gate_up_25"):
        n, k, regions = LAYERS[name]
        layer = make_layer(n, k, regions, FP8, CUDA)
        weights, ints = layer.kernel_tensors(), layer.layout.encode()
        for m in (64, 33):
            x = random_input(m, k, FP8, CUDA)
            call = host_microseconds(lambda: ops.linear_raw(x, weights, ints, n, BF16))  # noqa: B023
            rows.append((name, m, call))
    layer = make_layer(768, 1024, output_split(768, 1024, 0), FP8, CUDA)
    weights, x = layer.kernel_tensors(), random_input(64, 1024, FP8, CUDA)
    y = torch.empty(64, 768, dtype=BF16, device=CUDA)
    capability = torch.cuda.get_device_capability()
    problem = Problem.whole(layer.layout, 64, BF16, capability)
    alone = host_microseconds(
        lambda: cusparselt.run(problem, x, weights, y, alpha=1.0, accumulate=False, config=())
    )
    start = time.perf_counter()
    for m in range(16, 16 * 41, 16):
        cusparselt.run(
            *(problem, x.new_empty((m, 1024)), weights, y.new_empty((m, 768))),
            alpha=0.5,
            accumulate=False,
            config=(),
        )
    plan = (time.perf_counter() - start) / 40 * 1e6
    with capsys.disabled():
        print("\nhost µs per call of the op:")
        for name, m, call in rows:
            print(f"  {name:16} M = {m:3}  {call:6.1f}")
        print(f"  cuSPARSELt step alone {alone:.1f}; with a new plan {plan:.0f}")
    assert alone <= 35
