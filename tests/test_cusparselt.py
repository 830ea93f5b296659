"""What the cuSPARSELt path takes and refuses; its plans are tested on a GPU."""

import re

import pytest
import torch
from layers import DENSE, FP8, SPARSE, input_split, output_split

from vllm_spense.kernels import cusparselt, cusparselt_api
from vllm_spense.kernels.problem import Layout, Problem, Region

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(cusparselt, "missing", lambda: "")


def sparse(rows, cols, dtype=FP8):
    return Layout(rows, cols, (Region(SPARSE, 0, rows, 0, cols),), dtype)


def can(layout, out_dtype=BF16, capability=(9, 0), index=0):
    return cusparselt.can_implement(Problem.whole(layout, 8, out_dtype, capability).only(index))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(FP8, BF16), (FP8, FP16), (BF16, BF16), (FP16, FP16)]
)
def test_takes(library, dtype, out_dtype):
    assert can(sparse(96, 160, dtype), out_dtype) == (True, "")


@pytest.mark.parametrize("name", ["gate", "down"])
def test_takes_smollm2(library, name):
    layout = {
        "gate": Layout(1536, 576, output_split(1536, 576, 384), FP8),
        "down": Layout(576, 1536, input_split(576, 1536, 384), FP8),
    }[name]
    assert can(layout) == (True, "")


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        (sparse(96, 160), {"capability": (8, 9)}, "unmeasured on sm_89"),
        (sparse(96, 160, BF16), {"out_dtype": FP16}, "no torch.bfloat16 → torch.float16"),
        (sparse(48, 160), {}, r"\[48, 160\]: cuSPARSELt wants multiples of 32"),
        (sparse(96, 168, BF16), {}, "multiples of 16"),
        (Layout(64, 64, output_split(64, 64, 64), FP8), {}, "one 2:4 region at a time"),
        (
            Layout(36, 64, (Region(DENSE, 0, 4, 0, 64), Region(SPARSE, 4, 32, 0, 64)), FP8),
            {"index": 1},
            "channels from 4 of 36",
        ),
        (
            Layout(32, 72, (Region(DENSE, 0, 32, 0, 8), Region(SPARSE, 0, 32, 8, 64)), FP8),
            {"index": 1},
            "columns from 8 of 72",
        ),
    ],
)
def test_refuses(library, layout, options, reason):
    possible, found = can(layout, **options)
    assert not possible
    assert re.search(reason, found), found


def test_refuses_without_the_library(monkeypatch):
    def absent():
        raise OSError("libcusparseLt.so.0: cannot open shared object file")

    monkeypatch.setattr(cusparselt_api, "_open", absent)
    cusparselt_api._load.cache_clear()
    try:
        possible, reason = can(sparse(96, 160))
        assert not possible and "cannot be loaded: libcusparseLt.so.0" in reason
        with pytest.raises(cusparselt_api.CusparseLtError, match="cannot be loaded"):
            cusparselt_api.library()
    finally:
        cusparselt_api._load.cache_clear()


class FakePlan:
    def __init__(self, captured=False):
        self.captured, self.closed = captured, False

    def close(self):
        self.closed = True


def test_least_recently_used_plans_go_first(monkeypatch):
    made = {}
    monkeypatch.setattr(cusparselt, "_MAX_PLANS", 2)
    monkeypatch.setattr(cusparselt, "Handle", lambda: None)
    monkeypatch.setattr(cusparselt, "_make", lambda handle, name: made.setdefault(name, FakePlan()))
    plans = cusparselt._Plans()
    first = plans.get(("a",))
    plans.get(("b",))
    assert plans.get(("a",)) is first
    plans.get(("c",))
    assert made["b"].closed and not made["a"].closed
    made["a"].captured = True
    plans.get(("c",))
    plans.get(("d",))
    assert not made["a"].closed and made["a"] in plans._kept  # a graph may need it
