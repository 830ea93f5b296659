"""How a decode launch is cut: programs, warps, steps, shared memory. Pure; no Triton.

A `Config` says what to try, `plan` makes a `Launch` of it for a problem; `estimate` orders launches
by the bytes they move where nothing has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels.problem import Problem, Region

__all__ = ["CONFIGS", "Config", "Cut", "Kind", "Launch", "estimate", "fits", "kinds_of", "plan"]

BLOCK_K, TILE_ROWS, TOKENS = 128, 16, 8
FP8 = torch.float8_e4m3fn
TYPES = {FP8: "f16", torch.float16: "f16", torch.bfloat16: "bf16"}
PROCESSORS = 132  # where no device says otherwise
_SHARED = 227 << 10  # bytes of shared memory an SM gives to programs
_SPENT = 1 << 10  # of that, for each program
_DRAM, _L2, _SM = 4.1e6, 5.3e6, 60e3  # bytes per µs of memory, of L2, into one SM; H200
_LAUNCH, _REDUCTION = 2.5, 1.7  # µs


@dataclass(frozen=True)
class Config:
    """How a launch is cut: see `decode_kernel.py`."""

    warps: int = 8
    stages: int = 3  # slots in a warp's ring, at most: fewer where shared memory ends
    sparse_tiles: int = 5  # row tiles in a group
    dense_tiles: int = 3
    programs_per_sm: int = 1
    split: int = 1  # programs that share the k of a group
    pdl: int = 1  # programmatic dependent launch: start while the kernel before ends


CONFIGS = (
    Config(stages=2),
    Config(),
    Config(warps=4, stages=6),
    Config(warps=4, dense_tiles=5, stages=4),
    Config(warps=4, programs_per_sm=2),
    Config(stages=4, sparse_tiles=2, dense_tiles=2, programs_per_sm=2),
    Config(stages=6, sparse_tiles=3),
    Config(warps=16, sparse_tiles=3),
    Config(split=2),
    Config(stages=2, split=4),
    Config(warps=4, programs_per_sm=2, split=4),
    Config(warps=4, stages=4, split=4),
    Config(warps=4, split=5),
    Config(warps=4, split=8),
    Config(stages=2, sparse_tiles=4, split=8),
    Config(stages=2, sparse_tiles=3, split=8),
)


@dataclass(frozen=True)
class Kind:
    """The regions of one kind."""

    sparse: bool
    regions: int
    cols: int
    x_start: int
    steps: int  # blocks of 128 k for one warp
    tiles: int  # row tiles in a group


@dataclass(frozen=True)
class Cut:
    """How a layer is cut into programs, warps and steps: what the kernel is compiled for.

    Shared memory: X if it is kept [warp, step], then the rings [warp, slot], then the sums.
    """

    sparse: Kind
    dense: Kind
    mixed: bool  # rows have both kinds
    ldx: int
    itemsize: int
    operand: str  # type of the products: f16 (also for FP8 weights) or bf16
    token_tiles: int
    warps: int
    split: int
    even_rows: bool  # rows % 16 == 0
    keep_x: bool  # X stays for all groups; else it goes through the ring
    depth: int  # slots of a ring
    slot: int  # bytes
    ring_start: int
    sums_row: int  # where the sums start, in rows of warps² · 32 f32
    alpha: float
    pdl: bool  # programmatic dependent launch (sm_90)


@dataclass(frozen=True)
class Launch:
    """Grid and arguments of one launch that do not depend on tensors."""

    grid: tuple[int, int]
    programs: tuple[int, int]  # 2:4, dense
    groups: tuple[int, int]
    shared_rows: int
    cut: Cut

    @property
    def rounds(self) -> int:
        """Groups that the busiest program works through."""
        return max(-(-g // p) for g, p in zip(self.groups, self.programs, strict=True) if p)


def kinds_of(problem: Problem) -> tuple[list[Region], list[Region]]:
    """Regions that are 2:4, regions that are dense."""
    sparse = [r for r in problem.regions if r.kind is RegionKind.SPARSE_24]
    return sparse, [r for r in problem.regions if r.kind is RegionKind.DENSE]


def fits(launch: Launch, config: Config) -> bool:
    """Whether shared memory holds the programs, with two slots in a ring at least."""
    size = launch.shared_rows * launch.cut.warps**2 * 128 + _SPENT
    return launch.cut.depth >= 2 and size <= _SHARED // config.programs_per_sm


def estimate(problem: Problem, launch: Launch) -> float:
    """µs from bytes: of W from memory; of W, X and partial sums through L2.

    On 24 measured problems (Qwen3-32B on H200, M = 1, 16, 32) the candidate with the lowest
    estimate was 4 % slower than the best one on average.
    """
    cut, m = launch.cut, problem.m
    size = problem.layout.weight_dtype.itemsize
    per_weight = {RegionKind.SPARSE_24: size / 2 + 0.125, RegionKind.DENSE: size}
    weights = sum(r.rows * r.cols * per_weight[r.kind] for r in problem.regions)
    programs = launch.grid[0] * launch.grid[1]
    once = m * sum(k.cols for k in (cut.sparse, cut.dense) if k.regions) * size / cut.split
    once /= 1 if cut.mixed or not (cut.sparse.regions and cut.dense.regions) else 2
    x = programs * once * (1 if cut.keep_x else launch.rounds)
    partial = 0 if cut.split == 1 else 2 * cut.split * m * problem.layout.n * 4
    idle = launch.rounds * launch.programs[0] / launch.groups[0] if launch.programs[0] else 1
    spread = min(programs, PROCESSORS) * _SM
    busy = max(
        weights * (0.8 + 0.2 * idle) / _DRAM, (weights + x + partial) / _L2, (weights + x) / spread
    )
    busy *= _arithmetic(launch, programs)
    return busy + _LAUNCH + (_REDUCTION if cut.split > 1 else 0)


def _arithmetic(launch: Launch, programs: int) -> float:
    """What is not bytes, seen on H200: more tokens want 8 warps an SM, and 4 or 5 tiles a group."""
    cut = launch.cut
    warps = cut.warps * (2 if programs > PROCESSORS else 1)
    tiles = min(k.tiles for k in (cut.sparse, cut.dense) if k.regions)
    more = cut.token_tiles - 1
    factor = 1 + 0.08 * more * abs(8 / warps - 1 if warps < 8 else warps / 8 - 1)
    factor += 0.04 * more * max(0, 4 - tiles)
    return factor + (1 if tiles * cut.token_tiles > 20 else 0)  # sums no longer fit in registers


def _groups(regions: list[Region], tiles: int) -> int:
    return sum(-(-r.rows // (TILE_ROWS * tiles)) for r in regions)


def _share(total: int, groups: tuple[int, int], costs: tuple[int, int]) -> tuple[int, int]:
    """Programs for 2:4 and dense rows, so that the longest program is shortest."""
    if not groups[0] or not groups[1]:
        return min(total, groups[0]), min(total, groups[1])

    def longest(first: int) -> int:
        rounds = -(-groups[0] // first), -(-groups[1] // (total - first))
        return max(rounds[0] * costs[0], rounds[1] * costs[1])

    first = min(range(1, total), key=longest)
    return min(first, groups[0]), min(total - first, groups[1])


@lru_cache(maxsize=4096)
def plan(problem: Problem, config: Config, processors: int, alpha: float = 1.0) -> Launch:
    """The launch of `problem` on a device with so many SMs. Pure."""
    sides = kinds_of(problem)
    mixed = bool(sides[0] and sides[1] and sides[0][0].shares_rows(sides[1][0]))
    tiles = config.sparse_tiles, config.sparse_tiles if mixed else config.dense_tiles
    groups = _groups(sides[0], tiles[0]), _groups(sides[1], tiles[1])
    total = max(2, processors * config.programs_per_sm // config.split)
    costs = tiles[0] * 5, tiles[1] * 8  # bytes of eight FP8 weights
    programs = _share(total, (groups[0], 0) if mixed else groups, costs)
    launch = Launch((0, 0), programs, groups, 0, None)
    cut, shared_rows = _cut(problem, config, tiles, launch.rounds, alpha)
    count = programs[0] if mixed else sum(programs)
    return Launch((count, config.split), programs, groups, shared_rows, cut)


def _cut(
    problem: Problem, config: Config, tiles: tuple[int, int], rounds: int, alpha: float
) -> tuple[Cut, int]:
    """What the kernel is compiled for, and rows of shared memory."""
    warps, dtype = config.warps, problem.layout.weight_dtype
    kinds = _kernel_kinds(problem, config, tiles)
    used = [k for k in kinds if k.regions]
    mixed = len(used) == 2 and problem.regions[0].shares_rows(problem.regions[1])
    row = warps**2 * 128  # bytes in which as many sums as there are warps are added
    sums = max(-(-k.tiles * 4 // warps) for k in used)
    budget = _SHARED // config.programs_per_sm - _SPENT - sums * row
    tokens = -(-problem.m // TOKENS)
    x = tokens * TOKENS * BLOCK_K * dtype.itemsize
    w = max(_step_bytes(k, dtype.itemsize) for k in used)
    steps = sum(k.steps for k in used) if mixed else max(k.steps for k in used)
    keep = rounds > 1 and (steps * x + min(2, config.stages) * w) * warps <= budget
    ring_start = steps * x * warps if keep else 0
    slot = w if keep else w + x
    depth = max(1, min(config.stages, (budget - ring_start) // (slot * warps)))
    sums_row = -(-(ring_start + depth * slot * warps) // row)
    cut = Cut(
        *kinds,
        mixed=mixed,
        ldx=problem.layout.k,
        itemsize=dtype.itemsize,
        operand=TYPES[dtype],
        token_tiles=tokens,
        warps=warps,
        split=config.split,
        even_rows=all(r.rows % TILE_ROWS == 0 for r in problem.regions),
        keep_x=keep,
        depth=depth,
        slot=slot,
        ring_start=ring_start,
        sums_row=sums_row,
        alpha=alpha,
        pdl=bool(config.pdl),
    )
    return cut, sums_row + sums


def _kernel_kinds(problem: Problem, config: Config, tiles: tuple[int, int]) -> list[Kind]:
    width = BLOCK_K * config.warps * config.split
    return [
        Kind(
            sparse=i == 0,
            regions=len(side),
            cols=side[0].cols if side else 0,
            x_start=side[0].x_start if side else 0,
            steps=-(-side[0].cols // width) if side else 0,
            tiles=tiles[i],
        )
        for i, side in enumerate(kinds_of(problem))
    ]


def _step_bytes(kind: Kind, itemsize: int) -> int:
    """Bytes of W that a warp copies in a step: values and metadata (for pairs of row tiles)."""
    if kind.sparse:
        return kind.tiles * 1024 * itemsize + (kind.tiles + 1) // 2 * 512
    return kind.tiles * 2048 * itemsize
