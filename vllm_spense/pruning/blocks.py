"""One-shot zero tiles: which tiles of a weight go, and how the kept ones make up for them.

Minimises ‖XWᵀ − XŴᵀ‖². With U the upper Cholesky factor of H⁻¹ and J the columns of a tile,
removing it from the rows R of a row block costs

    ‖W_RJ · U_JJ⁻¹‖²

if all columns right of J are corrected by −W_RJ · U_JJ⁻¹ · U_J,right: SparseGPT (arXiv 2301.00774)
with a tile in place of a weight. Every row block loses the same number of tiles in every K-shard,
the cheapest ones given all corrections from the shards to the left. When the pattern stands, the
kept weights of each row block are set to the least-squares optimum for it.

Limits: the choice is greedy, and one-shot removal of whole tiles costs far more quality than 2:4.
It is meant for models trained or fine-tuned with block regularisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spense.format.tiles import Tiles

__all__ = ["prune_tiles", "prune_tiles_by_magnitude", "refit", "spread_order", "tile_costs"]


def spread_order(scores: Tensor, tiles: Tiles) -> Tensor:
    """The permutation of K that gathers channels of similar score in tiles, alike in all K-shards.

    A tile then is worth keeping or not as a whole. The highest scores fill the first tile of the
    first K-shard, the next the first tile of the second, and so on.

    Args:
        scores: [tiles.columns].

    Returns:
        int64 [tiles.columns]: entry j is the original index of new channel j.
    """
    by_score = scores.argsort(dim=0, descending=True, stable=True).view(tiles.total, tiles.cols)
    dealt = torch.arange(tiles.total, device=scores.device)
    dealt = dealt.view(tiles.shard_total, tiles.k_shards).T.flatten()
    return by_score.sort(dim=1).values[dealt].flatten()


def _solved(weight: Tensor, upper: Tensor) -> Tensor:
    """W · U⁻¹ for one tile column: [N, c] and [c, c] → [N, c]."""
    return torch.linalg.solve_triangular(upper, weight, upper=True, left=False)


def tile_costs(weight: Tensor, upper: Tensor, tiles: Tiles) -> Tensor:
    """What removing each tile costs, if all columns to its right take the error over.

    Args:
        weight: [N, n · tile columns] float32.
        upper: [K, K] of the same columns, upper Cholesky factor of the inverse Hessian.

    Returns:
        float32 [row blocks, n].
    """
    costs = []
    for start in range(0, weight.shape[1], tiles.cols):
        columns = slice(start, start + tiles.cols)
        squares = _solved(weight[:, columns], upper[columns, columns]).square().sum(1)
        costs.append(squares.view(-1, tiles.rows).sum(1))
    return torch.stack(costs, 1)


def prune_tiles(weight: Tensor, upper: Tensor, tiles: Tiles) -> Tensor:
    """Remove tiles from the first `tiles.columns` columns and correct all columns right of each.

    Args:
        weight: [N, K] float, K ≥ tiles.columns; not changed. Further columns absorb error.
        upper: [K, K] float32, upper Cholesky factor of the inverse Hessian.

    Returns:
        float32 [N, K].
    """
    tiles.check(weight.shape[0], tiles.columns)
    pruned = weight.float().clone()
    width = tiles.shard_total * tiles.cols
    for start in range(0, tiles.columns, width):
        shard = slice(start, start + width)
        removed = cheapest(tile_costs(pruned[:, shard], upper[shard, shard], tiles), tiles)
        for tile in range(tiles.shard_total):
            rows = removed[:, tile].repeat_interleave(tiles.rows)
            _remove(pruned, upper, start + tile * tiles.cols, tiles.cols, rows)
    return pruned


def cheapest(costs: Tensor, tiles: Tiles) -> Tensor:
    """The tiles of one K-shard that go: float [row blocks, shard_total] → bool, True where it goes.

    Of equal costs the lower tile stays.
    """
    order = costs.argsort(dim=1, descending=True, stable=True)
    removed = torch.ones_like(costs, dtype=torch.bool)
    return removed.scatter_(1, order[:, : tiles.shard_kept], False)


def prune_tiles_by_magnitude(weight: Tensor, tiles: Tiles) -> Tensor:
    """Remove the tiles of least energy from [N, tiles.columns]; nothing is corrected."""
    blocks = weight.shape[0] // tiles.rows
    pruned = weight.float().clone()
    cut = pruned.view(blocks, tiles.rows, tiles.k_shards, tiles.shard_total, tiles.cols)
    costs = cut.square().sum((1, 4))
    for shard in range(tiles.k_shards):
        removed = cheapest(costs[:, shard], tiles)
        cut[:, :, shard] *= ~removed[:, None, :, None]
    return pruned


def _remove(weight: Tensor, upper: Tensor, start: int, size: int, rows: Tensor) -> None:
    """Zero `size` columns of the rows that the mask names; correct what is right of them."""
    end = start + size
    errors = _solved(weight[rows, start:end], upper[start:end, start:end])
    weight[rows, start:end] = 0.0
    weight[rows, end:] -= errors @ upper[start:end, end:]


def refit(weight: Tensor, pruned: Tensor, hessian: Tensor, dampening: float, rows: int) -> Tensor:
    """The best weights for a given pattern: min ‖X(W − Ŵ)ᵀ‖² + damping, Ŵ zero where `pruned` is.

    With S the columns that a row block keeps, Ŵ_S = W · H_·S · H_SS⁻¹.

    Args:
        weight: [N, K] float, before pruning.
        pruned: [N, K]; a column that is zero in a whole row block stays so.
        hessian: [K, K] float32.
        dampening: added to the diagonal of H, as a share of its mean.
        rows: of a row block.

    Returns:
        float32 [N, K]; a row block whose H_SS has no Cholesky factor stays as in `pruned`.
    """
    damped = hessian.clone()
    damped.diagonal().add_(dampening * hessian.diagonal().mean())
    target = weight.float() @ damped
    fitted = pruned.clone()
    for start in range(0, len(pruned), rows):
        block = slice(start, start + rows)
        kept = (pruned[block] != 0).any(0).nonzero().squeeze(1)
        lower, failed = torch.linalg.cholesky_ex(damped[kept][:, kept])
        if not failed:
            solution = torch.cholesky_solve(target[block][:, kept].T, lower).T
            fitted[block, kept] = solution
    return fitted
