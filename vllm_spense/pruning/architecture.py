"""Which models can be pruned: decoders of gated MLPs, recognised by their structure.

Every decoder layer needs `self_attn.{q,k,v,o}_proj` and `mlp.{gate,up,down}_proj`, all `nn.Linear`,
and no further weights inside the MLP (a norm there would break the permutation of its channels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vllm_spense.format.partition import META_GROUP

__all__ = ["ATTENTION", "MLP", "Decoder", "UnsupportedModelError", "find_decoder"]

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
    def intermediate_size(self) -> int:
        """Channels of the MLP between gate/up and down."""
        return self.layers[0].mlp.gate_proj.out_features


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
    sizes = {layer.mlp.gate_proj.out_features for layer in layers}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"{architecture} is not supported: intermediate sizes differ by layer ({sorted(sizes)})"
        )
    return Decoder(body, layers, prefix)


def _problem(layer: nn.Module) -> str | None:
    """What keeps a layer from being pruned, or None."""
    for parent, children in (("self_attn", ATTENTION), ("mlp", MLP)):
        module = getattr(layer, parent, None)
        if module is None:
            return f"has no {parent}"
        for child in children:
            if not isinstance(getattr(module, child, None), nn.Linear):
                found = type(getattr(module, child, None)).__name__
                return f"has no {parent}.{child} of nn.Linear (found {found})"
            columns = getattr(module, child).in_features
            if columns % META_GROUP:
                return f"{parent}.{child} has {columns} columns, not a multiple of {META_GROUP}"
            if not getattr(module, child).weight.dtype.is_floating_point:
                return f"{parent}.{child} is stored as {module.get_submodule(child).weight.dtype}"
    known = {id(parameter) for child in MLP for parameter in _parameters(layer.mlp, child)}
    extra = [name for name, parameter in layer.mlp.named_parameters() if id(parameter) not in known]
    return f"has further weights in its MLP: {', '.join(extra)}" if extra else None


def _parameters(module: nn.Module, child: str) -> list[torch.Tensor]:
    return list(module.get_submodule(child).parameters())
