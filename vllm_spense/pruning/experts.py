"""Mixtures of experts as lists of gated MLPs, and which calibration tokens each expert sees.

transformers keeps the experts of a layer as two 3-D parameters. For pruning they are unpacked: each
expert becomes an MLP of three `nn.Linear` on views of the same memory, so that hooks, Hessians and
names work as in a dense model (and names are those of the checkpoint, but for Mixtral's).

An expert sees the tokens that the router sends to it. With fewer tokens than input channels its
Hessian is singular and says little; then the tokens that come nearest to being sent there (highest
router score) are added until there are as many as channels, and the report names the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ROUTERS", "Experts", "Routing", "route", "stored_name", "unpack_experts"]

ROUTERS = r"re:.*\.gate$"  # what `ignore` of the checkpoint says: routers stay as they were
_STORED = {
    "qwen3_moe": (),
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj", ".w1"),
        (".up_proj", ".w3"),
        (".down_proj", ".w2"),
    ),
}


class Expert(nn.Module):
    """down(act(gate·x) * up·x), on views of the packed weights."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (gate, up, down))
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """The experts of a layer, called as transformers calls its packed ones."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [tokens, hidden], indices and weights [tokens, k] → [tokens, hidden]."""
        y = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            rows, places = (top_k_index == index).nonzero(as_tuple=True)
            if len(rows):
                part = expert(hidden_states[rows]) * top_k_weights[rows, places, None]
                y.index_add_(0, rows, part.to(y.dtype))
        return y


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def unpack_experts(model: nn.Module) -> None:
    """Replace packed experts of the architectures that are known here, in place; others stay."""
    if model.config.model_type not in _STORED:
        return
    for layer in model.get_decoder().layers:
        packed = getattr(layer.mlp, "experts", None)
        if packed is None or isinstance(packed, Experts):
            continue
        gate_up, down = packed.gate_up_proj.detach(), packed.down_proj.detach()
        layer.mlp.experts = Experts(
            Expert(*gate_up[index].chunk(2), down[index], packed.act_fn)
            for index in range(len(down))
        )


def stored_name(name: str, model_type: str) -> str:
    """The name in a checkpoint for a name in the unpacked model."""
    for ours, theirs in _STORED.get(model_type, ()):
        name = name.replace(ours, theirs)
    return name


@dataclass(frozen=True)
class Routing:
    """Which calibration tokens each expert is pruned with.

    Attributes:
        chosen: per batch [tokens, k] int16: experts that the router sends a token to.
        counts: int64 [experts], tokens sent to each.
        nearest: expert with too few → per batch, rows of all its tokens, added ones included.
    """

    chosen: list[Tensor]
    counts: Tensor
    nearest: dict[int, list[Tensor]]

    @property
    def total(self) -> int:
        """Calibration tokens."""
        return sum(len(batch) for batch in self.chosen)

    def rows(self, expert: int) -> list[Tensor]:
        """Per batch, the rows that the expert sees."""
        if expert in self.nearest:
            return self.nearest[expert]
        return [(batch == expert).any(1).nonzero().flatten() for batch in self.chosen]


@torch.no_grad()
def route(router: nn.Module, batches: list[Tensor], device: str, needed: int) -> Routing:
    """Run the router of a layer over its calibration inputs.

    Args:
        batches: [tokens, hidden] each, on the CPU.
        needed: tokens below which an expert gets further ones (all there are, if that is fewer).
    """
    chosen: list[Tensor] = []
    for logits, indices in _run(router, batches, device):
        chosen.append(indices.to(torch.int16).cpu())
        experts = logits.shape[1]
    counts = torch.bincount(torch.cat(chosen).flatten().long(), minlength=experts)
    routing = Routing(chosen, counts, {})
    needed = min(needed, routing.total)
    starved = (counts < needed).nonzero().flatten().tolist()
    if starved:
        scores = _scores(router, batches, device, starved)
        for column, expert in enumerate(starved):
            routing.nearest[expert] = _nearest(routing, expert, scores[:, column], needed)
    return routing


def _run(router: nn.Module, batches: list[Tensor], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [tokens, experts], indices [tokens, k]) of each batch."""
    for batch in batches:
        logits, _, indices = router(batch.to(device))
        yield logits, indices


def _scores(router: nn.Module, batches: list[Tensor], device: str, experts: list[int]) -> Tensor:
    """Softmax scores of some experts for all tokens, float32 [tokens, len(experts)]."""
    found = [logits.float().softmax(-1)[:, experts] for logits, _ in _run(router, batches, device)]
    return torch.cat([scores.cpu() for scores in found])


def _nearest(routing: Routing, expert: int, scores: Tensor, needed: int) -> list[Tensor]:
    """Rows of the `needed` tokens with the highest score, those that are sent there first."""
    sent = torch.cat([(batch == expert).any(1) for batch in routing.chosen])
    picked = torch.zeros(len(scores), dtype=torch.bool)
    picked[(scores + 2.0 * sent).topk(needed).indices] = True
    sizes = [len(batch) for batch in routing.chosen]
    return [part.nonzero().flatten() for part in picked.split(sizes)]
