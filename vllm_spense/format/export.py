"""The dense twin: the same numbers as a checkpoint that stock vLLM serves without this plugin.

FP8 becomes compressed-tensors' `float-quantized` (per-channel weights, per-token activations), BF16
and FP16 an ordinary dense folder. It is the baseline, the reference and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_spense.format.checkpoint import Checkpoint, CheckpointWriter
from vllm_spense.format.planes import dense_planes
from vllm_spense.format.schema import SpenseQuantization

__all__ = ["export_dense", "stock_quantization"]


def stock_quantization(quantization: SpenseQuantization) -> dict[str, Any] | None:
    """`quantization_config` of compressed-tensors for the same scales; None for unscaled dtypes."""
    if quantization.weights is None or quantization.activations is None:
        return None
    stored = quantization.to_dict()
    group = {
        "targets": ["Linear"],
        "weights": stored["weights"],
        "input_activations": stored["activations"],
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": quantization.ignore,
        "kv_cache_scheme": None,
    }


def export_dense(
    folder: Path | str, out: Path | str, progress: Callable[[str], None] = lambda name: None
) -> Path:
    """Write the dense twin of a spense checkpoint.

    Args:
        progress: called with the name of every module.

    Raises:
        ValueError: `out` exists, or the checkpoint is not valid (every plane is checked).
    """
    checkpoint = Checkpoint.open(folder)
    writer = CheckpointWriter(out)
    for name in checkpoint.others():
        writer.add({name: checkpoint.tensor(name)})
    for module, (partition, _) in checkpoint.modules.items():
        progress(module)
        planes = checkpoint.verified_planes(module)
        dense = dense_planes(planes, partition)
        writer.add({f"{module}.{name}": tensor for name, tensor in dense.items()})
    config = dict(checkpoint.config)
    return writer.finish(config, stock_quantization(checkpoint.quantization), copy_from=folder)
