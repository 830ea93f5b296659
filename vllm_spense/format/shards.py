"""The safetensors files of a folder: which there are, and what their headers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_spense.format.planes import TensorSpec

__all__ = ["INDEX", "SINGLE", "read_headers", "read_json", "shard_files"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SAFETENSORS_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BF16": torch.bfloat16,
    "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "BOOL": torch.bool,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError naming the file if it is none."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; needed: an object")
    return content


def shard_files(folder: Path) -> dict[str, list[str] | None]:
    """Shard name → tensors that the index puts there (None without an index)."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        shards: dict[str, list[str] | None] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(
                    f"{folder / INDEX}: {tensor} points to {shard!r}, not a file beside it"
                )
            shards.setdefault(shard, []).append(tensor)
        for path in folder.glob("model*.safetensors"):
            if path.name not in shards:
                raise ValueError(f"{path} is a shard that {INDEX} does not name")
        return shards
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    raise ValueError(f"{folder} has neither {INDEX} nor {SINGLE}")


def read_headers(folder: Path) -> dict[str, tuple[str, TensorSpec]]:
    """Tensor name → (shard, shape and dtype), from the headers alone.

    Raises:
        ValueError: naming the file: missing, truncated, not safetensors, or at odds with the index.
    """
    headers: dict[str, tuple[str, TensorSpec]] = {}
    for shard, expected in shard_files(folder).items():
        found = _read_shard_header(folder / shard)
        for name in set(expected or ()) - found.keys():
            raise ValueError(f"{folder / shard}: the index puts {name} here, but it is missing")
        for name, spec in found.items():
            if expected is not None and name not in expected:
                raise ValueError(f"{folder / shard}: holds {name}, which the index does not name")
            headers[name] = (shard, spec)
    return headers


def _read_shard_header(path: Path) -> dict[str, TensorSpec]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, but the index names it")
    try:
        with safe_open(path, framework="pt") as shard:
            found = {}
            for name in shard.keys():
                view = shard.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _SAFETENSORS_DTYPES:
                    raise ValueError(f"{path}: {name} has dtype {dtype}, which is not known here")
                found[name] = TensorSpec(tuple(view.get_shape()), _SAFETENSORS_DTYPES[dtype])
            return found
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from None
