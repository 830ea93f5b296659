"""SparseGPT 2:4 (Frantar & Alistarh, arXiv 2301.00774) on one weight.

Minimises ‖XWᵀ − XŴᵀ‖² greedily from left to right. With U the upper Cholesky factor of H⁻¹,
removing weight j of a row costs (w_j / U_jj)², and the row's columns to the right are corrected by
−(w_j / U_jj) · U_j,right. Columns right of the 2:4 region are never masked; they only absorb the
error (SpenseGPT, arXiv 2606.10445, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spense.format.partition import GROUP
from vllm_spense.pruning.scoring import mask_24

__all__ = ["BLOCK_SIZE", "prune_24"]

BLOCK_SIZE = 128


def prune_24(
    weight: Tensor, upper: Tensor, sparse_columns: int, block_size: int = BLOCK_SIZE
) -> Tensor:
    """Prune the first `sparse_columns` columns to 2:4 and correct all columns right of each cut.

    Args:
        weight: [N, K] float; not changed.
        upper: [K, K] float32, upper Cholesky factor of the inverse Hessian.
        sparse_columns: a multiple of 4; the remaining columns absorb error and stay dense.
        block_size: columns whose corrections are applied to the rest in one matrix product; a
            multiple of 4. The result is the same for every value but for rounding.

    Returns:
        float32 [N, K].
    """
    assert sparse_columns % GROUP == 0 and block_size % GROUP == 0, (sparse_columns, block_size)
    pruned = weight.float().clone()
    for start in range(0, sparse_columns, block_size):
        end = min(start + block_size, sparse_columns)
        errors = _prune_block(pruned[:, start:end], upper[start:end, start:end])
        pruned[:, end:] -= errors @ upper[start:end, end:]
    return pruned


def _prune_block(block: Tensor, upper: Tensor) -> Tensor:
    """Prune [N, B] in place, correcting inside the block; returns the scaled errors [N, B]."""
    errors = torch.empty_like(block)
    for start in range(0, block.shape[1], GROUP):
        end = start + GROUP
        group, group_upper = block[:, start:end].clone(), upper[start:end, start:end]
        errors[:, start:end] = _prune_group(group, group_upper)
        block[:, start:end] = group
        block[:, end:].addmm_(errors[:, start:end], upper[start:end, end:], alpha=-1)
    return errors


def _prune_group(group: Tensor, upper: Tensor) -> Tensor:
    """Remove two of four columns in each row of [N, 4], in place; returns the scaled errors."""
    diagonal = upper.diagonal()
    removed = ~mask_24((group / diagonal).square())
    errors = torch.empty_like(group)
    for j in range(GROUP):
        errors[:, j] = group[:, j] * removed[:, j] / diagonal[j]
        group[:, j + 1 :].addr_(errors[:, j], upper[j, j + 1 :], alpha=-1)
    group.masked_fill_(removed, 0.0)
    return errors
