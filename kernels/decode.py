"""The decode path: a whole hybrid layer at M ≤ 32 in one launch (`decode_kernel.py`).

`candidates` lists what is worth measuring (`decode_plan.CONFIGS`), best estimate first; `run`
launches one. Where k is split over programs, f32 partial sums go to scratch from torch's allocator
and a second, small launch adds them in fixed order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels import problem as problems
from vllm_spense.kernels.decode_plan import (
    CONFIGS,
    PROCESSORS,
    TYPES,
    Config,
    Launch,
    estimate,
    fits,
    kinds_of,
    plan,
)
from vllm_spense.kernels.problem import Problem, Region

__all__ = ["can_implement", "candidates", "compile_only", "run"]

NAME = "decode"
WHOLE_LAYER = True
PADS_ROWS = False

MAX_M = 32


def can_implement(problem: Problem) -> tuple[bool, str]:
    """Whether this path can run `problem`, and if not, why."""
    layout = problem.layout
    if problem.m > MAX_M:
        return False, f"M = {problem.m}: the decode kernel is for M ≤ {MAX_M}"
    if layout.weight_dtype not in TYPES:
        return False, f"no decode kernel for {layout.weight_dtype} weights"
    if problem.capability < (9, 0):
        return False, f"the decode kernel is unmeasured on capability {problem.capability}"
    if len(problem.indices) != len(layout.regions):
        return False, "the decode kernel takes a whole layer"
    step = 16 // layout.weight_dtype.itemsize  # 16 bytes
    for region in problem.regions:
        if region.kind is RegionKind.ZERO_TILES:
            return False, "the decode kernel has no zero tiles"
        need = 2 * step if region.kind is RegionKind.SPARSE_24 else step
        if region.cols % need or region.x_start % step or layout.k % step:
            return False, f"{region}: columns are not in steps of {need}"
        if region.kind is RegionKind.SPARSE_24 and region.rows % need:
            return False, f"{region}: rows are not in steps of {need}"
    return _same_columns(problem)


def _same_columns(problem: Problem) -> tuple[bool, str]:
    for side in kinds_of(problem):
        if len({(r.x_start, r.cols) for r in side}) > 1:
            return False, "regions of one kind have different columns"
    sparse, dense = kinds_of(problem)
    shared = [s.shares_rows(d) for s in sparse for d in dense]
    if any(shared) and len(shared) > 1:
        return False, "more than one region of a kind shares rows"
    return True, ""


@lru_cache(maxsize=4096)
def candidates(problem: Problem) -> tuple[problems.Config, ...]:
    """Configurations to measure; the first one runs where nothing has been measured."""
    found = {}
    for config in CONFIGS:
        launch = plan(problem, config, PROCESSORS)
        if fits(launch, config):
            found.setdefault(launch, config)
    ranked = sorted(found, key=lambda launch: estimate(problem, launch))
    return tuple(tuple(asdict(found[launch]).items()) for launch in ranked)


@dataclass(frozen=True)
class Call:
    """A launch of the decode kernel and, where k is split, of the reduction that follows."""

    launch: Launch
    split: int
    options: dict[str, int | bool]

    @classmethod
    def of(cls, problem: Problem, config: problems.Config, alpha: float, processors: int) -> Call:
        chosen = Config(**dict(config))
        launch = plan(problem, chosen, processors, alpha)
        options = {"num_warps": chosen.warps, "launch_pdl": bool(chosen.pdl)}
        return cls(launch, chosen.split, options)

    def arguments(self, problem: Problem, x: Any, out: Any, weights: list[Any], n: int) -> tuple:
        """In the order of `decode_kernel`; x and weights as bytes."""
        pairs = list(zip(problem.regions, weights, strict=True))
        sides = [_side(side, [w for r, w in pairs if r in side], x) for side in kinds_of(problem)]
        launch = self.launch
        sizes = (problem.m, n, *launch.programs, *launch.groups)
        return (x, out, *sides, *sizes, launch.shared_rows, launch.cut)

    def reduction(self, out: Any, y: Any, count: int) -> tuple[tuple[int], tuple, dict]:
        """Grid, arguments and options of `reduce_kernel`; `count` = M · n."""
        pdl = self.options["launch_pdl"]
        options = {"SPLIT": self.split, "W": 4, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
        return (-(-count // 512),), (out, y, count), options


def _side(regions: list[Region], weights: list[Any], x: Any) -> tuple[tuple, tuple, tuple]:
    if not regions:
        return (x,), (0,), (0,)  # never read
    return tuple(weights), tuple(r.rows for r in regions), tuple(r.y_start for r in regions)


def run(
    problem: Problem,
    x: Tensor,
    weights: list[Tensor],
    y: Tensor,
    *,
    alpha: float,
    accumulate: bool,
    config: problems.Config,
) -> None:
    """Y = alpha · X·Wᵀ; x [M, K] and y [M, n] contiguous, weights one per region, as prepared."""
    from vllm_spense.kernels.decode_kernel import decode_kernel
    from vllm_spense.kernels.decode_sums import reduce_kernel

    assert not accumulate and x.is_contiguous() and y.is_contiguous()
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    call = Call.of(problem, config, alpha, processors)
    split, n = call.split, y.shape[1]
    out = y if split == 1 else y.new_empty((split, *y.shape), dtype=torch.float32)
    as_bytes = [w.view(torch.uint8) for w in weights]
    arguments = call.arguments(problem, x.view(torch.uint8), out, as_bytes, n)
    decode_kernel[call.launch.grid](*arguments, **call.options)
    if split > 1:
        grid, arguments, options = call.reduction(out, y, y.numel())
        reduce_kernel[grid](*arguments, **options)


def compile_only(
    problem: Problem, config: problems.Config, alpha: float, processors: int
) -> list[Any]:
    """Compile what `run` would launch, on no data; returns the compiled kernels."""
    from triton.runtime.jit import MockTensor

    from vllm_spense.kernels.decode_kernel import decode_kernel
    from vllm_spense.kernels.decode_sums import reduce_kernel

    call = Call.of(problem, config, alpha, processors)
    some_bytes, y = MockTensor(torch.uint8), MockTensor(problem.out_dtype)
    out = y if call.split == 1 else MockTensor(torch.float32)
    n = problem.layout.n
    arguments = call.arguments(problem, some_bytes, out, [some_bytes] * len(problem.regions), n)
    found = [decode_kernel.warmup(*arguments, grid=call.launch.grid, **call.options)]
    if call.split > 1:
        grid, arguments, options = call.reduction(out, y, problem.m * n)
        found.append(reduce_kernel.warmup(*arguments, grid=grid, **options))
    return found
