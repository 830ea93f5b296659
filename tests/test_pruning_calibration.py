"""Calibration tokens: where they come from, and every way in which there are too few."""

import json

import pytest
import torch
from pruning_helpers import TEXT, tiny_model, tiny_tokenizer

from vllm_spense.pruning.calibration import (
    CalibrationError,
    TextSource,
    pack_windows,
    text_tokens,
    token_digest,
)
from vllm_spense.pruning.self_text import HOT_TOKENS, _Sampler, chat_prompt, self_tokens


def tokens_of(name, samples=4, length=16, seed=0, tokenizer=None):
    return text_tokens(TextSource(str(name)), tokenizer or tiny_tokenizer(), samples, length, seed)


def test_text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    tokens = tokens_of(path)
    assert tokens.shape == (4, 16) and tokens.dtype == torch.int64
    assert tiny_tokenizer().decode(tokens[0]) in TEXT
    assert torch.equal(tokens, tokens_of(path))
    assert not torch.equal(tokens, tokens_of(path, seed=1))


def test_windows_are_in_order_and_do_not_overlap():
    windows = pack_windows(torch.arange(1000), 40, 20, 3, "numbers")
    starts = windows[:, 0]
    assert (starts % 20 == 0).all() and (starts.diff() > 0).all()
    assert (windows == starts[:, None] + torch.arange(20)).all()


def test_jsonl_text_and_messages(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    rows = [{"text": "plain words " * 20}, {"messages": messages}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    text = tiny_tokenizer().decode(tokens_of(path, 1, 60).flatten())
    assert "plain words" in text and "Why is the sky blue?" not in text
    path.write_text(json.dumps(rows[1]))
    text = tiny_tokenizer().decode(tokens_of(path, 1, 20).flatten())
    assert text.startswith("<|start|>user\nWhy is the sky")


def test_data_set(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": TEXT[i::7]}) for i in (0, 1)))
    assert not TextSource(str(folder)).is_file
    assert tokens_of(folder).shape == (4, 16)
    assert torch.equal(tokens_of(folder), tokens_of(f"{folder}::train"))


def test_python_docs_come_in_two_halves():
    first, second = (TextSource(f"python-docs:{half}") for half in (0, 1))
    assert first.digest() != second.digest()
    a, b = (tokens_of(source.name, 8, 32) for source in (first, second))
    assert not torch.equal(a, b)
    with pytest.raises(CalibrationError, match="python-docs:2: the halves"):
        tokens_of("python-docs:2")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", "", r"empty\.txt holds no text \(0 tokens\); needed: 64 tokens"),
        ("short.txt", "one two", r"short\.txt gives \d+ tokens; needed: 64 \(4 samples of 16\)"),
        ("bad.jsonl", '{"text": "a"}\n{"text"', r"bad\.jsonl, line 2 is not JSON"),
        ("keys.jsonl", '{"body": "a"}', r"keys\.jsonl, line 1 has \['body'\]; needed.*'text'"),
        ("list.jsonl", "[1]", r"list\.jsonl, line 1 has list"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(CalibrationError, match=message):
        tokens_of(tmp_path / name)


def test_files_that_are_not_text(tmp_path):
    with pytest.raises(CalibrationError, match=r"nothing\.txt does not exist"):
        tokens_of("nothing.txt")
    (tmp_path / "image.txt").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(CalibrationError, match=r"image\.txt is not UTF-8"):
        tokens_of(tmp_path / "image.txt")


def test_a_data_set_that_is_not_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError, match=r"'no-such/data-set' is no file, and no data set"):
        tokens_of("no-such/data-set")


def test_messages_need_a_chat_template(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(CalibrationError, match="line 1 has 'messages', but the tokenizer has no"):
        tokens_of(path, tokenizer=tiny_tokenizer(chat=False))


def test_the_model_writes_its_own_text():
    model, steps = tiny_model(), []
    settings = model.generation_config
    tokens = self_tokens(
        model, tiny_tokenizer(), 5, 24, 0, batch_size=2, progress=lambda *x: steps.append(x)
    )
    assert tokens.shape == (5, 24) and tokens.max() < 320
    assert model.generation_config is settings
    prompt = chat_prompt(tiny_tokenizer())
    assert tokens[:, : len(prompt)].tolist().count(prompt) == 3  # two of five start bare
    assert len({tuple(row) for row in tokens.tolist()}) == 5
    assert steps[-1] == (72, 72) and steps == sorted(steps)
    assert torch.equal(tokens, self_tokens(model, tiny_tokenizer(), 5, 24, 0, batch_size=2))
    assert not torch.equal(tokens, self_tokens(model, tiny_tokenizer(), 5, 24, 1, batch_size=2))


def test_end_of_text_does_not_stop_the_model():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight *= 0.1  # close to uniform, so that the end comes up somewhere
    tokens = self_tokens(model, tiny_tokenizer(chat=False), 16, 60, 0)
    assert tokens.shape == (16, 60) and (tokens == 1).any()


def test_self_text_needs_room_for_its_prompt():
    with pytest.raises(CalibrationError, match=r"samples of 3 tokens are too short: the prompt"):
        self_tokens(tiny_model(), tiny_tokenizer(), 2, 3, 0)


def test_self_text_needs_a_token_to_start_from():
    tokenizer = tiny_tokenizer(chat=False).__class__(
        tokenizer_object=tiny_tokenizer(chat=False).backend_tokenizer
    )
    with pytest.raises(CalibrationError, match="neither a beginning nor an end-of-text token"):
        self_tokens(tiny_model(), tokenizer, 2, 8, 0)


def test_digest_knows_shape_and_numbers():
    tokens = torch.arange(12).reshape(3, 4)
    assert token_digest(tokens) == token_digest(tokens.clone())
    assert token_digest(tokens) != token_digest(tokens.reshape(4, 3))
    assert token_digest(tokens) != token_digest(tokens + 1)


def test_tokens_are_drawn_as_often_as_the_model_says():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    sampler = _Sampler(prompt_tokens=1, seed=0, report=lambda step: None)
    prompt = torch.zeros(20000, 1 + HOT_TOKENS, dtype=torch.long)  # past the hot tokens
    drawn = sampler(prompt, probabilities.log().expand(20000, 4)).argmax(-1)
    torch.testing.assert_close(
        drawn.bincount(minlength=4) / 20000, probabilities, rtol=0, atol=0.015
    )
    hot = sampler(prompt[:, :1], probabilities.log().expand(20000, 4)).argmax(-1)
    expected = probabilities.sqrt() / probabilities.sqrt().sum()  # temperature 2
    torch.testing.assert_close(hot.bincount(minlength=4) / 20000, expected, rtol=0, atol=0.015)
