"""Calibration text that the model writes itself, when no text is at hand.

Half of the samples start from the beginning-of-text token alone, half (if there is a chat template)
as a conversation whose user turn the model invents as well. The first tokens are drawn hotter
than the rest, so that samples differ (Williams et al., arXiv 2410.17170). End-of-text does not stop
a sample: the model goes on with its next document, and every sample has the full length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from vllm_spense.pruning.calibration import CalibrationError
from vllm_spense.pruning.walk import replaced

__all__ = ["self_tokens"]

HOT_TEMPERATURE = 2.0
HOT_TOKENS = 4
_MARKER = "\N{BULLET}user turn\N{BULLET}"


class _Sampler(LogitsProcessor):
    """Draw the next token itself, and leave only that one for a greedy choice.

    Inverse of the distribution function, one random number per row: drawing one for every token of
    the vocabulary, as `torch.multinomial` does, takes a quarter of the time on a CPU. The
    temperature falls linearly to 1 over the first written tokens.
    """

    def __init__(self, prompt_tokens: int, seed: int, report: Callable[[int], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.report = report

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary] → the same shape, infinite at the drawn token."""
        step = input_ids.shape[1] - self.prompt_tokens
        heat = max(0.0, 1 - step / HOT_TOKENS) * (HOT_TEMPERATURE - 1)
        distribution = (scores.float() / (1 + heat)).softmax(-1).cumsum(-1)
        uniform = torch.rand(len(scores), 1, generator=self.generator).to(scores.device)
        drawn = torch.searchsorted(distribution, uniform * distribution[:, -1:], right=True)
        self.report(step + 1)
        return scores.scatter(-1, drawn.clamp_max(scores.shape[-1] - 1), float("inf"))


def self_tokens(
    model: PreTrainedModel,
    tokenizer: Any,
    samples: int,
    length: int,
    seed: int,
    batch_size: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Sample int64 [samples, length] from the model, on the device it is on.

    Args:
        progress: called with (tokens done per sequence over all batches, their total).
    """
    plan = _plan(tokenizer, samples, length, batch_size)
    total, done, written = length * len(plan), 0, []
    for number, (prompt, count) in enumerate(plan):
        batch = torch.tensor([prompt] * count, device=model.device)

        def report(step: int, base: int = done) -> None:
            progress(base + step, total)

        sampler = _Sampler(len(prompt), seed * 1_000_003 + number, report)
        written.append(_generate(model, batch, length, sampler).cpu())
        done += length
        progress(done, total)
    return torch.cat(written)


def _generate(model: PreTrainedModel, prompt: Tensor, length: int, sampler: _Sampler) -> Tensor:
    model.eval()
    # The model's own settings name end tokens, at which samples would stop.
    plain = GenerationConfig(
        max_new_tokens=length - prompt.shape[1],
        do_sample=False,
        pad_token_id=0,  # never used: all rows are of one length
    )
    with torch.no_grad(), replaced(model, "generation_config", plain):
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            logits_processor=LogitsProcessorList([sampler]),
        )


def _plan(
    tokenizer: Any, samples: int, length: int, batch_size: int
) -> list[tuple[list[int], int]]:
    """(prompt, number of samples) per batch."""
    prompts = [start_prompt(tokenizer)]
    chat = chat_prompt(tokenizer)
    if chat:
        prompts.append(chat)
    plan = []
    for i, prompt in enumerate(prompts):
        if len(prompt) >= length:
            raise CalibrationError(
                f"samples of {length} tokens are too short: the prompt alone has {len(prompt)}"
            )
        share = samples * (i + 1) // len(prompts) - samples * i // len(prompts)
        plan += [(prompt, min(batch_size, share - at)) for at in range(0, share, batch_size)]
    return plan


def start_prompt(tokenizer: Any) -> list[int]:
    """Beginning of text: that token, else end of text (which separates documents in training)."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise CalibrationError(
        "the tokenizer has neither a beginning nor an end-of-text token to start from; "
        "give calibration text"
    )


def chat_prompt(tokenizer: Any) -> list[int] | None:
    """The chat template up to where the user's words begin, or None without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}], tokenize=False)
    head, found, _ = text.partition(_MARKER)
    return tokenizer(head, add_special_tokens=False)["input_ids"] or None if found else None
