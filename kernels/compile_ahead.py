"""Compile decode launches before anyone waits for them, several at a time.

    compile_ahead(steps, alpha, processors, capability)

Triton compiles a launch at its first call, for some seconds, while holding Python's lock. Processes
of their own (`python -m vllm_spense.kernels.compile_ahead`) do it side by side, need no GPU, and
leave the results in Triton's cache on disk; then this process takes them from there. vLLM moves
that cache while it compiles a model, so this has to come before, at load.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_spense.kernels import decode, ops
from vllm_spense.kernels.decode_plan import TOKENS
from vllm_spense.kernels.dispatch import Step, make_plan
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Layout, Problem

__all__ = ["Job", "compile_ahead", "decode_steps"]

_FROM_CACHE = 1.5  # seconds: a launch that took longer was compiled
_PROCESSES = 16


@dataclass(frozen=True)
class Job:
    """One launch to compile: a step of the decode path, and the device it is for."""

    step: Step
    alpha: float
    processors: int

    @classmethod
    def on(cls, device: torch.device, step: Step, out_dtype: torch.dtype) -> Job:
        """The launch of a step on a CUDA device."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        weight_dtype = step.problem.layout.weight_dtype
        return cls(step, ops.alpha_for(weight_dtype, out_dtype), processors)

    def compile(self) -> None:
        """Into the cache of Triton's active driver."""
        decode.compile_only(self.step.problem, self.step.config, self.alpha, self.processors)


def decode_steps(
    layout: Layout, out_dtype: torch.dtype, capability: tuple[int, int], table: Table
) -> list[Step]:
    """Steps of the decode path that plans of a layer choose, one for each kernel."""
    found = {}
    for m in range(1, decode.MAX_M + 1):
        plan = make_plan(Problem.whole(layout, m, out_dtype, capability), table)
        for step in plan.steps:
            if step.path == decode.NAME:
                found.setdefault((-(-m // TOKENS), step.config), step)
    return list(found.values())


def compile_ahead(jobs: Sequence[Job]) -> float:
    """Compile for the current device; returns the seconds it took.

    Raises:
        RuntimeError: a process failed; holds what it printed.
    """
    began = time.monotonic()
    waiting = list(jobs)
    while waiting:
        started = time.monotonic()
        waiting.pop(0).compile()
        if time.monotonic() - started > _FROM_CACHE and len(waiting) > 1:
            _in_processes(waiting)
            break
    for job in jobs:  # those that other processes compiled are in the cache now
        job.compile()
    return time.monotonic() - began


def _in_processes(jobs: Sequence[Job]) -> None:
    count = min(len(jobs), _PROCESSES, max(1, (os.cpu_count() or 1) - 1))
    capability = torch.cuda.get_device_capability()
    command = [sys.executable, "-m", __spec__.name]
    running = []
    for first in range(count):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
        )
        process.stdin.write(pickle.dumps((capability, jobs[first::count])))
        process.stdin.close()
        running.append(process)
    for process in running:
        errors = process.stderr.read().decode(errors="replace")
        if process.wait():
            raise RuntimeError(f"compiling the decode kernel failed:\n{errors}")


def _environment() -> dict[str, str]:
    """That of this process, with the same modules to find and no GPU to take memory of."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}


class _NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_here(capability: tuple[int, int], jobs: Iterable[Job]) -> None:
    """Compile for a device that this process need not have."""
    from triton.runtime.driver import driver

    driver.set_active(_NoDevice(capability))
    for job in jobs:
        job.compile()


if __name__ == "__main__":
    compile_here(*pickle.loads(sys.stdin.buffer.read()))
