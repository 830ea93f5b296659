"""Layers with zero tiles for kernel tests; the dense weight that was cut is the reference."""

from dataclasses import dataclass

import torch
from layers import FP8, Layer, random_input
from test_tiles import random_tiles

from vllm_spense.format import tiles as tiled
from vllm_spense.format.partition import RegionKind
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels.problem import Layout, Problem, Region

ZERO, DENSE = RegionKind.ZERO_TILES, RegionKind.DENSE


@dataclass(frozen=True)
class Case:
    """A region of `blocks` row blocks, `dense` further rows or columns beside it."""

    tiles: Tiles
    blocks: int
    dense: int = 0
    split: str = "output"

    def layer(self, dtype: torch.dtype, device: str, seed: int = 0) -> Layer:
        rows, cols = self.blocks * self.tiles.rows, self.tiles.columns
        by_rows = self.split == "output"
        n, k = (rows + self.dense, cols) if by_rows else (rows, cols + self.dense)
        weight = random_input(n, k, torch.float32, "cpu", seed)
        weight[:rows, :cols] = random_tiles(rows, self.tiles, seed)
        weight = weight.to(dtype)
        regions = [Region(ZERO, 0, rows, 0, cols, self.tiles)]
        if self.dense and by_rows:
            regions.append(Region(DENSE, rows, self.dense, 0, cols))
        elif self.dense:
            regions.append(Region(DENSE, 0, rows, cols, self.dense))
        planes = [tiled.compress(weight[:rows, :cols].contiguous(), self.tiles)]
        planes += [
            (weight[r.y_start : r.y_stop, r.x_start : r.x_stop].contiguous(),) for r in regions[1:]
        ]
        planes = [tuple(plane.to(device) for plane in parts) for parts in planes]
        return Layer(Layout(n, k, tuple(regions), dtype), weight.to(device), planes)


def problem_of(layout: Layout, m: int, out_dtype=torch.bfloat16, capability=(9, 0)) -> Problem:
    """The zero tiles of a layout."""
    return Problem.whole(layout, m, out_dtype, capability).only(0)


QWEN_GATE_UP = Layout(
    51200, 5120, (Region(ZERO, 0, 51200, 0, 5120, Tiles(64, 128, 20, 40)),), FP8
)  # fmt: skip
QWEN_DOWN = Layout(
    5120, 25600, (Region(ZERO, 0, 5120, 0, 25600, Tiles(128, 128, 104, 200, 8)),), FP8
)
