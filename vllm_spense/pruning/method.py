"""One weight, one method: from a dense weight and the statistics of its input to a sparse one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_spense.format.partition import Partition, RegionKind
from vllm_spense.pruning.blocks import prune_tiles, refit
from vllm_spense.pruning.hessian import InverseFactor, inverse_factor
from vllm_spense.pruning.scoring import magnitude_scores, prune_by_score, wanda_scores
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.sparsegpt import prune_24

__all__ = ["InputStatistics", "prune_weight"]


@dataclass(frozen=True)
class InputStatistics:
    """H of one input, and what is derived from it at most once.

    Attributes:
        hessian: [K, K] float32, mean of xxᵀ.
        name: the layer, for errors.
    """

    hessian: Tensor
    dampening: float
    name: str

    @cached_property
    def factor(self) -> InverseFactor:
        """Upper Cholesky factor of the inverse."""
        return inverse_factor(self.hessian, self.dampening, self.name)

    @property
    def energy(self) -> Tensor:
        """diag(H) [K]."""
        return self.hessian.diagonal()

    def relative_error(self, weight: Tensor, approximation: Tensor) -> float:
        """‖X(W − Ŵ)ᵀ‖ / ‖XWᵀ‖ in the Frobenius norm."""
        weight = weight.float()
        difference = weight - approximation.float()
        lost = ((difference @ self.hessian) * difference).sum()
        whole = ((weight @ self.hessian) * weight).sum()
        return (lost.clamp_min(0) / whole.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().item()


def prune_weight(
    weight: Tensor, partition: Partition, statistics: InputStatistics, settings: PruneSettings
) -> Tensor:
    """Prune the sparse region of a weight [N, K]; returns float32 [N, K], not yet quantised.

    Rows of an output-split weight outside the region stay as they are; columns of an input-split
    weight outside it absorb error (the SparseGPT methods) or stay as they are.
    """
    if partition.tiles is not None:
        return _prune_tiles(weight, partition, statistics)
    pruned = weight.float().clone()
    sparse = partition.size_of(RegionKind.SPARSE_24)
    if not sparse:
        return pruned
    rows, columns = weight.shape
    if partition.split == "output":
        rows = sparse
    else:
        columns = sparse
    part = pruned[:rows]
    if settings.method == "magnitude":
        pruned[:rows] = prune_by_score(part, magnitude_scores(part), columns)
    elif settings.method == "wanda":
        pruned[:rows] = prune_by_score(part, wanda_scores(part, statistics.energy), columns)
    else:
        pruned[:rows] = prune_24(part, statistics.factor.upper, columns, settings.block_size)
    return pruned


def _prune_tiles(weight: Tensor, partition: Partition, statistics: InputStatistics) -> Tensor:
    """Remove tiles from a weight that is one region of them."""
    assert partition.single is RegionKind.ZERO_TILES, partition
    tiles, factor = partition.tiles, statistics.factor
    pruned = prune_tiles(weight, factor.upper, tiles)
    return refit(weight, pruned, statistics.hessian, factor.dampening, tiles.rows)
