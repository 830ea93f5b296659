"""Which models can be pruned: decoders of gated MLPs, recognised by their structure.

Every decoder layer needs `self_attn.{q,k,v,o}_proj` and `mlp.{gate,up,down}_proj`, all `nn.Linear`,
and no further weights inside the MLP (a norm there would break the permutation of its channels).
Or, in place of the one MLP, a router and unpacked experts (`experts.py`) of such projections.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vllm_spense.format.partition import META_GROUP
from vllm_spense.pruning.experts import Experts

__all__ = ["ATTENTION", "MLP", "Decoder", "UnsupportedModelError", "find_decoder", "mlp_names"]

MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class UnsupportedModelError(ValueError):
    """A model that this pruner does not understand; the message says what is missing."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal language model that pruning walks through.

    Attributes:
        body: the module that owns `layers` and runs embedding, layers and final norm.
        prefix: name of `layers` in the state dict, such as `model.layers`.
    """

    body: nn.Module
    layers: nn.ModuleList
    prefix: str

    def layer_name(self, index: int) -> str:
        """Name of a layer in the state dict."""
        return f"{self.prefix}.{index}"

    @property
    def mlps(self) -> tuple[str, ...]:
        """Names below a layer: `mlp`, or one for every expert."""
        return mlp_names(self.layers[0])

    @property
    def intermediate_size(self) -> int:
        """Channels of an MLP between gate/up and down."""
        return self.layers[0].get_submodule(self.mlps[0]).gate_proj.out_features


def mlp_names(layer: nn.Module) -> tuple[str, ...]:
    """The gated MLPs of a layer: `mlp`, or `mlp.experts.0`, `mlp.experts.1`, …"""
    experts = getattr(layer.mlp, "experts", None)
    if not isinstance(experts, Experts):
        return ("mlp",)
    return tuple(f"mlp.experts.{index}" for index in range(len(experts)))


def find_decoder(model: nn.Module) -> Decoder:
    """The decoder inside a causal language model of transformers.

    Raises:
        UnsupportedModelError: naming the architecture and the part that is missing or different.
    """
    architecture = type(model).__name__
    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnsupportedModelError(
            f"{architecture} is not supported: it has no list of decoder layers"
        )
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for index, layer in enumerate(layers):
        problem = _problem(layer)
        if problem:
            raise UnsupportedModelError(
                f"{architecture} is not supported: {prefix}.{index} {problem}; needed: a "
                f"gated MLP (mlp.{', '.join(MLP)}) and attention "
                f"(self_attn.{', '.join(ATTENTION)}) of nn.Linear"
            )
    counts = {len(mlp_names(layer)) for layer in layers}
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"{architecture} is not supported: only some layers have experts, or not as many "
            f"({sorted(counts)})"
        )
    sizes = {layer.get_submodule(mlp_names(layer)[0]).gate_proj.out_features for layer in layers}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"{architecture} is not supported: intermediate sizes differ by layer ({sorted(sizes)})"
        )
    return Decoder(body, layers, prefix)


def _problem(layer: nn.Module) -> str | None:
    """What keeps a layer from being pruned, or None."""
    for parent in ("self_attn", "mlp"):
        if getattr(layer, parent, None) is None:
            return f"has no {parent}"
    for parent, children in {"self_attn": ATTENTION, **_mlp_children(layer)}.items():
        for child in children:
            problem = _linear_problem(layer.get_submodule(parent), f"{parent}.{child}", child)
            if problem:
                return problem
    extra = _further_weights(layer)
    return f"has further weights in its MLP: {', '.join(extra)}" if extra else None


def _mlp_children(layer: nn.Module) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(mlp_names(layer), MLP)


def _linear_problem(parent: nn.Module, name: str, child: str) -> str | None:
    linear = getattr(parent, child, None)
    if not isinstance(linear, nn.Linear):
        return f"has no {name} of nn.Linear (found {type(linear).__name__})"
    if linear.in_features % META_GROUP:
        return f"{name} has {linear.in_features} columns, not a multiple of {META_GROUP}"
    if not linear.weight.dtype.is_floating_point:
        return f"{name} is stored as {linear.weight.dtype}"
    return None


def _further_weights(layer: nn.Module) -> list[str]:
    """Parameters inside `mlp` that are neither a projection's nor the router's."""
    known = [layer.get_submodule(f"{p}.{c}") for p, cs in _mlp_children(layer).items() for c in cs]
    if isinstance(getattr(layer.mlp, "experts", None), Experts):
        known.append(layer.mlp.gate)
    ours = {id(parameter) for module in known for parameter in module.parameters()}
    return [name for name, parameter in layer.mlp.named_parameters() if id(parameter) not in ours]
