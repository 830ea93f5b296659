"""Everything of vLLM that moved between the supported releases, and nothing else.

Tested range: 0.26.0 … 0.33.0. Outside it `check_version` refuses, and the plugin leaves vLLM alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import vllm
from compressed_tensors.quantization import QuantizationArgs
from packaging.version import Version
from torch import nn
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod as DenseFp8Experts,
)
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)

__all__ = [
    "DenseFp8Experts",
    "RoutedExperts",
    "check_version",
    "compiled",
    "dense_fp8_kernel",
    "describe_fp8_experts",
    "dummy_weights",
    "fp8_expert_arguments",
    "remember_choice",
    "rename_mapper",
    "token_quantizer",
]

METHOD = "spense"
CHOICES = "choices_made_at_load"
OLDEST, NEWEST = Version("0.26.0"), Version("0.33")


def check_version() -> None:
    """Refuse a vLLM outside the tested range.

    Raises:
        RuntimeError: with the version found and the range.
    """
    found = Version(vllm.__version__)
    if not OLDEST <= found or found.release[:2] > NEWEST.release[:2]:
        raise RuntimeError(f"vLLM {found} found; vllm-spense supports {OLDEST} to {NEWEST}.x")


def compiled() -> bool:
    """Whether vLLM compiles the model being built (vLLM hashes this mode into its graph cache)."""
    return get_current_vllm_config().compilation_config.mode != CompilationMode.NONE


def dummy_weights() -> bool:
    """Whether the model is being built with `--load-format dummy`."""
    return get_current_vllm_config().load_config.load_format == "dummy"


def remember_choice(config: VllmConfig, module: str, choice: str) -> None:
    """Make how a layer runs part of vLLM's graph-cache key.

    The key covers the checkpoint and vLLM's options, but not what a plugin finds out about the
    device at load: without this a compiled graph of another device could be replayed.
    """
    if isinstance(config.additional_config, dict):
        ours = config.additional_config.setdefault(METHOD, {})
        seen = f"{ours.get(CHOICES, '')}|{module}={choice}"
        ours[CHOICES] = hashlib.sha256(seen.encode()).hexdigest()


def rename_mapper(mapper: Any) -> Any:
    """The part of a model's weight mapper that renames modules without fusing them."""
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def token_quantizer() -> QuantFP8:
    """Dynamic per-token FP8 of activations, in the form that vLLM's fusion passes know."""
    return QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)


def dense_fp8_kernel(rows: int, cols: int, dtype: torch.dtype, module: str) -> Any:
    """vLLM's own FP8 linear kernel for this GPU, per-channel weights and per-token activations."""
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel

    return init_fp8_linear_kernel(
        activation_quant_key=kFp8DynamicTokenSym,
        weight_quant_key=kFp8StaticChannelSym,
        input_dtype=dtype,
        out_dtype=dtype,
        weight_shape=(rows, cols),
        module_name=module,
    )


def fp8_expert_arguments() -> tuple[QuantizationArgs, QuantizationArgs]:
    """Weights by channel, activations by token, as `DenseFp8Experts` takes them."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return (
        QuantizationArgs(**common, strategy="channel", dynamic=False),
        QuantizationArgs(**common, strategy="token", dynamic=True),
    )


def describe_fp8_experts(layer: nn.Module, dtype: torch.dtype) -> None:
    """Attributes that `DenseFp8Experts` puts on a layer beside its weights."""
    layer.num_experts = layer.local_num_experts
    layer.orig_dtype = dtype
    layer.weight_block_size = None
    layer.w13_input_scale = layer.w2_input_scale = None


def tensor_parallel(layer: nn.Module) -> int:
    """Ranks that divide this layer."""
    return int(getattr(layer, "tp_size", 1))
