"""The block-sparse kernel on a GPU: sizes, dtypes, slices, accumulation, capture, the op.

pytest -m gpu tests/test_gpu_block_sparse.py -s

Once this passes on a capability, it belongs into `block_sparse.MEASURED`.
"""

from dataclasses import asdict

import pytest
import torch
from gpu_cases import BF16, CUDA, DTYPES, check, poisoned_memory, raw
from layers import FP8, NAMES, random_input
from tile_cases import Case, problem_of

from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import block_sparse, dispatch
from vllm_spense.kernels.block_sparse import Config
from vllm_spense.kernels.problem import Problem

__all__ = ["poisoned_memory"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = {
    "64x128": Case(Tiles(64, 128, 8, 16, 2), 6),
    "128x128": Case(Tiles(128, 128, 4, 8, 4), 5),
    "64x64": Case(Tiles(64, 64, 5, 9), 24),
    "one tile": Case(Tiles(64, 128, 1, 3), 1),
    "all tiles": Case(Tiles(128, 128, 4, 4), 2),
    "beside dense rows": Case(Tiles(64, 128, 4, 8), 4, 72),
    "beside dense columns": Case(Tiles(128, 128, 6, 12, 2), 3, 256, "input"),
}
ROWS = (1, 7, 16, 33, 64, 65, 300, 1000)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The path is used on this GPU, whatever `MEASURED` says."""
    capability = torch.cuda.get_device_capability()
    monkeypatch.setattr(block_sparse, "MEASURED", (capability,))


def run(layer, x, config, alpha=1.0, before=None, out_dtype=BF16):
    """The zero tiles of a layer by one configuration; `before` is what Y holds."""
    y = torch.empty((len(x), layer.layout.n), dtype=out_dtype, device=CUDA)
    if before is not None:
        y.copy_(before)
    block_sparse.run(
        problem_of(layer.layout, len(x), out_dtype), x, [layer.kernel_tensors()[0]], y,
        alpha=alpha, accumulate=before is not None, config=config,
    )  # fmt: skip
    return y


def product(layer, x):
    """X · Wᵀ of the zero tiles in float64."""
    region = layer.layout.regions[0]
    weight = layer.weight[: region.rows, : region.cols].double()
    return x[:, : region.cols].double() @ weight.t()


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{NAMES[d[0]]}-{NAMES[d[1]]}")
@pytest.mark.parametrize("name", CASES)
def test_the_op_against_float64(name, dtypes):
    layer = CASES[name].layer(dtypes[0], CUDA)
    weights = layer.kernel_tensors()
    for m in ROWS:
        x = random_input(m, layer.layout.k, dtypes[0], CUDA, seed=m)
        check(raw(layer, weights, x, dtypes[1]), layer.product(x))


@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("name", ["64x128", "128x128", "beside dense columns"])
def test_every_candidate(name, m):
    layer = CASES[name].layer(FP8, CUDA)
    x = random_input(m, layer.layout.k, FP8, CUDA)
    expected, rows = product(layer, x), layer.layout.regions[0].rows
    for config in block_sparse.candidates(problem_of(layer.layout, m)):
        check(run(layer, x, config)[:, :rows], expected)


@pytest.mark.parametrize("split", [1, 4])
def test_slices_factors_and_sums(split):
    layer = CASES["beside dense rows"].layer(FP8, CUDA)
    x = random_input(40, layer.layout.k, FP8, CUDA)
    rows = layer.layout.regions[0].rows
    config = tuple(asdict(Config(64, 4, 3, 2, split=split)).items())
    before = torch.randn(40, layer.layout.n, device=CUDA).to(BF16) * 1000
    y = run(layer, x, config, 0.25, before)
    check(y[:, :rows], product(layer, x) * 0.25 + before[:, :rows].double())
    assert torch.equal(y[:, rows:], before[:, rows:])


@pytest.mark.parametrize("m", [1, 64, 300])
def test_the_same_bits_from_run_to_run_and_in_a_graph(m):
    layer = CASES["64x128"].layer(FP8, CUDA)
    x = random_input(m, layer.layout.k, FP8, CUDA)
    for config in block_sparse.candidates(problem_of(layer.layout, m))[:4]:
        first = run(layer, x, config)
        assert torch.equal(first, run(layer, x, config))
        weights, y = [layer.kernel_tensors()[0]], torch.empty_like(first)
        problem, graph = problem_of(layer.layout, m), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            block_sparse.run(
                problem, x, weights, y, alpha=1.0, accumulate=False, config=config
            )  # fmt: skip
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, first)


def test_dispatched():
    layout = CASES["beside dense columns"].layer(FP8, CUDA).layout
    capability = torch.cuda.get_device_capability()
    plan = dispatch.make_plan(Problem.whole(layout, 300, BF16, capability))
    assert [step.path for step in plan.steps] == ["scaled_mm", "block_sparse"]
