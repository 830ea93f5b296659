"""The dense twin has the same numbers, and stock readers understand it."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from test_checkpoint import PARTITIONS, change_tensors, tensors, write

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.export import export_dense
from vllm_spense.format.planes import decode


def test_same_numbers(tmp_path):
    folder = write(tmp_path / "model")
    out = export_dense(folder, tmp_path / "twin")
    dense = load_file(out / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    for module, partition in PARTITIONS.items():
        weight, scale = dense[f"{module}.weight"], dense[f"{module}.weight_scale"]
        assert weight.dtype == torch.float8_e4m3fn and scale.shape == (len(weight), 1)
        assert torch.equal(weight.float() * scale, decode(checkpoint.planes(module), partition))
    assert {n for n in dense if "norm" in n or "embed" in n} == {
        n for n in tensors() if "proj" not in n
    }


def test_stock_config(tmp_path):
    out = export_dense(write(tmp_path / "model"), tmp_path / "twin")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    group = parsed.config_groups["group_0"]
    assert (group.weights.strategy, group.weights.type, group.weights.num_bits) == (
        "channel", "float", 8,
    )  # fmt: skip
    assert group.input_activations.strategy == "token" and group.input_activations.dynamic
    assert parsed.ignore == ["lm_head"]


def test_invalid_planes_are_not_exported(tmp_path):
    folder = write(tmp_path / "model")
    change_tensors(folder, lambda t: t["model.layers.0.mlp.down_proj.weight_meta"].zero_())
    with pytest.raises(ValueError, match="down_proj.weight_meta: byte 0x00"):
        export_dense(folder, tmp_path / "twin")
    assert not (tmp_path / "twin").exists()
