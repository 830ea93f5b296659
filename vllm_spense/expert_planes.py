"""What a checkpoint says of a layer's experts, what one rank holds of it, and how it is loaded.

The names that vLLM gives the three projections: w1 gate, w3 up (both in w13), w2 down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from vllm_spense.format.partition import Partition
from vllm_spense.fused import FusedLayer, LocalPlane
from vllm_spense.parameters import copy_slice

__all__ = ["PlaneLoader", "StoredExperts"]

_SHARDS = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}  # fused layer, place in it


@dataclass(frozen=True)
class StoredExperts:
    """What the checkpoint says of a layer's experts, all alike.

    Attributes:
        layer: name of the layer, ends in `experts`.
        names: gate, up and down in the checkpoint.
        partitions: of gate, up and down.
    """

    layer: str
    names: tuple[str, str, str]
    partitions: tuple[Partition, Partition, Partition]
    weight_dtype: torch.dtype

    def local(self, hidden: int, ranks: int) -> dict[str, FusedLayer]:
        """What one of `ranks` holds of any expert: `w13` (gate above up) and `w2`.

        Raises:
            ValueError: segments that the ranks cannot share evenly.
        """
        gate, up, down = (f"{self.layer}.N.{name}" for name in self.names)
        inner = self.partitions[0].total // ranks
        return {
            "w13": FusedLayer.divide(
                (gate, up), self.partitions[:2], (inner, inner), hidden, self.weight_dtype
            ),
            "w2": FusedLayer.divide(
                (down,), self.partitions[2:], (hidden,), inner, self.weight_dtype
            ),
        }


@dataclass(frozen=True)
class PlaneLoader:
    """Loads one plane of the experts that this rank holds; vLLM calls it for all experts.

    vLLM's own loader is not used: it narrows tensors that are too large, casts, and decides by
    parts of names.
    """

    layer: nn.Module
    module: str
    plane: LocalPlane
    split_input: bool

    def __call__(
        self,
        param: Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = self.layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False if return_success else None
        config = self.layer.moe_config
        rank, ranks = config.tp_rank, config.tp_size
        fused, shard = _SHARDS[shard_id]
        rows = self.plane.shard_rows
        target = param.data[local].narrow(0, sum(rows[:shard]), rows[shard])
        name = f"{self.module}.{expert_id}.{shard_id}: {weight_name.rpartition('.')[2]}"
        if fused == "w13":
            copy_slice(target, loaded_weight, 0, rank, ranks, name)
        elif self.split_input:
            copy_slice(target, loaded_weight, 1, rank, ranks, name)
        else:
            copy_slice(target, loaded_weight, 0, 0, 1, name)
        return True if return_success else None
