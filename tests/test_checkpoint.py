"""A tiny checkpoint on disk, and everything that can be wrong with one."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sparse24 import random_24

from vllm_spense.format.checkpoint import INTERMEDIATE_ORDER, Checkpoint, CheckpointWriter
from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import decode, encode
from vllm_spense.format.schema import make_quantization
from vllm_spense.format.shards import INDEX

FP8 = torch.float8_e4m3fn
HIDDEN, INTERMEDIATE = 16, 32
SEGMENTS = (Segment(RegionKind.SPARSE_24, 24), Segment(RegionKind.DENSE, 8))
MLP = "model.layers.0.mlp"
PARTITIONS = {
    f"{MLP}.up_proj": Partition("output", SEGMENTS),
    f"{MLP}.down_proj": Partition("input", SEGMENTS),
    "model.layers.0.self_attn.q_proj": Partition.whole(RegionKind.DENSE, HIDDEN),
}
SHAPES = {
    f"{MLP}.up_proj": (INTERMEDIATE, HIDDEN),
    f"{MLP}.down_proj": (HIDDEN, INTERMEDIATE),
    "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN}


def tensors():
    found = {
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.randn(10, HIDDEN).bfloat16(),
    }
    for i, (module, partition) in enumerate(PARTITIONS.items()):
        planes = encode(random_24(*SHAPES[module], seed=i), partition, FP8)
        found |= {f"{module}.{name}": plane for name, plane in planes.items()}
    return found


def write(out, max_shard_bytes=5 << 30, **kwargs):
    writer = CheckpointWriter(out, max_shard_bytes)
    writer.add(tensors())
    return writer.finish(CONFIG, make_quantization(FP8, PARTITIONS, ["lm_head"], {}), **kwargs)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "model", max_shard_bytes=300)


def test_round_trip(folder):
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.names()) == set(tensors())
    assert {m: s for m, (_, s) in checkpoint.modules.items()} == SHAPES
    assert set(checkpoint.others()) == {"model.norm.weight", "model.embed_tokens.weight"}
    seen = []
    checkpoint.verify(seen.append)
    assert seen == list(checkpoint.modules)
    for i, (module, partition) in enumerate(PARTITIONS.items()):
        decoded = decode(checkpoint.planes(module), partition)
        assert (decoded - random_24(*SHAPES[module], seed=i)).abs().max() < 0.2


def test_sharded(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(index["weight_map"]) == set(tensors())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
    Checkpoint.open(sharded).verify()


def test_side_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "weights.bin"):
        (source / name).write_text("{}")
    order = {MLP: torch.arange(INTERMEDIATE).flip(0)}
    out = write(tmp_path / "model", copy_from=source, intermediate_order=order)
    assert {p.name for p in out.iterdir()} == {
        "tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json",
        "model.safetensors", "spense",
    }  # fmt: skip
    stored = load_file(out / INTERMEDIATE_ORDER)[MLP]
    assert stored.dtype == torch.int32 and torch.equal(stored.long(), order[MLP])


def test_files_are_readable_as_the_umask_says(folder):
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_existing_output_is_not_touched(folder):
    before = (folder / "config.json").read_text()
    with pytest.raises(ValueError, match="model exists; choose another"):
        CheckpointWriter(folder)
    assert (folder / "config.json").read_text() == before


def test_unfinished_folder_is_no_checkpoint(tmp_path):
    writer = CheckpointWriter(tmp_path / "model", max_shard_bytes=100)
    writer.add(tensors())
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="config.json does not exist"):
        Checkpoint.open(tmp_path / "model.partial")


def test_writing_a_tensor_twice(tmp_path):
    writer = CheckpointWriter(tmp_path / "model")
    writer.add({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="a was written twice"):
        writer.add({"a": torch.ones(1)})


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    content = load_file(path)
    change(content)
    save_file(content, path)


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


META = f"{MLP}.down_proj.weight_meta"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(META), "down_proj.weight_meta is missing; needed"),
        (
            lambda t: t.update({META: t[META][:, 1:].contiguous()}),
            "down_proj.weight_meta is .*; needed",
        ),
        (lambda t: t.update({META: t[META].int()}), "down_proj.weight_meta is .* int32; needed"),
        (
            lambda t: t.update({f"{MLP}.down_proj.weight": t[META].clone()}),
            "down_proj.weight is not expected",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight_meta": t[META].clone()}),
            "layers.1.mlp.up_proj is in no group and not in 'ignore'",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "up_proj" in name],
            "up_proj is named in quantization_config but has no tensors",
        ),
    ],
)
def test_wrong_tensors(folder, change, match):
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=match):
        Checkpoint.open(folder)


def test_wrong_numbers(folder):
    change_tensors(folder, lambda t: t[META].zero_())
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(ValueError, match="down_proj.weight_meta: byte 0x00"):
        checkpoint.verify()


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_shard(folder, keep):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    path.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors"):
        Checkpoint.open(folder)


def test_missing_shard(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name} does not exist, but the index names it"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", 7, "a/b.safetensors"])
def test_index_that_leaves_the_folder(sharded, target):
    change_json(sharded / INDEX, lambda j: j["weight_map"].update({META: target}))
    with pytest.raises(ValueError, match="weight_meta points to .*, not a file beside it"):
        Checkpoint.open(sharded)


def test_index_at_odds_with_the_shards(sharded):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    alone = next(name for name in index if list(index.values()).count(index[name]) == 1)
    change_json(sharded / INDEX, lambda j: j["weight_map"].pop(alone))
    with pytest.raises(ValueError, match=f"{index[alone]} is a shard that .* does not name"):
        Checkpoint.open(sharded)
    elsewhere = next(shard for shard in index.values() if shard != index[alone])
    change_json(sharded / INDEX, lambda j: j["weight_map"].update({alone: elsewhere}))
    (sharded / index[alone]).unlink()
    with pytest.raises(ValueError, match=f"the index puts {alone} here, but it is missing"):
        Checkpoint.open(sharded)


def test_tensor_that_the_index_does_not_name(sharded):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    shared = next(name for name in index if list(index.values()).count(index[name]) > 1)
    change_json(sharded / INDEX, lambda j: j["weight_map"].pop(shared))
    with pytest.raises(ValueError, match=f"holds {shared}, which the index does not name"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json holds a list; needed: an object"),
        ("config.json", "{}", "no 'quantization_config'"),
        (INDEX, "{}", "has no 'weight_map'"),
        (INDEX, '{"weight_map": {}}', "has no 'weight_map'"),
    ],
)
def test_broken_json(folder, name, text, match):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        Checkpoint.open(folder)


def test_folder_without_weights(tmp_path):
    with pytest.raises(ValueError, match="config.json does not exist"):
        Checkpoint.open(tmp_path)
