"""The library paths in CUDA graphs, on several streams and threads; the host time of a call.

`-s` prints the host times.
"""

import threading
import time

import pytest
import torch
from gpu_cases import (
    BF16,
    CUDA,
    LAYERS,
    MAX_NORM_ERROR,
    check,
    poisoned_memory,
    raw,
)
from layers import (
    FP8,
    input_split,
    make_layer,
    output_split,
    random_input,
    relative_error,
)

from vllm_spense.kernels import cusparselt, dispatch, execution, ops, scaled_mm
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Problem

__all__ = ["poisoned_memory"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


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
@pytest.mark.parametrize("name", ["gate_up_25", "input_split_25"])
def test_regions_side_by_side(name, captured):
    m, (n, k, regions) = 40, LAYERS[name]
    layer = make_layer(n, k, regions, FP8, CUDA)
    weights = layer.kernel_tensors()
    problem = Problem.whole(layer.layout, m, BF16, torch.cuda.get_device_capability())
    plan = dispatch.named_plan(problem, dispatch.BESIDE, Table(), False)
    x = random_input(m, k, FP8, CUDA)

    def run():
        return execution.run_plan(plan, x, weights, n, BF16, 1.0)

    check(run().double(), layer.product(x))
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
    for seed in range(2, 22):
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
