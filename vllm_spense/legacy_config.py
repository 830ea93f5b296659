"""`quantization_config` of a legacy 2:4 checkpoint: which method serves each of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_spense import compat
from vllm_spense.config import SpenseConfig
from vllm_spense.format.legacy import LegacyQuantization, Stored
from vllm_spense.format.legacy_checkpoint import LegacyCheckpoint
from vllm_spense.legacy_linear import LegacyLinearMethod
from vllm_spense.log import info_once

__all__ = ["LegacyConfig"]


class LegacyConfig(SpenseConfig):
    """What vLLM asks about a compressed-tensors checkpoint with 2:4 sparsity."""

    def __init__(self, legacy: LegacyQuantization) -> None:
        super(SpenseConfig, self).__init__()
        self._legacy = legacy
        info_once(
            f"spense: serving a compressed-tensors 2:4 checkpoint "
            f"({legacy.sparsity_config.format}) that vLLM itself does not read"
        )
        if legacy.static:
            info_once(
                "spense: its static activation scales are not used: activations are quantised per "
                "token as they come, which is more exact"
            )

    def _check(self, folder: Path) -> None:
        LegacyCheckpoint.open(folder)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Translate full names; types ("Linear") and patterns stay, as vLLM's own class does it."""
        mapper = compat.rename_mapper(hf_to_vllm_mapper)
        legacy = self._legacy
        for holder in (*legacy.config_groups.values(), legacy.sparsity_config):
            holder.targets = _mapped(holder.targets, mapper)
        for holder in (legacy, legacy.sparsity_config):
            holder.ignore = _mapped(holder.ignore, mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """As `SpenseConfig` does; embeddings and heads must be ordinary ones."""
        if isinstance(layer, ParallelLMHead):
            stored = self._legacy.stored_as(prefix)
            if stored.bitmask or stored.scale:
                raise ValueError(
                    f"{prefix}: quantization_config compresses it too (it is not in 'ignore'); "
                    "only linear layers inside the blocks can be served so"
                )
            return None
        return super().get_quant_method(layer, prefix)

    def _is_described(self, prefix: str) -> bool:
        return False

    def _experts_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase:
        raise ValueError(
            f"{prefix}: experts of a compressed-tensors 2:4 checkpoint are not served as they are; "
            "convert it: python scripts/convert.py LEGACY OUT"
        )

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        modules = self._modules(prefix)
        stored = tuple(self._legacy.stored_as(module) for module in modules)
        if all(module == Stored() for module in stored):
            return UnquantizedLinearMethod()
        return LegacyLinearMethod(modules, stored)


def _mapped(names: list[str] | None, mapper: Any) -> list[str] | None:
    if names is None:
        return None
    is_path = [("." in name and not name.startswith("re:")) for name in names]
    paths = iter(mapper.apply_list([n for n, path in zip(names, is_path, strict=True) if path]))
    kept = [n for n, path in zip(names, is_path, strict=True) if not path]
    return [*kept, *paths]
