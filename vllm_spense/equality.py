"""Does a checkpoint give the same distribution as its dense twin, in a real engine?

Teacher-forced: every engine gets the same token ids, and the logits are taken where the model
computes them. Two workloads: `batch B`, one decode step of B requests whose prefixes are cached;
`prompt L`, all positions of one prompt. The yardstick is how far vLLM's own dense FP8 kernels are
from each other on the same twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["collect", "divergence", "prompt_logits", "record_logits"]

PREFIX = 32  # tokens; two blocks of vLLM's prefix cache
PROMPT_STEP = 8  # of a long prompt, every eighth position is compared


def collect(
    folder: Path, batches: Sequence[int], prompt: int, seed: int = 0, **engine: Any
) -> dict[str, Tensor]:
    """Logits of one model.

    Args:
        batches: sizes of decode steps.
        prompt: length of the long prompt (0: none).
        engine: further arguments of `vllm.LLM`.

    Returns:
        workload → float32 [rows, vocabulary] on the CPU.
    """
    from vllm import LLM

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=max([*batches, 16]),
        max_model_len=max(prompt, PREFIX) + 16,
        **engine,
    )
    record_logits(llm)
    vocabulary = llm.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for batch in batches:
        ids = torch.randint(3, vocabulary, (batch, PREFIX + 1), generator=generator).tolist()
        _run(llm, [row[:-1] for row in ids])
        (step,) = _run(llm, ids)
        assert len(step) == batch, f"{len(step)} rows of logits for a decode step of {batch}"
        found[f"batch {batch}"] = step
    if prompt:
        ids = torch.randint(3, vocabulary, (1, prompt), generator=generator).tolist()
        found[f"prompt {prompt}"] = prompt_logits(llm, ids[0])[::PROMPT_STEP].clone()
    return found


def prompt_logits(llm: Any, ids: list[int]) -> Tensor:
    """Logits after every token but the last, [len(ids) - 1, V], of an engine that records."""
    calls = _run(llm, [ids], prompt_logprobs=0)
    sample = 0 if len(calls[0]) == 1 else len(calls) - 1  # the row that the new token came from
    logits = torch.cat([*calls[:sample], *calls[sample + 1 :]])
    assert len(logits) in (len(ids) - 1, len(ids)), f"{len(logits)} rows for {len(ids)} tokens"
    return logits[: len(ids) - 1]


def _run(llm: Any, ids: list[list[int]], **sampling: Any) -> list[Tensor]:
    """Generate one token per request; the logits of every call that computed some."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **sampling)
    prompts = [{"prompt_token_ids": row} for row in ids]
    llm.generate(prompts, parameters, use_tqdm=False)
    return llm.apply_model(_take)[0]


def record_logits(llm: Any) -> None:
    """Make an engine keep the logits that it computes."""
    llm.apply_model(_record)


def _record(model: nn.Module) -> None:
    """Keep a copy of all logits that a model computes (runs inside the worker)."""
    compute = model.compute_logits
    model.recorded_logits = []

    def recording(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is not None:
            model.recorded_logits.append(logits.float().cpu())
        return logits

    model.compute_logits = recording


def _take(model: nn.Module) -> list[Tensor]:
    recorded, model.recorded_logits = model.recorded_logits, []
    return recorded


def divergence(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Mean KL(reference ‖ other) in nats and the share of equal greedy tokens, of [rows, V]."""
    if reference.shape != other.shape:
        raise ValueError(f"logits {list(reference.shape)} against {list(other.shape)}")
    total, same = 0.0, 0
    for p, q in zip(reference.split(64), other.split(64), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return {"kl": total / len(reference), "top1": same / len(reference)}
