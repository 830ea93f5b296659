"""Region paths without a GPU: scripted times; one algorithm is wrong, one is refused."""

import pytest
import torch
from layers import FP8

from vllm_spense.kernels import (
    compile_ahead,
    cusparselt,
    decode,
    execution,
    reference,
    scaled_mm,
    timing,
)
from vllm_spense.kernels.measurements import candidate
from vllm_spense.kernels.problem import Layout, Region

RUNNING = []  # the candidates of the call that is being timed
WRONG = "cusparselt alg=5"


class FakeGraph:
    """Takes as long as the calls it captured say."""

    def __init__(self, calls):
        RUNNING.clear()
        calls[0]()
        self.us = sum(_time(name) for name in RUNNING)

    def replay(self):
        return self.us


def _time(name):
    if name.startswith("decode "):
        return 3.0 if "warps=4" in name else 9.0
    return {"cusparselt alg=3": 4.0, "scaled_mm gemm=cublaslt": 6.0, WRONG: 0.5}.get(name, 7.0)


def _sparse_run(problem, x, weights, y, *, alpha, accumulate, config):
    RUNNING.append(candidate("cusparselt", config))
    region = problem.region
    alone = Layout(
        region.rows, region.cols, (Region(region.kind, 0, region.rows, 0, region.cols),), FP8
    )
    weight = reference.expand(alone, weights)
    columns = x[:, region.x_start : region.x_stop].float()
    out = y[:, region.y_start : region.y_stop]
    product = columns @ weight.t() * (2.0 if candidate("cusparselt", config) == WRONG else 1.0)
    out.copy_(out + product if accumulate else product)


def _dense(x, weight, out, alpha, accumulate):
    RUNNING.append("scaled_mm gemm=cublaslt")
    out.copy_(x.float() @ weight.float())


def _decode_run(problem, x, weights, y, *, alpha, accumulate, config):
    RUNNING.append(candidate("decode", config))
    y.copy_(x.float() @ reference.expand(problem.layout, weights).t())


@pytest.fixture
def fake_gpu(monkeypatch):
    """Region paths run on the CPU and take scripted times."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda size, device: 2)
    monkeypatch.setattr(timing, "capture", lambda calls, rounds: FakeGraph(calls))
    monkeypatch.setattr(cusparselt, "missing", lambda: "")
    monkeypatch.setattr(cusparselt, "accepts", lambda problem, config: config != (("alg", 7),))
    monkeypatch.setattr(cusparselt, "run", _sparse_run)
    monkeypatch.setattr(decode, "run", _decode_run)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda jobs: 0.0)
    monkeypatch.setattr(compile_ahead.Job, "on", lambda device, step, out_dtype: step)
    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: None)
    monkeypatch.setitem(scaled_mm._WAYS, "cublaslt", _dense)

    def one_after_the_other(plan, run, y):
        target = torch.full_like(y, 0.0) if plan.added else y
        for step in plan.steps:
            run(step, target if step.path == "scaled_mm" else y)
        y += target if plan.added else 0

    monkeypatch.setattr(execution, "_run_beside", one_after_the_other)
