"""Random-weight models of real shapes, to measure speed and equality without a download.

Weights are normal with standard deviation 0.02 (embeddings too, norms are ones), pruned by
magnitude, made layer by layer: nothing larger than one tensor is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from vllm_spense.format.checkpoint import CheckpointWriter
from vllm_spense.format.partition import Partition, RegionKind
from vllm_spense.format.planes import encode
from vllm_spense.format.schema import make_quantization
from vllm_spense.pruning.architecture import find_decoder
from vllm_spense.pruning.blocks import prune_tiles_by_magnitude
from vllm_spense.pruning.experts import stored_name, unpack_experts
from vllm_spense.pruning.plan import PrunePlan, make_plan
from vllm_spense.pruning.scoring import magnitude_scores, prune_by_score
from vllm_spense.pruning.settings import PruneSettings

__all__ = ["SHAPES", "load_shape", "write_random_model"]

STD = 0.02
_QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN25_14B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
_SEED_OSS_36B = {
    "model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 155136, "max_position_embeddings": 524288, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
_MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 32768, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "qwen3-32b": _QWEN3_32B,
    "llama-3.1-8b": _LLAMA_8B,
    "qwen2.5-14b": _QWEN25_14B,
    "seed-oss-36b": _SEED_OSS_36B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
}


def load_shape(
    name: str, layers: int | None = None, vocabulary: int | None = None
) -> PretrainedConfig:
    """A config by short name (`SHAPES`) or from a model folder, cut to `layers` and `vocabulary`.

    Raises:
        ValueError: neither a known name nor a folder with a config.
    """
    if name in SHAPES:
        values = dict(SHAPES[name])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    elif (Path(name) / "config.json").is_file():
        config = AutoConfig.from_pretrained(name)
    else:
        raise ValueError(f"{name} is neither a model folder nor one of {', '.join(SHAPES)}")
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.vocab_size = vocabulary or config.vocab_size
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.dtype = torch.bfloat16
    return config


def write_random_model(
    config: PretrainedConfig,
    out: Path,
    settings: PruneSettings,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> Path:
    """Write a pruned checkpoint of random weights.

    Args:
        settings: dense share or tiles, attention mode, dtype and device are used.
        progress: called with the name of every module or tensor.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        unpack_experts(model)
    decoder = find_decoder(model)
    plan = make_plan(decoder, settings)
    generator = torch.Generator(settings.device).manual_seed(seed)
    writer = CheckpointWriter(out)
    partitions = {}
    for name, parameter in _parameters(model):
        progress(name)
        partition = _partition(plan, name, decoder.prefix)
        stored = stored_name(name, config.model_type)
        if partition is None:
            writer.add({stored: _random(name, parameter, generator)})
            continue
        module = stored.removesuffix(".weight")
        partitions[module] = partition
        weight = _prune(_normal(parameter.shape, generator), partition)
        planes = encode(weight, partition, settings.weight_dtype, module)
        writer.add({f"{module}.{plane}": tensor for plane, tensor in planes.items()})
    config.architectures = [type(model).__name__]
    quantization = make_quantization(
        settings.weight_dtype, partitions, plan.ignored(decoder), {"recipe": "random", "seed": seed}
    )
    return writer.finish(config.to_dict(), quantization)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters; a tied head is the embedding and comes once."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    return (
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not (tied and name == "lm_head.weight")
    )


def _partition(plan: PrunePlan, name: str, prefix: str) -> Partition | None:
    if not name.startswith(prefix) or not name.endswith(".weight"):
        return None
    child = ".".join(name.removeprefix(f"{prefix}.").split(".")[1:-1])
    return plan.partitions.get(child)


def _random(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape, dtype=torch.bfloat16)
    return _normal(parameter.shape, generator).bfloat16()


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device) * STD


def _prune(weight: Tensor, partition: Partition) -> Tensor:
    """By magnitude: whole tiles, or 2:4 in the 2:4 region (in place)."""
    if partition.tiles is not None:
        return prune_tiles_by_magnitude(weight, partition.tiles)
    sparse = partition.size_of(RegionKind.SPARSE_24)
    if sparse:
        part = weight[:sparse] if partition.split == "output" else weight
        columns = weight.shape[1] if partition.split == "output" else sparse
        part.copy_(prune_by_score(part, magnitude_scores(part), columns))
    return weight
