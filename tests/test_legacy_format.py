"""Legacy 2:4 checkpoints are described, checked and converted; the numbers stay what they were."""

import subprocess
import sys
from pathlib import Path

import legacy
import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import change_json, change_tensors

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.legacy import LegacyQuantization, claims
from vllm_spense.format.legacy_checkpoint import LegacyCheckpoint, convert_legacy
from vllm_spense.format.legacy_planes import metadata, to_planes
from vllm_spense.format.partition import RegionKind
from vllm_spense.format.planes import decode

CONVERT = Path(__file__).parent.parent / "scripts" / "convert.py"
BLOCK = "model.layers.0"
DENSE = {
    "bf16-partial-bitmask": {
        f"{BLOCK}.mlp.up_proj", f"{BLOCK}.self_attn.k_proj", "model.layers.1.self_attn.o_proj"
    },
    "fp8-dense": {f"{BLOCK}.mlp.up_proj"},
}  # fmt: skip


def quantization(name="fp8-bitmask", **changes):
    return legacy.config(name)["quantization_config"] | changes


@pytest.mark.parametrize("name", legacy.NAMES)
def test_the_reference_is_compressed_tensors_own_expansion(name):
    dense = legacy.expanded(legacy.tensors(name))
    found = {module: legacy.digest(dense[f"{module}.weight"]) for module in legacy.DIGESTS[name]}
    assert found == legacy.DIGESTS[name]


@pytest.mark.parametrize("name", legacy.NAMES)
def test_converted_numbers_are_the_same(name, tmp_path):
    done = convert_legacy(legacy.FOLDER / name, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    checkpoint.verify()
    dense = legacy.expanded(legacy.tensors(name))
    assert set(checkpoint.modules) == set(legacy.DIGESTS[name])
    for module, (partition, _) in checkpoint.modules.items():
        planes = checkpoint.planes(module)
        assert torch.equal(decode(planes, partition), dense[f"{module}.weight"]), module
        is_dense = partition.single is RegionKind.DENSE
        assert is_dense == (module in DENSE.get(name, ())), module
    for other in checkpoint.others():
        assert torch.equal(checkpoint.tensor(other).float(), dense[other])
    assert set(done.dense) == DENSE.get(name, set())
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_what_a_conversion_says(tmp_path):
    dense = convert_legacy(legacy.FOLDER / "fp8-dense", tmp_path / "dense")
    assert dense.warnings == [
        f"{BLOCK}.mlp.up_proj: announced as 2:4, stored dense: it has groups of four with more "
        "than two nonzeros"
    ]
    static = convert_legacy(legacy.FOLDER / "fp8-static-bitmask", tmp_path / "static")
    assert static.warnings == ["activations: static scales dropped; they become dynamic by token"]
    provenance = Checkpoint.open(tmp_path / "static").quantization.provenance
    assert provenance["static_activations_dropped"] and provenance["sparsity_format"] == (
        "sparse-24-bitmask"
    )


def test_the_script(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, CONVERT, legacy.FOLDER / "fp8-dense", out]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "up_proj: announced as 2:4" in run.stdout and f"wrote {out}" in run.stdout
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and f"{out} exists" in again.stderr


@pytest.mark.parametrize("columns", [8, 64])
def test_every_bitmask_byte(columns):
    """All 36 valid bytes, against numpy's bit order."""
    valid = [m for m in range(256) if (m & 15).bit_count() == 2 and (m >> 4).bit_count() == 2]
    bits = torch.tensor(valid, dtype=torch.uint8).repeat(1, columns // 8).reshape(-1, columns // 8)
    values = torch.arange(1, len(bits) * columns // 2 + 1).float().reshape(-1, columns // 2)
    partition, planes, reason = to_planes({"compressed": values, "bitmask": bits}, True, "layer")
    shape = torch.tensor([len(bits), columns])
    stored = {"layer.compressed": values, "layer.bitmask": bits, "layer.shape": shape}
    assert torch.equal(decode(planes, partition), legacy.expanded(stored)["layer.weight"])
    assert not reason


@pytest.mark.parametrize("byte", [0x00, 0x37, 0x10, 0xFF])
def test_bitmasks_that_are_not_two_of_four(byte):
    bits = torch.full((2, 3), 0x33, dtype=torch.uint8)
    bits[1, 2] = byte
    with pytest.raises(ValueError, match=rf"up.bitmask: byte {byte:#04x} at row 1, column 2"):
        metadata(bits, "up")


def test_columns_that_do_not_fill_a_metadata_byte_stay_dense():
    partition, planes, reason = to_planes({"weight": torch.zeros(4, 12)}, True, "layer")
    assert partition.single is RegionKind.DENSE and set(planes) == {"weight"}
    assert reason == "12 columns are not a multiple of 8"


class TestClaims:
    @pytest.mark.parametrize("name", legacy.NAMES)
    def test_fixtures_are_ours(self, name):
        assert claims(quantization(name))

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"quant_method": "fp8"},
            {"quant_method": "awq", "bits": 4},
            quantization(sparsity_config=None),
            quantization(sparsity_config={}),
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            quantization(sparsity_config={"format": "dense", "sparsity_structure": "unstructured"}),
            None,
            "compressed-tensors",
        ],
    )
    def test_others_are_not(self, config):
        assert not claims(config)

    def test_integers_that_vllm_serves_stay_vllms(self):
        """Without targets vLLM serves the weights as they are; with them it refuses, so do we."""
        config = quantization("fp8-dense")
        config["config_groups"]["group_0"]["weights"].update(num_bits=4, type="int")
        assert claims(config)
        with pytest.raises(ValueError, match="4-bit int weights .* without the key 'sparsity_con"):
            LegacyQuantization.parse(config)
        del config["sparsity_config"]["targets"]
        assert not claims(config)

    def test_announced_without_targets(self):
        config = quantization("fp16-dense")
        del config["sparsity_config"]["targets"]
        assert claims(config)
        stored = LegacyQuantization.parse(config).stored_as(f"{BLOCK}.mlp.up_proj")
        assert stored.sparse and not stored.bitmask

    @pytest.mark.parametrize(
        "config",
        [
            {"quant_method": "gptq_marlin_24"},
            {"quant_method": "marlin_24"},
            {"quant_method": "gptq", "checkpoint_format": "marlin_24"},
            {"quant_method": "gptq", "is_marlin_24_format": True},
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
        ],
    )
    def test_marlin_is_refused_with_a_reason(self, config):
        assert claims(config)
        with pytest.raises(ValueError, match=r"Marlin's 2:4 layout .* vLLM removed in 0\.15"):
            LegacyQuantization.parse(config)


def test_keys_that_others_add_are_not_looked_at():
    added = {"total_num_heads": 2, "total_num_kv_heads": 1, "colour": "red"}
    assert LegacyQuantization.parse(quantization(**added)) == LegacyQuantization.parse(
        quantization()
    )


def changed_group(**changes):
    config = quantization()
    for key, value in changes.items():
        if isinstance(value, dict):
            config["config_groups"]["group_0"][key].update(value)
        else:
            config["config_groups"]["group_0"][key] = value
    return config


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (quantization(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is .*num_bits"),
        (quantization(transform_config={"config_groups": {"a": 1}}), "transform_config is"),
        (changed_group(input_activations=None), "group_0: no input_activations"),
        (changed_group(weights={"strategy": "block", "block_structure": [128, 128]}), "by block"),
        (changed_group(weights={"type": "int"}), "8-bit int weights"),
        (changed_group(input_activations={"strategy": "group", "group_size": 128}), "by group"),
        (changed_group(targets=7), "config_groups.group_0.targets: "),
        (quantization(sparsity_config={"format": "sparse-bitmask", "targets": ["Linear"]}),
         "format 'sparse-bitmask' cannot be read"),
        (quantization(sparsity_config={"format": "sparse-24-bitmask"}), "structure None; needed"),
        (quantization(sparsity_config={"targets": ["Linear"]}), "sparsity_config.format: Field"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read(config, match):
    assert claims(config)
    with pytest.raises(ValueError, match=match):
        LegacyQuantization.parse(config)


UP = f"{BLOCK}.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{UP}.bitmask"), r"up_proj\.bitmask is missing; needed: \[96, 8\] uint8"),
        (lambda t: t.update({f"{UP}.bitmask": t[f"{UP}.bitmask"][:, 1:].contiguous()}),
         r"up_proj\.bitmask is \[96, 7\] uint8; needed: \[96, 8\]"),
        (lambda t: t.pop(f"{UP}.weight_scale"), r"up_proj\.weight_scale is missing"),
        (lambda t: t.update({f"{UP}.compressed": t[f"{UP}.compressed"].float()}),
         r"up_proj\.compressed is \[96, 32\] float32; needed: \[96, 32\] float8_e4m3fn"),
        (lambda t: t.update({f"{UP}.weight_g_idx": torch.zeros(2)}), "weight_g_idx is not exp"),
        (lambda t: t.update({"lm_head.compressed": torch.zeros(8, 8)}), "lm_head is compressed"),
    ],
)  # fmt: skip
def test_folders_whose_headers_do_not_fit(tmp_path, change, match):
    folder = legacy.copy("fp8-bitmask", tmp_path / "copy")
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=match):
        LegacyCheckpoint.open(folder)


def test_a_config_that_does_not_fit_the_tensors(tmp_path):
    folder = legacy.copy("bf16-partial-bitmask", tmp_path / "copy")
    change_json(
        folder / "config.json",
        lambda c: c["quantization_config"]["sparsity_config"].update(ignore=["lm_head"]),
    )
    with pytest.raises(ValueError, match=r"up_proj: quantization_config says that it is stored as"):
        LegacyCheckpoint.open(folder)


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("bitmask", 0, r"up_proj\.bitmask: byte 0x00"),
        ("weight_scale", float("nan"), r"up_proj\.weight_scale: not a finite number"),
        ("weight_scale", 0.0, r"up_proj\.weight_scale: scale 0\.0 at .* is not positive"),
    ],
)
def test_invalid_numbers_are_not_converted(tmp_path, kind, value, match):
    folder = legacy.copy("fp8-bitmask", tmp_path / "copy")
    change_tensors(folder, lambda t: t[f"{UP}.{kind}"].fill_(value))
    with pytest.raises(ValueError, match=match):
        convert_legacy(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_legacy(tmp_path):
    folder = legacy.copy("fp8-bitmask", tmp_path / "copy")
    change_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(ValueError, match="describes no 2:4 checkpoint"):
        convert_legacy(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="config.json does not exist"):
        convert_legacy(tmp_path / "nowhere", tmp_path / "out")


def test_a_pruned_layer_that_is_not_quantised(tmp_path):
    """BF16 2:4 inside an FP8 model: a spense checkpoint has one weight dtype, so it is kept dense;
    the old name of the key is read too."""
    folder = legacy.copy("fp8-bitmask", tmp_path / "copy")
    module = "model.layers.1.self_attn.o_proj"
    values = legacy.tensors("fp8-bitmask")[f"{module}.compressed"].bfloat16()
    change_tensors(folder, lambda t: t.pop(f"{module}.weight_scale"))
    change_tensors(folder, lambda t: t.update({f"{module}.compressed": values}))

    def change(config):
        config["compression_config"] = config.pop("quantization_config")
        config["compression_config"]["ignore"].append(module)

    change_json(folder / "config.json", change)
    done = convert_legacy(folder, tmp_path / "out")
    assert f"{module}: torch.bfloat16 in an FP8 model; kept dense" in done.warnings
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert module not in checkpoint.modules and "compression_config" not in checkpoint.config
    expected = legacy.expanded(load_file(folder / "model.safetensors"))[f"{module}.weight"]
    assert torch.equal(checkpoint.tensor(f"{module}.weight").float(), expected)
