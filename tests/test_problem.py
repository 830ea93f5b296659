"""Regions, layouts and problems."""

import pytest
import torch
from layers import DENSE, FP8, SPARSE, gate_up, input_split, output_split

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels.problem import Layout, Problem, Region, padded_rows

TILED, TILES = RegionKind.ZERO_TILES, Tiles(64, 128, kept=4, total=8, k_shards=2)
LAYOUTS = {
    "output": Layout(96, 64, output_split(96, 64, 32), FP8),
    "input": Layout(32, 128, input_split(32, 128, 64), FP8),
    "gate_up": Layout(128, 64, gate_up(128, 64, 32), FP8),
    "tiles": Layout(256, 1024, (Region(TILED, 0, 256, 0, 1024, TILES),), FP8),
    "tiles and dense": Layout(
        64, 1152, (Region(TILED, 0, 64, 0, 1024, TILES), Region(DENSE, 0, 64, 1024, 128)), FP8
    ),
    "one": Layout(32, 64, output_split(32, 64, 0), torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_integers_and_back(layout):
    ints = layout.encode()
    assert len(ints) == 5 * len(layout.regions) and all(type(i) is int for i in ints)
    assert Layout.decode(layout.n, layout.k, ints, layout.weight_dtype) == layout


def test_dense_runs_first_and_sparse_adds_to_it():
    layout = LAYOUTS["input"]
    assert layout.order == (1, 0)
    assert [layout.accumulates(i) for i in (0, 1)] == [True, False]


def test_regions_of_other_channels_do_not_add():
    layout = LAYOUTS["gate_up"]
    assert layout.order == (1, 3, 0, 2)
    assert not any(layout.accumulates(i) for i in range(4))


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([Region(DENSE, 0, 32, 0, 64)], "cover 2048 of the 4096"),
        ([Region(DENSE, 0, 64, 0, 64), Region(DENSE, 32, 32, 0, 64)], "overlap"),
        ([Region(DENSE, 0, 64, 0, 32), Region(SPARSE, 0, 32, 32, 32)], "only a part of their rows"),
        ([Region(DENSE, 0, 96, 0, 64)], r"outside \[64, 64\]"),
        ([Region(DENSE, 0, 0, 0, 64)], "or is empty"),
        ([Region(TILED, 0, 64, 0, 64)], "say how they are cut"),
        ([Region(DENSE, 0, 64, 0, 64, TILES)], "no other kind, say how"),
        ([Region(TILED, 0, 64, 0, 64, TILES)], r"region \[64, 64\] is not 8 tiles of 64x128"),
        ([Region(SPARSE, 0, 64, 0, 60), Region(DENSE, 0, 64, 60, 4)], "multiples of 8"),
    ],
)
def test_impossible_layouts(regions, message):
    with pytest.raises(ValueError, match=message):
        Layout(64, 64, tuple(regions), FP8)


@pytest.mark.parametrize(
    ("ints", "message"),
    [
        ([0, 0, 64, 0], "4 integers"),
        ([7, 0, 64, 0, 64], "region kind 7 is unknown"),
        ([257, 0, 64, 0, 64], "kind 257 is unknown"),
        ([2, 0, 64, 0, 64], "tiles of 0x0"),
    ],
)
def test_broken_integers(ints, message):
    with pytest.raises(ValueError, match=message):
        Layout.decode(64, 64, ints, FP8)


def test_equal_problems_are_one_key():
    first, second = (Problem.whole(LAYOUTS["input"], 8, torch.bfloat16, (9, 0)) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first.only(0) != first and first.only(0).region.kind is SPARSE


@pytest.mark.parametrize(("m", "padded"), [(0, 0), (1, 16), (16, 16), (17, 32), (8191, 8192)])
def test_padded_rows(m, padded):
    assert padded_rows(m) == padded
