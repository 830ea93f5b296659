"""Scores against direct formulas; loading; the quality table; the command lines."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from pruning_helpers import TEXT, save_tiny, tiny_model
from typer.testing import CliRunner

from vllm_spense.pruning.evaluation import DenseReference, lm_eval_tasks, log_probabilities
from vllm_spense.pruning.loading import is_spense, load_model
from vllm_spense.pruning.pipeline import prune
from vllm_spense.pruning.quality import Variant, quality_rows, standard_variants
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.source import load_source

ROOT = Path(__file__).parent.parent
WINDOWS = torch.randint(0, 320, (3, 20), generator=torch.Generator().manual_seed(5))
ROW = {
    *("model", "method", "scope", "dense_share", "zero_share", "dtype", "calibration", "text"),
    *("seed", "ppl", "kl", "top1", "dense_ppl", "bytes"),
}  # design.md, section 7


def script(name: str):
    """Import a script by path; its `app` is the command line."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object):
    environment = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    return CliRunner().invoke(script(name).app, [str(a) for a in arguments], env=environment)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_scores_are_the_direct_formulas():
    dense, other = tiny_model(seed=0), tiny_model(seed=1)
    scores = DenseReference(dense, WINDOWS).compare(other)
    losses, kls, same = [], [], 0
    with torch.no_grad():
        for window in WINDOWS:
            p = dense(window[None]).logits[0].double().log_softmax(-1)
            q = other(window[None]).logits[0].double().log_softmax(-1)
            for t in range(19):
                losses.append(-q[t, window[t + 1]].item())
                kls.append((p[t].exp() * (p[t] - q[t])).sum().item())
                same += p[t].argmax().item() == q[t].argmax().item()
    assert scores.tokens == 57
    assert scores.ppl == pytest.approx(torch.tensor(losses).mean().exp().item(), rel=1e-4)
    assert scores.kl == pytest.approx(sum(kls) / 57, rel=1e-3)
    assert scores.top1 == same / 57


def test_a_model_against_itself():
    reference = DenseReference(tiny_model(), WINDOWS)
    scores = reference.compare(tiny_model())
    assert scores.ppl == reference.scores.ppl
    assert scores.kl == pytest.approx(0, abs=1e-4) and scores.top1 == 1.0


def test_the_head_runs_in_float32_and_the_model_is_left_as_it_was():
    model = tiny_model(tie_word_embeddings=True, dtype=torch.bfloat16)
    logp, _ = next(log_probabilities(model, WINDOWS))
    with torch.no_grad():
        hidden = model.model(WINDOWS[:1]).last_hidden_state[0, :-1]
        expected = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)
    torch.testing.assert_close(logp, expected)
    DenseReference(model, WINDOWS)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.dtype == torch.bfloat16 and not model.lm_head._forward_pre_hooks


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="has 352 output tokens, its dense original 320"):
        DenseReference(tiny_model(), WINDOWS).compare(tiny_model(vocab_size=352))


def test_loading_tells_dense_from_spense(tmp_path, text):
    folder, out = save_tiny(tmp_path / "dense", dtype=torch.bfloat16), tmp_path / "out"
    prune(str(folder), out, PruneSettings(calibration=str(text), samples=8, length=32))
    assert is_spense(out) and not is_spense(folder) and not is_spense("some/hub-name")
    for path in (folder, out):
        model, tokenizer = load_model(path)
        assert model.dtype == torch.bfloat16 and len(tokenizer) == 320
        assert load_model(path, torch.float32)[0].dtype == torch.float32


def test_quality_rows(tmp_path):
    folder = save_tiny(tmp_path / "dense", tie_word_embeddings=True, dtype=torch.bfloat16)
    source = load_source(str(folder), None, None)
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    reference = DenseReference(source.model, WINDOWS)
    variants = [Variant("wanda", 0.0, "bf16"), Variant("spensegpt+", 0.25, "fp8")]
    tokens = torch.randint(0, 320, (8, 32))
    settings = PruneSettings(calibration="python-docs:0")
    rows = list(quality_rows(source, tokens, reference, "python-docs:1", settings, variants))
    assert [set(row) for row in rows] == [ROW, ROW]
    assert [row["method"] for row in rows] == ["wanda", "spensegpt+"]
    assert all(row["kl"] > 0 and row["dense_ppl"] == rows[0]["dense_ppl"] for row in rows)
    assert rows[1]["bytes"] < rows[0]["bytes"] < (folder / "model.safetensors").stat().st_size
    for name, tensor in source.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_standard_variants_are_those_of_the_table():
    variants = standard_variants()
    assert len(variants) == 15 == len(set(variants))
    assert {v.dense_share for v in variants if v.method == "spensegpt+"} == {0.25, 0.5}
    assert {v.dense_share for v in variants if v.method in ("magnitude", "wanda")} == {0.0}


def fake_lm_eval(monkeypatch, simple_evaluate):
    """lm-eval takes half a minute to import and its data sets a network."""
    fake = types.ModuleType("lm_eval")
    fake.simple_evaluate = simple_evaluate
    huggingface = types.ModuleType("lm_eval.models.huggingface")
    huggingface.HFLM = lambda pretrained, tokenizer: pretrained
    monkeypatch.setitem(sys.modules, "lm_eval", fake)
    monkeypatch.setitem(sys.modules, "lm_eval.models", types.ModuleType("lm_eval.models"))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", huggingface)


def test_tasks_of_lm_eval(monkeypatch):
    metrics = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1}
    fake_lm_eval(monkeypatch, lambda model, tasks, limit: {"results": {tasks[0]: metrics}})
    assert lm_eval_tasks("model", None, ["arc"], 7) == {"arc": {"acc,none": 0.5}}
    assert lm_eval_tasks("model", None, [], None) == {}


def test_tasks_that_are_not_at_hand_are_refused(monkeypatch):
    def offline(model, tasks, limit):
        raise ConnectionError("no network")

    fake_lm_eval(monkeypatch, offline)
    with pytest.raises(ValueError, match=r"lm-eval tasks \['arc'\] cannot be run: no network"):
        lm_eval_tasks("model", None, ["arc"], 1)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match="lm-eval is needed for tasks"):
        lm_eval_tasks("model", None, ["arc"], 1)


def test_prune_and_evaluate_on_the_command_line(tmp_path, text):
    folder, out, scores = save_tiny(tmp_path / "dense"), tmp_path / "out", tmp_path / "scores.json"
    sizes = ("--samples", 8, "--length", 32, "--device", "cpu")
    result = run("prune", folder, out, "--calibration", text, "--dense-share", 0.5, *sizes)
    assert result.exit_code == 0, result.output
    assert "mlp.down_proj" in result.output and "report.md" in result.output
    result = run("evaluate", folder, out, "--text", text, "--json", scores, *sizes)
    assert result.exit_code == 0, result.output
    assert "top-1 agreement" in result.output
    rows = json.loads(scores.read_text())
    assert [row["model"] for row in rows] == [str(folder), str(out)]
    assert rows[0]["kl"] == 0 < rows[1]["kl"] and rows[1]["bytes"] < rows[0]["bytes"]


def test_quality_on_the_command_line(tmp_path):
    folder, out = save_tiny(tmp_path / "dense"), tmp_path / "quality.json"
    sizes = ("--samples", 4, "--length", 16, "--test-samples", 2, "--test-length", 16)
    result = run("quality", folder, "--dtypes", "fp8", "--out", out, *sizes)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert set(content) == {"date", "command", "rows"} and len(content["rows"]) == 8
    assert str(tmp_path) not in content["command"]
    result = run("quality", folder, "--dtypes", "int4")
    assert result.exit_code == 1 and "dtypes ['int4'] are not known" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--dense-share", "1.5"), "dense share 1.5 is outside 0 … 1"),
        (("--calibration", "missing.txt"), "missing.txt does not exist"),
        (("--calibration", "python-docs", "--samples", "100000"), "needed: 800000 (100000"),
    ],
)
def test_prune_says_what_is_wrong_and_fails(tmp_path, arguments, message):
    folder = save_tiny(tmp_path / "dense")
    result = run("prune", folder, tmp_path / "out", "--length", 8, "--device", "cpu", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("name", ["prune", "evaluate", "quality"])
def test_help_has_examples(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"python scripts/{name}.py" in result.output
