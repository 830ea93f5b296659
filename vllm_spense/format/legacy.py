"""2:4 checkpoints of compressed-tensors (0.9 … 0.12, llm-compressor's `*-2of4-*`): what they say.

    format                 tensors of a module [N, K]
    sparse-24-bitmask      compressed [N, K/2]: two values of every four, in order
                           bitmask [N, K/8] uint8: bit i of byte b is set where column 8 b + i is
                           one of the two; shape int64 [2] or [2, 1]
    dense                  weight [N, K] with the zeros inside
    FP8 on top of either   weight_scale [N, 1] or [1]; input_scale [1] if activations are static

Not readable: unstructured bitmasks, Marlin's 2:4 layouts, integer weights, KV-cache scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from pydantic import BaseModel, ValidationError

from vllm_spense.format.partition import META_GROUP
from vllm_spense.format.planes import TensorSpec
from vllm_spense.format.schema import matches

__all__ = ["BITMASK", "METHOD", "LegacyQuantization", "Stored", "claims"]

METHOD = "compressed-tensors"
BITMASK = "sparse-24-bitmask"
_MARLIN = {"gptq_marlin_24", "marlin_24"}
_ANY_LINEAR = "Linear"
_ACTIVATIONS = {("token", True), ("tensor", True), ("tensor", False)}


@dataclass(frozen=True)
class Stored:
    """How the config says that one linear module is stored.

    `sparse`: it is announced as 2:4; `bitmask`: as `compressed` and `bitmask`; `scale`: FP8 with
    one scale per channel or one in all, None: not quantised; `static`: it has an `input_scale`.
    """

    sparse: bool = False
    bitmask: bool = False
    scale: Literal["channel", "tensor"] | None = None
    static: bool = False

    def specs(self, rows: int, cols: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The tensors that carry the weight (not scales)."""
        if not self.bitmask:
            return {"weight": TensorSpec((rows, cols), dtype)}
        return {
            "compressed": TensorSpec((rows, cols // 2), dtype),
            "bitmask": TensorSpec((rows, cols // META_GROUP), torch.uint8),
        }


class SparsityModel(BaseModel):
    """`sparsity_config`; without targets all linear layers are meant."""

    format: str
    targets: list[str] | None = None
    ignore: list[str] | None = None
    sparsity_structure: str | None = None


class GroupModel(BaseModel):
    """One of `config_groups`."""

    targets: list[str]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None


class LegacyQuantization(BaseModel):
    """What of a compressed-tensors config decides how tensors are read; vLLM and later releases add
    keys of their own, which are not looked at."""

    config_groups: dict[str, GroupModel] = {}
    ignore: list[str] = []
    sparsity_config: SparsityModel
    version: str = "unknown"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LegacyQuantization:
        """Validate the `quantization_config` of a checkpoint that `claims` is true for.

        Raises:
            ValueError: naming the key, what it holds and what can be read.
        """
        if _is_marlin(config):
            raise ValueError(
                "this checkpoint is in Marlin's 2:4 layout (marlin_24): 4- or 8-bit integers "
                "permuted for a kernel that vLLM removed in 0.15; no kernel here takes them. Prune "
                "the original model again: python scripts/prune.py MODEL OUT"
            )
        for key, why in _UNREADABLE.items():
            if config.get(key):
                raise ValueError(f"quantization_config: {key} is {config[key]!r}; {why}")
        try:
            parsed = cls.model_validate({k: v for k, v in config.items() if v is not None})
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            raise ValueError(f"quantization_config of the checkpoint: {faults}") from None
        _check_sparsity(parsed.sparsity_config)
        for name, group in parsed.config_groups.items():
            _check_group(name, group, parsed.sparsity_config.format)
        return parsed

    @property
    def static(self) -> bool:
        """Whether some activations were meant to be quantised with stored scales."""
        return any(
            g.input_activations is not None and not g.input_activations.dynamic
            for g in self.config_groups.values()
        )

    def stored_as(self, module: str) -> Stored:
        """How a linear layer (its full name) is stored; `Stored()` if it is an ordinary one.

        Raises:
            ValueError: several groups quantise it.
        """
        sparsity = self.sparsity_config
        sparse = sparsity.sparsity_structure == "2:4" and _targets(
            module, sparsity.targets or [_ANY_LINEAR], sparsity.ignore or []
        )
        bitmask = sparse and sparsity.format == BITMASK
        found = [
            group for group in self.config_groups.values()
            if group.weights is not None and _targets(module, group.targets, self.ignore)
        ]  # fmt: skip
        if len(found) > 1:  # a full name or pattern is meant to override the type
            found = [group for group in found if matches(module, group.targets)]
        if len(found) > 1:
            raise ValueError(f"{module} is in {len(found)} of quantization_config's groups")
        if not found:
            return Stored(sparse, bitmask)
        return Stored(
            sparse,
            bitmask,
            QuantizationStrategy(found[0].weights.strategy).value,
            not found[0].input_activations.dynamic,
        )


_UNREADABLE = {
    "kv_cache_scheme": "KV-cache scales cannot be read by this release",
    "transform_config": "transformed weights cannot be read by this release",
}


def claims(config: Any) -> bool:
    """Whether a `quantization_config` is a 2:4 one that vLLM itself does not serve, or not sparse.

    vLLM refuses compressed-tensors checkpoints whose `sparsity_config` has targets, whatever they
    hold, and cannot read bitmasks. Those are ours, and so is an announced 2:4 structure that can be
    read here; everything else stays vLLM's.
    """
    if not isinstance(config, Mapping):
        return False
    if _is_marlin(config):
        return True
    sparsity = config.get("sparsity_config")
    if _method(config) != "compressed_tensors" or not isinstance(sparsity, Mapping) or not sparsity:
        return False
    if sparsity.get("targets") or sparsity.get("format") == BITMASK:
        return True
    if sparsity.get("sparsity_structure") != "2:4":
        return False
    try:
        LegacyQuantization.parse(config)
    except ValueError:
        return False
    return True


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("quant_method", "")).lower().replace("-", "_")


def _is_marlin(config: Mapping[str, Any]) -> bool:
    layouts = (config.get("format"), config.get("checkpoint_format"))
    named = {str(layout).lower().replace("-", "_") for layout in layouts}
    return bool(_MARLIN & {_method(config), *named}) or bool(config.get("is_marlin_24_format"))


def _check_sparsity(sparsity: SparsityModel) -> None:
    structure = sparsity.sparsity_structure
    if sparsity.format == BITMASK and structure != "2:4":
        raise ValueError(f"sparsity_config: {BITMASK} with structure {structure!r}; needed: '2:4'")
    if sparsity.format not in ("dense", BITMASK):
        raise ValueError(
            f"sparsity_config: format {sparsity.format!r} cannot be read; needed: 'dense' or "
            f"{BITMASK!r} (an unstructured sparse model gains nothing from 2:4 kernels)"
        )


def _check_group(name: str, group: GroupModel, sparse_format: str) -> None:
    """FP8 weights by channel or tensor with FP8 activations, or nothing."""
    where = f"config_groups.{name}"
    weights, activations = group.weights, group.input_activations
    if weights is None and activations is None:
        return
    if group.output_activations is not None:
        raise ValueError(f"{where}: quantised outputs cannot be served")
    if weights is None or activations is None:
        missing = "weights" if weights is None else "input_activations"
        raise ValueError(f"{where}: no {missing}; needed: FP8 weights with FP8 activations")
    is_fp8 = all((a.num_bits, a.type, a.symmetric) == (8, "float", True)
                 for a in (weights, activations))  # fmt: skip
    if not is_fp8:
        hint = (
            "; its weights are stored densely, so without the key 'sparsity_config' in config.json "
            "vLLM serves it as a dense model" if sparse_format == "dense" else ""
        )  # fmt: skip
        raise ValueError(
            f"{where}: {weights.num_bits}-bit {weights.type} weights with "
            f"{activations.num_bits}-bit {activations.type} activations; "
            f"needed: symmetric 8-bit float{hint}"
        )
    if weights.strategy not in ("channel", "tensor") or weights.dynamic:
        raise ValueError(
            f"{where}: weights by {weights.strategy}, dynamic={weights.dynamic}; "
            "needed: static scales by channel or tensor"
        )
    if (activations.strategy, activations.dynamic) not in _ACTIVATIONS:
        raise ValueError(
            f"{where}: activations by {activations.strategy}, dynamic={activations.dynamic}; "
            "needed: dynamic by token or tensor, or static by tensor"
        )


def _targets(module: str, targets: list[str], ignore: list[str]) -> bool:
    """Whether a linear layer is meant: by type, full name or pattern, and not ignored."""
    if matches(module, ignore):
        return False
    return _ANY_LINEAR in targets or matches(module, targets)
