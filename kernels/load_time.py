"""Measure at load what no table knows, within a budget of seconds, and remember it on disk.

    ensure_measured(layout, out_dtype, device)

Loading calls this for every layer: known shapes cost a look-up, an unknown one about two seconds
per region. After the budget of the process is used up, the nearest shape's choice runs and one
warning per shape names the command that measures in full.
"""

from __future__ import annotations

import logging
import time

import torch

from vllm_spense.kernels import execution, table_files
from vllm_spense.kernels.machine import this_machine
from vllm_spense.kernels.problem import Layout, Problem
from vllm_spense.kernels.tuning import GRID, Tuner

__all__ = ["SECONDS", "ensure_measured"]

SECONDS = 30.0  # per process, all layers together
_SIZES = tuple(m for m in GRID if 16 <= m <= 8192)
_REPETITIONS = 5
logger = logging.getLogger(__name__)


class _Budget:
    """Seconds that this process may still spend."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


_budget = _Budget(SECONDS)


def ensure_measured(layout: Layout, out_dtype: torch.dtype, device: torch.device) -> None:
    """Make the table of `device` know the regions of `layout`, if the budget allows."""
    table = table_files.table_for(device.index)
    capability = torch.cuda.get_device_capability(device)
    problem = Problem.whole(layout, 1, out_dtype, capability)
    if all(table.knows(problem.only(i)) for i in problem.indices) or _budget.left <= 0:
        return
    start = time.monotonic()
    with torch.cuda.device(device):
        tuner = Tuner(out_dtype, logger.debug, start + _budget.left, _REPETITIONS, device)
        tuner.table.add(*table.rows())  # what is known is not measured again
        tuner.regions(layout, _SIZES)
    spent = time.monotonic() - start
    _budget.left -= spent
    regions, _ = tuner.table.rows()
    table.add(regions)
    execution.forget_plans()
    torch.cuda.empty_cache()
    _remember(regions, device)
    logger.info(
        "measured the regions of a [%d, %d] layer in %.1f s%s",
        *(layout.n, layout.k, spent),
        *("; out of time: run scripts/tune.py MODEL to measure the rest" if tuner.late else "",),
    )


def _remember(regions: list, device: torch.device) -> None:
    """Merge rows into this machine's cache; a read-only disk costs the memory, not the start."""
    path = table_files.cache_path(torch.cuda.get_device_name(device))
    try:
        table = table_files.read(path)[1] if path.exists() else table_files.Table()
        table.add(regions)
        table_files.write(path, this_machine("at load"), table)
    except OSError as error:
        logger.warning("measurements are not kept: %s", error)
