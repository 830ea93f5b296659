"""`quantization_config` of a spense checkpoint: what every linear layer looks like.

FP8 is described by compressed-tensors' `QuantizationArgs`, and module names are matched as it
matches them (full names, or `re:` patterns). Anything that this version does not know is refused by
name: an ignored key is a wrong answer later.

Experts are targets of the same groups, one pattern for a projection of all experts of a layer.
Where later versions will go: KV-cache scales are announced by `kv_cache_scheme`; other scale
layouts by `weights.strategy`; other region kinds by the `kind` of a segment; whatever else by a
name in `features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import match_name
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from vllm_spense.format.experts import targets_of
from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import WEIGHT_DTYPES
from vllm_spense.format.tiles import Tiles

__all__ = ["FORMAT_VERSION", "METHOD", "ModuleGroup", "SpenseQuantization", "make_quantization"]

METHOD = "spense"
FORMAT_VERSION = 1
MAX_PARTITIONS = 4  # every further set of shapes is compiled anew when serving
_STORED_ARGS = {"num_bits", "type", "symmetric", "strategy", "dynamic"}
_ACTIVATIONS = {("token", True), ("tensor", False)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TilesModel(_Strict):
    """`tiles.Tiles`: tiles of rows × cols, `kept` of `total` along K in every row block."""

    rows: int
    cols: int
    kept: int
    total: int
    k_shards: int

    @model_validator(mode="after")
    def _possible(self) -> TilesModel:
        _ = self.tiles
        return self

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.rows, self.cols, self.kept, self.total, self.k_shards)


class SegmentModel(_Strict):
    """`partition.Segment`; the key `tiles` exists for kind `zero_tiles` alone."""

    kind: RegionKind
    size: int = Field(gt=0)
    tiles: TilesModel | None = None

    @classmethod
    def of(cls, segment: Segment) -> SegmentModel:
        tiles = None if segment.tiles is None else TilesModel(**asdict(segment.tiles))
        return cls(kind=segment.kind, size=segment.size, tiles=tiles)

    @property
    def segment(self) -> Segment:
        return Segment(self.kind, self.size, self.tiles and self.tiles.tiles)

    @model_serializer(mode="wrap")
    def _without_empty_tiles(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stored = handler(self)
        if self.tiles is None:
            del stored["tiles"]
        return stored


class ModuleGroup(_Strict):
    """Modules with the same partition."""

    targets: list[str] = Field(min_length=1)
    split: Literal["output", "input"]
    segments: list[SegmentModel] = Field(min_length=1)

    @property
    def partition(self) -> Partition:
        return Partition(self.split, tuple(model.segment for model in self.segments))

    @model_validator(mode="after")
    def _partition_is_possible(self) -> ModuleGroup:
        _ = self.partition
        return self


class SpenseQuantization(_Strict):
    """The whole of `quantization_config`; `parse` is the way in, `to_dict` the way out."""

    quant_method: Literal["spense"] = METHOD
    format_version: int = FORMAT_VERSION
    features: list[str] = []
    weight_dtype: str
    weights: QuantizationArgs | None = None
    activations: QuantizationArgs | None = None
    kv_cache_scheme: QuantizationArgs | None = None
    groups: dict[str, ModuleGroup]
    ignore: list[str] = []
    provenance: dict[str, Any] = {}

    @field_validator("format_version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if version != FORMAT_VERSION:
            raise ValueError(
                f"version {version} is not readable; this release reads {FORMAT_VERSION}"
            )
        return version

    @field_validator("features")
    @classmethod
    def _no_features_yet(cls, features: list[str]) -> list[str]:
        if features:
            raise ValueError(
                f"unknown features {features}: a newer vllm-spense wrote this checkpoint"
            )
        return features

    @field_validator("weight_dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{dtype!r}; needed: one of {sorted(WEIGHT_DTYPES)}")
        return dtype

    @model_validator(mode="after")
    def _consistent(self) -> SpenseQuantization:
        _check_args(self)
        partitions = {group.partition.segments for group in self.groups.values()}
        hybrids = {segments for segments in partitions if len(segments) > 1}
        if len(hybrids) > MAX_PARTITIONS:
            raise ValueError(
                f"{len(hybrids)} distinct hybrid partitions; at most {MAX_PARTITIONS} per model"
            )
        return self

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> SpenseQuantization:
        """Validate a `quantization_config`.

        Raises:
            ValueError: one line per fault, each with the key it concerns.
        """
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'quantization_config'}: {fault['msg']}"
                for fault in error.errors()
            )
            raise ValueError(f"quantization_config of the checkpoint: {faults}") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Of compressed-tensors' arguments only those that all its releases share."""
        args = dict.fromkeys(("weights", "activations", "kv_cache_scheme"), _STORED_ARGS)
        dump = self.model_dump(mode="json", exclude=set(args))
        for key, stored in args.items():
            value = getattr(self, key)
            dump[key] = None if value is None else value.model_dump(mode="json", include=stored)
        return dump

    @property
    def dtype(self) -> torch.dtype:
        return WEIGHT_DTYPES[self.weight_dtype]

    @property
    def static_activations(self) -> bool:
        """Whether each module carries an `input_scale`."""
        return self.activations is not None and not self.activations.dynamic

    def names(self, module: str) -> bool:
        """Whether some group has `module` as a target."""
        return any(matches(module, group.targets) for group in self.groups.values())

    def partition_of(self, module: str) -> Partition | None:
        """How `module` (its full name) is stored; None if the checkpoint keeps it as it was.

        Raises:
            ValueError: the module is in no group and not ignored, or in several groups.
        """
        found = [name for name, group in self.groups.items() if matches(module, group.targets)]
        if matches(module, self.ignore):
            if found:
                raise ValueError(f"{module} is both ignored and in group {found[0]!r}")
            return None
        if len(found) != 1:
            problem = f"is in groups {found}" if found else "is in no group and not in 'ignore'"
            raise ValueError(f"{module} {problem}; quantization_config must name it exactly once")
        return self.groups[found[0]].partition


def matches(module: str, targets: list[str]) -> bool:
    """Whether a full module name is among targets (names, or `re:` patterns)."""
    return any(match_name(module, target) for target in targets)


def _check_args(config: SpenseQuantization) -> None:
    fp8 = config.weight_dtype == "float8_e4m3fn"
    if fp8 != (config.weights is not None):
        raise ValueError(
            f"'weights' must be {'given' if fp8 else 'null'} for {config.weight_dtype}"
        )
    if config.weights is not None:
        weights = config.weights
        if (weights.num_bits, weights.type, weights.strategy) != (8, "float", "channel"):
            raise ValueError(
                f"weights: {weights.num_bits}-bit {weights.type} by {weights.strategy}; "
                "version 1 has 8-bit float by channel (tensor, group and block are reserved)"
            )
        if weights.dynamic or not weights.symmetric:
            raise ValueError("weights: version 1 has static symmetric scales")
    activations = config.activations
    if fp8 != (activations is not None):
        raise ValueError(
            f"'activations' must be {'given' if fp8 else 'null'} for {config.weight_dtype}"
        )
    if activations is not None:
        if (activations.num_bits, activations.type) != (8, "float") or not activations.symmetric:
            raise ValueError("activations: version 1 has 8-bit symmetric float")
        if (activations.strategy, activations.dynamic) not in _ACTIVATIONS:
            raise ValueError(
                f"activations: strategy {activations.strategy} with dynamic={activations.dynamic}; "
                "version 1 has dynamic by token and static by tensor"
            )
    if config.kv_cache_scheme is not None:
        raise ValueError("kv_cache_scheme is reserved; version 1 stores no KV-cache scales yet")


def _fp8_args(strategy: str, dynamic: bool) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy=strategy, dynamic=dynamic
    )


def make_quantization(
    weight_dtype: torch.dtype,
    partitions: Mapping[str, Partition],
    ignore: list[str],
    provenance: dict[str, Any],
) -> SpenseQuantization:
    """Describe a model whose modules (full names) have these partitions."""
    by_partition: dict[Partition, list[str]] = {}
    for target, partition in targets_of(partitions).items():
        by_partition.setdefault(partition, []).append(target)
    fp8 = weight_dtype == torch.float8_e4m3fn
    return SpenseQuantization(
        weight_dtype=str(weight_dtype).removeprefix("torch."),
        weights=_fp8_args("channel", False) if fp8 else None,
        activations=_fp8_args("token", True) if fp8 else None,
        groups={
            f"group_{i}": ModuleGroup(
                targets=targets,
                split=partition.split,
                segments=[SegmentModel.of(segment) for segment in partition.segments],
            )
            for i, (partition, targets) in enumerate(by_partition.items())
        },
        ignore=ignore,
        provenance=provenance,
    )
