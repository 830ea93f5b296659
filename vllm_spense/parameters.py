"""Planes as vLLM parameters: loaded and sharded by vLLM's own loaders.

vLLM's loaders of merged layers (gate_up, qkv) hand over offsets in rows of the whole N. A plane has
fewer rows (those of its region), so it ignores those offsets and uses its own, by shard number.
Along the input dimension a plane is proportional to K, and plain narrowing is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import ModelWeightParameter

from vllm_spense.format.tiles import INDEX_DTYPE

__all__ = ["PlaneParameter", "copy_slice", "poisoned"]

_QKV = {"q": 0, "k": 1, "v": 2}


class PlaneParameter(ModelWeightParameter):
    """One plane of a possibly fused layer, [sum(shard_rows), cols] on this rank.

    `shard_rows[i]` are the local rows that projection i (gate, up; q, k, v) has in this plane, 0
    where it has none. `split_input` tells whether tensor parallelism divides the columns of a
    row-parallel layer (scales belong to rows and stay whole).
    """

    def __init__(
        self,
        *,
        data: Tensor,
        weight_loader: Callable,
        name: str,
        shard_rows: tuple[int, ...],
        split_input: bool,
    ) -> None:
        super().__init__(data=data, weight_loader=weight_loader, input_dim=1, output_dim=0)
        self.plane_name = name
        self.shard_rows = shard_rows
        self.split_input = split_input

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        self._load_shard(loaded_weight, 0, self.tp_rank, self.tp_size)

    def load_merged_column_weight(self, loaded_weight: Tensor, **kwargs: Any) -> None:
        self._load_shard(loaded_weight, kwargs["shard_id"], self.tp_rank, self.tp_size)

    def load_qkv_weight(self, loaded_weight: Tensor, **kwargs: Any) -> None:
        shard = kwargs["shard_id"]
        replicas = 1 if shard == "q" else kwargs["num_heads"]
        self._load_shard(
            loaded_weight, _QKV[shard], self.tp_rank // replicas, self.tp_size // replicas
        )

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        parts = self.tp_size if self.split_input else 1
        rank = self.tp_rank if self.split_input else 0
        copy_slice(self.data, loaded_weight, 1, rank, parts, self.plane_name)

    def _load_shard(self, loaded: Tensor, shard: int, rank: int, parts: int) -> None:
        """Copy rank's rows of projection `shard`, which is divided into `parts`."""
        target = self.data.narrow(0, sum(self.shard_rows[:shard]), self.shard_rows[shard])
        copy_slice(target, loaded, 0, rank, parts, self.plane_name)


def copy_slice(target: Tensor, loaded: Tensor, dim: int, rank: int, parts: int, name: str) -> None:
    """Fill `target` with part `rank` of `loaded`, which has `parts` of them along `dim`.

    Raises:
        ValueError: naming `name`, when shape or dtype are not exactly that.
    """
    shape = list(target.shape)
    shape[dim] *= parts
    # A cast here would be silent: float8 rounds, uint8 wraps.
    if list(loaded.shape) != shape or loaded.dtype != target.dtype:
        raise ValueError(
            f"{name}: the checkpoint holds {list(loaded.shape)} {loaded.dtype}; needed: {shape} "
            f"{target.dtype} (divided over {parts} ranks)"
        )
    size = target.shape[dim]
    target.copy_(loaded.narrow(dim, rank * size, size))


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A plane that no check will let pass until it is loaded: NaN, metadata 0x00, index −1."""
    if dtype == torch.uint8:
        return torch.zeros(shape, dtype=dtype)
    if dtype == INDEX_DTYPE:
        return torch.full(shape, -1, dtype=dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)
