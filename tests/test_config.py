"""What vLLM asks the plugin about a checkpoint."""

import json

import pytest
import torch
from test_checkpoint import CONFIG, PARTITIONS, change_json, change_tensors, write

pytest.importorskip("vllm")

import vllm_spense
from vllm_spense import compat
from vllm_spense.config import SpenseConfig
from vllm_spense.format.schema import make_quantization


def example():
    return make_quantization(torch.bfloat16, PARTITIONS, ["lm_head"], {})


def test_registered_by_the_entry_point():
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    vllm_spense.register()  # a second time, as vLLM does in each process
    assert get_quantization_config("spense") is SpenseConfig


def test_ordinary_model_is_refused_with_the_prune_command():
    with pytest.raises(ValueError, match=r"Prune it first: python scripts/prune.py"):
        SpenseConfig()


def test_unknown_keys_are_refused():
    with pytest.raises(ValueError, match="colour: Extra inputs are not permitted"):
        SpenseConfig.from_config(example().to_dict() | {"colour": "red"})


def test_headers_are_checked_before_loading(tmp_path):
    folder = write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    SpenseConfig.from_config(config).maybe_update_config(str(folder))
    change_tensors(folder, lambda t: t.pop("model.layers.0.mlp.down_proj.weight_meta"))
    with pytest.raises(ValueError, match="down_proj.weight_meta is missing"):
        SpenseConfig.from_config(config).maybe_update_config(str(folder))


def test_names_follow_vllms_mapper():
    from vllm.model_executor.models.utils import WeightsMapper

    config = SpenseConfig(example())
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    module = "language_model.model.layers.0.mlp.up_proj"
    assert config._quantization.partition_of(module) == PARTITIONS["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("version", ["0.25.3", "0.34.0", "1.0.0"])
def test_other_vllm_versions_are_left_alone(monkeypatch, caplog, version):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(RuntimeError, match=f"vLLM {version} found; vllm-spense supports 0.26.0"):
        compat.check_version()
    vllm_spense.register()  # says so, and does not raise


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.0", "0.33.2+cpu"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    compat.check_version()


def test_other_quantization_flag_is_refused(tmp_path):
    """vLLM itself compares the flag with the checkpoint; nothing is served by accident."""
    from vllm.config import ModelConfig

    folder = write(tmp_path / "model")
    change_json(
        folder / "config.json",
        lambda c: c.update(
            CONFIG, model_type="llama", num_attention_heads=2, num_hidden_layers=1,
            intermediate_size=32, vocab_size=10,
        ),
    )  # fmt: skip
    vllm_spense.register()
    with pytest.raises(ValueError, match="does not match"):
        ModelConfig(model=str(folder), quantization="fp8", skip_tokenizer_init=True)
