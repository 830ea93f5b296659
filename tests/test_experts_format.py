"""Experts in a checkpoint: described by one pattern for a layer, refused when they differ."""

import json
import shutil

import pytest
import torch
from models import FP8, magnitude
from moe_models import prune_moe, tiny_moe
from safetensors.torch import load_file
from test_checkpoint import change_json, change_tensors

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.experts import ExpertName
from vllm_spense.format.export import export_dense
from vllm_spense.format.partition import Partition, hybrid_segments
from vllm_spense.format.planes import decode, encode
from vllm_spense.format.schema import make_quantization
from vllm_spense.pruning.loading import load_pruned

KINDS = ["qwen3_moe", "mixtral"]
QWEN, MIXTRAL = "model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("experts")
    return {
        kind: prune_moe(tiny_moe(base / f"{kind}-dense", kind, num_hidden_layers=2), base / kind)
        for kind in KINDS
    }


@pytest.fixture
def copied(folders, tmp_path):
    """A Qwen3-MoE checkpoint of this test's own, to be broken."""
    return shutil.copytree(folders["qwen3_moe"], tmp_path / "copied")


def test_names():
    assert ExpertName.parse("m.experts.12.w1") == ExpertName("m.experts", 12, "w1")
    assert ExpertName.parse("m.mlp.up_proj") is None
    assert ExpertName.parse("m.experts.up_proj") is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_target_for_a_projection_of_all_experts(folders, kind):
    checkpoint = Checkpoint.open(folders[kind])
    groups = checkpoint.quantization.groups.values()
    patterns = [t for group in groups for t in group.targets if t.startswith("re:")]
    assert len(patterns) == 2 * 3
    experts = [name for name in checkpoint.modules if ".experts." in name]
    assert len(experts) == 2 * 6 * 3
    assert any(name.endswith(".gate.weight") for name in checkpoint.others())
    checkpoint.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_dense_twin(folders, kind, tmp_path):
    """The twin has the same numbers, per expert, and transformers loads it as the same model."""
    twin = export_dense(folders[kind], tmp_path / "twin")
    tensors, checkpoint = load_file(twin / "model.safetensors"), Checkpoint.open(folders[kind])
    for module, (partition, _) in checkpoint.modules.items():
        weight = tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"]
        assert torch.equal(weight, decode(checkpoint.planes(module), partition))
    config = json.loads((twin / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", r"re:.*\.gate$"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gets_the_decoded_experts(folders, kind):
    checkpoint = Checkpoint.open(folders[kind])
    experts = load_pruned(checkpoint, torch.float32).model.layers[1].mlp.experts
    prefix, names = (
        (QWEN, ("gate_proj", "up_proj", "down_proj"))
        if kind == "qwen3_moe"
        else (MIXTRAL, ("w1", "w3", "w2"))
    )
    for index in range(6):
        modules = [f"{prefix}.{index}.{name}" for name in names]
        gate, up, down = (decode(checkpoint.planes(m), checkpoint.modules[m][0]) for m in modules)
        assert torch.equal(experts.gate_up_proj[index], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[index], down)


def test_experts_that_differ_cannot_be_described():
    name = "model.layers.0.mlp.experts.{}.down_proj"
    partitions = {
        name.format(i): Partition("input", hybrid_segments(64, share))
        for i, share in enumerate((0.25, 0.5))
    }
    with pytest.raises(ValueError, match=r"experts\.1\.down_proj: input-split 32 sparse_24 \+ 32"):
        make_quantization(FP8, partitions, [], {})


def drop(folder, name):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{QWEN}.{name}.")]:
            del tensors[key]

    change_tensors(folder, change)


def test_a_missing_expert(copied):
    drop(copied, "2.up_proj")
    with pytest.raises(ValueError, match=r"experts\.2\.up_proj is missing: the layer has 6"):
        Checkpoint.open(copied)


def test_a_missing_projection(copied):
    for index in range(6):
        drop(copied, f"{index}.up_proj")
    with pytest.raises(
        ValueError, match=r"experts of \['down_proj', 'gate_proj'\]; needed: one of"
    ):
        Checkpoint.open(copied)


def test_more_experts_than_the_model_has(copied):
    change_json(copied / "config.json", lambda c: c.update(num_experts=5))
    with pytest.raises(ValueError, match=r"experts\.5\.\w+: config\.json states 5 experts"):
        Checkpoint.open(copied)


def test_an_expert_of_another_shape(copied):
    name = f"{QWEN}.3.gate_proj"

    def change(tensors):
        partition = Partition("output", hybrid_segments(256, 0.25))
        planes = encode(magnitude(torch.randn(256, 64), partition), partition, FP8)
        tensors.update({f"{name}.{plane}": part for plane, part in planes.items()})

    change_tensors(copied, change)
    with pytest.raises(ValueError, match=r"experts\.3\.gate_proj is \[256, 64\].*expert 0 differs"):
        Checkpoint.open(copied)


def test_an_mlp_with_two_lists_of_segments(tmp_path):
    """Right on one rank, garbage on two: gate and down would mean different channels."""
    from test_checkpoint import CONFIG, CheckpointWriter, random_24

    partitions = {
        "m.mlp.gate_proj": Partition("output", hybrid_segments(32, 0.5)),
        "m.mlp.down_proj": Partition("input", hybrid_segments(32, 0.25)),
    }
    writer = CheckpointWriter(tmp_path / "model")
    for module, partition in partitions.items():
        planes = encode(random_24(32, 32), partition, FP8)
        writer.add({f"{module}.{name}": plane for name, plane in planes.items()})
    folder = writer.finish(CONFIG, make_quantization(FP8, partitions, [], {}))
    message = r"gate_proj divides its output channels into \[16, 16\], m.mlp.down_proj .*\[24, 8\]"
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(folder)
