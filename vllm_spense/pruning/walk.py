"""Running a decoder block by block: one block on the device, hidden states on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vllm_spense.pruning.architecture import Decoder

__all__ = ["BlockInputs", "capture_inputs", "on_inputs", "replaced", "run_block"]


class _Recorder(nn.Module):
    """Stands where a module was: records what it is called with and passes its input on."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type", "is_sliding"):
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))
        self.hidden: Tensor | None = None
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden, self.kwargs = hidden_states, kwargs
        return hidden_states


@dataclass
class BlockInputs:
    """Everything the decoder layers are called with.

    Attributes:
        hidden: batches [windows, length, hidden] on the CPU, the input of the next layer.
        kwargs: per layer the other arguments (mask, positions, rotary embeddings), made for a batch
            of one window and broadcast: all windows are of one length, without padding.
    """

    hidden: list[Tensor]
    kwargs: list[dict[str, Any]]


@contextmanager
def replaced(parent: nn.Module, child: str, module: nn.Module) -> Iterator[None]:
    """Put another module in the place of `parent.child` for a while."""
    original = getattr(parent, child)
    setattr(parent, child, module)
    try:
        yield
    finally:
        setattr(parent, child, original)


@contextmanager
def on_inputs(hooks: Iterable[tuple[nn.Module, Callable[[Tensor], None]]]) -> Iterator[None]:
    """Call each function with every input of its module for a while."""
    with ExitStack() as stack:
        for module, action in hooks:
            stack.callback(_on_input(module, action).remove)
        yield


def _on_input(module: nn.Module, action: Callable[[Tensor], None]) -> RemovableHandle:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        action(args[0])  # what it returns is dropped: torch would take it for a new input

    return module.register_forward_pre_hook(hook)


@torch.no_grad()
def capture_inputs(decoder: Decoder, tokens: Tensor, windows_per_batch: int) -> BlockInputs:
    """Embed calibration tokens and record what the model hands to each of its layers.

    A real forward pass of the model runs with recorders in place of its layers.

    Args:
        tokens: int64 [windows, length].
    """
    recorders = nn.ModuleList(_Recorder(layer) for layer in decoder.layers)
    decoder.body.eval()
    device = next(decoder.body.parameters()).device
    hidden = []
    with replaced(decoder.body, "layers", recorders):
        for batch in tokens.split(windows_per_batch):
            decoder.body(input_ids=batch.to(device), use_cache=False)
            hidden.append(recorders[0].hidden.cpu())
        decoder.body(input_ids=tokens[:1].to(device), use_cache=False)
    return BlockInputs(hidden, [recorder.kwargs for recorder in recorders])


def to_device(value: Any, device: torch.device | str) -> Any:
    """Move tensors inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value


@torch.no_grad()
def run_block(
    layer: nn.Module, hidden: list[Tensor], kwargs: dict[str, Any], device: torch.device | str
) -> Iterator[Tensor]:
    """Outputs of a layer (already on `device`) for each batch, still on the device."""
    kwargs = to_device(kwargs, device)
    for batch in hidden:
        output = layer(batch.to(device), **kwargs)
        yield output[0] if isinstance(output, tuple) else output
