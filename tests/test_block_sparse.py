"""The block-sparse path without a GPU: choices, refusals, the kernel in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import FP8, random_input, relative_error
from tile_cases import DENSE, QWEN_DOWN, QWEN_GATE_UP, ZERO, Case, problem_of

from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import block_sparse, dispatch, ops
from vllm_spense.kernels.block_sparse import Config
from vllm_spense.kernels.operands import Operands
from vllm_spense.kernels.problem import Layout, Problem, Region
from vllm_spense.kernels.tile_layout import TileBlob

BF16 = torch.bfloat16
TILES = Tiles(64, 128, kept=4, total=8, k_shards=2)
DTYPES = [FP8, BF16, torch.float16]


@pytest.fixture
def measured(monkeypatch):
    """As if the GPU tests had passed on sm_90."""
    monkeypatch.setattr(block_sparse, "MEASURED", ((9, 0),))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffer_round_trip(dtype):
    layer = Case(TILES, 3).layer(dtype, "cpu")
    blob = TileBlob(192, TILES, dtype)
    (buffer,) = layer.kernel_tensors()
    assert buffer.dtype == torch.uint8 and tuple(buffer.shape) == blob.storage_shape
    for plane, back in zip(layer.planes[0], blob.unpack(buffer), strict=True):
        assert torch.equal(plane.view(torch.uint8), back.view(torch.uint8))
    _, index = blob.parts(buffer)
    assert index.dtype == torch.int32 and (index[:, 2:] >= 4).all()  # absolute, second K-shard


def test_buffer_refuses_other_planes():
    values, index = Case(TILES, 2).layer(BF16, "cpu").planes[0]
    with pytest.raises(ValueError, match=r"planes of zero tiles are .*; needed: \(\(128, 512\)"):
        TileBlob(128, TILES, BF16).pack(values[:64], index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_is_the_dense_product(dtype):
    layer = Case(TILES, 2).layer(dtype, "cpu")
    values, index = TileBlob(128, TILES, dtype).parts(layer.kernel_tensors()[0])
    x = random_input(5, 1024, dtype, "cpu")
    assert relative_error(block_sparse.product(x, values, index, TILES), layer.product(x)) < 1e-6


@pytest.mark.parametrize("case", [Case(TILES, 2, 40), Case(TILES, 2, 64, "input")], ids=str)
@pytest.mark.parametrize("copy", [False, True], ids=["", "dense copy"])
def test_the_op_on_the_cpu(case, copy):
    layer = case.layer(FP8, "cpu")
    weights = ops.prepare(layer.layout, layer.planes, dense_copy=copy)
    x = random_input(3, layer.layout.k, FP8, "cpu")
    y = ops.linear_raw(x, weights, layer.layout.encode(), layer.layout.n, BF16)
    assert relative_error(y, layer.product(x)) < 2**-8
    if copy:
        assert torch.equal(weights[-1].float(), layer.weight.float())


def test_not_used_before_it_has_been_measured():
    problem = problem_of(QWEN_GATE_UP, 16)
    assert block_sparse.can_implement(problem) == (
        False, "the block-sparse kernel has not been measured on sm_90",
    )  # fmt: skip
    (reason,) = dispatch.region_refusals(QWEN_GATE_UP, BF16, (9, 0))
    assert "not been measured" in reason
    with pytest.raises(ValueError, match="no path runs .*: .*not been measured on sm_90"):
        dispatch.make_plan(Problem.whole(QWEN_GATE_UP, 16, BF16, (9, 0)))


def test_dispatched_once_measured(measured, monkeypatch):
    monkeypatch.setattr("vllm_spense.kernels.scaled_mm.cutlass_op", lambda: None)
    layout = Case(TILES, 2, 64, "input").layer(FP8, "cpu").layout
    plan = dispatch.make_plan(Problem.whole(layout, 16, BF16, (9, 0)))
    steps = [(step.path, step.weights, step.accumulate) for step in plan.steps]
    assert steps == [("scaled_mm", (1,), False), ("block_sparse", (0,), True)]
    assert dispatch.region_refusals(layout, BF16, (8, 9))[0]


@pytest.mark.parametrize(
    ("layout", "out_dtype", "match"),
    [
        (Layout(64, 128, (Region(DENSE, 0, 64, 0, 128),), FP8), BF16, "one region of zero tiles"),
        (QWEN_DOWN, torch.float32, "float32 outputs"),
        (
            Layout(
                64, 136,
                (Region(DENSE, 0, 64, 0, 8), Region(ZERO, 0, 64, 8, 128, Tiles(64, 64, 1, 2))), FP8,
            ),
            BF16,
            "columns from 8 of 136: not in steps of 16",
        ),
    ],
)  # fmt: skip
def test_refusals(measured, layout, out_dtype, match):
    problem = Problem.whole(layout, 16, out_dtype, (9, 0)).only(len(layout.regions) - 1)
    possible, reason = block_sparse.can_implement(problem)
    assert not possible and match in reason


@pytest.mark.parametrize("layout", [QWEN_GATE_UP, QWEN_DOWN], ids=["gate_up", "down"])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 256, 1024, 8192])
def test_candidates_fit_the_machine(layout, m):
    problem, tiles = problem_of(layout, m), layout.regions[0].tiles
    found = [Config(**dict(config)) for config in block_sparse.candidates(problem)]
    assert 1 <= len(found) <= 32 and len(set(found)) == len(found)
    for config in found:
        assert tiles.rows * config.block_m <= 128 * 32 * config.warps
        stage = (tiles.rows + config.block_m) * tiles.cols
        assert config.per_sm * config.stages * stage <= block_sparse.SHARED_BYTES
        assert config.per_sm * config.warps * 32 * 64 <= 65536 and config.stages >= 2
        assert m > 64 or 16 <= config.block_m < max(32, 2 * m)


def test_estimates_split_where_row_blocks_are_few_and_widen_where_tokens_are_many():
    few = Config(**dict(block_sparse.candidates(problem_of(QWEN_DOWN, 1))[0]))
    many = Config(**dict(block_sparse.candidates(problem_of(QWEN_DOWN, 8192))[0]))
    assert few.split > 1 and few.block_m == 16
    assert many.split == 1 and many.block_m == 256 and many.group > 1


def test_random_operands_are_valid():
    """What tuning measures with: planes that a kernel may be given, and the product of rows."""
    layout = Case(Tiles(128, 128, 2, 4), 2, 32).layer(FP8, "cpu").layout
    torch.manual_seed(0)
    from vllm_spense.kernels.operands import random_planes

    planes = [random_planes(region, FP8, "cpu") for region in layout.regions]
    operands = Operands(layout, [ops.prepare(layout, planes)], planes)
    x = random_input(4, layout.k, FP8, "cpu")
    y = ops.linear_raw(x, operands.copies[0], layout.encode(), layout.n, BF16)
    assert operands.error((0, 1), x, y) < 4e-3
    y[:, 250] = 0
    assert operands.error((0, 1), x, y) > 4e-3


SCRIPT = """
import sys, torch
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
from tile_cases import Case, problem_of
from layers import FP8, random_input, relative_error
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import block_sparse
from vllm_spense.kernels.block_sparse import Config

WIDE, TALL = Tiles(64, 128, 4, 6, 2), Tiles(128, 128, 3, 4)
SMALL = Tiles(64, 64, 5, 9)
RUNS = [  # case, M, config, accumulate
    (Case(WIDE, 3), 1, Config(16, 4, 4, 1), False),
    (Case(WIDE, 3), 7, Config(16, 4, 4, 1, split=4), False),
    (Case(WIDE, 3, 40), 33, Config(32, 4, 3, 1, group=2), False),
    (Case(WIDE, 2, 64, "input"), 20, Config(16, 4, 2, 1, split=2), True),
    (Case(TALL, 2, 32, "input"), 40, Config(16, 8, 2, 1, group=2), True),
    (Case(SMALL, 2), 5, Config(16, 4, 2, 1, split=3), False),
]
block_sparse.PROCESSORS = 2  # programs take several pairs in turn
for dtype in (FP8, torch.float16):
    for case, m, config, accumulate in RUNS:
        layer = case.layer(dtype, "cpu")
        problem = problem_of(layer.layout, m, torch.float16)
        x = random_input(m, layer.layout.k, dtype, "cpu")
        y = torch.full((m, layer.layout.n), 0.5, dtype=torch.float16)
        outside = y.clone()
        block_sparse.run(
            problem, x, [layer.kernel_tensors()[0]], y, alpha=0.25, accumulate=accumulate,
            config=tuple(asdict(config).items()),
        )
        region = layer.layout.regions[0]
        part = layer.weight[: region.rows, : region.cols].double()
        expected = 0.25 * x[:, : region.cols].double() @ part.t() + (0.5 if accumulate else 0.0)
        error = relative_error(y[:, : region.rows], expected)
        assert error < 1e-3, (dtype, case, m, config, error)
        assert torch.equal(y[:, region.rows :], outside[:, region.rows :]), "written outside"
print("multiplied")
"""


def test_kernel_in_the_interpreter():
    """FP8 and FP16 (the interpreter's BF16 products are wrong in Triton 3.9)."""
    tests = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, "-c", SCRIPT, str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "multiplied" in done.stdout
