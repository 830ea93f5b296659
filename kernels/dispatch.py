"""Choose how to run a problem (`execution.py` runs it).

A frozen `Problem` goes in, a frozen `Plan` comes out: one `Step` per launch or library call, dense
regions before sparse ones. Plans are chosen inside the opaque op, by the M of the call, so compiled
and captured graphs never hold a choice. Measured times (`measurements.py`) decide. A region without
any runs by the first candidate of the first path that takes it; a path for whole layers only where
it was measured.

A path is a module with

    NAME, WHOLE_LAYER (takes all regions at once), PADS_ROWS (wants M padded to 16)
    can_implement(problem) -> (bool, reason)
    candidates(problem) -> configurations, the most promising one first
    run(problem, x, weights, y, *, alpha, accumulate, config); weights in the problem's order

A layer may come with one tensor more than it has regions: its dense weight [N, K]. Then the plan
can be "dense", and is where that was measured to be fastest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import torch

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels import block_sparse, cusparselt, decode, scaled_mm
from vllm_spense.kernels.measurements import Table, candidate, parse_candidate
from vllm_spense.kernels.problem import Config, Layout, Problem, Region, padded_rows

__all__ = [
    "PATHS",
    "Plan",
    "Step",
    "make_plan",
    "named_plan",
    "refusal",
    "region_refusals",
    "whole_candidates",
]

PATHS: tuple[ModuleType, ...] = (decode, cusparselt, scaled_mm, block_sparse)
REGIONS, BESIDE, DENSE_COPY = "regions", "regions beside", "dense"  # plans, as layer rows name
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One path running some regions; `weights` are the tensors it takes, by index.

    `accumulate` adds to what an earlier step wrote to the same channels of Y.
    """

    path: str
    problem: Problem
    weights: tuple[int, ...]
    accumulate: bool
    config: Config


@dataclass(frozen=True)
class Plan:
    """The steps of a problem, in order, and the rows that X and Y need (M, or M padded to 16).

    `beside` runs the dense steps on a second stream beside the sparse ones: each fills the gaps
    that the other leaves at its ends. Where both contribute to the same channels (input-split),
    `added` gives the dense steps a buffer of their own, and one more launch adds it: cheaper at
    some sizes than a sparse GEMM that has to read Y.
    """

    steps: tuple[Step, ...]
    rows: int
    beside: bool = False
    added: bool = False


def path_named(name: str) -> ModuleType | None:
    return next((path for path in PATHS if path.NAME == name), None)


def _plan_of(steps: tuple[Step, ...], m: int) -> Plan:
    padded = any(path_named(step.path).PADS_ROWS for step in steps)
    return Plan(steps, padded_rows(m) if padded else m)


def make_plan(problem: Problem, table: Table | None = None, dense_copy: bool = False) -> Plan:
    """The fastest known plan of a problem of all regions of a layout. Pure.

    Raises:
        ValueError: no path takes one of the regions; says why for each path.
    """
    table = table or Table()
    times = table.layer(problem)
    for name in sorted(times, key=times.__getitem__):
        plan = named_plan(problem, name, table, dense_copy)
        if plan:
            return plan
    return _by_regions(problem, table)


def whole_candidates(problem: Problem) -> Iterator[str]:
    """Names of the plans that run all regions in one launch, the most promising one first."""
    for path in PATHS:
        if path.WHOLE_LAYER and _takes(path, problem):
            yield from (candidate(path.NAME, config) for config in path.candidates(problem))


def named_plan(problem: Problem, name: str, table: Table, dense_copy: bool) -> Plan | None:
    """The plan that a layer row calls `name`; None if it cannot run here."""
    if name in (REGIONS, BESIDE):
        if any(region_refusals_of(problem)):
            return None
        plan = _by_regions(problem, table)
        return plan if name == REGIONS else _beside(plan)
    if name == DENSE_COPY:
        return _plan_of((_dense_step(problem, table),), problem.m) if dense_copy else None
    path_name, config = parse_candidate(name)
    path = path_named(path_name)
    if path is None or not path.WHOLE_LAYER or not _takes(path, problem):
        return None
    return _whole(path, problem, config) if config in path.candidates(problem) else None


def _beside(plan: Plan) -> Plan | None:
    """The plan on two streams, if it has steps of both kinds."""
    if len(dense_steps(plan)) % len(plan.steps) == 0:
        return None
    added = any(step.accumulate for step in plan.steps)
    if added and not all(step.problem.region.rows == step.problem.layout.n for step in plan.steps):
        return None  # the added buffer would hold channels that nobody wrote
    steps = tuple(replace(step, accumulate=False) for step in plan.steps)
    return replace(plan, steps=steps, beside=True, added=added)


def dense_steps(plan: Plan) -> tuple[Step, ...]:
    return tuple(s for s in plan.steps if s.problem.regions[0].kind is RegionKind.DENSE)


def _whole(path: ModuleType, problem: Problem, config: Config) -> Plan:
    return _plan_of((Step(path.NAME, problem, problem.indices, False, config),), problem.m)


def _by_regions(problem: Problem, table: Table) -> Plan:
    steps = tuple(_region_step(problem.only(i), table) for i in problem.layout.order)
    return _plan_of(steps, problem.m)


def _region_step(problem: Problem, table: Table) -> Step:
    (index,) = problem.indices
    path, config = _choose(problem, table)
    return Step(path, problem, (index,), problem.layout.accumulates(index), config)


def _dense_step(problem: Problem, table: Table) -> Step:
    """One dense GEMM with the tensor that follows those of the regions."""
    layout = problem.layout
    whole = Region(RegionKind.DENSE, 0, layout.n, 0, layout.k)
    dense = Layout(layout.n, layout.k, (whole,), layout.weight_dtype)
    only = Problem.whole(dense, problem.m, problem.out_dtype, problem.capability)
    path, config = _choose(only, table)
    return Step(path, only, (len(layout.regions),), False, config)


def _choose(problem: Problem, table: Table) -> tuple[str, Config]:
    """The fastest path and configuration for one region."""
    able = {path.NAME: path.candidates(problem) for path in PATHS if _takes_region(path, problem)}
    if not able:
        raise ValueError(f"no path runs {problem.region}: {refusal(problem)}")
    times = table.region(problem)
    for name in sorted(times, key=times.__getitem__):
        path, config = parse_candidate(name)
        if config in able.get(path, ()):
            return path, config
    path = next(iter(able))
    return path, able[path][0]


def _takes_region(path: ModuleType, problem: Problem) -> bool:
    return not path.WHOLE_LAYER and _takes(path, problem)


def _takes(path: ModuleType, problem: Problem) -> bool:
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
    return region_refusals_of(Problem.whole(layout, 1, out_dtype, capability))


def region_refusals_of(problem: Problem) -> tuple[str, ...]:
    """Per region of `problem` why no path runs it, or ""."""
    return tuple(refusal(problem.only(i)) for i in problem.indices)
