import pytest
import torch
from test_sparse24 import random_24

from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import decode, dense_planes, encode, specs, verify

SPARSE, DENSE = RegionKind.SPARSE_24, RegionKind.DENSE
FP8 = torch.float8_e4m3fn
N, K = 24, 64
PARTITIONS = {
    "output-split": Partition("output", (Segment(SPARSE, 16), Segment(DENSE, 8))),
    "input-split": Partition("input", (Segment(SPARSE, 48), Segment(DENSE, 16))),
    "all-sparse": Partition.whole(SPARSE, N),
    "all-dense": Partition.whole(DENSE, N),
    "dense first": Partition("output", (Segment(DENSE, 8), Segment(SPARSE, 16))),
}
NAMES = {
    "output-split": {"weight_values", "weight_meta", "weight_dense", "weight_values_scale",
                     "weight_dense_scale"},
    "input-split": {"weight_values", "weight_meta", "weight_dense", "weight_scale"},
    "all-sparse": {"weight_values", "weight_meta", "weight_scale"},
    "all-dense": {"weight", "weight_scale"},
    "dense first": {"weight_values", "weight_meta", "weight_dense", "weight_values_scale",
                    "weight_dense_scale"},
}  # fmt: skip


def pruned(partition):
    """A weight that is 2:4 exactly where the partition says so."""
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    sparse = random_24(N, K, seed=2)
    weight = dense.clone()
    if SPARSE in partition.spans():
        start, size = partition.spans()[SPARSE]
        if partition.split == "output":
            weight[start : start + size] = sparse[start : start + size]
        else:
            weight[:, start : start + size] = sparse[:, start : start + size]
    return weight


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16], ids=str)
def test_round_trip(name, dtype):
    partition = PARTITIONS[name]
    weight = pruned(partition)
    planes = encode(weight, partition, dtype)
    verify(planes, partition, (N, K), dtype, "m")
    wanted = NAMES[name] if dtype == FP8 else {n for n in NAMES[name] if "scale" not in n}
    assert set(planes) == wanted
    back = decode(planes, partition)
    if dtype == FP8:  # e4m3 keeps 3 mantissa bits: half a step is 1/16 of the power of two below
        smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
        assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, smallest)).all()
    else:
        assert torch.equal(back, weight.to(dtype).float())
    assert ((back == 0) | (weight != 0)).all()


@pytest.mark.parametrize("name", PARTITIONS)
def test_scales_are_row_maxima_of_their_region(name):
    partition = PARTITIONS[name]
    weight = pruned(partition)
    dense = dense_planes(encode(weight, partition, FP8), partition)
    assert dense["weight"].shape == (N, K) and dense["weight_scale"].shape == (N, 1)
    assert torch.allclose(dense["weight_scale"], weight.abs().amax(1, keepdim=True) / 448)


def test_slicing_planes_is_slicing_the_weight():
    """What tensor parallelism does: every plane by itself, along its own rows or columns."""
    partition = PARTITIONS["output-split"]
    weight = pruned(partition)
    planes = encode(weight, partition, FP8)
    half = {name: plane[plane.shape[0] // 2 :] for name, plane in planes.items()}
    local = Partition("output", (Segment(SPARSE, 8), Segment(DENSE, 4)))
    expected = decode(planes, partition)[[*range(8, 16), *range(20, 24)]]
    assert torch.equal(decode(half, local), expected)

    partition = PARTITIONS["input-split"]
    planes = encode(pruned(partition), partition, FP8)
    half = {n: p if "scale" in n else p[:, : p.shape[1] // 2] for n, p in planes.items()}
    local = Partition("input", (Segment(SPARSE, 24), Segment(DENSE, 8)))
    expected = decode(planes, partition)[:, [*range(24), *range(48, 56)]]
    assert torch.equal(decode(half, local), expected)


def test_row_of_zeros_gets_a_valid_scale():
    partition = PARTITIONS["all-dense"]
    planes = encode(torch.zeros(N, K), partition, FP8)
    verify(planes, partition, (N, K), FP8, "m")
    assert torch.equal(decode(planes, partition), torch.zeros(N, K))


def test_shapes_without_data():
    """Shapes follow from the description alone (meta device, headers)."""
    for name, partition in PARTITIONS.items():
        planes = encode(pruned(partition), partition, FP8)
        found = {plane: (tuple(t.shape), t.dtype) for plane, t in planes.items()}
        wanted = {p: (s.shape, s.dtype) for p, s in specs(partition, (N, K), FP8).items()}
        assert found == wanted, name


def test_encode_refuses():
    partition = PARTITIONS["all-sparse"]
    with pytest.raises(ValueError, match="down: row 0, columns 0–3 hold more than two"):
        encode(torch.ones(N, K), partition, FP8, "down")
    with pytest.raises(ValueError, match="down: the weight holds NaN"):
        encode(torch.full((N, K), float("nan")), partition, FP8, "down")
    with pytest.raises(ValueError, match="add up to 24, the output dimension has 23"):
        encode(torch.zeros(23, K), partition, FP8, "down")


@pytest.mark.parametrize(
    ("plane", "change", "match"),
    [
        ("weight_meta", lambda t: t * 0, "weight_meta: byte 0x00 at row 0, column 0 is not two"),
        ("weight_scale", lambda t: t * 0, "weight_scale: scale 0.0 at .* is not positive"),
        ("weight_scale", lambda t: -t, "weight_scale: scale -.* is not positive"),
        ("weight_scale", lambda t: t / 0, "weight_scale: not a finite number"),
        ("weight_scale", lambda t: t * float("nan"), "weight_scale: not a finite number"),
        ("weight_scale", lambda t: t[:5], r"weight_scale is \[5, 1\] float32; needed: \[24, 1\]"),
        ("weight_dense", lambda t: t.float(), "weight_dense is .* float32; needed: .* float8"),
        ("weight_dense", lambda t: (t.view(torch.uint8) | 0x7F).view(FP8), "not a finite number"),
        ("weight_values", lambda t: t[:, 1:], "weight_values is .*; needed"),
        ("weight_values", None, "mlp.down.weight_values is missing"),
    ],
)
def test_verify_names_the_plane(plane, change, match):
    partition = PARTITIONS["input-split"]
    planes = encode(pruned(partition), partition, FP8)
    if change is None:
        del planes[plane]
    else:
        planes[plane] = change(planes[plane])
    with pytest.raises(ValueError, match=match):
        verify(planes, partition, (N, K), FP8, "mlp.down")


def test_verify_refuses_an_extra_plane():
    partition = PARTITIONS["all-dense"]
    planes = encode(pruned(partition), partition, FP8) | {"weight_meta": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"m.weight_meta is not expected"):
        verify(planes, partition, (N, K), FP8, "m")
