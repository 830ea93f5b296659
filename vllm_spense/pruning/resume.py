"""The work folder of a run, `OUT.work`: what is already done survives a crash.

    settings.json             fingerprint of the run; a resumed run must have the same
    calibration.safetensors   the calibration tokens
    block-00000.safetensors   one per finished layer: its tensors, its report in the metadata

Every file is written under another name, flushed to disk, and renamed: it is there whole or not at
all. The folder appears with the first file, so that a run which is refused leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_spense.pruning.block import BlockResult
from vllm_spense.pruning.report import ModuleReport

__all__ = ["WorkFolder", "WorkFolderError"]

_ORDER = "intermediate_order:"  # + the MLP below the layer; no tensor name has a colon
_SETTINGS = "settings.json"
_TOKENS = "calibration.safetensors"


class WorkFolderError(ValueError):
    """A work folder that cannot be continued; the message says why and what to do."""


class WorkFolder:
    """Opened for one run; `resume` decides what an existing folder means.

    Args:
        out: the checkpoint folder that the run is going to write.
        fingerprint: JSON-ready settings; what must not differ between a run and its continuation.

    Raises:
        WorkFolderError: a folder is there without `resume`, or it belongs to another run (naming
            the key that differs).
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], resume: bool) -> None:
        self.path = out.with_name(out.name + ".work")
        self.fingerprint = json.loads(json.dumps(fingerprint))
        settings = self.path / _SETTINGS
        if self.path.exists() and not resume:
            raise WorkFolderError(
                f"{self.path} is left from an interrupted run; continue it with --resume, "
                "or remove it"
            )
        self.resumed = settings.is_file()
        if self.resumed:
            self._compare(settings)

    def _write(self, file: Path, write: Callable[[Path], Any]) -> None:
        settings = self.path / _SETTINGS
        if not settings.is_file():
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.fingerprint, indent=2)
            _write(settings, lambda path: path.write_text(text))
        _write(file, write)

    def _compare(self, settings: Path) -> None:
        try:
            stored = json.loads(settings.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise WorkFolderError(f"{settings} is not readable: {error}") from None
        for key in sorted(stored.keys() | self.fingerprint.keys()):
            before, now = stored.get(key), self.fingerprint.get(key)
            if before != now:
                raise WorkFolderError(
                    f"{self.path} belongs to another run: {key} was {before!r}, now it is {now!r}; "
                    "give the same settings, or remove the folder"
                )

    def load_tokens(self) -> Tensor | None:
        """Calibration tokens int64 [windows, length], if they were made before."""
        path = self.path / _TOKENS
        return _load(path)[0]["tokens"] if path.is_file() else None

    def save_tokens(self, tokens: Tensor) -> None:
        """Keep calibration tokens."""
        self._write(
            self.path / _TOKENS, lambda path: save_file({"tokens": tokens.contiguous()}, path)
        )

    def _block(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def has_block(self, index: int) -> bool:
        """Whether a layer is finished."""
        return self._block(index).is_file()

    def save_block(self, index: int, result: BlockResult) -> None:
        """Keep a finished layer."""
        tensors = {name: tensor.contiguous() for name, tensor in result.tensors.items()}
        tensors |= {f"{_ORDER}{mlp}": order for mlp, order in result.orders.items()}
        report = {
            "reports": [asdict(module) for module in result.reports],
            "warnings": result.warnings,
            "names": list(result.tensors),
        }
        metadata = {"report": json.dumps(report)}
        self._write(self._block(index), lambda path: save_file(tensors, path, metadata=metadata))

    def load_block(self, index: int) -> BlockResult:
        """Read a finished layer, tensors in the order in which they were saved."""
        tensors, metadata = _load(self._block(index))
        report = json.loads(metadata["report"])
        return BlockResult(
            tensors={name: tensors[name] for name in report["names"]},
            orders={
                name.removeprefix(_ORDER): tensor
                for name, tensor in tensors.items()
                if name.startswith(_ORDER)
            },
            reports=[ModuleReport(**module) for module in report["reports"]],
            warnings=report["warnings"],
        )

    @property
    def bytes(self) -> int:
        """Size of the files that are there."""
        files = self.path.iterdir() if self.path.is_dir() else ()
        return sum(file.stat().st_size for file in files)

    def remove(self) -> None:
        """The run is finished."""
        shutil.rmtree(self.path)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, flush it, and give it its name."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WorkFolderError(f"{path} is damaged ({error}); remove it and resume again") from None
