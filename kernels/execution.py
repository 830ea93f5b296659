"""Run plans: what the CUDA implementation of the ops does.

A call costs host time only for a dictionary look-up (the plan of this M), an allocation for Y and
the launches: plans and library descriptors are cached by exact M.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from vllm_spense.kernels.dispatch import Plan, Step, dense_steps, make_plan, path_named
from vllm_spense.kernels.problem import Layout, Problem, Region
from vllm_spense.kernels.table_files import table_for

__all__ = ["execute", "forget_plans", "run_plan"]

logger = logging.getLogger(__name__)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=8192)
def _cached_plan(
    regions: tuple[int, ...],
    size: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: int,
    dense_copy: bool,
) -> Plan:
    """The plan of an op call: `size` (M, n, K), `dtypes` of W and Y."""
    m, n, k = size
    layout = Layout.decode(n, k, list(regions), dtypes[0])
    problem = Problem.whole(layout, m, dtypes[1], _capability(device))
    table = table_for(device)
    for index in problem.indices:
        if not table.knows(problem.only(index)):
            _warn_unmeasured(problem.only(index).region, dtypes[0], device)
    return make_plan(problem, table, dense_copy)


@cache
def _warn_unmeasured(region: Region, dtype: torch.dtype, device: int) -> None:
    logger.warning(
        "%s has not been measured on %s in %s; the choice for the nearest shape is taken. To "
        "measure it: python scripts/tune.py MODEL",
        *(f"{region.label} region [{region.rows}, {region.cols}]",),
        *(torch.cuda.get_device_name(device), dtype),
    )


def forget_plans() -> None:
    """Choose anew: the table has changed."""
    _cached_plan.cache_clear()


def execute(
    x: Tensor,
    weights: Sequence[Tensor],
    regions: Sequence[int],
    n: int,
    out_dtype: torch.dtype,
    alpha: float,
) -> Tensor:
    """Y [M, n] = alpha · X · Wᵀ on the GPU. x [M, K] contiguous, M > 0."""
    m, k = x.shape
    dense_copy = len(weights) * 5 > len(regions)
    dtypes = (x.dtype, out_dtype)
    plan = _cached_plan(tuple(regions), (m, n, k), dtypes, x.device.index, dense_copy)
    return run_plan(plan, x, weights, n, out_dtype, alpha)


def run_plan(
    plan: Plan, x: Tensor, weights: Sequence[Tensor], n: int, out_dtype: torch.dtype, alpha: float
) -> Tensor:
    """Run the steps of a plan.

    Y is allocated with M padded to 16 where a step wants it and narrowed at the end, so only X may
    have to be copied for padding, once per call, where M % 16 ≠ 0.
    """
    m, rows = x.shape[0], plan.rows
    y = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    padded = x if rows == m else _pad_rows(x, rows)

    def run(step: Step, out: Tensor) -> None:
        path = path_named(step.path)
        path.run(
            step.problem,
            padded if path.PADS_ROWS else x,
            [weights[i] for i in step.weights],
            out if path.PADS_ROWS or rows == m else out.narrow(0, 0, m),
            alpha=alpha,
            accumulate=step.accumulate,
            config=step.config,
        )

    if plan.beside:
        _run_beside(plan, run, y)
    else:
        for step in plan.steps:
            run(step, y)
    return y if rows == m else y.narrow(0, 0, m)


def _run_beside(plan: Plan, run: Callable[[Step, Tensor], None], y: Tensor) -> None:
    """Dense steps on the side stream, the others here; both are done when later work here runs.

    Waiting at both ends is also what makes it safe to free or reuse X, Y and the added buffer: all
    were allocated here, and here nothing goes on before the side stream is done.
    """
    dense, device = dense_steps(plan), y.device.index
    target = torch.empty_like(y) if plan.added else y
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for step in dense:
            run(step, target)
    for step in plan.steps:
        if step not in dense:
            run(step, y)
    here.wait_stream(side)
    if plan.added:
        y.add_(target)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """X [M, K] as [rows, K]; the added rows are arbitrary, as are the rows of Y that they make.

    A copy, unless the storage of X goes on for long enough: a quantiser that allocates M padded to
    16 and returns the first M rows saves it.
    """
    storage = x.untyped_storage()
    behind = x.data_ptr() - storage.data_ptr() + rows * x.shape[1] * x.element_size()
    if behind <= storage.nbytes():
        return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))
    padded = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    padded.narrow(0, 0, x.shape[0]).copy_(x)
    return padded
