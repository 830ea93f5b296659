"""Small real and random models for tests, pruned by magnitude without any of our pruning code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_spense.format.checkpoint import Checkpoint, CheckpointWriter
from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments
from vllm_spense.format.planes import decode, encode
from vllm_spense.format.schema import make_quantization

FP8 = torch.float8_e4m3fn
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def keep_two_of_four(weight: torch.Tensor) -> torch.Tensor:
    """The two largest of every four along the last dimension."""
    groups = weight.reshape(-1, 4)
    keep = torch.zeros_like(groups, dtype=torch.bool)
    keep.scatter_(1, groups.abs().float().topk(2, 1).indices, True)
    return (groups * keep).reshape(weight.shape)


def magnitude(weight: torch.Tensor, partition: Partition) -> torch.Tensor:
    pruned = weight.clone()
    if RegionKind.SPARSE_24 in partition.spans():
        start, size = partition.spans()[RegionKind.SPARSE_24]
        region = pruned.narrow(0 if partition.split == "output" else 1, start, size)
        region.copy_(keep_two_of_four(region.contiguous()))
    return pruned


def partition_for(name: str, shape: torch.Size, share: float, attention: str) -> Partition | None:
    """None for modules that stay as they are."""
    if name.endswith(("gate_proj", "up_proj")):
        return Partition("output", hybrid_segments(shape[0], share))
    if name.endswith("down_proj"):
        return Partition("input", hybrid_segments(shape[1], share))
    if name.endswith(ATTENTION) and attention != "keep":
        kind = RegionKind.SPARSE_24 if attention == "2:4" else RegionKind.DENSE
        if attention == "q only":
            kind = RegionKind.SPARSE_24 if name.endswith("q_proj") else RegionKind.DENSE
        return Partition.whole(kind, shape[0])
    return None


def prune(model: Path, out: Path, dtype=FP8, share=0.25, attention="dense") -> Path:
    """Write a spense checkpoint of a Llama-like folder with one safetensors file."""
    writer = CheckpointWriter(out)
    partitions, ignore = {}, ["lm_head"]
    for tensor_name, tensor in load_file(model / "model.safetensors").items():
        module = tensor_name.removesuffix(".weight")
        partition = partition_for(module, tensor.shape, share, attention)
        if partition is None:
            writer.add({tensor_name: tensor})
            if module.endswith(ATTENTION):
                ignore.append(module)
            continue
        partitions[module] = partition
        planes = encode(magnitude(tensor.float(), partition), partition, dtype, module)
        writer.add({f"{module}.{name}": plane for name, plane in planes.items()})
    config = json.loads((model / "config.json").read_text())
    quantization = make_quantization(dtype, partitions, ignore, {"recipe": "magnitude"})
    return writer.finish(config, quantization, copy_from=model)


def expand(folder: Path, out: Path, dtype=torch.float32) -> Path:
    """The same numbers as an ordinary dense folder in `dtype`."""
    checkpoint = Checkpoint.open(folder)
    tensors = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.others()}
    for module, (partition, _) in checkpoint.modules.items():
        tensors[f"{module}.weight"] = decode(checkpoint.planes(module), partition, dtype)
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def tiny_qwen3(out: Path) -> Path:
    """A random Qwen3-like decoder with 8 heads and 4 KV heads, which divide over 2 and 4 ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, vocab_size=512, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(out)
    return out
