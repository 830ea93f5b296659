"""The layouts of a model's linear layers on one rank, as vLLM fuses them.

From a spense checkpoint's partitions, or for dense shares that are still to be chosen. Used to
measure kernels for a model (`scripts/tune.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PretrainedConfig

from vllm_spense.format.partition import Partition, RegionKind, Segment, hybrid_segments
from vllm_spense.format.schema import SpenseQuantization
from vllm_spense.format.tiles import K_SHARDS, choose_tiles
from vllm_spense.fused import FusedLayer
from vllm_spense.kernels.problem import Layout

__all__ = ["checkpoint_layouts", "share_layouts", "tile_layouts"]

Shapes = dict[str, tuple[list[str], list[int], int]]  # layer → modules, rows of each, columns


def _shapes(config: PretrainedConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "qkv": ([f"self_attn.{name}_proj" for name in "qkv"], [q, kv, kv], hidden),
        "o": (["self_attn.o_proj"], [hidden], q),
        "gate_up": (["mlp.gate_proj", "mlp.up_proj"], [inner, inner], hidden),
        "down": (["mlp.down_proj"], [hidden], inner),
    }


def _local(layer: str, rows: Sequence[int], cols: int, tp: int) -> tuple[tuple[int, ...], int]:
    """Rows and columns on one rank: o and down are divided along K, the others along N."""
    if layer in ("o", "down"):
        return tuple(rows), cols // tp
    return tuple(n // tp for n in rows), cols


def share_layouts(
    config: PretrainedConfig, dense_share: float, weight_dtype: torch.dtype, tp: int = 1
) -> dict[str, Layout]:
    """Layer → layout with `dense_share` of the split dimension dense in each of the four layers.

    gate and up are split one by one; q, k and v as one module, so that a table has the sizes of a
    hybrid attention layer whatever its heads are.
    """
    layouts = {}
    for layer, (modules, rows, cols) in _shapes(config).items():
        if layer == "qkv":
            modules, rows = ["self_attn.qkv_proj"], [sum(rows)]
        split = "input" if layer in ("o", "down") else "output"
        sizes = [cols] if split == "input" else rows
        parts = tuple(Partition(split, hybrid_segments(size, dense_share)) for size in sizes)
        local = _local(layer, rows, cols, tp)
        layouts[layer] = FusedLayer.divide(tuple(modules), parts, *local, weight_dtype).layout()
    return layouts


def tile_layouts(
    config: PretrainedConfig,
    tile: tuple[int, int],
    sparsity: float,
    weight_dtype: torch.dtype,
    tp: int = 1,
) -> dict[str, Layout]:
    """gate_up and down as one region of zero tiles each, as the pruner cuts them."""
    layouts = {}
    for layer in ("gate_up", "down"):
        modules, rows, cols = _shapes(config)[layer]
        tiles = choose_tiles(tile, cols, sparsity, K_SHARDS if layer == "down" else 1)
        parts = tuple(
            Partition("input", (Segment(RegionKind.ZERO_TILES, cols, tiles),))
            if layer == "down"
            else Partition.whole(RegionKind.ZERO_TILES, n, tiles)
            for n in rows
        )
        local = _local(layer, rows, cols, tp)
        layouts[layer] = FusedLayer.divide(tuple(modules), parts, *local, weight_dtype).layout()
    return layouts


def checkpoint_layouts(
    config: PretrainedConfig, quantization: SpenseQuantization, tp: int = 1
) -> Iterator[tuple[str, Layout]]:
    """(layer, layout) of every decoder block's quantised layers, repeated ones once."""
    seen = set()
    for block in range(config.num_hidden_layers):
        for layer, (modules, rows, cols) in _shapes(config).items():
            names = tuple(f"model.layers.{block}.{module}" for module in modules)
            parts = tuple(quantization.partition_of(name) for name in names)
            if any(part is None for part in parts):
                continue
            local = _local(layer, rows, cols, tp)
            layout = FusedLayer.divide(names, parts, *local, quantization.dtype).layout()
            if layout not in seen:
                seen.add(layout)
                yield layer, layout
