"""Tiny random mixtures of experts, pruned by magnitude without any of our pruning code."""

from __future__ import annotations

from pathlib import Path

import torch
from models import FP8, magnitude
from safetensors.torch import load_file

from vllm_spense.format.checkpoint import CheckpointWriter
from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments
from vllm_spense.format.planes import encode
from vllm_spense.format.schema import make_quantization
from vllm_spense.format.shards import read_json

SIZES = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, vocab_size=512, max_position_embeddings=512, initializer_range=0.3,
    num_experts_per_tok=2, tie_word_embeddings=False,
)  # fmt: skip
OUTPUT_SPLIT, INPUT_SPLIT = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")
IGNORE = ["lm_head", r"re:.*\.gate$"]


def tiny_moe(out: Path, kind: str, **changes) -> Path:
    """A random `qwen3_moe` or `mixtral`: 6 experts of 256 channels, 2 of them per token."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if kind == "mixtral":
        own = {"intermediate_size": 256, "num_local_experts": 6}
        model = MixtralForCausalLM(MixtralConfig(**(SIZES | own | changes)))
    else:
        own = {"moe_intermediate_size": 256, "intermediate_size": 64, "num_experts": 6,
               "norm_topk_prob": True}  # fmt: skip
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | own | changes)))
    model.bfloat16().save_pretrained(out)
    return out


def partition_for(name: str, shape: torch.Size, share: float) -> Partition | None:
    if name.endswith(OUTPUT_SPLIT):
        return Partition("output", hybrid_segments(shape[0], share))
    if name.endswith(INPUT_SPLIT):
        return Partition("input", hybrid_segments(shape[1], share))
    if ".self_attn." in name and name.endswith("_proj"):
        return Partition.whole(RegionKind.DENSE, shape[0])
    return None


def prune_moe(model: Path, out: Path, dtype=FP8, share=0.25) -> Path:
    """Write a spense checkpoint: hybrid experts, dense attention."""
    writer, partitions = CheckpointWriter(out), {}
    for tensor_name, tensor in load_file(model / "model.safetensors").items():
        module = tensor_name.removesuffix(".weight")
        partition = partition_for(module, tensor.shape, share)
        if partition is None:
            writer.add({tensor_name: tensor})
            continue
        partitions[module] = partition
        planes = encode(magnitude(tensor.float(), partition), partition, dtype, module)
        writer.add({f"{module}.{name}": plane for name, plane in planes.items()})
    quantization = make_quantization(dtype, partitions, IGNORE, {"recipe": "magnitude"})
    return writer.finish(read_json(model / "config.json"), quantization, copy_from=model)
