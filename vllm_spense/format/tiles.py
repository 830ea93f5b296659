"""Zero-tile weights as two planes: the tiles that are kept, side by side, and which ones they are.

    W, tiles 0 … 7 of a row block      kept tiles side by side      index (two K-shards of four)
    a . . b | . c d .                  a b | c d                    0 3 | 1 2

`weight_tiles` [N, kept · tile columns] holds every row's kept columns, row-major;
`weight_tile_index` [N / tile rows, kept] int16 says which tile of its K-shard each one is,
ascending. All row blocks keep the same number of tiles, and the same number in every K-shard:
equal work, and a tensor-parallel rank slices both planes plainly, along rows in steps of a row
block, along columns in steps of a K-shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "INDEX_DTYPE",
    "K_SHARDS",
    "TILE_SHAPES",
    "Tiles",
    "choose_tiles",
    "compress",
    "expand",
    "invalid_index",
    "nonzero_tiles",
    "tile_columns",
]

INDEX_DTYPE = torch.int16
# One wgmma has 64 rows; 64 columns serve models whose K is no multiple of 128.
TILE_SHAPES = ((64, 64), (64, 128), (128, 128))
K_SHARDS = 8  # of a layer whose K is divided over tensor-parallel ranks, where they fit
_TOLERANCE = 0.025  # of the sparsity, for more K-shards
_MAX_INDEX = torch.iinfo(INDEX_DTYPE).max


@dataclass(frozen=True)
class Tiles:
    """How a region is cut: tiles of rows × cols, `kept` of `total` along K in every row block.

    `k_shards` divides both: tensor parallelism along K works for its divisors.
    """

    rows: int
    cols: int
    kept: int
    total: int
    k_shards: int = 1

    def __post_init__(self) -> None:
        if (self.rows, self.cols) not in TILE_SHAPES:
            known = ", ".join(f"{rows}x{cols}" for rows, cols in TILE_SHAPES)
            raise ValueError(f"tiles of {self.rows}x{self.cols}; known: {known}")
        if not 1 <= self.kept <= self.total:
            raise ValueError(f"{self.kept} of {self.total} tiles are kept; needed: 1 … all")
        if self.k_shards < 1 or self.kept % self.k_shards or self.total % self.k_shards:
            raise ValueError(
                f"{self.k_shards} K-shards do not divide {self.kept} kept of {self.total} tiles"
            )
        if self.shard_total > _MAX_INDEX + 1:
            raise ValueError(f"{self.shard_total} tiles in a K-shard; at most {_MAX_INDEX + 1}")

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols} {self.kept}/{self.total}/{self.k_shards}"

    @property
    def shard_total(self) -> int:
        """Tiles of a row block in one K-shard."""
        return self.total // self.k_shards

    @property
    def shard_kept(self) -> int:
        """Kept tiles of a row block in one K-shard."""
        return self.kept // self.k_shards

    @property
    def columns(self) -> int:
        """K of the region."""
        return self.total * self.cols

    @property
    def stored_columns(self) -> int:
        """Columns of `weight_tiles`."""
        return self.kept * self.cols

    @property
    def sparsity(self) -> float:
        """Zero tiles over all tiles, 0 … 1."""
        return 1 - self.kept / self.total

    def check(self, rows: int, cols: int) -> None:
        """Refuse a region that these tiles do not cut evenly.

        Raises:
            ValueError: with both sizes.
        """
        if rows % self.rows or cols != self.columns:
            raise ValueError(
                f"a region [{rows}, {cols}] is not {self.total} tiles of {self.rows}x{self.cols} "
                f"along K: needed are a multiple of {self.rows} rows and {self.columns} columns"
            )

    def divide_columns(self, parts: int) -> Tiles:
        """What one of `parts` tensor-parallel ranks has.

        Raises:
            ValueError: the K-shards do not divide.
        """
        if self.k_shards % parts:
            raise ValueError(f"{self.k_shards} K-shards do not divide over {parts} ranks")
        return replace(
            self,
            kept=self.kept // parts,
            total=self.total // parts,
            k_shards=self.k_shards // parts,
        )


def choose_tiles(
    shape: tuple[int, int], columns: int, sparsity: float, most_shards: int = 1
) -> Tiles:
    """Cut `columns` into tiles of `shape` and keep about 1 − sparsity of them.

    As many K-shards as divide the tiles, at most `most_shards`, and fewer where equal counts in
    each would miss the sparsity by more than 0.025. Callers compare the result with the request.

    Raises:
        ValueError: columns that the tiles do not divide.
    """
    total, rest = divmod(columns, shape[1])
    if rest or not total:
        raise ValueError(f"{columns} columns are no multiple of {shape[1]}, the columns of a tile")
    for shards in range(most_shards, 0, -1):
        if total % shards:
            continue
        inside = total // shards
        kept = min(max(int(inside * (1 - sparsity) + 0.5), 1), inside)
        if shards == 1 or abs(1 - kept / inside - sparsity) <= _TOLERANCE:
            return Tiles(*shape, kept * shards, total, shards)
    raise AssertionError(most_shards)


def _bits(weight: Tensor) -> Tensor:
    """The same memory as integers: FP8 has few operators, and −0.0 and NaN must survive."""
    return weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()])


def _blocked(weight: Tensor, tiles: Tiles) -> Tensor:
    """[N, n · cols] → [row blocks, n, rows, cols], a view."""
    rows, cols = weight.shape
    shape = (rows // tiles.rows, tiles.rows, cols // tiles.cols, tiles.cols)
    return weight.view(shape).transpose(1, 2)


def nonzero_tiles(weight: Tensor, tiles: Tiles) -> Tensor:
    """Which tiles of [N, K] hold a number other than zero: bool [row blocks, total]."""
    tiles.check(*weight.shape)
    return (_blocked(weight.contiguous(), tiles).float() != 0).any(-1).any(-1)


def compress(weight: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Split a weight into its planes.

    Args:
        weight: [N, K], any float dtype, at most `tiles.shard_kept` nonzero tiles per row block and
            K-shard (−0.0 counts as zero). Where there are fewer, tiles of zeros fill up.

    Returns:
        weight_tiles [N, kept · cols] in the dtype of `weight`; weight_tile_index [row blocks, kept]
        int16.

    Raises:
        ValueError: sizes that do not fit, or a row block with more nonzero tiles in a K-shard.
    """
    zero = ~nonzero_tiles(weight, tiles)
    blocks = zero.shape[0]
    zero = zero.view(blocks, tiles.k_shards, tiles.shard_total)
    crowded = (~zero).sum(-1) > tiles.shard_kept
    if crowded.any():
        block, shard = crowded.nonzero()[0].tolist()
        raise ValueError(
            f"rows {block * tiles.rows}–{(block + 1) * tiles.rows - 1} hold "
            f"{int((~zero[block, shard]).sum())} nonzero tiles of {tiles.rows}x{tiles.cols} in "
            f"K-shard {shard}; needed: at most {tiles.shard_kept} of {tiles.shard_total}"
        )
    first = zero.to(torch.int8).argsort(dim=-1, stable=True)  # nonzero tiles first, then the lowest
    index = first[..., : tiles.shard_kept].sort(-1).values.reshape(blocks, tiles.kept)
    index = index.to(INDEX_DTYPE)
    cut = _blocked(_bits(weight.contiguous()), tiles)
    picked = cut[torch.arange(blocks, device=weight.device)[:, None], tile_columns(index, tiles)]
    values = picked.transpose(1, 2).reshape(weight.shape[0], tiles.stored_columns)
    return values.view(weight.dtype), index


def tile_columns(index: Tensor, tiles: Tiles) -> Tensor:
    """Index plane [row blocks, kept] → tiles counted from the region's first column, int64."""
    shard = torch.arange(tiles.kept, device=index.device) // tiles.shard_kept
    return index.long() + shard * tiles.shard_total


def expand(values: Tensor, index: Tensor, tiles: Tiles) -> Tensor:
    """The inverse of `compress`: planes → dense [N, K], zeros elsewhere."""
    blocks, rows = index.shape[0], values.shape[0]
    bits = _bits(values.contiguous())
    dense = bits.new_zeros(blocks, tiles.total, tiles.rows, tiles.cols)
    block = torch.arange(blocks, device=values.device)[:, None]
    dense[block, tile_columns(index, tiles)] = _blocked(bits, tiles)
    return dense.transpose(1, 2).reshape(rows, tiles.columns).view(values.dtype)


def invalid_index(index: Tensor, tiles: Tiles) -> tuple[int, int] | None:
    """Row block and slot of the first index outside its K-shard or not ascending, or None."""
    sharded = index.long().view(index.shape[0], tiles.k_shards, tiles.shard_kept)
    bad = (sharded < 0) | (sharded >= tiles.shard_total)
    bad[..., 1:] |= sharded.diff(dim=-1) <= 0
    if not bad.any():
        return None
    block, slot = bad.view(index.shape).nonzero()[0].tolist()
    return block, slot
