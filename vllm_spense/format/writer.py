"""Write checkpoint folders: into `OUT.partial`, then one rename.

A half-written folder is never taken for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_spense.format.schema import SpenseQuantization
from vllm_spense.format.shards import INDEX, SINGLE

__all__ = ["INTERMEDIATE_ORDER", "CheckpointWriter"]

INTERMEDIATE_ORDER = "spense/intermediate_order.safetensors"
_SIDE_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json",
               "added_tokens.json", "generation_config.json", "chat_template*", "preprocessor*",
               "processor_config.json")  # fmt: skip


class CheckpointWriter:
    """Streams tensors into shards under `OUT.partial`; `finish` makes it a checkpoint."""

    def __init__(self, out: Path | str, max_shard_bytes: int = 5 << 30) -> None:
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        if self.out.exists():
            raise ValueError(f"{self.out} exists; choose another output folder or remove it")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, dict[str, int]]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Append tensors (full names). A name that comes twice is an error."""
        for name, tensor in tensors.items():
            if name in self._pending or any(name in sizes for _, sizes in self._shards):
                raise ValueError(f"{name} was written twice")
            if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous()
            self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}"
        _save(self._pending, self.partial / name)
        self._shards.append((name, {key: t.nbytes for key, t in self._pending.items()}))
        self._pending, self._pending_bytes = {}, 0

    def finish(
        self,
        config: Mapping[str, Any],
        quantization: SpenseQuantization | dict[str, Any] | None,
        copy_from: Path | str | None = None,
        intermediate_order: Mapping[str, Tensor] | None = None,
        extra_files: Mapping[str, str] | None = None,
    ) -> Path:
        """Write index, config and side files, then rename to `out`.

        Args:
            config: the model's config.json; its `quantization_config` is replaced (or dropped if
                None).
            copy_from: folder whose tokenizer, chat template and generation files are copied.
            intermediate_order: MLP module → int32 [intermediate]: original index of each channel.
            extra_files: path inside the folder → text.
        """
        self._flush()
        self._name_shards()
        config = {k: v for k, v in config.items() if k != "quantization_config"}
        if quantization is not None:
            is_ours = isinstance(quantization, SpenseQuantization)
            config["quantization_config"] = quantization.to_dict() if is_ours else quantization
        if copy_from is not None:
            _copy_side_files(Path(copy_from), self.partial)
        if intermediate_order:
            path = self.partial / INTERMEDIATE_ORDER
            path.parent.mkdir(exist_ok=True)
            _save({k: v.to(torch.int32).contiguous() for k, v in intermediate_order.items()}, path)
        for name, text in {
            "config.json": json.dumps(config, indent=2) + "\n",
            **(extra_files or {}),
        }.items():
            (self.partial / name).parent.mkdir(parents=True, exist_ok=True)
            (self.partial / name).write_text(text)
        if self.out.exists():
            raise ValueError(
                f"{self.out} appeared while the checkpoint was written; it was not touched"
            )
        os.replace(self.partial, self.out)
        return self.out

    def _name_shards(self) -> None:
        total = len(self._shards)
        if total == 1:
            (self.partial / self._shards[0][0]).rename(self.partial / SINGLE)
            return
        weight_map, size = {}, 0
        for i, (temporary, sizes) in enumerate(self._shards, 1):
            name = f"model-{i:05d}-of-{total:05d}.safetensors"
            (self.partial / temporary).rename(self.partial / name)
            weight_map |= dict.fromkeys(sizes, name)
            size += sum(sizes.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors makes files that only their owner can read; a checkpoint follows the umask."""
    save_file(tensors, path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _copy_side_files(source: Path, target: Path) -> None:
    for pattern in _SIDE_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
