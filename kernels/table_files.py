"""Tables of measurements on disk.

tables/NVIDIA_H200.json     shipped, written by `scripts/tune.py`
CACHE/NVIDIA_H200-….json    what was measured at load on this machine, for shapes without a row
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from vllm_spense.kernels.machine import Head
from vllm_spense.kernels.measurements import LayerRow, RegionRow, Table

__all__ = ["cache_path", "read", "shipped_path", "table_for", "write"]


def shipped_path(device: str) -> Path:
    """The table that comes with the package."""
    return Path(__file__).parent / "tables" / f"{device.replace(' ', '_')}.json"


def cache_path(device: str) -> Path:
    """The table that this machine fills at load, for the libraries at hand."""
    versions = f"torch-{torch.__version__}-cuda-{torch.version.cuda}"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-spense" / f"{device.replace(' ', '_')}-{versions}.json"


def read(path: Path) -> tuple[Head, Table]:
    """A table file.

    Raises:
        ValueError: it is not one; names the file and what is wrong.
    """
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        regions = [RegionRow(**row) for row in file.pop("regions")]
        layers = [LayerRow(**row) for row in file.pop("layers")]
        return Head(**file), Table(regions, layers)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of measurements: {error}") from None


def write(path: Path, head: Head, table: Table) -> None:
    """Write a table, one row a line, atomically."""
    regions, layers = table.rows()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in asdict(head).items()]
    for name, rows in (("regions", regions), ("layers", layers)):
        body = ",\n".join(json.dumps(asdict(row)) for row in rows)
        lines.append(f'"{name}": [\n{body}\n]')
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(path)


@cache
def table_for(index: int) -> Table:
    """All that is known about the CUDA device `index`; the same object at every call."""
    device = torch.cuda.get_device_name(index)
    table = Table()
    for path in (shipped_path(device), cache_path(device)):
        if path.exists():
            table.add(*read(path)[1].rows())
    return table
