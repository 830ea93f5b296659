"""Calibration tokens [samples, length] from a text file, a JSONL file or a hub data set.

Windows never overlap and are never padded. Which windows are taken depends on the seed alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "PYTHON_DOCS",
    "SELF",
    "CalibrationError",
    "TextSource",
    "documents",
    "pack_windows",
    "text_tokens",
    "token_digest",
]

SELF = "self"
PYTHON_DOCS = "python-docs"  # English text that every Python carries: help topics, in two halves
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_KEYS = ("text", "messages")


class CalibrationError(ValueError):
    """Calibration text that cannot be used; the message names the source."""


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Attributes:
        name: path of a text or JSONL file, `NAME[:CONFIG[:SPLIT]]` of a data set
            (a hub name or a local folder), or one of
            `python-docs`, `python-docs:0` and `python-docs:1` (the help topics of the running
            Python, or every second of them).
    """

    name: str

    @property
    def is_file(self) -> bool:
        """Whether the name is an existing file, or can only have been meant as one."""
        path = Path(self.name)
        if Path(self.name.partition(":")[0]).is_dir():
            return False  # a data set in a local folder
        text_like = path.suffix in (".txt", ".md", *_JSON_SUFFIXES)
        return path.is_file() or path.is_absolute() or text_like

    @property
    def is_python_docs(self) -> bool:
        """Whether the name means Python's help topics."""
        return self.name.partition(":")[0] == PYTHON_DOCS and not Path(self.name).exists()

    def digest(self) -> str:
        """SHA-256 of the text; for a data set its name (its content is known only once loaded)."""
        if self.is_python_docs:
            return hashlib.sha256("".join(_python_docs(self.name)).encode()).hexdigest()
        if not self.is_file:
            return self.name
        return hashlib.sha256(_read(Path(self.name)).encode()).hexdigest()


def _read(path: Path) -> str:
    if not path.is_file():
        raise CalibrationError(f"calibration file {path} does not exist")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"calibration file {path} is not UTF-8 text: {error}") from None


def documents(source: TextSource, tokenizer: Any) -> Iterator[str]:
    """The documents of a source as text; chat messages go through the tokenizer's chat template."""
    if source.is_python_docs:
        yield from _python_docs(source.name)
        return
    if not source.is_file:
        yield from (_record_text(row, source.name, tokenizer) for row in _data_set(source.name))
        return
    path = Path(source.name)
    content = _read(path)
    if path.suffix not in _JSON_SUFFIXES:
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{where} is not JSON: {error}") from None
            yield _record_text(record, where, tokenizer)


def _python_docs(name: str) -> list[str]:
    from pydoc_data.topics import topics

    half = name.partition(":")[2]
    if half not in ("", "0", "1"):
        raise CalibrationError(f"{name}: the halves of {PYTHON_DOCS} are :0 and :1")
    texts = [topics[key] for key in sorted(topics)]
    return texts[int(half) :: 2] if half else texts


def _record_text(record: Any, where: str, tokenizer: Any) -> str:
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{where} has 'messages', but the tokenizer has no chat template"
            )
        return tokenizer.apply_chat_template(record["messages"], tokenize=False)
    keys = sorted(record) if isinstance(record, dict) else type(record).__name__
    raise CalibrationError(f"{where} has {keys}; needed: one of the keys {list(_KEYS)}")


def _data_set(name: str) -> Iterable[dict[str, Any]]:
    import datasets

    path, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        return datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
    except Exception as error:  # datasets raises many kinds; all mean that there is no text
        raise CalibrationError(
            f"calibration source {name!r} is no file, and no data set that can be loaded: {error}"
        ) from error


def pack_windows(ids: Tensor, samples: int, length: int, seed: int, source: str) -> Tensor:
    """Cut a stream of tokens into windows and take `samples` of them, chosen by seed.

    Args:
        ids: int64 [tokens].

    Returns:
        int64 [samples, length], in stream order.

    Raises:
        CalibrationError: too few tokens, with both numbers.
    """
    available = len(ids) // length
    if available < samples:
        raise CalibrationError(
            f"{source} gives {len(ids)} tokens; needed: {samples * length} ({samples} samples of "
            f"{length}). Give more text, or fewer or shorter samples"
        )
    windows = ids[: available * length].reshape(available, length)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(available, generator=generator)[:samples].sort().values
    return windows[chosen]


def text_tokens(source: TextSource, tokenizer: Any, samples: int, length: int, seed: int) -> Tensor:
    """Tokens [samples, length] of a source, documents separated by the end-of-text token.

    A data set is read only as far as needed, so that a large one is not downloaded whole.

    Raises:
        CalibrationError: naming the source: missing, empty, too short, not readable.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for text in documents(source, tokenizer):
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
        if not source.is_file and len(ids) >= samples * length:
            break
    if len(ids) <= len(end):
        raise CalibrationError(
            f"{source.name} holds no text (0 tokens); needed: {samples * length} tokens"
        )
    return pack_windows(torch.tensor(ids), samples, length, seed, source.name)


def token_digest(tokens: Tensor) -> str:
    """SHA-256 of tokens and shape."""
    head = f"{tuple(tokens.shape)}".encode()
    return hashlib.sha256(head + tokens.to(torch.int64).cpu().numpy().tobytes()).hexdigest()
