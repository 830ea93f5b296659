"""Kernel order of a 2:4 region: one buffer that cuSPARSELt and our own kernels read.

    FP8, rows % 64 == 0, cols % 128 == 0 (`ordered`):
        values    rows × cols/2 bytes, row-major: the plane as it is stored
        metadata  rows × cols/8 bytes, tiles of 64 rows × 128 k, k tiles innermost, 1024 B a tile

    one tile:   k 0–63, then k 64–127                                        2 × 512 B
    one half:   32 runs for the row pairs (16a + g, 16a + g + 8),
                a = 0 … 3, then g = 0 … 7                                     32 × 16 B
    one run:    words t = 0 … 3                                               4 × 4 B
    one word:   two groups (of four k, counted within the 64) a byte, low nibble first:
                2t, 2t+1 of row g │ the same of row g+8 │ 8+2t, 9+2t of row g │ the same of row g+8

This is the compressed form of cuSPARSELt 0.8 for FP8 on sm_90, found by probing and checked bit by
bit on the device. Other sizes and dtypes are in cuSPARSELt's hands there (`cusparselt.prepare`);
on the CPU they are stored plainly, values then metadata, both row-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spense.format.partition import META_GROUP

__all__ = ["Blob24", "Metadata24", "order_metadata", "restore_metadata"]

TILE_ROWS, TILE_COLS = 64, 128
_PADDING = 0xE  # positions 2 and 3
_TILE_BYTES = TILE_COLS // META_GROUP  # metadata bytes of one row in a tile


def order_metadata(meta: Tensor) -> Tensor:
    """Row-major metadata [rows, cols/8] → the order above, flat uint8 of the same size."""
    rows, row_bytes = meta.shape
    # A stored byte is a byte of the plane (two neighbouring groups, low nibble first).
    # axes: row tile, a, row +8, g, k tile, k half, group half (+8), t
    tiled = meta.view(rows // TILE_ROWS, 4, 2, 8, row_bytes // _TILE_BYTES, 2, 2, 4)
    return tiled.permute(0, 4, 5, 1, 3, 7, 6, 2).reshape(-1)


def restore_metadata(ordered: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `order_metadata`: flat uint8 → [rows, cols/8]."""
    tiled = ordered.view(rows // TILE_ROWS, cols // TILE_COLS, 2, 4, 8, 4, 2, 2)
    return tiled.permute(0, 3, 7, 4, 1, 2, 6, 5).reshape(rows, cols // META_GROUP)


@dataclass(frozen=True)
class Blob24:
    """A 2:4 region [rows, cols] as one flat uint8 buffer: values, then metadata."""

    rows: int
    cols: int
    dtype: torch.dtype

    @property
    def ordered(self) -> bool:
        """Whether the metadata is in tile order, so that sparse kernels can read the buffer."""
        aligned = self.rows % TILE_ROWS == 0 and self.cols % TILE_COLS == 0
        return aligned and self.dtype == torch.float8_e4m3fn

    @property
    def values_bytes(self) -> int:
        return self.rows * self.cols // 2 * self.dtype.itemsize

    @property
    def storage_shape(self) -> tuple[int]:
        return (self.values_bytes + self.rows * self.cols // META_GROUP,)

    def pack(self, values: Tensor, meta: Tensor) -> Tensor:
        """Planes [rows, cols/2] and [rows, cols/8] → buffer."""
        expected = (self.rows, self.cols // 2), (self.rows, self.cols // META_GROUP)
        if (tuple(values.shape), tuple(meta.shape)) != expected or values.dtype != self.dtype:
            raise ValueError(
                f"planes are {list(values.shape)} {values.dtype} and {list(meta.shape)}; "
                f"needed: {list(expected[0])} {self.dtype} and {list(expected[1])}"
            )
        blob = torch.empty(self.storage_shape, dtype=torch.uint8, device=values.device)
        blob[: self.values_bytes] = values.contiguous().view(torch.uint8).reshape(-1)
        blob[self.values_bytes :] = order_metadata(meta) if self.ordered else meta.reshape(-1)
        return blob

    def unpack(self, blob: Tensor) -> tuple[Tensor, Tensor]:
        """Buffer → planes [rows, cols/2] and [rows, cols/8]."""
        if blob.shape != self.storage_shape or blob.dtype != torch.uint8:
            raise ValueError(
                f"buffer is {list(blob.shape)} {blob.dtype}; "
                f"needed: {list(self.storage_shape)} torch.uint8 for {self}"
            )
        values = blob[: self.values_bytes].view(self.dtype).view(self.rows, self.cols // 2)
        meta = blob[self.values_bytes :]
        if self.ordered:
            return values, restore_metadata(meta, self.rows, self.cols)
        return values, meta.view(self.rows, self.cols // META_GROUP)


@dataclass(frozen=True)
class Metadata24:
    """cuSPARSELt's order of a region's metadata, any size, FP8 or 16-bit types."""

    rows: int
    cols: int
    itemsize: int

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and groups of four, whole tiles."""
        tile = 16 // self.itemsize  # groups
        return -(-self.rows // 64) * 64, -(-self.cols // 4 // tile) * tile

    @property
    def storage_shape(self) -> tuple[int]:
        rows, groups = self.padded
        return (rows * groups // 2,)

    def pack(self, meta: Tensor) -> Tensor:
        """Row-major metadata [rows, cols/8] → flat uint8."""
        rows, groups = self.padded
        nibbles = torch.full((rows, groups), _PADDING, dtype=torch.uint8, device=meta.device)
        nibbles[: self.rows, : self.cols // 4] = torch.stack([meta & 15, meta >> 4], -1).flatten(1)
        pairs = nibbles.view(self._tiled()).permute(self._order()).reshape(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def unpack(self, stored: Tensor) -> Tensor:
        """The inverse of `pack`."""
        tiled, order = self._tiled(), self._order()
        nibbles = torch.stack([stored & 15, stored >> 4], -1).view([tiled[i] for i in order])
        inverse = [order.index(i) for i in range(len(order))]
        plain = nibbles.permute(inverse).reshape(self.padded)[: self.rows, : self.cols // 4]
        return plain[:, 0::2] | plain[:, 1::2] << 4

    def _tiled(self) -> list[int]:
        # FP8:     row tile, a, row +8, g │ k tile, group half (+8), t, group
        # 16 bits: row tile, a, row +8, g │ k tile, group half (+4), w, group
        rows, groups = self.padded
        words = 4 // self.itemsize
        return [rows // 64, 4, 2, 8, groups // (4 * words), 2, words, 2]

    def _order(self) -> list[int]:
        # row tile, k tile, a, g, word, then the nibbles of a word, slowest first
        return [0, 4, 1, 3, 6, *((5, 2, 7) if self.itemsize == 1 else (7, 5, 2))]
