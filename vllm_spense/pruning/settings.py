"""What one pruning run was asked for, checked once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vllm_spense.format.tiles import TILE_SHAPES
from vllm_spense.pruning.calibration import SELF
from vllm_spense.pruning.sparsegpt import BLOCK_SIZE

__all__ = ["ATTENTION_MODES", "DTYPES", "METHODS", "PruneSettings"]

METHODS = ("magnitude", "wanda", "sparsegpt", "spensegpt", "spensegpt+", "blocks")
ATTENTION_MODES = ("dense", "2:4", "keep")
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class PruneSettings:
    """One recipe.

    Attributes:
        method: how weights are chosen. With a dense share above 0, magnitude, wanda and sparsegpt
            keep the last channels dense, as spensegpt does (sparsegpt and spensegpt are then the
            same thing); spensegpt+ chooses the channels by score and permutes them to the end;
            blocks removes whole tiles of the MLP and has no dense share.
        dense_share: dense part of the intermediate dimension, 0 (all 2:4) … 1 (only quantised).
        tile, sparsity: of blocks alone: rows and columns of a tile, such as `64x128`, and the share
            of tiles that go.
        attention: `dense` (quantised under FP8, else left as it is), `2:4`, or `keep`.
        dtype: weight dtype, a key of `DTYPES`.
        calibration: `self`, a file, or a data set.
        samples, length: calibration windows and tokens in each.
        dampening: added to the Hessian's diagonal, as a share of its mean.
        block_size: columns that SparseGPT corrects at a time.
        batch_size: windows per forward pass (0: about 4096 tokens).
        device: `cpu` or `cuda[:i]`.
    """

    method: str = "spensegpt+"
    dense_share: float = 0.25
    tile: str | None = None
    sparsity: float | None = None
    attention: str = "dense"
    dtype: str = "fp8"
    calibration: str = SELF
    samples: int = 64
    length: int = 512
    seed: int = 0
    dampening: float = 0.01
    block_size: int = BLOCK_SIZE
    batch_size: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for key, known in (
            ("method", METHODS),
            ("attention", ATTENTION_MODES),
            ("dtype", tuple(DTYPES)),
        ):
            if getattr(self, key) not in known:
                raise ValueError(
                    f"{key} {getattr(self, key)!r} is not known; needed: one of {known}"
                )
        if not 0.0 <= self.dense_share <= 1.0:
            raise ValueError(f"dense share {self.dense_share} is outside 0 … 1")
        self._check_blocks()
        if self.samples < 1 or self.length < 2:
            raise ValueError(
                f"calibration of {self.samples} samples of {self.length} tokens; needed: at least "
                "one sample of two tokens"
            )
        if not (math.isfinite(self.dampening) and self.dampening >= 0):
            raise ValueError(f"dampening {self.dampening}; needed: a number of 0 or more")
        if self.block_size < 4 or self.block_size % 4:
            raise ValueError(f"block size {self.block_size} is not a positive multiple of 4")
        if self.batch_size < 0:
            raise ValueError(f"batch size {self.batch_size} is negative")

    def _check_blocks(self) -> None:
        if self.method != "blocks":
            for key in ("tile", "sparsity"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} {getattr(self, key)}: only method 'blocks' has it")
            return
        known = tuple(f"{rows}x{cols}" for rows, cols in TILE_SHAPES)
        if self.tile not in known:
            raise ValueError(f"tile {self.tile!r} is not known; needed: one of {known}")
        if self.sparsity is None or not 0.0 < self.sparsity < 1.0:
            raise ValueError(f"sparsity {self.sparsity}; needed: a share between 0 and 1")
        if self.dense_share != 0.0:
            raise ValueError(f"dense share {self.dense_share}: method 'blocks' has none (0)")

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of a tile (method blocks)."""
        rows, _, cols = self.tile.partition("x")
        return int(rows), int(cols)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the stored weights."""
        return DTYPES[self.dtype]

    @property
    def windows_per_batch(self) -> int:
        """Calibration windows in one forward pass."""
        return self.batch_size or max(1, _BATCH_TOKENS // self.length)

    def with_device_defaults(self, samples: int | None, length: int | None) -> PruneSettings:
        """Fill in sizes where none were given: few on a CPU, 128 long samples on a GPU."""
        cpu_samples, cpu_length = (64, 256) if self.calibration == SELF else (64, 512)
        on_cpu = self.device == "cpu"
        return replace(
            self,
            samples=samples or (cpu_samples if on_cpu else 128),
            length=length or (cpu_length if on_cpu else 2048),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; without what the method does not have."""
        return {key: value for key, value in asdict(self).items() if value is not None}
