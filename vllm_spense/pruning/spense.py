"""SpenseGPT and SpenseGPT+ (arXiv 2606.10445): which intermediate channels of an MLP stay dense.

A gated MLP, down(act(gate·x) * up·x), does not change when the rows of gate and up and the columns
of down are permuted alike. So any set of channels can stay dense and be made contiguous. The dense
channels go last: the right-hand columns of down then absorb the error of the 2:4 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channel_scores", "dense_last_order", "mean_normalise"]

EPSILON = 1e-12


def mean_normalise(scores: Tensor) -> Tensor:
    """s_i / (mean(s) + ε), so that gate, up and down count alike: [I] → [I] (equation 10)."""
    return scores / (scores.mean() + EPSILON)


def channel_scores(
    gate: Tensor, up: Tensor, down: Tensor, mlp_energy: Tensor, down_energy: Tensor
) -> Tensor:
    """Importance of every intermediate channel (equations 8, 9 and 11).

    The mean of |W|·√H_jj over the row of gate, the row of up and the column of down, each vector
    divided by its mean, summed.

    Args:
        gate, up: [I, K]; down: [N, I].
        mlp_energy: diag(H) [K] of the inputs of gate and up.
        down_energy: diag(H) [I] of the inputs of down, from the unpruned gate and up.

    Returns:
        float32 [I]; high = keep dense.
    """
    input_norm, intermediate_norm = mlp_energy.float().sqrt(), down_energy.float().sqrt()
    per_projection = (
        (gate.float().abs() * input_norm).mean(1),
        (up.float().abs() * input_norm).mean(1),
        down.float().abs().mean(0) * intermediate_norm,
    )
    return torch.stack([mean_normalise(scores) for scores in per_projection]).sum(0)


def dense_last_order(scores: Tensor, dense: int) -> Tensor:
    """The permutation that puts the `dense` highest scores last.

    Both parts keep their original order. Of equal scores the lower channel counts as higher.

    Returns:
        int64 [I]: entry j is the original index of new channel j.
    """
    by_score = scores.argsort(dim=0, descending=True, stable=True)
    return torch.cat([by_score[dense:].sort().values, by_score[:dense].sort().values])
