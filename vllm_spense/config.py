"""`--quantization spense`: reads the checkpoint's description, picks a method for every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from vllm_spense import compat
from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.legacy import METHOD as LEGACY_METHOD
from vllm_spense.format.legacy import LegacyQuantization, claims
from vllm_spense.format.schema import METHOD, SpenseQuantization
from vllm_spense.linear import SpenseLinearMethod
from vllm_spense.log import info_once, logger

__all__ = ["SpenseConfig"]

PRUNE_FIRST = (
    "--quantization spense serves checkpoints that were pruned before, and this model has no "
    "spense 'quantization_config'. Prune it first: "
    "python scripts/prune.py MODEL OUT --method spensegpt+ --dense-share 0.25"
)


class SpenseConfig(QuantizationConfig):
    """What vLLM asks about a spense checkpoint."""

    def __init__(self, quantization: SpenseQuantization | None = None) -> None:
        super().__init__()
        if quantization is None:  # vLLM's way of asking for online quantization of any model
            raise ValueError(PRUNE_FIRST)
        if quantization.static_activations:
            raise ValueError("static activation scales cannot be served by this release yet")
        self._quantization = quantization

    @classmethod
    def register(cls) -> None:
        """Make the method known to vLLM (again and again, harmlessly)."""
        compat.check_version()
        register_quantization_config(METHOD)(cls)

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim 2:4 checkpoints that compressed-tensors wrote and vLLM does not serve."""
        if not claims(hf_quant_cfg):
            return None
        named = (None, METHOD, LEGACY_METHOD, hf_quant_cfg.get("quant_method"))
        return METHOD if user_quant in named else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SpenseConfig:
        if claims(config):
            from vllm_spense.legacy_config import LegacyConfig  # a subclass of this class

            return LegacyConfig(LegacyQuantization.parse(config))
        return cls(SpenseQuantization.parse(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Check all headers before anything is loaded (a local folder; hub files come later)."""
        if not Path(model_name).is_dir():
            info_once(
                f"spense: {model_name} is no local folder; its tensors are checked as they load"
            )
            return
        if not any(Path(model_name).glob("*.safetensors*")):
            logger.warning("spense: %s holds no safetensors to check", model_name)
            return
        self._check(Path(model_name))

    def _check(self, folder: Path) -> None:
        """Refuse a folder whose headers are not what the config says."""
        Checkpoint.open(folder)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Translate module names where a model of vLLM names its modules differently."""
        mapper = compat.rename_mapper(hf_to_vllm_mapper)
        for group in self._quantization.groups.values():
            group.targets = mapper.apply_list(group.targets)
        self._quantization.ignore = mapper.apply_list(self._quantization.ignore)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer.

        Raises:
            ValueError: a layer that the checkpoint neither describes nor ignores, a fused layer of
                which only a part is ignored, or a kind of layer that cannot be served sparse.
        """
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if isinstance(layer, compat.RoutedExperts):
            return self._experts_method(layer, prefix)
        if self._is_described(prefix):
            raise ValueError(
                f"{prefix} is a {type(layer).__name__}; this release serves pruned linear layers "
                "and experts only"
            )
        return None

    def _is_described(self, prefix: str) -> bool:
        """Whether the checkpoint names a layer of whatever kind as one of its own."""
        return self._quantization.names(prefix)

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        modules = self._modules(prefix)
        partitions = [self._quantization.partition_of(module) for module in modules]
        if all(partition is None for partition in partitions):
            return UnquantizedLinearMethod()
        if any(partition is None for partition in partitions):
            kept = [m for m, p in zip(modules, partitions, strict=True) if p is None]
            raise ValueError(
                f"{prefix}: {kept} are ignored but the rest of the fused layer is not; store them "
                "as dense regions instead"
            )
        return SpenseLinearMethod(modules, tuple(partitions), self._quantization.dtype)

    def _experts_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase:
        """All experts of a layer have one description; ignored ones stay as they were."""
        from vllm_spense.expert_planes import StoredExperts
        from vllm_spense.experts import experts_method

        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        found = {
            tuple(self._quantization.partition_of(f"{prefix}.{index}.{name}") for name in names)
            for index in range(layer.moe_config.num_logical_experts)
        }
        if found == {(None,) * 3}:
            info_once("spense: experts that the checkpoint does not quantise stay as they are")
            return UnquantizedFusedMoEMethod(layer.moe_config)
        partitions = found.pop()
        if found or None in partitions:
            raise ValueError(
                f"{prefix}: its experts are not stored alike; all experts of a layer have the same "
                "partitions, or all are ignored"
            )
        stored = StoredExperts(prefix, names, partitions, self._quantization.dtype)
        return experts_method(stored, layer)

    def _modules(self, prefix: str) -> tuple[str, ...]:
        """The checkpoint's modules in a layer: q, k, v of qkv_proj; gate, up of gate_up_proj."""
        parent, _, name = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(name, [name])
        return tuple(f"{parent}.{part}" if parent else part for part in parts)
