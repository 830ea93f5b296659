"""The block-sparse path: a region of zero tiles at any M (`block_sparse_kernel.py`).

    Y[:, y_start : y_start+rows] (+)= alpha · X[:, x_start : x_start+cols] · Wᵀ

W is a `tile_layout.TileBlob`, FP8 e4m3, BF16 or FP16; Y is BF16 or FP16. Slices of X and Y are
leading dimensions; the part of an input-split layer that dense columns wrote is added to in the
epilogue. Same launch, same order of additions: the result is the same from run to run.

**Not measured yet.** The kernel is right in Triton's interpreter and compiles for sm_90 and sm_100
(`tests/test_block_sparse*.py`), but it has not run on a GPU. Until `tests/test_gpu_block_sparse.py`
passes on one and its times are known, `MEASURED` is empty: `can_implement` refuses, and layers are
served with these regions expanded to dense.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import problem as problems
from vllm_spense.kernels.problem import Problem
from vllm_spense.kernels.tile_layout import TileBlob

__all__ = ["Config", "can_implement", "candidates", "fits", "product", "run"]

NAME = "block_sparse"
WHOLE_LAYER = False
PADS_ROWS = False

MEASURED: tuple[tuple[int, int], ...] = ()  # capabilities on which the GPU tests have passed
TYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
PROCESSORS = 132  # SMs that estimates assume
SHARED_BYTES = 227 << 10  # of an SM
_STEP = 16  # bytes that one copy moves
_ACCUMULATORS = 128  # registers of a thread for sums
_MAX_STAGES = 6
_GROUP = 8
_TRIED = 32  # candidates at most, by estimate
_SUM_BLOCK = 512


@dataclass(frozen=True)
class Config:
    """A launch: tokens of a program, its warps, tiles under way, programs an SM, programs that
    share the tiles of a row block, token blocks that follow one another on a row block."""

    block_m: int
    warps: int
    stages: int
    per_sm: int
    split: int = 1
    group: int = 1


def can_implement(problem: Problem) -> tuple[bool, str]:
    """Whether this path can run `problem`, and if not, why."""
    possible, reason = fits(problem)
    if possible and problem.capability not in MEASURED:
        major, minor = problem.capability
        return False, f"the block-sparse kernel has not been measured on sm_{major}{minor}"
    return possible, reason


def fits(problem: Problem) -> tuple[bool, str]:
    """Whether the kernel takes this region, were it measured on the GPU at hand."""
    if len(problem.indices) != 1 or problem.region.kind is not RegionKind.ZERO_TILES:
        return False, "the block-sparse kernel takes one region of zero tiles at a time"
    region, layout = problem.region, problem.layout
    if layout.weight_dtype not in TYPES:
        return False, f"no block-sparse kernel for {layout.weight_dtype} weights"
    if problem.out_dtype not in (torch.bfloat16, torch.float16):
        return False, f"no block-sparse kernel for {problem.out_dtype} outputs"
    step = _STEP // layout.weight_dtype.itemsize
    if region.x_start % step or layout.k % step:
        return False, f"columns from {region.x_start} of {layout.k}: not in steps of {step}"
    return True, ""


@lru_cache(maxsize=4096)
def candidates(problem: Problem) -> tuple[problems.Config, ...]:
    """The best estimates, to be measured; the first one runs until then."""
    tiles, itemsize = problem.region.tiles, problem.layout.weight_dtype.itemsize
    found: dict[Config, float] = {}
    for block_m in _token_blocks(problem.m):
        for warps in (4, 8):
            if tiles.rows * block_m > _ACCUMULATORS * warps * 32 or warps * 16 > 2 * tiles.rows:
                continue
            for per_sm in (1, 2, 3):
                stages = _stages(tiles, block_m, per_sm, itemsize)
                if stages < 2 or tiles.rows * block_m * per_sm > _ACCUMULATORS * 384:
                    continue
                for split in _splits(problem, block_m):
                    for group in _groups(problem.m, block_m):
                        config = Config(block_m, warps, stages, per_sm, split, group)
                        found[config] = estimate(problem, config)
    best = sorted(found, key=found.__getitem__)[:_TRIED]
    return tuple(tuple(asdict(config).items()) for config in best)


def _token_blocks(m: int) -> tuple[int, ...]:
    """Sizes of a token block: the smallest that holds M, or those worth trying above 64."""
    if m <= 64:
        return (max(16, 1 << (m - 1).bit_length()),)
    return tuple(size for size in (64, 128, 256) if size < 2 * m)


def _stages(tiles: Tiles, block_m: int, per_sm: int, itemsize: int) -> int:
    stage = (tiles.rows + block_m) * tiles.cols * itemsize
    left = SHARED_BYTES // per_sm - tiles.rows * block_m * 4 // 8  # the epilogue turns its sums
    return min(_MAX_STAGES, left // stage, max(2, tiles.kept))


def _splits(problem: Problem, block_m: int) -> tuple[int, ...]:
    """Splits that keep at least four tiles a program, where row blocks alone do not fill it."""
    work = problem.region.rows // problem.region.tiles.rows * -(-problem.m // block_m)
    if work >= 2 * PROCESSORS:
        return (1,)
    return tuple(s for s in (1, 2, 4, 8, 16) if s == 1 or problem.region.tiles.kept >= 4 * s)


def _groups(m: int, block_m: int) -> tuple[int, ...]:
    """All row blocks for one token block before the next one, or eight token blocks together."""
    blocks = -(-m // block_m)
    return (1,) if blocks == 1 else (min(blocks, _GROUP), 1)


def estimate(problem: Problem, config: Config) -> float:
    """Microseconds, roughly: rounds of programs, each limited by arithmetic, L2 or memory."""
    region, tiles = problem.region, problem.region.tiles
    itemsize = problem.layout.weight_dtype.itemsize
    blocks = region.rows // tiles.rows
    work = blocks * -(-problem.m // config.block_m) * config.split
    rounds = -(-work // PROCESSORS)  # of one program an SM; per_sm overlaps them
    slots = -(-tiles.kept // config.split)
    clocks = tiles.rows * config.block_m * tiles.cols * itemsize / 4300
    from_l2 = (tiles.rows + config.block_m) * tiles.cols * itemsize / 26
    overlap = 1.0 if config.per_sm > 1 else 1.1
    on_chip = rounds * slots * max(clocks, from_l2) * overlap / 1.7e3
    stored = region.rows * tiles.stored_columns * itemsize
    # what is under way: 30 KB an SM saturate memory
    under_way = config.per_sm * (config.stages - 1) * tiles.rows * tiles.cols * itemsize
    memory = stored / 4.0e6 * max(1.0, 30e3 / under_way)
    parts = 3.0 + 8e-6 * config.split * problem.m * region.rows / 4 if config.split > 1 else 0.0
    return max(on_chip, memory) + parts


def product(x: Tensor, values: Tensor, index: Tensor, tiles: Tiles) -> Tensor:
    """The plain-torch twin: X · Wᵀ of one region in float32.

    Args:
        x: [M, tiles.columns]; values [rows, kept · tile columns]; index int32 [row blocks, kept].
    """
    by_tile = x.float().view(len(x), tiles.total, tiles.cols)
    found = [
        by_tile[:, chosen.long()].flatten(1) @ part.float().t()
        for chosen, part in zip(index, values.split(tiles.rows), strict=True)
    ]
    return torch.cat(found, 1)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    """Write (or add to) the region's channels of `y`.

    Args:
        x: [M, K], rows contiguous, in the weight dtype.
        weights: the buffer of the region (`TileBlob`).
        y: [M, N], rows contiguous.
    """
    from vllm_spense.kernels.block_sparse_kernel import block_sparse_kernel, sum_parts_kernel

    region, chosen, m = problem.region, Config(**dict(config)), x.shape[0]
    tiles, rows, split = region.tiles, region.rows, chosen.split
    values, index = TileBlob(rows, tiles, x.dtype).parts(weights[0])
    xs = x.narrow(1, region.x_start, region.cols)
    out = y.narrow(1, region.y_start, rows)
    target = out if split == 1 else out.new_empty((split, m, rows), dtype=torch.float32)
    blocks, token_blocks = rows // tiles.rows, -(-m // chosen.block_m)
    programs = max(1, _processors(x.device) * chosen.per_sm // split)
    block_sparse_kernel[(min(blocks * token_blocks, programs), split)](
        *(xs, values, index, target, m, xs.stride(0), target.stride(-2), blocks, token_blocks),
        *(alpha, tiles.kept, split, tiles.rows, tiles.cols, chosen.block_m, chosen.group),
        STAGES=chosen.stages,
        ACCUMULATE=accumulate and split == 1,
        num_warps=chosen.warps,
    )
    if split > 1:
        sum_parts_kernel[(m, -(-rows // _SUM_BLOCK))](
            *(target, out, m, rows, out.stride(0)),
            SPLIT=split,
            ACCUMULATE=accumulate,
            BLOCK=_SUM_BLOCK,
        )
