"""Kernel order of a region of zero tiles: one buffer, tiles first, then where they stand.

    values   rows × kept · tile columns, row-major: the plane `weight_tiles` as it is stored
    index    int32 [row blocks, kept], tiles counted from the region's first column, ascending

Indices on disk are relative to their K-shard (`format/tiles.py`); kernels want one addition less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spense.format.tiles import INDEX_DTYPE, Tiles, tile_columns

__all__ = ["TileBlob"]


@dataclass(frozen=True)
class TileBlob:
    """A region of `rows` rows as one flat uint8 buffer."""

    rows: int
    tiles: Tiles
    dtype: torch.dtype

    @property
    def values_shape(self) -> tuple[int, int]:
        return self.rows, self.tiles.stored_columns

    @property
    def index_shape(self) -> tuple[int, int]:
        return self.rows // self.tiles.rows, self.tiles.kept

    @property
    def values_bytes(self) -> int:
        """A multiple of 4096: no tile is smaller."""
        return self.rows * self.tiles.stored_columns * self.dtype.itemsize

    @property
    def storage_shape(self) -> tuple[int]:
        blocks, kept = self.index_shape
        return (self.values_bytes + blocks * kept * torch.int32.itemsize,)

    def pack(self, values: Tensor, index: Tensor) -> Tensor:
        """Planes `weight_tiles` and `weight_tile_index` → the buffer."""
        expected = (self.values_shape, self.index_shape, self.dtype, INDEX_DTYPE)
        found = (tuple(values.shape), tuple(index.shape), values.dtype, index.dtype)
        if found != expected:
            raise ValueError(f"planes of zero tiles are {found}; needed: {expected}")
        absolute = tile_columns(index, self.tiles).to(torch.int32)
        flat = (part.contiguous().view(torch.uint8).flatten() for part in (values, absolute))
        return torch.cat(tuple(flat))

    def parts(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views: values [rows, kept · tile columns], absolute index int32 [row blocks, kept]."""
        values, index = buffer.split((self.values_bytes, buffer.numel() - self.values_bytes))
        return (
            values.view(self.dtype).view(self.values_shape),
            index.view(torch.int32).view(self.index_shape),
        )

    def unpack(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        values, absolute = self.parts(buffer)
        return values, (absolute % self.tiles.shard_total).to(INDEX_DTYPE)
