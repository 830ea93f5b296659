"""Per-channel FP8 (e4m3): one scale per output channel, round to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FP8", "quantize_rows", "row_scales"]

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448; there is no infinity, 0x7F and 0xFF are NaN


def row_scales(weight: Tensor) -> Tensor:
    """Largest magnitude of each row / 448: [N, K] → float32 [N, 1]; 1 for a row of zeros."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))


def quantize_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Round [N, K] / [N, 1] to e4m3. Zeros stay zero, so a 2:4 pattern survives."""
    return (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
