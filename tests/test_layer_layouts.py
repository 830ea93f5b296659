"""Layouts of a model's layers, from shares and from a checkpoint's partitions."""

import pytest
import torch
from transformers import AutoConfig

from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments
from vllm_spense.format.schema import make_quantization
from vllm_spense.kernels.measurements import layer_key
from vllm_spense.layer_layouts import checkpoint_layouts, share_layouts, tile_layouts

FP8 = torch.float8_e4m3fn


@pytest.fixture
def config():
    return AutoConfig.for_model(
        "qwen3",
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


def keys(layouts):
    return {name: layer_key(layout) for name, layout in layouts.items()}


def test_zero_tiles(config):
    assert keys(tile_layouts(config, (64, 128), 0.5, FP8)) == {
        "gate_up": "2048x512 zero_tiles_64x128_2of4 2048x512",
        "down": "512x1024 zero_tiles_64x128_4of8 512x1024",
    }
    assert keys(tile_layouts(config, (64, 64), 0.25, FP8, tp=2)) == {
        "gate_up": "1024x512 zero_tiles_64x64_6of8 1024x512",
        "down": "512x512 zero_tiles_64x64_6of8 512x512",
    }


def test_no_dense_share(config):
    assert keys(share_layouts(config, 0.0, FP8)) == {
        "qkv": "1024x512 sparse_24 1024x512",
        "o": "512x512 sparse_24 512x512",
        "gate_up": "2048x512 sparse_24 2048x512",
        "down": "512x1024 sparse_24 512x1024",
    }


def test_a_quarter_dense_on_two_ranks(config):
    assert keys(share_layouts(config, 0.25, FP8, tp=2)) == {
        "qkv": "512x512 sparse_24 384x512 + dense 128x512",
        "o": "512x256 sparse_24 512x192 + dense 512x64",
        "gate_up": "1024x512 sparse_24 768x512 + dense 256x512",
        "down": "512x512 sparse_24 512x384 + dense 512x128",
    }


def test_a_checkpoint_s_layers_once_each(config):
    segments = hybrid_segments(1024, 0.5)
    partitions = {}
    for block in range(3):
        mlp = f"model.layers.{block}.mlp"
        partitions[f"{mlp}.gate_proj"] = partitions[f"{mlp}.up_proj"] = Partition(
            "output", segments
        )
        partitions[f"{mlp}.down_proj"] = Partition("input", segments)
    attention = [
        f"model.layers.{block}.self_attn.{name}_proj" for block in range(3) for name in "qkvo"
    ]
    quantization = make_quantization(FP8, partitions, [*attention, "lm_head"], {})
    found = list(checkpoint_layouts(config, quantization))
    assert [name for name, _ in found] == ["gate_up", "down"]
    assert found[1][1].regions[1].kind is RegionKind.DENSE
    assert found[1][1].regions[1].x_start == 512
