"""How far a pruned model is from its dense original, teacher-forced on one text.

Perplexity, mean KL(dense ‖ pruned) per token, and how often both have the same most likely token.
Weights are what is served; activations are not quantised. The body runs in the model's dtype, the
output projection in float32, so that KL is not drowned in rounding of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["DenseReference", "Scores", "lm_eval_tasks", "log_probabilities"]


@dataclass(frozen=True)
class Scores:
    """Means over `tokens` predicted tokens. KL is in nats; `top1` is a share, 0 … 1."""

    ppl: float
    kl: float
    top1: float
    tokens: int


@contextmanager
def float32_head(model: PreTrainedModel) -> Iterator[None]:
    """Run the output projection in float32 for a while; a tied embedding keeps its own dtype."""
    head = model.get_output_embeddings()
    original = head.weight
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    head.weight = nn.Parameter(original.float(), requires_grad=False)
    try:
        yield
    finally:
        head.weight = original
        hook.remove()


@torch.no_grad()
def log_probabilities(
    model: PreTrainedModel, windows: Tensor, windows_per_batch: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities [tokens, vocabulary] float32 and targets int64 [tokens], batch by batch.

    Args:
        windows: int64 [samples, length]; every token but the first of a window is predicted.
    """
    model.eval()
    with float32_head(model):
        for batch in windows.split(windows_per_batch):
            batch = batch.to(model.device)
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            yield logits.log_softmax(-1).flatten(0, 1), batch[:, 1:].flatten()


class DenseReference:
    """What the dense model says, computed once: log-probabilities in float16, on the CPU.

    Takes 2 bytes × vocabulary per token. Rounding to float16 moves a KL by about 1e-5.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Tensor,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.windows = windows
        self._log_probabilities: list[Tensor] = []
        self._loss = 0.0
        for logp, targets in log_probabilities(model, windows):
            self._log_probabilities.append(logp.half().cpu())
            self._loss -= logp.gather(-1, targets[:, None]).double().sum().item()
            progress(len(self._log_probabilities), len(windows))

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return self.windows.shape[0] * (self.windows.shape[1] - 1)

    @property
    def scores(self) -> Scores:
        """The dense model against itself."""
        return Scores(math.exp(self._loss / self.tokens), 0.0, 1.0, self.tokens)

    def compare(
        self,
        model: PreTrainedModel,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Scores:
        """Score another model with the same vocabulary on the same windows."""
        loss = kl = same = 0.0
        batches = zip(log_probabilities(model, self.windows), self._log_probabilities, strict=True)
        for done, ((logp, targets), dense) in enumerate(batches, 1):
            if dense.shape != logp.shape:
                raise ValueError(
                    f"the model has {logp.shape[-1]} output tokens, its dense original "
                    f"{dense.shape[-1]}: not the same vocabulary"
                )
            dense = dense.to(logp.device).float()
            loss -= logp.gather(-1, targets[:, None]).double().sum().item()
            kl += (dense.exp() * (dense - logp)).sum(-1).double().sum().item()
            same += (dense.argmax(-1) == logp.argmax(-1)).sum().item()
            progress(done, len(self.windows))
        return Scores(
            math.exp(loss / self.tokens), kl / self.tokens, same / self.tokens, self.tokens
        )


def lm_eval_tasks(
    model: PreTrainedModel, tokenizer: Any, tasks: list[str], limit: int | None
) -> dict[str, dict[str, float]]:
    """Task → metric → value, from lm-eval.

    Raises:
        ValueError: lm-eval is not installed, or a task or its data set is not at hand.
    """
    if not tasks:
        return {}
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ValueError(f"lm-eval is needed for tasks and cannot be imported: {error}") from error
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer)
    try:
        results = lm_eval.simple_evaluate(wrapped, tasks=tasks, limit=limit)["results"]
    except Exception as error:  # data sets and tasks fail in many ways; all mean "not at hand"
        raise ValueError(f"lm-eval tasks {tasks} cannot be run: {error}") from error
    return {
        task: {
            metric: value
            for metric, value in metrics.items()
            if isinstance(value, (int, float)) and "stderr" not in metric
        }
        for task, metrics in results.items()
    }
