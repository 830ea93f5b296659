"""What a pruning run did: per module, as JSON for programs and Markdown for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ModuleReport", "PruneReport"]


@dataclass(frozen=True)
class ModuleReport:
    """One pruned (or only quantised) linear layer.

    Attributes:
        dense_share: dense part of its partition, after rounding.
        relative_error: ‖X(W − Ŵ)ᵀ‖ / ‖XWᵀ‖ on the calibration text, quantisation included.
        dampening: share of mean(diag H) added before factoring; None where nothing was factored.
        seconds: time to prune and quantise it, without the forward passes.
    """

    name: str
    dense_share: float
    relative_error: float
    dampening: float | None
    seconds: float


@dataclass
class PruneReport:
    """A whole run.

    Attributes:
        settings: the recipe, JSON-ready.
        versions: of this package and the libraries that decide the numbers.
        seconds: stage → time. Blocks taken over from an interrupted run count as loaded.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    dense_share: float
    calibration: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    resumed_blocks: int = 0
    modules: list[ModuleReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bytes: int = 0
    dense_bytes: int = 0

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def errors_by_kind(self) -> dict[str, Sequence[float]]:
        """Projection, such as `mlp.down_proj` → relative errors in layer order."""
        errors: dict[str, list[float]] = {}
        for module in self.modules:
            kind = ".".join(module.name.split(".")[-2:])
            errors.setdefault(kind, []).append(module.relative_error)
        return errors

    def to_markdown(self) -> str:
        """A page: recipe, relative errors by projection, warnings."""
        recipe = "\n".join(f"* {key}: {value}" for key, value in self.settings.items())
        rows = "\n".join(
            f"| {kind} | {len(errors)} | {min(errors):.4f} | {statistics.median(errors):.4f} "
            f"| {max(errors):.4f} |"
            for kind, errors in self.errors_by_kind().items()
        )
        warnings = "\n".join(f"* {warning}" for warning in self.warnings) or "None."
        return (
            f"# Pruning report\n\n{recipe}\n* dense share after rounding: {self.dense_share:.6g}\n"
            f"* size: {self.bytes / 2**20:.1f} MiB (source {self.dense_bytes / 2**20:.1f} MiB)\n\n"
            "Relative output error on the calibration text, quantisation included:\n\n"
            "| projection | layers | least | median | largest |\n|---|---|---|---|---|\n"
            f"{rows}\n\n## Warnings\n\n{warnings}\n"
        )
