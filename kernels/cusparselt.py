"""2:4 regions through cuSPARSELt: mid-range and large M.

    Y[:, y_start : y_start+rows] (+)= alpha · X[:, x_start : x_start+cols] · Wᵀ

W is a compressed buffer (`layouts.Blob24`, or whatever the library makes of other sizes), FP8
e4m3, BF16 or FP16; Y is BF16 or FP16. Column slices of Y and X are leading dimensions, the second
region of an input-split layer adds in place (beta = 1): no copy in either case. The library wants
M % 16 == 0, so the caller pads the rows of X and Y.

Limits: the library refuses per-row scales for FP8 on Hopper, so Y is unscaled. Adding in place
rounds the first region's part of the sum to the dtype of Y.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from functools import cache

import torch
from torch import Tensor

from vllm_spense.format import sparse24
from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels.cusparselt_api import CusparseLtError, Handle, Plan, missing
from vllm_spense.kernels.layouts import TILE_COLS, TILE_ROWS, Blob24
from vllm_spense.kernels.problem import Config, Problem, padded_rows

__all__ = ["can_implement", "candidates", "prepare", "run"]

NAME = "cusparselt"
WHOLE_LAYER = False
PADS_ROWS = True

FP8 = torch.float8_e4m3fn
# Sizes the library takes: multiples of 32 for 8-bit, 16 for 16-bit weights.
_STEPS = {FP8: 32, torch.bfloat16: 16, torch.float16: 16}
_OUTPUTS = {
    FP8: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
_MEASURED = ((9, 0),)  # capabilities on which this path has been checked
_MAX_PLANS = 1024  # per thread and device; a plan is about 25 KB of host memory
_ALGORITHMS = 26  # ids on sm_90 (0.8) lie below: FP8 has 0 … 25, BF16 0 … 21

logger = logging.getLogger(__name__)


def can_implement(problem: Problem) -> tuple[bool, str]:
    """Whether this path can run `problem`, and if not, why."""
    if len(problem.indices) != 1 or problem.region.kind is not RegionKind.SPARSE_24:
        return False, "cuSPARSELt takes one 2:4 region at a time"
    if missing():
        return False, missing()
    if problem.capability not in _MEASURED:
        return (
            False,
            f"cuSPARSELt is unmeasured on sm_{problem.capability[0]}{problem.capability[1]}",
        )
    dtype = problem.layout.weight_dtype
    if problem.out_dtype not in _OUTPUTS.get(dtype, ()):
        return False, f"cuSPARSELt has no {dtype} → {problem.out_dtype}"
    return _fits(problem)


def _fits(problem: Problem) -> tuple[bool, str]:
    region, layout = problem.region, problem.layout
    step = _STEPS[layout.weight_dtype]
    if region.rows % step or region.cols % step:
        shape = f"[{region.rows}, {region.cols}]"
        return False, f"2:4 region {shape}: cuSPARSELt wants multiples of {step}"
    in_step, out_step = 16 // layout.weight_dtype.itemsize, 16 // problem.out_dtype.itemsize
    if region.x_start % in_step or layout.k % in_step:
        return False, f"columns from {region.x_start} of {layout.k}: not in steps of {in_step}"
    if region.y_start % out_step or layout.n % out_step:
        return False, f"channels from {region.y_start} of {layout.n}: not in steps of {out_step}"
    return True, ""


def candidates(problem: Problem) -> tuple[Config, ...]:
    """Configurations to measure; the first one runs where nothing has been measured."""
    return ((), *((("alg", i),) for i in range(1, _ALGORITHMS)))


def accepts(problem: Problem, config: Config) -> bool:
    """Whether the library takes `config` for this region (some ids fail for some sizes)."""
    region, m = problem.region, padded_rows(problem.m)
    handle = _plans(torch.device("cuda", torch.cuda.current_device())).handle
    dtypes = problem.layout.weight_dtype, problem.out_dtype
    leading = problem.layout.k, problem.layout.n
    try:
        Plan(
            *(handle, (m, region.rows, region.cols), dtypes, leading, (1.0, 0.0), dict(config))
        ).close()
    except CusparseLtError:
        return False
    return True


class _Plans:
    """Handle and least-recently-used plans of one thread on one device.

    A plan that was captured in a CUDA graph is kept for good: nothing says that a replay does not
    need it.
    """

    def __init__(self) -> None:
        self.handle = Handle()
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()
        self._kept: list[Plan] = []

    def get(self, key: tuple) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _make(self.handle, *key)
            if len(self._plans) > _MAX_PLANS:
                self._evict()
        else:
            self._plans.move_to_end(key)
        return plan

    def _evict(self) -> None:
        _, plan = self._plans.popitem(last=False)
        if plan.captured:
            self._kept.append(plan)
        else:
            plan.close()


def _make(
    handle: Handle,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    leading: tuple[int, int],
    factors: tuple[float, float],
    config: Config,
) -> Plan:
    try:
        return Plan(handle, shape, dtypes, leading, factors, dict(config))
    except CusparseLtError as error:
        if not config:
            raise
        # Another version of the library than the one that was measured.
        _warn_once(f"{error} with {dict(config)}: cuSPARSELt's default algorithm runs instead")
        return Plan(handle, shape, dtypes, leading, factors, {})


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.devices: dict[int, _Plans] = {}


_threads = _Threads()


def _plans(device: torch.device) -> _Plans:
    plans = _threads.devices.get(device.index)
    if plans is None:
        plans = _threads.devices[device.index] = _Plans()
    return plans


def run(
    problem: Problem,
    x: Tensor,
    weights: list[Tensor],
    y: Tensor,
    *,
    alpha: float,
    accumulate: bool,
    config: Config,
) -> None:
    """Write (or add to) the region's channels of `y`.

    Args:
        x: [padded M, K] contiguous, in the weight dtype; rows past M are arbitrary.
        weights: the compressed buffer of the region.
        y: [padded M, N] contiguous; rows past M are written too.
    """
    region = problem.layout.regions[problem.indices[0]]
    device = x.device
    plan = _plans(device).get(
        (
            (x.shape[0], region.rows, region.cols),
            (x.dtype, y.dtype),
            (x.shape[1], y.shape[1]),
            (alpha, 1.0 if accumulate else 0.0),
            config,
        )
    )
    if not plan.captured and torch.cuda.is_current_stream_capturing():
        plan.captured = True
    plan(
        weights[0].data_ptr(),
        x.data_ptr() + region.x_start * x.element_size(),
        y.data_ptr() + region.y_start * y.element_size(),
        device,
    )


@cache
def order_is_known(device: torch.device) -> bool:
    """Whether the library at hand compresses FP8 as `layouts` describes; checked on one tile."""
    codes = torch.arange(TILE_ROWS * TILE_COLS // 4) * 7 % 6
    pairs = torch.tensor([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])[codes]
    kept = 1.0 + torch.arange(codes.numel() * 2).view(-1, 2) % 5
    tile = torch.zeros(codes.numel(), 4).scatter_(1, pairs, kept)
    weight = tile.view(TILE_ROWS, TILE_COLS).to(FP8).to(device)
    blob = Blob24(TILE_ROWS, TILE_COLS, FP8).pack(*sparse24.compress(weight))
    same = torch.equal(blob, _plans(device).handle.compress(weight))
    if not same:
        logger.warning(
            "this cuSPARSELt (%s) compresses FP8 in an unknown order: only its own kernels can "
            "read 2:4 weights",
            _plans(device).handle.version(),
        )
    return same


def prepare(blob: Blob24, values: Tensor, meta: Tensor) -> Tensor:
    """Planes [rows, cols/2], [rows, cols/8] on the GPU → the buffer that the library reads.

    Raises:
        CusparseLtError: only the library knows the order of this size, and it cannot be loaded.
    """
    if blob.ordered and (missing() or order_is_known(values.device)):
        return blob.pack(values, meta)
    return _plans(values.device).handle.compress(sparse24.expand(values, meta))
