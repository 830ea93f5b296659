"""Tensors of a legacy 2:4 layer (`legacy.py` lists them) → our planes.

A byte of a bitmask and a byte of our metadata describe the same eight columns: bitmasks are divided
by tensor parallelism as our planes are, and become ours by looking up every byte. `compressed` is
our values plane already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spense.format import sparse24
from vllm_spense.format.fp8 import FP8
from vllm_spense.format.partition import META_GROUP, Partition, RegionKind

__all__ = ["channel_scale", "metadata", "to_planes"]


def metadata(bitmask: Tensor, name: str) -> Tensor:
    """Bitmask [N, K/8] uint8 → metadata of the same shape.

    Raises:
        ValueError: a group of four in which not exactly two bits are set.
    """
    known = {1 << (nibble & 3) | 1 << (nibble >> 2): nibble for nibble in sparse24.VALID_NIBBLES}
    table = torch.zeros(256, dtype=torch.uint8)
    for low, low_nibble in known.items():
        for high, high_nibble in known.items():
            table[low | high << 4] = low_nibble | high_nibble << 4
    meta = table.to(bitmask.device)[bitmask.int()]
    if (meta == 0).any():  # 0 is no metadata byte
        row, column = (meta == 0).nonzero()[0].tolist()
        raise ValueError(
            f"{name}.bitmask: byte {bitmask[row, column].item():#04x} at row {row}, column "
            f"{column} does not mark two of each four"
        )
    return meta


def channel_scale(scale: Tensor, rows: int, name: str) -> Tensor:
    """One scale in all ([], [1]) or one per row ([N], [N, 1]) → float32 [N, 1]."""
    if scale.numel() not in (1, rows):
        raise ValueError(
            f"{name}.weight_scale is {list(scale.shape)}; needed: one, or one for each of "
            f"{rows} rows"
        )
    return scale.float().reshape(-1, 1).expand(rows, 1).contiguous()


def to_planes(
    tensors: Mapping[str, Tensor], announced: bool, name: str
) -> tuple[Partition, dict[str, Tensor], str]:
    """Planes of one module, or of a tensor-parallel part of it.

    Args:
        tensors: `compressed` and `bitmask`, or `weight`; `weight_scale` if it is FP8.
        announced: a `weight` that the config announces as 2:4 becomes a 2:4 region if it is one.

    Returns:
        The partition (one region), its planes, and why an announced module became dense ("" if it
        did not).
    """
    if "compressed" in tensors:
        values = tensors["compressed"]
        planes = {"weight_values": values, "weight_meta": metadata(tensors["bitmask"], name)}
        kind, reason = RegionKind.SPARSE_24, ""
    else:
        values = tensors["weight"]
        pair, reason = _compress(values) if announced else (None, "")
        kind = RegionKind.DENSE if pair is None else RegionKind.SPARSE_24
        planes = {"weight": values}
        if pair is not None:
            planes = {"weight_values": pair[0], "weight_meta": pair[1]}
    if values.dtype == FP8:
        planes["weight_scale"] = channel_scale(tensors["weight_scale"], len(values), name)
    return Partition.whole(kind, len(values)), planes, reason


def _compress(weight: Tensor) -> tuple[tuple[Tensor, Tensor] | None, str]:
    """Values and metadata of [N, K], or None and the reason."""
    if weight.shape[1] % META_GROUP:
        return None, f"{weight.shape[1]} columns are not a multiple of {META_GROUP}"
    try:
        return sparse24.compress(weight), ""
    except ValueError:
        return None, "it has groups of four with more than two nonzeros"
