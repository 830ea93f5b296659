"""Loading the dense model that is to be pruned, and telling one model from another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)

from vllm_spense.pruning.experts import stored_name, unpack_experts

__all__ = ["Source", "load_source", "model_digest"]

_SAMPLE = 4096


@dataclass(frozen=True)
class Source:
    """A dense model on the CPU.

    Attributes:
        name: what goes into the provenance: a hub name, or the last part of a local path.
        folder: where tokenizer files can be copied from, if the source is a local folder.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    folder: Path | None

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the dense model."""
        config = self.model.config.to_diff_dict()
        config["architectures"] = [type(self.model).__name__]
        config["dtype"] = str(self.model.dtype).removeprefix("torch.")
        for key in ("quantization_config", "_name_or_path"):
            config.pop(key, None)
        return config

    def stored_name(self, name: str) -> str:
        """The name in a checkpoint for a name in `model`."""
        return stored_name(name, self.model.config.model_type)

    def write_side_files(self, folder: Path) -> Path:
        """Folder with tokenizer, chat template and generation config: the source's own if local."""
        if self.folder is not None:
            return self.folder
        self.tokenizer.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        return folder


def load_source(model: str, gguf_file: str | None, dtype: torch.dtype | None) -> Source:
    """Load a model and its tokenizer.

    Args:
        model: a folder or hub name.
        gguf_file: a file in it; its weights are expanded.
        dtype: of the loaded weights; None: as stored (BF16 from GGUF).

    Raises:
        ValueError: a model that is quantised already, or cannot be loaded.
    """
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = _load(AutoTokenizer, model, options)
    if gguf_file:
        options["quantization_config"] = GgufConfig(dequantize=True)
        dtype = dtype or torch.bfloat16
    else:
        _refuse_quantised(model)
    loaded = _load(AutoModelForCausalLM, model, options | {"dtype": dtype or "auto"})
    unpack_experts(loaded)
    local = Path(model)
    folder = local if local.is_dir() and not gguf_file else None
    return Source(loaded.eval(), tokenizer, local.name if local.is_dir() else model, folder)


def _refuse_quantised(model: str) -> None:
    quantization = getattr(_load(AutoConfig, model, {}), "quantization_config", None)
    if quantization is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(f"{model} is quantised already ({method}); needed: a dense model")


def _load(kind: Any, model: str, options: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model {model!r} cannot be loaded: {error}") from error


def model_digest(model: nn.Module) -> str:
    """SHA-256 of names, shapes, dtypes and up to 4096 evenly spaced numbers of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
