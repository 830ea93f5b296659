"""Which two of four weights stay: scores of single weights, and the 2:4 mask they give."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spense.format.partition import GROUP

__all__ = ["magnitude_scores", "mask_24", "prune_by_score", "wanda_scores"]

KEPT = 2


def magnitude_scores(weight: Tensor) -> Tensor:
    """|W|: [N, K] → float32 [N, K]."""
    return weight.float().abs()


def wanda_scores(weight: Tensor, input_energy: Tensor) -> Tensor:
    """|W_ij| · √H_jj (Wanda, arXiv 2306.11695): [N, K] and diag(H) [K] → float32 [N, K]."""
    return weight.float().abs() * input_energy.float().sqrt()


def mask_24(scores: Tensor) -> Tensor:
    """Keep the two highest scores of every four consecutive columns.

    Args:
        scores: [N, K], K % 4 == 0. Of equal scores the lower column stays.

    Returns:
        bool [N, K], True where the weight stays.
    """
    rows, cols = scores.shape
    groups = scores.reshape(rows, cols // GROUP, GROUP)
    kept = groups.argsort(dim=-1, descending=True, stable=True)[..., :KEPT]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, kept, True)
    return mask.reshape(rows, cols)


def prune_by_score(weight: Tensor, scores: Tensor, sparse_columns: int) -> Tensor:
    """Zero all but two of four in the first `sparse_columns` columns; the rest stays as it is.

    Args:
        weight, scores: [N, K]; `sparse_columns` is a multiple of 4.
    """
    pruned = weight.clone()
    mask = mask_24(scores[:, :sparse_columns])
    pruned[:, :sparse_columns] *= mask
    return pruned
