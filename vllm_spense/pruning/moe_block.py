"""Prune a decoder layer whose MLP is a mixture of experts.

The router sees what the served router sees (its input does not depend on the experts), so the
tokens of every expert are known before the first is pruned, and experts are independent: one after
the other, each with a Hessian and a permutation of its own, only its tokens at hand.
"""

from __future__ import annotations

from torch import Tensor

from vllm_spense.pruning.block import BlockPruner
from vllm_spense.pruning.experts import Routing, route
from vllm_spense.pruning.hessian import Hessian

__all__ = ["MoeBlockPruner"]


class MoeBlockPruner(BlockPruner):
    """As `BlockPruner`; the layer's experts are unpacked (`experts.unpack_experts`)."""

    def _prune_mlps(self, inputs: Hessian, batches: list[Tensor]) -> None:
        """Every expert; `inputs` counts all tokens and is not used."""
        flat = [batch.reshape(-1, batch.shape[-1]) for batch in batches]
        mlp, device = self.layer.mlp, self.settings.device
        first = mlp.experts[0]
        needed = max(first.gate_proj.in_features, first.down_proj.in_features)
        routing = route(mlp.gate, flat, device, needed)
        for index in range(len(mlp.experts)):
            name = f"mlp.experts.{index}"
            seen = [x[rows] for x, rows in zip(flat, routing.rows(index), strict=True)]
            seen = [x for x in seen if len(x)]
            expert_inputs = self._hessian(f"{name}.gate_proj")
            for x in seen:
                expert_inputs.add(x.to(device))
            self._prune_mlp(name, expert_inputs, seen)
        if routing.nearest:
            self._warn(routing, min(needed, routing.total))

    def _warn(self, routing: Routing, used: int) -> None:
        """Name the experts that were pruned with tokens of others."""
        experts = ", ".join(f"{i} ({routing.counts[i]})" for i in routing.nearest)
        self.result.warnings.append(
            f"{self.name}.mlp.experts: too few of {routing.total} calibration tokens are sent to "
            f"experts (their number in brackets) {experts}; each was pruned with the {used} nearest"
        )
