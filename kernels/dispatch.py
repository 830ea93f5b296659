"""Choose how to run a problem, and run it.

A frozen `Problem` goes in, a frozen `Plan` comes out: one `Step` per launch or library call, dense
regions before sparse ones. Plans are chosen inside the opaque op, by the M of the call, so compiled
and captured graphs never hold a choice.

A path is a module with

    NAME, WHOLE_LAYER (takes all regions at once), PADS_ROWS (wants M padded to 16)
    can_implement(problem) -> (bool, reason)
    candidates(problem) -> configurations; the first one runs where nothing has been measured
    run(problem, x, weights, y, *, alpha, accumulate, config)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from vllm_spense.kernels import cusparselt, scaled_mm
from vllm_spense.kernels.problem import Layout, Problem, padded_rows

__all__ = ["PATHS", "Plan", "Step", "execute", "make_plan", "refusal", "region_refusals"]

PATHS = (cusparselt, scaled_mm)
_BY_NAME = {path.NAME: path for path in PATHS}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One path running some regions, with its parameters; `accumulate` adds to what Y holds."""

    path: str
    problem: Problem
    accumulate: bool
    config: tuple


@dataclass(frozen=True)
class Plan:
    """The steps of a problem, in order, and the rows that X and Y need (M, or M padded to 16)."""

    steps: tuple[Step, ...]
    rows: int


def make_plan(problem: Problem) -> Plan:
    """The plan of a problem of all regions of a layout. Pure.

    Raises:
        ValueError: no path takes one of the regions; says why for each path.
    """
    steps = _whole_layer(problem) or tuple(
        _region_step(problem.only(i), problem.layout.accumulates(i)) for i in problem.layout.order
    )
    padded = any(_BY_NAME[step.path].PADS_ROWS for step in steps)
    return Plan(steps, padded_rows(problem.m) if padded else problem.m)


def _whole_layer(problem: Problem) -> tuple[Step, ...]:
    for path in PATHS:
        if path.WHOLE_LAYER and _takes(path, problem):
            return (Step(path.NAME, problem, False, path.candidates(problem)[0]),)
    return ()


def _region_step(problem: Problem, accumulate: bool) -> Step:
    for path in PATHS:
        if not path.WHOLE_LAYER and _takes(path, problem):
            return Step(path.NAME, problem, accumulate, path.candidates(problem)[0])
    raise ValueError(f"no path runs {problem.region}: {refusal(problem)}")


def _takes(path: object, problem: Problem) -> bool:
    possible, reason = path.can_implement(problem)
    if not possible:
        _log_once(path.NAME, reason)
    return possible


@cache
def _log_once(path: str, reason: str) -> None:
    logger.debug("path %s is not used: %s", path, reason)


def refusal(problem: Problem) -> str:
    """Why no path runs the only region of `problem`; empty if one does."""
    reasons = []
    for path in PATHS:
        if path.WHOLE_LAYER:
            continue
        possible, reason = path.can_implement(problem)
        if possible:
            return ""
        reasons.append(f"{path.NAME}: {reason}")
    return "; ".join(reasons)


def region_refusals(
    layout: Layout, out_dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[str, ...]:
    """Per region why no path runs it at every M, or "": the caller keeps those dense instead."""
    problem = Problem.whole(layout, 1, out_dtype, capability)
    return tuple(refusal(problem.only(i)) for i in problem.indices)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=8192)
def _plan(
    regions: tuple[int, ...],
    size: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: int,
) -> Plan:
    """The cached plan of an op call: `size` (M, n, K), `dtypes` of W and Y."""
    m, n, k = size
    layout = Layout.decode(n, k, list(regions), dtypes[0])
    return make_plan(Problem.whole(layout, m, dtypes[1], _capability(device)))


def execute(
    x: Tensor,
    weights: Sequence[Tensor],
    regions: Sequence[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float,
) -> Tensor:
    """Y [M, n] = alpha · X · Wᵀ on the GPU. x [M, K] contiguous, M > 0.

    Y is allocated with M padded to 16 where a step wants it and narrowed at the end, so only X is
    ever copied for padding (once per call, M % 16 ≠ 0 only).
    """
    m, k = x.shape
    plan = _plan(tuple(regions), (m, n, k), (x.dtype, out_dtype), x.device.index)
    rows = plan.rows
    y = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    exact = y if rows == m else y.narrow(0, 0, m)
    padded = x if rows == m else _pad_rows(x, rows)
    for step in plan.steps:
        path = _BY_NAME[step.path]
        xs, out = (padded, y) if path.PADS_ROWS else (x, exact)
        path.run(
            *(step.problem, xs, weights, out),
            alpha=alpha,
            accumulate=step.accumulate,
            config=step.config,
        )
    return exact


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """Copy [M, K] into [rows, K]; the added rows stay arbitrary, as do the rows of Y they make."""
    padded = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    padded.narrow(0, 0, x.shape[0]).copy_(x)
    return padded
