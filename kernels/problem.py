"""What is to be computed: Y[M, N] = X[M, K] · W[N, K]ᵀ with W divided into regions.

A `Region` is a rectangle of W, a `Layout` the regions that tile all of it, a `Problem` a layout at
one M on one kind of device. All are frozen and hashable, so that plans can be looked up by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch

from vllm_spense.format.partition import META_GROUP, RegionKind
from vllm_spense.format.tiles import Tiles

__all__ = ["Config", "Layout", "Problem", "Region", "padded_rows"]

_CODES = {RegionKind.DENSE: 0, RegionKind.SPARSE_24: 1, RegionKind.ZERO_TILES: 2}
_KINDS = {code: kind for kind, code in _CODES.items()}
_FIELDS = 5  # integers per region: kind, y_start, rows, x_start, cols
# A kind of zero tiles carries the tiles: bits 8 … tile rows / 64, tile columns / 64, K-shards,
# kept tiles. Their number in all follows from cols.
_TILE_UNIT = 64
_TILE_BITS = ((8, 4), (12, 4), (16, 8), (24, 24))  # (shift, bits)
Config = tuple[tuple[str, int | str], ...]  # parameters of a path: (name, value) pairs
ROW_STEP = 16  # sparse library GEMMs take M in multiples of this


def padded_rows(m: int) -> int:
    """M rounded up to a multiple of 16."""
    return -(-m // ROW_STEP) * ROW_STEP


@dataclass(frozen=True)
class Region:
    """Rows y_start … y_start+rows and columns x_start … x_start+cols of W, all of one kind.

    `tiles` says how zero tiles are cut; other kinds have none.
    """

    kind: RegionKind
    y_start: int
    rows: int
    x_start: int
    cols: int
    tiles: Tiles | None = None

    @property
    def label(self) -> str:
        """The kind as tables and logs name it: zero tiles with their size and share."""
        if self.tiles is None:
            return self.kind.value
        tiles = self.tiles
        return f"{self.kind.value}_{tiles.rows}x{tiles.cols}_{tiles.kept}of{tiles.total}"

    @property
    def y_stop(self) -> int:
        return self.y_start + self.rows

    @property
    def x_stop(self) -> int:
        return self.x_start + self.cols

    def shares_rows(self, other: Region) -> bool:
        """Whether both contribute to the same channels of Y."""
        return self.y_start < other.y_stop and other.y_start < self.y_stop

    def _shares_columns(self, other: Region) -> bool:
        return self.x_start < other.x_stop and other.x_start < self.x_stop


@dataclass(frozen=True)
class Layout:
    """The regions of W [n, k]; together they cover it exactly once.

    Regions that share channels of Y share all of them: they add up, one after the other.
    """

    n: int
    k: int
    regions: tuple[Region, ...]
    weight_dtype: torch.dtype

    def __post_init__(self) -> None:
        for region in self.regions:
            self._check_bounds(region)
        for a, b in combinations(self.regions, 2):
            if not a.shares_rows(b):
                continue
            if a._shares_columns(b):
                raise ValueError(f"regions overlap: {a} and {b}")
            if (a.y_start, a.rows) != (b.y_start, b.rows):
                raise ValueError(f"regions share only a part of their rows: {a} and {b}")
        covered = sum(region.rows * region.cols for region in self.regions)
        if covered != self.n * self.k:
            raise ValueError(
                f"regions cover {covered} of the {self.n * self.k} weights of [{self.n}, {self.k}]"
            )

    def _check_bounds(self, region: Region) -> None:
        inside = (
            0 <= region.y_start < region.y_stop <= self.n
            and 0 <= region.x_start < region.x_stop <= self.k
        )
        if not inside:
            raise ValueError(f"{region} lies outside [{self.n}, {self.k}] or is empty")
        if region.kind is RegionKind.SPARSE_24 and region.cols % META_GROUP:
            raise ValueError(f"{region}: columns of a 2:4 region are multiples of {META_GROUP}")
        if (region.kind is RegionKind.ZERO_TILES) != (region.tiles is not None):
            raise ValueError(f"{region}: zero tiles, and no other kind, say how they are cut")
        if region.tiles is not None:
            region.tiles.check(region.rows, region.cols)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the regions in the order in which they run: dense before sparse.

        Sparse library GEMMs can add to what Y holds (beta = 1), vLLM's dense ones cannot.
        """
        dense_first = sorted(
            range(len(self.regions)), key=lambda i: self.regions[i].kind is not RegionKind.DENSE
        )
        return tuple(dense_first)

    def accumulates(self, index: int) -> bool:
        """Whether a region that runs before region `index` has written its channels of Y."""
        earlier = self.order[: self.order.index(index)]
        return any(self.regions[index].shares_rows(self.regions[i]) for i in earlier)

    def encode(self) -> list[int]:
        """Flat integers for a custom op: (kind, y_start, rows, x_start, cols) per region."""
        return [
            value
            for r in self.regions
            for value in (_code(r), r.y_start, r.rows, r.x_start, r.cols)
        ]

    @staticmethod
    def decode(n: int, k: int, ints: list[int], weight_dtype: torch.dtype) -> Layout:
        """The inverse of `encode`."""
        if len(ints) % _FIELDS:
            raise ValueError(f"{len(ints)} integers describe no regions: {_FIELDS} per region")
        regions = []
        for i in range(0, len(ints), _FIELDS):
            regions.append(_region(*ints[i : i + _FIELDS]))
        return Layout(n, k, tuple(regions), weight_dtype)


def _code(region: Region) -> int:
    code, tiles = _CODES[region.kind], region.tiles
    if tiles is None:
        return code
    sizes = (tiles.rows // _TILE_UNIT, tiles.cols // _TILE_UNIT, tiles.k_shards, tiles.kept)
    for value, (shift, bits) in zip(sizes, _TILE_BITS, strict=True):
        assert 0 < value < 1 << bits, tiles
        code |= value << shift
    return code


def _region(code: int, y_start: int, rows: int, x_start: int, cols: int) -> Region:
    kind = _KINDS.get(code & 0xFF)
    if kind is None or (code >> 8 and kind is not RegionKind.ZERO_TILES):
        raise ValueError(f"region kind {code} is unknown; known: {sorted(_KINDS)}")
    if kind is not RegionKind.ZERO_TILES:
        return Region(kind, y_start, rows, x_start, cols)
    sizes = [code >> shift & ((1 << bits) - 1) for shift, bits in _TILE_BITS]
    tile_rows, tile_cols, shards, kept = sizes[0] * _TILE_UNIT, sizes[1] * _TILE_UNIT, *sizes[2:]
    total = cols // tile_cols if tile_cols else 0
    return Region(
        kind, y_start, rows, x_start, cols, Tiles(tile_rows, tile_cols, kept, total, shards)
    )


@dataclass(frozen=True)
class Problem:
    """One GEMM to plan: a layout at one M.

    `indices` are the regions that are meant; a path that takes one region at a time is asked about
    a problem of one index, a path that runs the whole layer in one launch about all of them.
    """

    layout: Layout
    m: int
    out_dtype: torch.dtype
    capability: tuple[int, int]
    indices: tuple[int, ...]

    @classmethod
    def whole(
        cls, layout: Layout, m: int, out_dtype: torch.dtype, capability: tuple[int, int]
    ) -> Problem:
        """All regions of `layout`."""
        return cls(layout, m, out_dtype, capability, tuple(range(len(layout.regions))))

    def only(self, index: int) -> Problem:
        """The same problem, one region of it."""
        return Problem(self.layout, self.m, self.out_dtype, self.capability, (index,))

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self.layout.regions[i] for i in self.indices)

    @property
    def region(self) -> Region:
        """The only region."""
        assert len(self.indices) == 1, self.indices
        return self.layout.regions[self.indices[0]]

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.m, self.out_dtype, self.capability, self.indices))

    def __hash__(self) -> int:  # computed once: plans are looked up by problems on every call
        return self._hash
