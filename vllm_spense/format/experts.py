"""Mixtures of experts in a checkpoint: every expert is three linear layers of its own.

    Qwen3-MoE   LAYER.mlp.experts.N.{gate_proj, up_proj, down_proj}
    Mixtral     LAYER.block_sparse_moe.experts.N.{w1, w3, w2}

All experts of a layer are stored alike: a kernel that runs several of them has one description.
The router stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_spense.format.partition import Partition

__all__ = ["PROJECTIONS", "ExpertName", "check_mlps", "targets_of"]

PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # in config.json of Qwen3-MoE, of Mixtral
_EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.(?P<index>\d+)\.(?P<projection>[^.]+)")

Modules = Mapping[str, tuple[Partition, tuple[int, int]]]  # name → partition, (N, K)


@dataclass(frozen=True)
class ExpertName:
    """`layer` ends in `experts`; `projection` is one of `PROJECTIONS` in a valid checkpoint."""

    layer: str
    index: int
    projection: str

    @classmethod
    def parse(cls, module: str) -> ExpertName | None:
        """None for modules that belong to no expert."""
        found = _EXPERT.fullmatch(module)
        return found and cls(found["layer"], int(found["index"]), found["projection"])

    @property
    def pattern(self) -> str:
        """A target of `quantization_config` for this projection of all experts of the layer."""
        return rf"re:{re.escape(self.layer)}\.\d+\.{self.projection}$"


def targets_of(partitions: Mapping[str, Partition]) -> dict[str, Partition]:
    """Target → partition: full names, and one pattern for the experts of a layer.

    Raises:
        ValueError: experts of one layer whose partitions differ.
    """
    targets: dict[str, Partition] = {}
    for module, partition in partitions.items():
        expert = ExpertName.parse(module)
        target = expert.pattern if expert else module
        if targets.setdefault(target, partition) != partition:
            raise ValueError(
                f"{module}: {_words(partition)}, but other experts of its layer: "
                f"{_words(targets[target])}; all experts of a layer are divided alike"
            )
    return targets


def check_mlps(modules: Modules, config: Mapping[str, Any]) -> None:
    """Refuse MLPs that tensor parallelism would tear apart, and incomplete or unequal experts.

    Args:
        config: config.json of the model.

    Raises:
        ValueError: naming the module.
    """
    _check_experts(modules, config)
    for module, (partition, shape) in modules.items():
        parent, _, child = module.rpartition(".")
        for names in PROJECTIONS:
            down = f"{parent}.{names[2]}"
            if child in names[:2] and down in modules:
                _check_divided_alike(module, partition, shape[0], down, *modules[down])


def _check_divided_alike(
    module: str,
    partition: Partition,
    rows: int,
    down: str,
    down_partition: Partition,
    down_shape: tuple[int, int],
) -> None:
    """A rank takes its part of every segment: gate, up and down must mean the same channels."""
    sizes = _along(partition, rows, "output")
    down_sizes = _along(down_partition, down_shape[1], "input")
    if sizes != down_sizes:
        raise ValueError(
            f"{module} divides its output channels into {sizes}, {down} its input channels into "
            f"{down_sizes}; an MLP has one list of segments"
        )


def _along(partition: Partition, size: int, split: str) -> list[int]:
    """Segment sizes along the intermediate dimension, of `size` channels."""
    if partition.split != split:  # one region, or divided along the other dimension
        return [size]
    return [segment.size for segment in partition.segments]


def _check_experts(modules: Modules, config: Mapping[str, Any]) -> None:
    layers: dict[str, dict[str, dict[int, str]]] = {}
    for module in modules:
        expert = ExpertName.parse(module)
        if expert:
            found = layers.setdefault(expert.layer, {}).setdefault(expert.projection, {})
            found[expert.index] = module
    for layer, projections in layers.items():
        if set(projections) not in [set(names) for names in PROJECTIONS]:
            raise ValueError(
                f"{layer}: experts of {sorted(projections)}; needed: one of "
                f"{[list(names) for names in PROJECTIONS]}"
            )
        count = _expert_count(config) or 1 + max(max(found) for found in projections.values())
        for projection, found in projections.items():
            _check_alike(modules, found, f"{layer}.{{}}.{projection}", count)


def _check_alike(modules: Modules, found: Mapping[int, str], name: str, count: int) -> None:
    for index in range(count):
        if index not in found:
            raise ValueError(
                f"{name.format(index)} is missing: the layer has {count} experts, and all of them "
                "are stored or none"
            )
    for index, module in found.items():
        if index >= count:
            raise ValueError(f"{module}: config.json states {count} experts")
        if modules[module] != modules[found[0]]:
            partition, shape = modules[module]
            raise ValueError(
                f"{module} is {list(shape)}, {_words(partition)}; expert 0 differs: all experts of "
                "a layer are divided alike"
            )


def _expert_count(config: Mapping[str, Any]) -> int | None:
    text = {**config, **(config.get("text_config") or {})}
    return next((text[key] for key in _EXPERT_COUNTS if isinstance(text.get(key), int)), None)


def _words(partition: Partition) -> str:
    segments = " + ".join(f"{s.size} {s.kind.value}" for s in partition.segments)
    return f"{partition.split}-split {segments}"
