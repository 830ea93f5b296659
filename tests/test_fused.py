"""The rank's view of fused layers, against plain slicing of the dense weight."""

import pytest
import torch
from test_sparse24 import random_24

from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import decode, encode
from vllm_spense.fused import FusedLayer

FP8 = torch.float8_e4m3fn
SPARSE, DENSE = RegionKind.SPARSE_24, RegionKind.DENSE
HYBRID = (Segment(SPARSE, 48), Segment(DENSE, 16))


def stacked(partitions, rows, cols, seed=0):
    """Encoded modules and their planes stacked as vLLM stacks them (one rank)."""
    per_module = [
        encode(random_24(n, cols, seed=seed + i), partition, FP8)
        for i, (partition, n) in enumerate(zip(partitions, rows, strict=True))
    ]
    names = dict.fromkeys(name for planes in per_module for name in planes)
    return per_module, {n: torch.cat([p[n] for p in per_module if n in p]) for n in names}


def fused(partitions, rows, cols):
    modules = tuple(f"m{i}" for i in range(len(partitions)))
    return FusedLayer.divide(modules, partitions, rows, cols, FP8)


CASES = {
    "gate_up hybrid": ((Partition("output", HYBRID),) * 2, (64, 64), 32),
    "gate_up sparse": ((Partition.whole(SPARSE, 64),) * 2, (64, 64), 32),
    "down": ((Partition("input", HYBRID),), (32,), 64),
    "q sparse, k and v dense": (
        (Partition.whole(SPARSE, 32), Partition.whole(DENSE, 16), Partition.whole(DENSE, 16)),
        (32, 16, 16),
        32,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decode_and_scales(case):
    partitions, rows, cols = CASES[case]
    per_module, planes = stacked(partitions, rows, cols)
    layer = fused(partitions, rows, cols)
    assert {n: p.shape for n, p in layer.planes().items()} == {
        n: t.shape for n, t in planes.items()
    }
    expected = torch.cat([decode(p, q) for p, q in zip(per_module, partitions, strict=True)])
    assert torch.equal(layer.decode(planes, torch.float32), expected)
    raw = layer.decode_fp8(planes).float() * layer.row_scale(planes)
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("case", CASES)
def test_regions_tile_the_weight(case):
    partitions, rows, cols = CASES[case]
    _, planes = stacked(partitions, rows, cols)
    layer = fused(partitions, rows, cols)
    weight = torch.zeros(sum(rows), cols)
    layout = layer.layout()
    for region, tensors in zip(layout.regions, layer.region_planes(planes), strict=True):
        whole = Partition.whole(region.kind, region.rows)
        names = ("weight",) if region.kind is DENSE else ("weight_values", "weight_meta")
        part = decode(dict(zip(names, tensors, strict=True)), whole)
        weight[region.y_start : region.y_stop, region.x_start : region.x_stop] = part
    slices = layer.slices() or ((0, len(weight)),)
    restored = torch.cat([weight[start : start + size] for start, size in slices])
    assert torch.equal(restored, layer.decode_fp8(planes).float())


def test_scale_in_the_order_of_the_op():
    """Equal to the standard scale after the slices are put together, and really reordered."""
    partitions, rows, cols = CASES["gate_up hybrid"]
    _, planes = stacked(partitions, rows, cols)
    layer = fused(partitions, rows, cols)
    assert layer.slices() == ((0, 48), (96, 16), (48, 48), (112, 16))
    scale = layer.op_scale(planes)
    restored = torch.cat([scale[start : start + size] for start, size in layer.slices()])
    assert torch.equal(restored, layer.row_scale(planes))
    assert not torch.equal(scale, restored)
    assert [fused(*CASES[case]).slices() for case in list(CASES)[1:]] == [(), (), ()]


def test_neighbours_of_one_kind_are_joined():
    kinds = {
        case: [(r.kind, r.rows) for r in fused(*CASES[case]).layout().regions] for case in CASES
    }
    assert kinds == {
        "gate_up hybrid": [(SPARSE, 96), (DENSE, 32)],
        "gate_up sparse": [(SPARSE, 128)],
        "down": [(SPARSE, 32), (DENSE, 32)],
        "q sparse, k and v dense": [(SPARSE, 32), (DENSE, 32)],
    }


def test_divide():
    layer = fused((Partition("output", HYBRID),) * 2, (32, 32), 32)
    assert layer.partitions[0].segments == (Segment(SPARSE, 24), Segment(DENSE, 8))
    layer = fused((Partition("input", HYBRID),), (32,), 32)
    assert layer.partitions[0].segments == (Segment(SPARSE, 24), Segment(DENSE, 8))


def test_sizes_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"m0: 48 channels .* over 4 ranks in steps of 8; .*: 1, 2$"
    ):
        fused((Partition("input", (Segment(SPARSE, 48), Segment(DENSE, 16))),), (32,), 16)
    odd = Partition("output", (Segment(SPARSE, 45), Segment(DENSE, 15)))
    with pytest.raises(
        ValueError, match=r"45 channels .* over 2 ranks in steps of 1; .*: 1, 3, 5, 15"
    ):
        fused((odd,), (30,), 32)
