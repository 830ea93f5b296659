"""Which dense GEMM takes which region; their numbers are tested on a GPU."""

import pytest
import torch
from layers import FP8, input_split, output_split

from vllm_spense.kernels import scaled_mm
from vllm_spense.kernels.problem import Layout, Problem

BF16 = torch.bfloat16
WHOLE = Layout(64, 128, output_split(64, 128, 64), FP8)
ROWS = Layout(128, 64, output_split(128, 64, 32), FP8)
COLUMNS = Layout(64, 128, input_split(64, 128, 64), FP8)
ODD = Layout(40, 72, output_split(40, 72, 40), FP8)


def names(layout, m, monkeypatch, cutlass=True):
    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: print if cutlass else None)
    index = len(layout.regions) - 1
    problem = Problem.whole(layout, m, BF16, (9, 0)).only(index)
    assert scaled_mm.can_implement(problem) == (True, "")
    return [dict(config)["gemm"] for config in scaled_mm.candidates(problem)]


@pytest.mark.parametrize(
    ("layout", "m", "expected"),
    [
        (WHOLE, 16, ["cublaslt", "cutlass"]),
        (WHOLE, 4096, ["cutlass", "cublaslt"]),
        (ROWS, 16, ["cublaslt", "cutlass"]),
        (COLUMNS, 4096, ["cublaslt"]),  # CUTLASS would read X as if it had no leading dimension
        (ODD, 16, ["upcast"]),
    ],
)
def test_candidates(monkeypatch, layout, m, expected):
    assert names(layout, m, monkeypatch) == expected


def test_without_vllm(monkeypatch):
    assert names(WHOLE, 4096, monkeypatch, cutlass=False) == ["cublaslt"]


def test_sixteen_bit_weights_have_one_way(monkeypatch):
    layout = Layout(40, 72, output_split(40, 72, 40), BF16)
    assert names(layout, 16, monkeypatch) == ["mm"]


def test_refusals():
    problem = Problem.whole(ROWS, 16, BF16, (9, 0))
    assert "one dense region at a time" in scaled_mm.can_implement(problem)[1]
    assert "one dense region at a time" in scaled_mm.can_implement(problem.only(0))[1]
    ampere = Problem.whole(WHOLE, 16, BF16, (8, 0)).only(0)
    assert "compute capability 8.9" in scaled_mm.can_implement(ampere)[1]


@pytest.mark.parametrize("accumulate", [False, True])
def test_mm_writes_a_slice(accumulate):
    """BF16 needs no GPU: slices of X and Y through `out=`."""
    layout = Layout(128, 64, output_split(128, 64, 32), BF16)
    weight, x = torch.randn(32, 64).to(BF16), torch.randn(5, 64).to(BF16)
    y = torch.full((5, 128), 7.0, dtype=BF16)
    problem = Problem.whole(layout, 5, BF16, (9, 0)).only(1)
    config = scaled_mm.candidates(problem)[0]
    scaled_mm.run(problem, x, [weight], y, alpha=2.0, accumulate=accumulate, config=config)
    expected = x.double() @ weight.double().t() * 2 + (7.0 if accumulate else 0.0)
    assert ((y[:, 96:].double() - expected).norm() / expected.norm()).item() < 4e-3
    assert bool((y[:, :96] == 7.0).all())
