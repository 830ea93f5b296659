"""The dense twin in transformers and through `scripts/convert.py`.

transformers quantises activations as the twin's config says: per token, to FP8, in a hook before
every linear layer. Our decoded model does not, and neither does vLLM's CPU engine serving the
sparse checkpoint; so both are compared here, without that hook and with it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import prune, tiny_qwen3
from transformers import AutoModelForCausalLM

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.export import export_dense
from vllm_spense.pruning.loading import load_pruned

CONVERT = Path(__file__).parent.parent / "scripts" / "convert.py"
IDS = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("twin") / "dense")


@pytest.fixture(scope="module")
def fp8(dense):
    """A checkpoint and its twin."""
    checkpoint = prune(dense, dense.with_name("fp8"), attention="2:4")
    return checkpoint, export_dense(checkpoint, dense.with_name("fp8-twin"))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def decoded(checkpoint):
    return load_pruned(Checkpoint.open(checkpoint), torch.float32)


def loaded(twin):
    return AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)


def quantise_input(module, inputs):
    """compressed-tensors' dynamic per-token FP8, written down once more."""
    scale = inputs[0].abs().amax(-1, keepdim=True) / 448
    return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale,)


def test_same_logits_in_transformers(fp8):
    checkpoint, twin = fp8
    model = loaded(twin)
    logits(model)  # weights are expanded at the first call
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    assert torch.equal(logits(model), logits(decoded(checkpoint)))


def test_transformers_quantises_activations_per_token(fp8):
    checkpoint, twin = fp8
    reference = decoded(checkpoint)
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(quantise_input)
    assert torch.equal(logits(loaded(twin)), logits(reference))


def test_bf16_twin_is_an_ordinary_model(dense):
    checkpoint = prune(dense, dense.with_name("bf16"), dtype=torch.bfloat16)
    twin = export_dense(checkpoint, dense.with_name("bf16-twin"))
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
    assert torch.equal(logits(loaded(twin)), logits(decoded(checkpoint)))


def convert(*arguments):
    return subprocess.run(
        [sys.executable, CONVERT, *map(str, arguments)], capture_output=True, text=True
    )


def test_convert_writes_the_twin(fp8, tmp_path):
    checkpoint, twin = fp8
    run = convert(checkpoint, tmp_path / "out", "--dense-fp8")
    assert run.returncode == 0, run.stderr
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (twin / name).read_bytes()


def test_convert_names_what_is_wrong(fp8, dense, tmp_path):
    checkpoint, twin = fp8
    assert "add --dense-fp8" in convert(checkpoint, tmp_path / "out").stderr
    assert f"{twin} exists" in convert(checkpoint, twin, "--dense-fp8").stderr
    assert "not pruned yet?" in convert(dense, tmp_path / "out", "--dense-fp8").stderr
    assert not (tmp_path / "out").exists()
