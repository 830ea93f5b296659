"""Measured times: how long every candidate takes, by shape and M (files: `table_files.py`).

A region row has the times of the paths that take one region, a layer row those of whole plans:
"regions" (each region by its best path), paths that run a layer in one launch, and "dense" (one
dense weight [N, K]). Candidates are named "path key=value,key=value". Lookup is by nearest M in log
space; a region of unknown shape borrows from the nearest shape of its kind and dtypes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from vllm_spense.kernels.problem import Config, Layout, Problem

__all__ = ["LayerRow", "RegionRow", "Table", "Times", "candidate", "layer_key", "parse_candidate"]

Times = Mapping[str, float]  # candidate → microseconds
RegionKey = tuple[str, int, int, bool, str, str]
DTYPES = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class _Row:
    dtype: str  # of the weight
    out_dtype: str
    m: int
    us: Times

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values() or self.out_dtype not in DTYPES.values():
            raise ValueError(
                f"dtypes {self.dtype!r}, {self.out_dtype!r}; known: {[*DTYPES.values()]}"
            )
        if self.m < 1 or not self.us or not all(us > 0 for us in self.us.values()):
            raise ValueError(f"m = {self.m}, us = {self.us}: needed are positive numbers")


@dataclass(frozen=True)
class RegionRow(_Row):
    """One region at one M."""

    kind: str
    rows: int
    cols: int
    part: bool  # a part of Y or X, reached by a leading dimension


@dataclass(frozen=True)
class LayerRow(_Row):
    """One layer at one M; `layer` is its `layer_key`."""

    layer: str


def candidate(path: str, config: Config) -> str:
    """The name of a candidate in a table."""
    return " ".join([path, ",".join(f"{key}={value}" for key, value in config)]).strip()


def parse_candidate(name: str) -> tuple[str, Config]:
    """The inverse of `candidate`."""
    path, _, text = name.partition(" ")
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return path, tuple((key, int(v) if v.lstrip("-").isdigit() else v) for key, _, v in pairs)


def layer_key(layout: Layout) -> str:
    """N×K and the regions of a layer, as tables name it: "1536x576 sparse_24 1152x576 + …"."""
    regions = " + ".join(f"{r.label} {r.rows}x{r.cols}" for r in layout.regions)
    return f"{layout.n}x{layout.k} {regions}"


def _short(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype))  # a dtype that no table has is simply not found


def _region_key(problem: Problem) -> RegionKey:
    region, layout = problem.region, problem.layout
    part = (region.rows, region.cols) != (layout.n, layout.k)
    dtypes = _short(layout.weight_dtype), _short(problem.out_dtype)
    return (region.label, region.rows, region.cols, part, *dtypes)


def _distance(a: float, b: float) -> float:
    return abs(math.log2(a / b))


def _shape_distance(a: RegionKey, b: RegionKey) -> float:
    return _distance(a[1], b[1]) + _distance(a[2], b[2])


def _nearest_m(rows: Mapping[int, Times], m: int) -> Times:
    return rows[min(rows, key=lambda known: (_distance(known, m), known))]


class Table:
    """Rows of one device, looked up by shape and M."""

    def __init__(self, regions: Iterable[RegionRow] = (), layers: Iterable[LayerRow] = ()) -> None:
        self._regions: dict[RegionKey, dict[int, Times]] = defaultdict(dict)
        self._layers: dict[tuple[str, str, str], dict[int, Times]] = defaultdict(dict)
        self.add(regions, layers)

    def add(self, regions: Iterable[RegionRow], layers: Iterable[LayerRow] = ()) -> None:
        """Add rows; later ones replace earlier ones of the same shape and M."""
        for row in regions:
            key = (row.kind, row.rows, row.cols, row.part, row.dtype, row.out_dtype)
            self._regions[key][row.m] = row.us
        for row in layers:
            self._layers[row.layer, row.dtype, row.out_dtype][row.m] = row.us

    def knows(self, problem: Problem) -> bool:
        """Whether the shape of the only region of `problem` was measured."""
        return _region_key(problem) in self._regions

    def region(self, problem: Problem) -> Times:
        """Times of the nearest shape and M, of the same dtypes if there are any.

        Empty without a row of this kind and weight dtype.
        """
        key = _region_key(problem)
        if key not in self._regions:
            wanted = key
            alike = [k for k in self._regions if (k[0], k[4]) == (wanted[0], wanted[4])]
            if not alike:
                return {}
            key = min(alike, key=lambda k: (k[5] != wanted[5], _shape_distance(k, wanted)))
        return _nearest_m(self._regions[key], problem.m)

    def layer(self, problem: Problem) -> Times:
        """Times of whole plans of this layer at the nearest M; empty if it was not measured."""
        dtypes = _short(problem.layout.weight_dtype), _short(problem.out_dtype)
        rows = self._layers.get((layer_key(problem.layout), *dtypes))
        return _nearest_m(rows, problem.m) if rows else {}

    def rows(self) -> tuple[list[RegionRow], list[LayerRow]]:
        """All rows, ordered."""
        regions = [
            RegionRow(d, o, m, us, k, n, c, part)
            for (k, n, c, part, d, o), rows in sorted(self._regions.items())
            for m, us in sorted(rows.items())
        ]
        layers = [
            LayerRow(d, o, m, us, name)
            for (name, d, o), rows in sorted(self._layers.items())
            for m, us in sorted(rows.items())
        ]
        return regions, layers
