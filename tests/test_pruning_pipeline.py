"""Whole runs on tiny models: what is written is what was computed; kills and bad input."""

import hashlib
import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from pruning_helpers import TEXT, save_tiny, tiny_model
from safetensors.torch import load_file

from vllm_spense.format.checkpoint import INTERMEDIATE_ORDER, Checkpoint
from vllm_spense.format.partition import RegionKind
from vllm_spense.pruning import pipeline
from vllm_spense.pruning.architecture import find_decoder
from vllm_spense.pruning.block import BlockPruner
from vllm_spense.pruning.calibration import TextSource, text_tokens
from vllm_spense.pruning.loading import load_model
from vllm_spense.pruning.pipeline import prune, prune_blocks
from vllm_spense.pruning.plan import make_plan
from vllm_spense.pruning.settings import PruneSettings

ROOT = Path(__file__).parent.parent
PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def recipe(text: str, **changes) -> PruneSettings:
    return PruneSettings(**({"calibration": text, "samples": 16, "length": 32} | changes))


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every weight file and of the config."""
    files = [*folder.rglob("*.safetensors"), folder / "config.json"]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


CASES = [
    ("llama", {"tie_word_embeddings": True}, {"method": "spensegpt+", "dense_share": 0.25}),
    ("llama", {"mlp_bias": True}, {"method": "spensegpt+", "dense_share": 0.5, "dtype": "bf16"}),
    ("qwen3", {}, {"method": "sparsegpt", "dense_share": 0.0, "attention": "2:4", "dtype": "bf16"}),
    ("qwen2", {}, {"method": "magnitude", "dense_share": 0.25, "attention": "2:4"}),
    ("mistral", {}, {"method": "wanda", "dense_share": 0.5, "dtype": "fp16"}),
    ("qwen3", {}, {"method": "spensegpt", "dense_share": 1.0, "attention": "keep"}),
    (
        "qwen3",
        {"hidden_size": 128, "intermediate_size": 512},
        {"method": "blocks", "dense_share": 0.0, "tile": "64x64", "sparsity": 0.5},
    ),
]


@pytest.mark.parametrize("kind, model_changes, changes", CASES, ids=lambda v: str(v)[:40])
def test_the_checkpoint_is_the_model_that_was_walked(tmp_path, text, kind, model_changes, changes):
    folder, out = save_tiny(tmp_path / "dense", kind, **model_changes), tmp_path / "out"
    settings = recipe(text, **changes)
    report = prune(str(folder), out, settings)
    assert not (tmp_path / "out.work").exists() and not (tmp_path / "out.partial").exists()
    checkpoint = Checkpoint.open(out)
    checkpoint.verify()

    walked, tokenizer = load_model(
        folder, None if settings.dtype == "fp8" else settings.weight_dtype
    )
    decoder = find_decoder(walked)
    tokens = text_tokens(TextSource(text), tokenizer, 16, 32, 0)
    list(prune_blocks(decoder, tokens, make_plan(decoder, settings), settings))
    served, _ = load_model(out)
    expected = walked.state_dict()
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        assert torch.equal(served(tokens[:2]).logits, walked(tokens[:2]).logits)

    tied = bool(model_changes.get("tie_word_embeddings"))
    assert ("lm_head.weight" in checkpoint.names()) != tied
    assert report.bytes == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
    stored = json.loads((out / "spense/report.json").read_text())
    assert len(stored["modules"]) == len(checkpoint.modules)
    assert "| mlp.down_proj | 2 |" in (out / "spense/report.md").read_text()
    assert checkpoint.quantization.provenance["base_model"] == "dense"
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()


def test_spensegpt_plus_permutes_and_leaves_dense_rows_alone(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense", dtype=torch.bfloat16), tmp_path / "out"
    prune(str(folder), out, recipe(text, dense_share=0.25, dtype="bf16", attention="keep"))
    order = load_file(out / INTERMEDIATE_ORDER)["model.layers.0.mlp"].long()
    assert order.sort().values.tolist() == list(range(128))
    assert (order[:96].diff() > 0).all() and (order[96:].diff() > 0).all()
    dense, checkpoint = load_file(folder / "model.safetensors"), Checkpoint.open(out)
    for name in PROJECTIONS[:2]:
        original = dense[f"model.layers.0.{name}.weight"][order]
        kept = checkpoint.tensor(f"model.layers.0.{name}.weight_dense")
        assert torch.equal(kept, original[96:])
    down = dense["model.layers.0.mlp.down_proj.weight"][:, order][:, 96:]
    absorbed = checkpoint.tensor("model.layers.0.mlp.down_proj.weight_dense")
    assert (absorbed != down).float().mean() > 0.5
    for name in ("self_attn.q_proj", "input_layernorm"):
        key = f"model.layers.1.{name}.weight"
        assert torch.equal(checkpoint.tensor(key), dense[key])


def test_nothing_pruned_in_bf16_is_the_dense_model(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense", dtype=torch.bfloat16), tmp_path / "out"
    prune(str(folder), out, recipe(text, dense_share=1.0, dtype="bf16"))
    dense = load_file(folder / "model.safetensors")
    for name, tensor in load_model(out)[0].state_dict().items():
        assert torch.equal(tensor, dense[name]), name


def test_statistics_come_from_the_pruned_and_quantised_layers_before(text, monkeypatch):
    """True-sequential: the inputs that down is pruned for are those of the pruned gate and up."""
    model, settings = tiny_model(), recipe(text, dense_share=0.0, attention="2:4")
    decoder, seen = find_decoder(model), {}
    original = BlockPruner._replace

    def replace(self, child, statistics):
        seen[f"{self.name}.{child}"] = statistics.hessian.clone()
        original(self, child, statistics)

    monkeypatch.setattr(BlockPruner, "_replace", replace)
    tokens = torch.randint(0, 320, (6, 32))
    list(prune_blocks(decoder, tokens, make_plan(decoder, settings), settings))
    assert [name.split(".")[-1][0] for name in seen] == list("qkvogud") * 2

    inputs = {}  # the finished model's own inputs must be what each step was shown
    for name in seen:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.update({name: args[0].flatten(0, 1)})
        )
    with torch.no_grad():
        model(tokens)
    for name, hessian in seen.items():
        x = inputs[name]
        torch.testing.assert_close(hessian, x.T @ x / len(x), rtol=2e-3, atol=2e-3)


def test_methods_rank_as_they_should(text):
    """Mean relative error of the MLP: SparseGPT < Wanda < magnitude, and less with a dense part."""
    errors = {}
    for method, share in [("magnitude", 0), ("wanda", 0), ("sparsegpt", 0), ("spensegpt+", 0.5)]:
        settings = recipe(text, method=method, dense_share=float(share), dtype="bf16")
        model = tiny_model("llama")
        decoder = find_decoder(model)
        tokens = torch.randint(0, 320, (32, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():  # inputs of very unequal size, as real models have them
            for layer in decoder.layers:
                layer.post_attention_layernorm.weight.copy_(torch.linspace(0.05, 3, 64))
        results = prune_blocks(decoder, tokens, make_plan(decoder, settings), settings)
        reports = [module for _, result in results for module in result.reports]
        errors[method] = sum(module.relative_error for module in reports) / len(reports)
    assert errors["spensegpt+"] < errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


KILLED = """
import os, signal, sys
from vllm_spense.pruning.pipeline import prune
from vllm_spense.pruning.settings import PruneSettings

def progress(stage, done, total):
    if (stage, done) == ("prune", 1):
        os.kill(os.getpid(), signal.SIGKILL)

model, out, text = sys.argv[1:]
settings = PruneSettings(method="spensegpt+", calibration=text, samples=16, length=32)
prune(model, out, settings, progress=progress)
"""


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense", dtype=torch.bfloat16), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(folder), str(out), text]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    work = tmp_path / "out.work"
    assert sorted(file.name for file in work.iterdir()) == [
        "block-00000.safetensors",
        "calibration.safetensors",
        "settings.json",
    ]
    assert not out.exists()
    (work / "block-00001.safetensors.tmp").write_bytes(b"half a block")  # killed while writing

    with pytest.raises(ValueError, match=r"out\.work is left from an interrupted run.*--resume"):
        prune(str(folder), out, recipe(text))
    for changes, key in [
        ({"dense_share": 0.5}, r"dense_share was 0\.25, now it is 0\.5"),
        ({"seed": 1}, "seed was 0, now it is 1"),
        ({"dtype": "bf16"}, "dtype was 'fp8', now it is 'bf16'"),
    ]:
        with pytest.raises(ValueError, match=f"belongs to another run: {key}"):
            prune(str(folder), out, recipe(text, **changes), resume=True)
    other = save_tiny(tmp_path / "other", seed=1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="belongs to another run: model was"):
        prune(str(other), out, recipe(text), resume=True)

    report = prune(str(folder), out, recipe(text), resume=True)
    assert report.resumed_blocks == 1 and len(report.modules) == 14
    assert not work.exists()
    whole = tmp_path / "whole"
    prune(str(folder), whole, recipe(text))
    assert digest(out) == digest(whole)


def test_changed_calibration_text_is_another_run(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense"), tmp_path / "out"
    mine = tmp_path / "mine.txt"
    mine.write_text(TEXT)

    def stop(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(str(folder), out, recipe(str(mine)), progress=stop)
    mine.write_text(TEXT + ".")
    with pytest.raises(ValueError, match="another run: calibration_digest was"):
        prune(str(folder), out, recipe(str(mine)), resume=True)


def test_a_damaged_block_is_named(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense"), tmp_path / "out"

    def stop(stage, done, total):
        if (stage, done) == ("prune", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(str(folder), out, recipe(text), progress=stop)
    block = tmp_path / "out.work/block-00000.safetensors"
    block.write_bytes(block.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"block-00000\.safetensors is damaged.*resume again"):
        prune(str(folder), out, recipe(text), resume=True)


def test_the_model_can_write_its_own_text(tmp_path):
    folder = save_tiny(tmp_path / "dense")
    settings = PruneSettings(samples=8, length=24, dtype="bf16")
    prune(str(folder), tmp_path / "out", settings)
    provenance = Checkpoint.open(tmp_path / "out").quantization.provenance
    assert provenance["calibration"]["source"] == "self"
    assert provenance["calibration"]["tokens"] == 8 * 24
    assert provenance["recipe"]["method"] == "spensegpt+"


def test_partitions_of_the_config(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense"), tmp_path / "out"
    prune(str(folder), out, recipe(text, dense_share=0.25))
    quantization = Checkpoint.open(out).quantization
    for name, split in zip(PROJECTIONS, ("output", "output", "input"), strict=True):
        partition = quantization.partition_of(f"model.layers.1.{name}")
        assert partition.split == split
        assert [(s.kind, s.size) for s in partition.segments] == [
            (RegionKind.SPARSE_24, 96),
            (RegionKind.DENSE, 32),
        ]
    assert quantization.partition_of("model.layers.0.self_attn.q_proj").single is RegionKind.DENSE
    assert quantization.partition_of("lm_head") is None


def test_an_existing_output_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"exists; choose another output folder"):
        prune("anything", tmp_path, recipe(text))


def test_a_missing_model_is_named(tmp_path, text, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="model '/no/such/model' cannot be loaded"):
        prune("/no/such/model", tmp_path / "out", recipe(text))


def test_a_quantised_model_is_refused(tmp_path, text):
    folder = save_tiny(tmp_path / "dense")
    prune(str(folder), tmp_path / "out", recipe(text))
    with pytest.raises(ValueError, match=r"out is quantised already \(spense\); needed: a dense"):
        prune(str(tmp_path / "out"), tmp_path / "twice", recipe(text))


def test_too_little_disk_is_refused_before_the_work_begins(tmp_path, text, monkeypatch):
    folder, out = save_tiny(tmp_path / "dense"), tmp_path / "out"
    usage = namedtuple("usage", "total used free")(0, 0, 1 << 20)
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"0\.00 GiB free; needed: 0\.06 GiB"):
        prune(str(folder), out, recipe(text))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_short_text_leaves_nothing_behind(tmp_path):
    folder, short = save_tiny(tmp_path / "dense"), tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match=r"short\.txt gives \d+ tokens; needed: 512"):
        prune(str(folder), tmp_path / "out", recipe(str(short)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "short.txt"]


def test_a_model_that_overflows_names_the_layer(tmp_path, text):
    folder = tmp_path / "dense"
    save_tiny(folder)
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(float("inf"))
    model.save_pretrained(folder)
    message = r"model\.layers\.1\.self_attn\.q_proj.*: the Hessian of its inputs is not finite"
    with pytest.raises(ValueError, match=message):
        prune(str(folder), tmp_path / "out", recipe(text))


def test_weights_that_do_not_fit_fp16_are_refused(text):
    model, settings = tiny_model(), recipe(text, dtype="fp16", dense_share=1.0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] = 1e6
    decoder = find_decoder(model)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj: .*1e\+06\) overflows fp16"):
        list(
            prune_blocks(
                decoder, torch.arange(16).reshape(2, 8), make_plan(decoder, settings), settings
            )
        )
