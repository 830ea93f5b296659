"""Compiling decode launches without a GPU, in other processes, into Triton's cache."""

import pickle
import subprocess
import sys

import pytest
import torch
from layers import FP8, gate_up

from vllm_spense.kernels import compile_ahead, cusparselt, decode, scaled_mm
from vllm_spense.kernels.compile_ahead import Job, decode_steps
from vllm_spense.kernels.dispatch import REGIONS, Step
from vllm_spense.kernels.measurements import LayerRow, Table, candidate, layer_key
from vllm_spense.kernels.problem import Layout, Problem

BF16 = torch.bfloat16
LAYOUT = Layout(192, 576, gate_up(192, 576, 64), FP8)


def job(m, split):
    problem = Problem.whole(LAYOUT, m, BF16, (9, 0))
    config = next(c for c in decode.candidates(problem) if dict(c)["split"] == split)
    return Job(Step(decode.NAME, problem, problem.indices, False, config), 1.0, 132)


def test_other_processes_leave_what_this_one_will_look_for(tmp_path, monkeypatch):
    """What `run` would launch, on tensors, is the kernel compiled on none, out of the cache."""
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from vllm_spense.kernels.decode_kernel import decode_kernel

    wanted = job(3, 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jobs = pickle.dumps(((9, 0), [wanted]))
    subprocess.run([sys.executable, "-m", compile_ahead.__name__], input=jobs, check=True)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(written) == 2  # the launch and the reduction

    monkeypatch.setattr(driver, "_active", compile_ahead._NoDevice((9, 0)))
    problem = wanted.step.problem
    compiled = decode.compile_only(problem, wanted.step.config, 1.0, 132)
    call = decode.Call.of(problem, wanted.step.config, 1.0, 132)
    x, out = torch.empty(3, 576, dtype=torch.uint8), torch.empty(2, 3, 192)
    weights = [torch.empty(64, dtype=torch.uint8) for _ in problem.regions]
    arguments = call.arguments(problem, x, out, weights, 192)
    launched = decode_kernel.warmup(*arguments, grid=call.launch.grid, **call.options)
    assert launched is compiled[0]
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}


def test_one_job_for_each_kernel_that_plans_choose(monkeypatch):
    monkeypatch.setattr(cusparselt, "missing", lambda: "")
    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: None)
    at = {}
    for m in (8, 32):
        problem = Problem.whole(LAYOUT, m, BF16, (9, 0))
        at[m] = candidate(decode.NAME, decode.candidates(problem)[0])
    rows = [
        LayerRow("fp8", "bf16", 8, {at[8]: 1.0, REGIONS: 9.0}, layer_key(LAYOUT)),
        LayerRow("fp8", "bf16", 32, {at[32]: 9.0, REGIONS: 1.0}, layer_key(LAYOUT)),
    ]
    steps = decode_steps(LAYOUT, BF16, (9, 0), Table((), rows))
    # M up to 16 is nearest to 8 in log space: kernels of one and of two token tiles
    assert sorted(-(-step.problem.m // 8) for step in steps) == [1, 2]
    assert decode_steps(LAYOUT, BF16, (9, 0), Table()) == []


def test_a_failing_process_is_not_passed_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    broken = Job(None, 1.0, 132)
    with pytest.raises(RuntimeError, match=r"compiling the decode kernel failed:(.|\n)*NoneType"):
        compile_ahead._in_processes([broken])
