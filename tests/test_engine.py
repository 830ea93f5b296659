"""The plugin in a real vLLM engine on the CPU, against transformers running the dense twin.

Greedy tokens are checked by teacher forcing: if at every position the token that vLLM chose is what
transformers would choose after the same prefix, then both write the same text.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from models import expand, prune, tiny_qwen3
from safetensors.torch import load_file
from test_checkpoint import change_json, change_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_spense.pruning.smollm2 import save_smollm2

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU engine"),
]
WORKER = Path(__file__).with_name("engine_worker.py")


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    return save_smollm2(tmp_path_factory.mktemp("smollm2") / "dense")


@pytest.fixture(scope="session")
def smollm2_pruned(smollm2_folder):
    """SpenseGPT's shape: a quarter of every MLP dense, the rest 2:4; FP8; k, v, o dense, q 2:4."""
    return prune(smollm2_folder, smollm2_folder.with_name("pruned"), attention="q only")


@pytest.fixture(scope="session")
def qwen3_pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return prune(tiny_qwen3(folder / "dense"), folder / "pruned", attention="2:4")


def english(folder, count, length):
    """Token ids of English text: the starts of Python's help topics."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for _, text in sorted(topics.items()) if len(text) > 20 * length]
    return [tokenizer(text).input_ids[:length] for text in texts[:count]]


def serve(tmp_path, prompts, tokens, logits=False, bind=None, timeout=900, **engine):
    """Run an engine in its own process; returns new token ids per prompt."""
    job = tmp_path / "job.json"
    engine = {"max_model_len": 512, "enforce_eager": True} | engine
    job.write_text(
        json.dumps({"engine": engine, "prompts": prompts, "tokens": tokens, "logits": logits})
    )
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if bind:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = bind
    run = subprocess.run(
        [sys.executable, str(WORKER), str(job)], env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    if run.returncode:
        errors = [line for line in (run.stdout + run.stderr).splitlines() if "Error" in line]
        raise RuntimeError("\n".join(errors) or run.stderr[-3000:])
    return json.loads(job.with_suffix(".out").read_text())


def transformers_twin(folder, dtype=torch.float32):
    twin = folder.with_name(f"{folder.name}-twin")
    if not twin.exists():
        expand(folder, twin)
    return AutoModelForCausalLM.from_pretrained(twin, dtype=dtype)


@torch.no_grad()
def greedy_after(model, prompt, answer):
    """What the model would choose at every position of the answer."""
    ids = torch.tensor([[*prompt, *answer]])
    return model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_same_tokens(model, prompts, answers):
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_after(model, prompt, answer)


def test_float32_tokens_equal_the_twins(smollm2_pruned, tmp_path):
    """32 prompts of several lengths, 64 tokens each, continuous batching, prefix caching on."""
    prompts = [ids[: 5 + i] for i, ids in enumerate(english(smollm2_pruned, 32, 40))]
    answers = serve(
        tmp_path, prompts, 64, model=str(smollm2_pruned), quantization="spense", dtype="float32"
    )
    assert [len(answer) for answer in answers] == [64] * 32
    assert_same_tokens(transformers_twin(smollm2_pruned), prompts, answers)


def test_bfloat16_logits_agree_within_rounding(smollm2_pruned, tmp_path, capsys):
    """vLLM's BF16 is not further from the float32 twin than transformers' own BF16 is (× 1.5)."""
    prompts = english(smollm2_pruned, 4, 128)
    serve(
        tmp_path, prompts, 1, logits=True, model=str(smollm2_pruned), quantization="spense",
        dtype="bfloat16",
    )  # fmt: skip
    served = load_file(tmp_path / "job.logits")
    exact, rounded = transformers_twin(smollm2_pruned), transformers_twin(smollm2_pruned)
    rounded = rounded.bfloat16()
    ours = theirs = norm = 0.0
    with torch.no_grad():
        for i, ids in enumerate(prompts):
            reference = exact(torch.tensor([ids])).logits[0, :-1]
            bf16 = rounded(torch.tensor([ids])).logits[0, :-1].float()
            ours += (served[str(i)] - reference).square().sum().item()
            theirs += (bf16 - reference).square().sum().item()
            norm += reference.square().sum().item()
    ours, theirs = (ours / norm) ** 0.5, (theirs / norm) ** 0.5
    with capsys.disabled():
        print(f"\nBF16 logits, relative error to float32: served {ours:.2e}, twin {theirs:.2e}")
    assert ours <= 1.5 * theirs


def test_tensor_parallel_2(qwen3_pruned, tmp_path):
    """Two real processes; hybrid MLP, 2:4 attention, 8 heads."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 500, (4, 12), generator=generator).tolist()
    answers = serve(
        tmp_path, prompts, 16, bind="0|1", model=str(qwen3_pruned), quantization="spense",
        dtype="float32", tensor_parallel_size=2,
    )  # fmt: skip
    assert_same_tokens(transformers_twin(qwen3_pruned), prompts, answers)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs g++")
def test_compiled(qwen3_pruned, tmp_path):
    """vLLM's default compilation: the plugin's layers inside a compiled graph."""
    prompts = torch.randint(3, 500, (4, 12), generator=torch.Generator().manual_seed(1)).tolist()
    answers = serve(
        tmp_path, prompts, 16, model=str(qwen3_pruned), dtype="float32", enforce_eager=False
    )
    assert_same_tokens(transformers_twin(qwen3_pruned), prompts, answers)


@pytest.mark.slow
def test_tensor_parallel_3(smollm2_pruned, tmp_path):
    """SmolLM2's 9 heads over three processes (two of them share a core)."""
    prompts = [ids[:8] for ids in english(smollm2_pruned, 2, 8)]
    answers = serve(
        tmp_path, prompts, 4, bind="0|1|0", model=str(smollm2_pruned), quantization="spense",
        dtype="float32", tensor_parallel_size=3,
    )  # fmt: skip
    assert_same_tokens(transformers_twin(smollm2_pruned), prompts, answers)


def refused(folder, **arguments):
    """vLLM's own checks of a configuration, as `LLM()` and `vllm serve` run them at start."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError) as error:
        EngineArgs(
            model=str(folder), skip_tokenizer_init=True, max_model_len=64, **arguments
        ).create_engine_config()
    return str(error.value)


@pytest.fixture
def copied(qwen3_pruned, tmp_path):
    """A checkpoint of this test's own, to be broken."""
    return Path(shutil.copytree(qwen3_pruned, tmp_path / "copied"))


def test_ordinary_model_with_our_flag(qwen3_pruned):
    message = refused(qwen3_pruned.with_name("dense"), quantization="spense")
    assert "Prune it first: python scripts/prune.py" in message


def test_our_checkpoint_with_another_flag(qwen3_pruned):
    assert "spense" in refused(qwen3_pruned, quantization="fp8")


def test_broken_checkpoints_are_refused_before_loading(copied):
    shard = copied / "model.safetensors"
    meta = "model.layers.0.mlp.down_proj.weight_meta"
    change_tensors(copied, lambda t: t.update({meta: t[meta][:, 1:].contiguous()}))
    assert f"{meta} is " in refused(copied)
    change_tensors(copied, lambda t: t.pop(meta))
    assert f"{meta} is missing" in refused(copied)
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert "model.safetensors is truncated" in refused(copied)


def test_unknown_key_in_the_config(copied):
    change_json(copied / "config.json", lambda c: c["quantization_config"].update(colour="red"))
    assert "colour: Extra inputs are not permitted" in refused(copied)


def test_invalid_numbers_stop_the_engine(copied, tmp_path):
    """What headers cannot show is found when the planes are loaded, before anything is served."""
    meta = "model.layers.1.mlp.up_proj.weight_meta"
    change_tensors(copied, lambda t: t[meta][3].zero_())
    with pytest.raises(RuntimeError, match=r"up_proj\.weight_meta: byte 0x00 at row 3"):
        serve(tmp_path, [[1, 2, 3]], 1, model=str(copied), dtype="float32")
