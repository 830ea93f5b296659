"""How a weight is divided: regions of one kind each, along one dimension.

`Y[M, N] = X[M, K] · W[N, K]ᵀ`. An *output-split* partition divides N (gate and up), an
*input-split* one divides K (down). Both are written as one list of segments, so the three
projections of an MLP share the segment list of the intermediate dimension and cannot disagree about
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from vllm_spense.format.tiles import Tiles

__all__ = ["Partition", "RegionKind", "Segment", "Split", "hybrid_segments"]

Split = Literal["output", "input"]

GROUP = 4  # 2:4 keeps two of four consecutive k
META_GROUP = 8  # one metadata byte covers two groups
_ALIGNMENTS = (256, 128, 64, 32, 16, 8)
_SHARE_TOLERANCE = 0.01


class RegionKind(str, Enum):
    """What a region stores: every weight, two of four, or the tiles that are not zero."""

    DENSE = "dense"
    SPARSE_24 = "sparse_24"
    ZERO_TILES = "zero_tiles"


@dataclass(frozen=True)
class Segment:
    """`size` consecutive channels (rows if output-split, columns if input-split) of one kind.

    `tiles` says how a region of zero tiles is cut; other kinds have none.
    """

    kind: RegionKind
    size: int
    tiles: Tiles | None = None


@dataclass(frozen=True)
class Partition:
    """The segments of one weight, in stored order, along `split`."""

    split: Split
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.split not in ("output", "input"):
            raise ValueError(f"split is {self.split!r}; needed: 'output' or 'input'")
        if not self.segments:
            raise ValueError("a partition needs at least one segment")
        for segment in self.segments:
            if segment.size <= 0:
                raise ValueError(f"segment of kind {segment.kind.value} has size {segment.size}")
            if (segment.kind is RegionKind.ZERO_TILES) != (segment.tiles is not None):
                given = "no 'tiles'" if segment.tiles is None else "'tiles'"
                raise ValueError(
                    f"segment of kind {segment.kind.value} has {given}; only zero_tiles has them"
                )
        kinds = [segment.kind for segment in self.segments]
        if len(set(kinds)) != len(kinds):
            raise ValueError(
                f"segments {[k.value for k in kinds]}: format version 1 has one segment per kind"
            )

    @property
    def total(self) -> int:
        """Channels that the segments cover together."""
        return sum(segment.size for segment in self.segments)

    def size_of(self, kind: RegionKind) -> int:
        """Channels of one kind (0 where there are none)."""
        return sum(segment.size for segment in self.segments if segment.kind is kind)

    @property
    def dense_share(self) -> float:
        """Dense channels over all channels, 0 … 1."""
        return self.size_of(RegionKind.DENSE) / self.total

    @property
    def single(self) -> RegionKind | None:
        """The kind, if there is only one region; else None."""
        return self.segments[0].kind if len(self.segments) == 1 else None

    @property
    def tiles(self) -> Tiles | None:
        """How the region of zero tiles is cut, if there is one."""
        return next((s.tiles for s in self.segments if s.tiles is not None), None)

    def spans(self) -> dict[RegionKind, tuple[int, int]]:
        """Kind → (first channel, channels), in stored order."""
        spans, start = {}, 0
        for segment in self.segments:
            spans[segment.kind] = (start, segment.size)
            start += segment.size
        return spans

    @classmethod
    def whole(cls, kind: RegionKind, rows: int, tiles: Tiles | None = None) -> Partition:
        """A partition of one region: all `rows` output channels of one kind."""
        return cls("output", (Segment(kind, rows, tiles),))


def hybrid_segments(size: int, dense_share: float) -> tuple[Segment, ...]:
    """Divide `size` intermediate channels: 2:4 first, `dense_share` of them dense and last.

    The dense part is rounded to the coarsest of 256, 128, … 8 channels that keeps the share within
    0.01 of what was asked: multiples of 256 leave kernel-sized shards at tensor parallel 8. Callers
    compare the result with the request and tell the user.

    Raises:
        ValueError: a share outside 0 … 1, or a size that no 2:4 region can fill.
    """
    if not 0.0 <= dense_share <= 1.0:
        raise ValueError(f"dense share {dense_share} is outside 0 … 1")
    if dense_share == 1.0:
        return (Segment(RegionKind.DENSE, size),)
    if dense_share == 0.0 and size % META_GROUP == 0:
        return (Segment(RegionKind.SPARSE_24, size),)
    dense = _round_dense(size, dense_share)
    sparse = size - dense
    segments = (Segment(RegionKind.SPARSE_24, sparse), Segment(RegionKind.DENSE, dense))
    return tuple(segment for segment in segments if segment.size)


def _round_dense(size: int, dense_share: float) -> int:
    for alignment in _ALIGNMENTS:
        # The sparse part is what must be aligned: the dense part takes an odd remainder.
        sparse = round(size * (1 - dense_share) / alignment) * alignment
        if sparse <= size and abs((size - sparse) / size - dense_share) <= _SHARE_TOLERANCE:
            return size - sparse
    raise ValueError(
        f"{size} channels cannot be divided into a 2:4 region of a multiple of {META_GROUP} and "
        f"a dense share of {dense_share} (within {_SHARE_TOLERANCE})"
    )
