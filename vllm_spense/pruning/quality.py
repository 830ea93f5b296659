"""The quality table: every method, at several dense shares and dtypes, on text not calibrated on.

Models are pruned in memory by the same code that writes checkpoints, from one dense model and one
set of calibration tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vllm_spense.pruning.architecture import find_decoder
from vllm_spense.pruning.evaluation import DenseReference, Scores
from vllm_spense.pruning.pipeline import prune_blocks
from vllm_spense.pruning.plan import make_plan, output_bytes
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.source import Source

__all__ = ["Variant", "quality_row", "quality_rows", "standard_variants"]


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    method: str
    dense_share: float
    dtype: str


def standard_variants(dtypes: Sequence[str] = ("bf16", "fp8")) -> list[Variant]:
    """Plain 2:4 by three methods, the hybrids at a quarter and a half dense, and nothing pruned."""
    recipes = [(method, 0.0) for method in ("magnitude", "wanda", "sparsegpt")]
    recipes += [(method, p) for p in (0.25, 0.5) for method in ("spensegpt", "spensegpt+")]
    variants = [Variant(method, p, dtype) for dtype in dtypes for method, p in recipes]
    if "fp8" in dtypes:
        variants.append(Variant("spensegpt", 1.0, "fp8"))
    return variants


def quality_row(
    model: str, settings: dict[str, Any], text: str, scores: Scores, dense: Scores, size: int
) -> dict[str, Any]:
    """One row of `benchmarks/quality.json`."""
    return {
        "model": model,
        "method": settings["method"],
        "scope": "all" if settings["attention"] == "2:4" else "mlp",
        "dense_share": settings["dense_share"],
        "zero_share": 0.0,
        "dtype": settings["dtype"],
        "calibration": settings["calibration"],
        "text": text,
        "seed": settings["seed"],
        "ppl": round(scores.ppl, 4),
        "kl": round(scores.kl, 5),
        "top1": round(scores.top1, 4),
        "dense_ppl": round(dense.ppl, 4),
        "bytes": size,
    }


def quality_rows(
    source: Source,
    calibration: Tensor,
    reference: DenseReference,
    text: str,
    base: PruneSettings,
    variants: Sequence[Variant],
    progress: Callable[[Variant, int, int], None] = lambda variant, done, total: None,
) -> Iterator[dict[str, Any]]:
    """Prune and score each variant, one row at a time; `source.model` itself is left as it is.

    Args:
        calibration: int64 [samples, length].
        progress: called with (variant, blocks done, blocks).
    """
    for variant in variants:
        settings = replace(base, **vars(variant))
        model = copy.deepcopy(source.model)
        decoder = find_decoder(model)
        plan = make_plan(decoder, settings)
        for index, _ in prune_blocks(decoder, calibration, plan, settings):
            progress(variant, index + 1, len(decoder.layers))
        scores = reference.compare(model)
        size = output_bytes(model, decoder, plan, settings.weight_dtype)
        used = settings.to_dict() | {"dense_share": round(plan.dense_share, 6)}
        yield quality_row(source.name, used, text, scores, reference.scores, size)
