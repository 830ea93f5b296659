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
    groups = weight.reshape(rows, cols // GROUP, GROUP)
    zero = groups.float() == 0
    crowded = (~zero).sum(-1) > 2
    if crowded.any():
        row, group = crowded.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, columns {group * GROUP}–{group * GROUP + 3} "
            "hold more than two nonzeros: not 2:4"
        )
    order = zero.to(torch.int8) * GROUP + torch.arange(
        GROUP, dtype=torch.int8, device=weight.device
    )
    kept = order.argsort(-1)[..., :2].sort(-1).values  # nonzeros first, then the lowest positions
    values = _bits(groups).gather(-1, kept).reshape(rows, cols // 2).view(weight.dtype)
    nibbles = (kept[..., 0] | kept[..., 1] << 2).to(torch.uint8)
    return values.contiguous(), nibbles[:, 0::2] | nibbles[:, 1::2] << 4


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
