"""Prune one decoder layer in data-flow order: q, k, v → o → gate, up → down.

Each sub-layer sees inputs that come from the pruned and quantised sub-layers before it: after each
step the weight is replaced by what the checkpoint decodes to, so that the walked model is the
served one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.planes import decode, encode, specs
from vllm_spense.pruning.architecture import MLP, mlp_names
from vllm_spense.pruning.blocks import spread_order
from vllm_spense.pruning.hessian import Hessian, diagonal_energy
from vllm_spense.pruning.method import InputStatistics, prune_weight
from vllm_spense.pruning.plan import PrunePlan
from vllm_spense.pruning.report import ModuleReport
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.spense import channel_scores, dense_last_order
from vllm_spense.pruning.walk import on_inputs, replaced, run_block

__all__ = ["BlockPruner", "BlockResult", "load_block", "permute_mlp"]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
DENSE_MLP = "mlp"


@dataclass
class BlockResult:
    """One pruned layer, ready to be stored.

    Attributes:
        tensors: full name → tensor on the CPU: planes, norms, biases, untouched weights.
        orders: MLP below the layer, such as `mlp` → int32 [I], original index of each intermediate
            channel; only where channels moved.
        reports: one per module.
        warnings: such as raised dampening.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    orders: dict[str, Tensor] = field(default_factory=dict)
    reports: list[ModuleReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class BlockPruner:
    """Prunes the one layer it is made for; `prune` leaves the layer with its decoded weights.

    Args:
        layer: on `settings.device`.
        name: of the layer in the state dict.
        hidden: input batches [windows, length, hidden] on the CPU.
        kwargs: the layer's other arguments.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        hidden: list[Tensor],
        kwargs: dict[str, Any],
        plan: PrunePlan,
        settings: PruneSettings,
    ) -> None:
        self.layer, self.name = layer, name
        self.hidden, self.kwargs = hidden, kwargs
        self.plan, self.settings = plan, settings
        self.planes: dict[str, dict[str, Tensor]] = {}
        self.result = BlockResult()

    @torch.no_grad()
    def prune(self) -> BlockResult:
        """Prune or quantise attention, then prune the MLP."""
        if self.settings.attention == "2:4":
            self._prune_attention()
            mlp_input, mlp_batches = self._mlp_inputs({})
        else:
            mlp_input, mlp_batches = self._mlp_inputs(self._quantise_attention())
        self._prune_mlps(mlp_input, mlp_batches)
        self.result.tensors = _stored_tensors(self.layer, self.name, self.planes)
        return self.result

    def _prune_mlps(self, inputs: Hessian, batches: list[Tensor]) -> None:
        """The one MLP of a dense layer; `batches` [windows, length, hidden] on the CPU."""
        self._prune_mlp(DENSE_MLP, inputs, batches)

    def _prune_mlp(self, mlp: str, inputs: Hessian, batches: list[Tensor]) -> None:
        """Permute, prune and store gate, up and down of the gated MLP called `mlp`."""
        statistics = self._statistics(inputs, f"{mlp}.gate_proj and up_proj")
        down = f"{mlp}.down_proj"
        if self.settings.method == "blocks":
            self._permute(mlp, batches, self._tile_order)
        elif self.settings.method == "spensegpt+" and self.plan.partitions[down].single is None:
            self._permute(mlp, batches, partial(self._dense_last, statistics.energy))
        for child in (f"{mlp}.gate_proj", f"{mlp}.up_proj"):
            self._replace(child, statistics)
        down_input = self._hessian(down)
        with on_inputs([(self.layer.get_submodule(down), down_input.add)]):
            self._run_mlp(mlp, batches)
        self._replace(down, self._statistics(down_input, down))

    def _prune_attention(self) -> None:
        """q, k and v from the layer's input; o from what the pruned q, k and v give."""
        for children in (QKV, (OUT,)):
            first = children[0]
            inputs = self._hessian(first)
            self._run_attention([(self.layer.get_submodule(first), inputs.add)])
            statistics = self._statistics(inputs, " and ".join(children))
            for child in children:
                self._replace(child, statistics)

    def _mlp_inputs(self, originals: dict[str, Tensor]) -> tuple[Hessian, list[Tensor]]:
        """Run attention as it now is: the Hessian of the MLP's input, and the input itself.

        Args:
            originals: weights of attention projections that were only quantised; their errors are
                measured on the way and reported.
        """
        mlp_input = self._hessian(f"{mlp_names(self.layer)[0]}.gate_proj")
        measured = {child: self._hessian(child) for child in (QKV[0], OUT) if originals}
        hooks = [(self.layer.get_submodule(child), h.add) for child, h in measured.items()]
        batches = self._run_attention(hooks, mlp_input)
        for child, original in originals.items():
            inputs = measured[OUT if child == OUT else QKV[0]]
            self._report(child, original, self._statistics(inputs, child), 0.0)
        return mlp_input, batches

    def _quantise_attention(self) -> dict[str, Tensor]:
        """Round dense attention projections; needs no statistics. Returns the original weights."""
        originals = {}
        for child in self.plan.partitions:
            if child.startswith("self_attn."):
                originals[child] = self.layer.get_submodule(child).weight.clone()
                self._store(child, originals[child])
        return originals

    def _run_attention(self, hooks: list[Any], mlp_input: Hessian | None = None) -> list[Tensor]:
        """Run the layer without its MLP; returns the inputs that the MLP would have got."""
        batches: list[Tensor] = []

        def record(x: Tensor) -> None:
            batches.append(x.cpu())
            if mlp_input is not None:
                mlp_input.add(x)

        stand_in = nn.Identity()
        with (
            replaced(self.layer, "mlp", stand_in),
            on_inputs([*hooks, (stand_in, record)]),
        ):
            for _ in run_block(self.layer, self.hidden, self.kwargs, self.settings.device):
                pass
        return batches

    def _run_mlp(self, mlp: str, batches: list[Tensor]) -> None:
        for batch in batches:
            self.layer.get_submodule(mlp)(batch.to(self.settings.device))

    def _permute(
        self, mlp: str, batches: list[Tensor], order_of: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Reorder the intermediate channels, given diag(H) [I] of the inputs of down."""
        module, device = self.layer.get_submodule(mlp), self.settings.device
        energy = torch.zeros(module.down_proj.in_features, device=device)
        with on_inputs([(module.down_proj, lambda x: energy.add_(diagonal_energy(x)))]):
            self._run_mlp(mlp, batches)
        order = order_of(mlp, energy)
        permute_mlp(module, order)
        self.result.orders[mlp] = order.to(torch.int32).cpu()

    def _dense_last(self, mlp_energy: Tensor, mlp: str, down_energy: Tensor) -> Tensor:
        """SpenseGPT+: the channels that matter most go last."""
        module = self.layer.get_submodule(mlp)
        weights = (module.get_submodule(child).weight for child in MLP)
        dense = self.plan.partitions[f"{mlp}.down_proj"].size_of(RegionKind.DENSE)
        return dense_last_order(channel_scores(*weights, mlp_energy, down_energy), dense)

    def _tile_order(self, mlp: str, down_energy: Tensor) -> Tensor:
        """Zero tiles: columns of down that matter alike share tiles."""
        down = f"{mlp}.down_proj"
        scores = self.layer.get_submodule(down).weight.float().square().sum(0) * down_energy
        return spread_order(scores, self.plan.partitions[down].tiles)

    def _hessian(self, child: str) -> Hessian:
        """An empty Hessian for the inputs of a projection."""
        return Hessian(self.layer.get_submodule(child).in_features, self.settings.device)

    def _statistics(self, hessian: Hessian, child: str) -> InputStatistics:
        name = f"{self.name}.{child}"
        return InputStatistics(hessian.mean(name), self.settings.dampening, name)

    def _replace(self, child: str, statistics: InputStatistics) -> None:
        """Prune, store and decode one projection."""
        began = perf_counter()
        original = self.layer.get_submodule(child).weight.clone()
        pruned = prune_weight(original, self.plan.partitions[child], statistics, self.settings)
        self._store(child, pruned)
        self._report(child, original, statistics, perf_counter() - began)

    def _store(self, child: str, weight: Tensor) -> None:
        """Encode a weight, and put what it decodes to into the layer."""
        linear, partition = self.layer.get_submodule(child), self.plan.partitions[child]
        name = f"{self.name}.{child}"
        planes = encode(weight, partition, self.settings.weight_dtype, name)
        decoded = decode(planes, partition, linear.weight.dtype)
        if not torch.isfinite(decoded).all():
            raise ValueError(
                f"{name}: a weight (largest {weight.abs().max().item():g}) overflows "
                f"{self.settings.dtype}; use another --dtype"
            )
        linear.weight.copy_(decoded)
        self.planes[child] = {plane: tensor.cpu() for plane, tensor in planes.items()}

    def _report(
        self, child: str, original: Tensor, statistics: InputStatistics, seconds: float
    ) -> None:
        name, partition = f"{self.name}.{child}", self.plan.partitions[child]
        dampening = None
        if "factor" in statistics.__dict__:
            dampening = statistics.factor.dampening
            if dampening > self.settings.dampening:
                self.result.warnings.append(
                    f"{name}: dampening raised from {self.settings.dampening:g} to {dampening:g}, "
                    "its Hessian had no Cholesky factor"
                )
        decoded = self.layer.get_submodule(child).weight
        self.result.reports.append(
            ModuleReport(
                name=name,
                dense_share=partition.size_of(RegionKind.DENSE) / partition.total,
                relative_error=statistics.relative_error(original, decoded),
                dampening=dampening,
                seconds=round(seconds, 3),
            )
        )


def permute_mlp(mlp: nn.Module, order: Tensor) -> None:
    """Permute rows of gate and up (with bias) and columns of down in place; `order` int64 [I]."""
    for child in (mlp.gate_proj, mlp.up_proj):
        child.weight.copy_(child.weight[order])
        if child.bias is not None:
            child.bias.copy_(child.bias[order])
    mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])


def _stored_tensors(
    layer: nn.Module, name: str, planes: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """All tensors of a layer under their full names, in the order of its state dict."""
    stored = {}
    for key, tensor in layer.state_dict().items():
        child, _, leaf = key.rpartition(".")
        if leaf == "weight" and child in planes:
            stored |= {f"{name}.{child}.{plane}": part for plane, part in planes[child].items()}
        else:
            stored[f"{name}.{key}"] = tensor.detach().cpu().clone()
    return stored


@torch.no_grad()
def load_block(
    layer: nn.Module,
    name: str,
    tensors: Mapping[str, Tensor],
    plan: PrunePlan,
    weight_dtype: torch.dtype,
) -> None:
    """Put a stored layer back into a model: planes decoded, all else as it is."""
    for key, target in layer.state_dict(keep_vars=True).items():
        child, _, leaf = key.rpartition(".")
        partition = plan.partitions.get(child) if leaf == "weight" else None
        if partition is None:
            target.copy_(tensors[f"{name}.{key}"])
            continue
        planes = {
            plane: tensors[f"{name}.{child}.{plane}"]
            for plane in specs(partition, tuple(target.shape), weight_dtype)
        }
        target.copy_(decode(planes, partition, target.dtype))
