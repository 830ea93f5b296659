"""2:4 weights as two planes: the kept values, and where in their group of four they stand.

    group of four      w0  0  w2  0      kept values   w0 w2
    positions          0      2          nibble        0 | 2 << 2 = 0b1000

A metadata byte holds two groups, the lower one in the low nibble. Positions ascend, so six of the
sixteen nibbles are valid. Both planes are row-major and can be sliced along rows, or along k in
steps of eight. (The same nibbles as `mma.sp` and `wgmma.sp` take: PTX ISA, "Sparse matrix
storage".)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spense.format.partition import GROUP, META_GROUP

__all__ = ["VALID_NIBBLES", "compress", "expand", "invalid_metadata"]

VALID_NIBBLES = tuple(a | b << 2 for a in range(4) for b in range(a + 1, 4))

_CHUNK = (
    1 << 22
)  # weights compressed at a time: what is in between takes several times their memory
_CROWDED = 0xFF
# Moves the lowest bits of the four bytes of a word (little-endian) next to one another, to bit 24.
_GATHER_BITS = 1 << 24 | 1 << 17 | 1 << 10 | 1 << 3


def _nibble_of(mask: int) -> int:
    """Bit i of `mask` is set where weight i is not zero: nonzeros first, then the lowest zeros."""
    if mask.bit_count() > 2:
        return _CROWDED
    first, second = sorted(sorted(range(4), key=lambda i: not mask >> i & 1)[:2])
    return first | second << 2


_NIBBLES = torch.tensor([_nibble_of(mask) for mask in range(16)], dtype=torch.uint8)


def _bits(weight: Tensor) -> Tensor:
    """The same memory as integers: FP8 has few operators, and −0.0 and NaN must survive."""
    return weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()])


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split a 2:4 weight into its planes.

    Args:
        weight: [N, K], any float dtype, at most two of four consecutive k nonzero, K % 8 == 0. −0.0
            counts as zero.

    Returns:
        values [N, K/2] in the dtype of `weight`; metadata [N, K/8] uint8.

    Raises:
        ValueError: K is not a multiple of 8, or a group of four has more than two nonzeros.
    """
    rows, cols = weight.shape
    if cols % META_GROUP:
        raise ValueError(f"a 2:4 region has {cols} columns; needed: a multiple of {META_GROUP}")
    bits = _bits(weight.contiguous())
    values = bits.new_empty(rows, cols // 2)
    meta = torch.empty(rows, cols // META_GROUP, dtype=torch.uint8, device=weight.device)
    step = max(1, _CHUNK // cols)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        groups = bits[part].view(-1, cols // GROUP, GROUP)
        nibbles = _nibbles(groups, start)
        kept = torch.stack([nibbles & 3, nibbles >> 2], -1).long()
        values[part] = groups.gather(-1, kept).flatten(1)
        meta[part] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return values.view(weight.dtype), meta


def _nibbles(groups: Tensor, first_row: int) -> Tensor:
    """Metadata of [rows, groups, 4] weights as integers: uint8 [rows, groups]."""
    magnitude = torch.iinfo(groups.dtype).max >> (groups.dtype == torch.uint8)  # all but the sign
    nonzero = ((groups & magnitude) != 0).view(torch.int32).squeeze(-1)  # a byte 0 or 1 for each
    nibbles = _NIBBLES.to(groups.device)[nonzero * _GATHER_BITS >> 24 & 0xF]
    crowded = nibbles == _CROWDED
    if crowded.any():
        row, group = crowded.nonzero()[0].tolist()
        raise ValueError(
            f"row {first_row + row}, columns {group * GROUP}–{group * GROUP + 3} "
            "hold more than two nonzeros: not 2:4"
        )
    return nibbles


def positions(meta: Tensor) -> Tensor:
    """Metadata [N, K/8] uint8 → positions [N, K/4, 2] int64, each 0 … 3."""
    rows, half_groups = meta.shape
    nibbles = torch.stack([meta & 0xF, meta >> 4], -1).reshape(rows, half_groups * 2)
    return torch.stack([nibbles & 3, nibbles >> 2], -1).long()


def expand(values: Tensor, meta: Tensor) -> Tensor:
    """The inverse of `compress`: planes [N, K/2] and [N, K/8] → dense [N, K], zeros elsewhere."""
    rows, half = values.shape
    dense = torch.zeros(rows, half // 2, GROUP, dtype=_bits(values).dtype, device=values.device)
    dense.scatter_(-1, positions(meta), _bits(values).reshape(rows, half // 2, 2))
    return dense.reshape(rows, half * 2).view(values.dtype)


def invalid_metadata(meta: Tensor) -> tuple[int, int] | None:
    """Row and byte of the first metadata byte that is not two ascending pairs, or None."""
    valid = torch.zeros(16, dtype=torch.bool, device=meta.device)
    valid[list(VALID_NIBBLES)] = True
    bad = ~(valid[(meta & 0xF).long()] & valid[(meta >> 4).long()])
    if not bad.any():
        return None
    row, column = bad.nonzero()[0].tolist()
    return row, column
