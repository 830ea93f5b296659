"""Open a checkpoint, dense or spense, as a dense transformers model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.planes import decode
from vllm_spense.format.schema import METHOD

__all__ = ["folder_bytes", "is_spense", "load_model", "load_pruned"]


def is_spense(folder: Path | str) -> bool:
    """Whether the `config.json` of a folder names quant_method spense."""
    if not (Path(folder) / "config.json").is_file():
        return False
    config = AutoConfig.from_pretrained(folder)
    quantization = getattr(config, "quantization_config", None) or {}
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


def load_model(folder: Path | str, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer, on the CPU.

    The planes of a spense checkpoint are decoded to dense weights: the numbers that are served,
    with activations not quantised. The permutation of MLP channels is part of the stored weights.

    Args:
        folder: of either kind; a hub name for dense models.
        dtype: of the weights; None: as the config says.
    """
    if is_spense(folder):
        checkpoint = Checkpoint.open(folder)
        model = load_pruned(checkpoint, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def load_pruned(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The dense model that a spense checkpoint stands for."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    del config.quantization_config
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    state = {name: checkpoint.tensor(name) for name in checkpoint.others()}
    for module, (partition, _) in checkpoint.modules.items():
        state[f"{module}.weight"] = decode(checkpoint.planes(module), partition, dtype)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def folder_bytes(folder: Path) -> int | None:
    """Bytes of the weight files of a folder; None for a hub name."""
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
