"""Dense copies: what they cost, what they gain, which are made."""

import pytest
import torch
from layers import FP8, input_split, make_layer, output_split, random_input, relative_error

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import cusparselt, ops, scaled_mm
from vllm_spense.kernels.copies import choose_copies, copy_bytes, saved_bytes
from vllm_spense.kernels.dispatch import DENSE_COPY, REGIONS
from vllm_spense.kernels.measurements import LayerRow, Table, layer_key
from vllm_spense.kernels.problem import Layout, Region

BF16 = torch.bfloat16
UP = Layout(1024, 512, output_split(1024, 512, 256), FP8)
DOWN = Layout(512, 1024, input_split(512, 1024, 256), FP8)
LAYERS = {"up": (UP, 2), "down": (DOWN, 1)}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr(cusparselt, "missing", lambda: "")
    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: None)


def table(up, down):
    rows = [(UP, up), (DOWN, down)]
    return Table((), [LayerRow("fp8", "bf16", 64, us, layer_key(layout)) for layout, us in rows])


def chosen(up, down, budget=None):
    found = choose_copies(LAYERS, table(up, down), BF16, (9, 0), budget)
    return [(copy.layer, round(copy.gain, 3)) for copy in found]


SLOWER, FASTER = {REGIONS: 12.0, DENSE_COPY: 10.0}, {REGIONS: 8.0, DENSE_COPY: 10.0}


def test_bytes():
    assert copy_bytes(UP) == 768 * 512
    assert copy_bytes(DOWN) == 512 * 1024  # its dense region has half rows: no view
    assert saved_bytes(UP) == saved_bytes(DOWN) == 768 * 512 * 3 // 8
    tiled = Region(RegionKind.ZERO_TILES, 0, 256, 0, 512, Tiles(64, 128, 1, 4))
    assert saved_bytes(Layout(256, 512, (tiled,), FP8)) == 256 * 512 * 3 // 4 - 4 * 4


def test_nothing_to_gain_nothing_copied():
    assert chosen(FASTER, FASTER) == []


def test_gain_is_a_share_of_the_dense_time_of_the_model():
    assert chosen(FASTER, SLOWER, 10**9) == [("down", round(2 / 30, 3))]


def test_the_default_budget_is_what_sparsity_saves():
    # saved: 3 · 147456 bytes; a copy of down costs 524288, of up (twice) 786432
    assert chosen(SLOWER, SLOWER) == []
    assert chosen(SLOWER, SLOWER, 600_000) == [("down", round(2 / 30, 3))]
    assert len(chosen(SLOWER, SLOWER, 10**9)) == 2


def test_unmeasured_layers_get_none():
    assert choose_copies(LAYERS, Table(), BF16, (9, 0), 10**9) == ()


@pytest.mark.parametrize("layout", [UP, DOWN], ids=["up", "down"])
def test_prepared_copy_holds_the_same_numbers(layout):
    layer = make_layer(layout.n, layout.k, layout.regions, FP8, "cpu")
    weights = ops.prepare(layout, layer.planes, dense_copy=True)
    assert len(weights) == len(layout.regions) + 1
    assert torch.equal(weights[-1].float(), layer.weight.float())
    dense, copy = weights[1], weights[-1]
    shared = dense.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr()
    assert shared is (layout is UP) and dense.is_contiguous()
    assert torch.equal(dense.float(), layer.planes[1][0].float())
    x = random_input(3, layout.k, FP8, "cpu")
    y = ops.linear_raw(x, weights, layout.encode(), layout.n, BF16)
    assert relative_error(y, layer.product(x)) <= 2**-8
