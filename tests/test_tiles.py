"""Zero-tile planes: round trips, slicing, what is refused."""

import pytest
import torch

from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import decode, dense_planes, encode, verify
from vllm_spense.format.tiles import TILE_SHAPES, Tiles, compress, expand, invalid_index

ZERO, SPARSE, DENSE = RegionKind.ZERO_TILES, RegionKind.SPARSE_24, RegionKind.DENSE
FP8 = torch.float8_e4m3fn
DTYPES = [FP8, torch.bfloat16, torch.float16]


def random_mask(blocks: int, tiles: Tiles, seed: int = 0, spare: int = 0) -> torch.Tensor:
    """Kept tiles, bool [row blocks, total]; `spare` fewer than allowed in every K-shard."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(blocks, tiles.total, dtype=torch.bool)
    for block in range(blocks):
        for shard in range(tiles.k_shards):
            order = torch.randperm(tiles.shard_total, generator=generator)
            chosen = order[: tiles.shard_kept - spare]
            mask[block, shard * tiles.shard_total + chosen] = True
    return mask


def random_tiles(rows: int, tiles: Tiles, seed: int = 0, spare: int = 0) -> torch.Tensor:
    """A float weight [rows, K] whose other tiles are zero."""
    mask = random_mask(rows // tiles.rows, tiles, seed, spare)
    dense = torch.randn(rows, tiles.columns, generator=torch.Generator().manual_seed(seed + 1))
    return dense * mask.repeat_interleave(tiles.rows, 0).repeat_interleave(tiles.cols, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_round_trip(shape, spare, dtype):
    tiles = Tiles(*shape, kept=4, total=12, k_shards=2)
    weight = random_tiles(3 * shape[0], tiles, spare=spare).to(dtype)
    values, index = compress(weight, tiles)
    assert values.shape == (3 * shape[0], 4 * shape[1]) and values.dtype == dtype
    assert index.shape == (3, 4) and index.dtype == torch.int16
    assert invalid_index(index, tiles) is None
    back = expand(values, index, tiles)
    assert torch.equal(back.float(), weight.float()) and back.dtype == dtype


def test_where_a_tile_is_stored():
    """Row block 1, K-shard 1, second kept tile: by hand."""
    tiles = Tiles(64, 128, kept=4, total=8, k_shards=2)
    weight = torch.zeros(128, 1024)
    for column in (0, 3, 5, 6):
        weight[64:, column * 128 : (column + 1) * 128] = column + 1
    values, index = compress(weight, tiles)
    assert index.tolist() == [[0, 1, 0, 1], [0, 3, 1, 2]]  # the empty row block keeps zeros
    assert (values[64:, 3 * 128 :] == 7).all() and (values[:64] == 0).all()


def test_bits_survive():
    tiles = Tiles(64, 64, kept=1, total=2)
    weight = torch.zeros(64, 128, dtype=torch.uint8)
    weight[:, 64:] = torch.arange(64) * 4 % 256  # negative zero and both NaNs
    weight[0, 64:68] = torch.tensor([0x80, 0x7F, 0xFF, 0x01])
    values, index = compress(weight.view(FP8), tiles)
    assert torch.equal(expand(values, index, tiles).view(torch.uint8), weight)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_planes_are_slices_of_the_weight(ranks):
    tiles = Tiles(64, 128, kept=8, total=16, k_shards=4)
    weight = random_tiles(256, tiles)
    planes = compress(weight, tiles)
    for rank in range(ranks):
        rows = [plane.chunk(ranks)[rank] for plane in planes]
        assert torch.equal(expand(*rows, tiles), weight.chunk(ranks)[rank])
        local = tiles.divide_columns(ranks)
        columns = [plane.chunk(ranks, 1)[rank] for plane in planes]
        assert torch.equal(expand(*columns, local), weight.chunk(ranks, 1)[rank])


def test_too_many_tiles():
    tiles = Tiles(64, 64, kept=2, total=4, k_shards=2)
    weight = random_tiles(128, tiles)
    weight[70, 128:] = 1.0
    with pytest.raises(ValueError, match="rows 64–127 hold 2 nonzero tiles of 64x64 in K-shard 1"):
        compress(weight, tiles)
    with pytest.raises(ValueError, match=r"region \[128, 192\] is not 4 tiles .* 256 columns"):
        compress(weight[:, :192], tiles)
    with pytest.raises(ValueError, match=r"region \[100, 256\] .* multiple of 64 rows"):
        compress(weight[:100], tiles)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((32, 32, 1, 2, 1), "tiles of 32x32; known: 64x64, 64x128, 128x128"),
        ((64, 128, 0, 2, 1), "0 of 2 tiles are kept"),
        ((64, 128, 3, 2, 1), "3 of 2 tiles are kept"),
        ((64, 128, 2, 4, 4), "4 K-shards do not divide 2 kept of 4"),
        ((64, 128, 2, 4, 0), "0 K-shards do not divide"),
        ((64, 128, 2, 40000, 1), "40000 tiles in a K-shard; at most 32768"),
    ],
)
def test_impossible_tiles(sizes, match):
    with pytest.raises(ValueError, match=match):
        Tiles(*sizes)


def test_segments_of_zero_tiles_and_no_others_have_tiles():
    with pytest.raises(ValueError, match="kind zero_tiles has no 'tiles'"):
        Partition.whole(ZERO, 64)
    with pytest.raises(ValueError, match="kind dense has 'tiles'"):
        Partition.whole(DENSE, 64, Tiles(64, 64, 1, 2))


HALF = Tiles(64, 64, kept=2, total=4, k_shards=2)
ROWS, COLUMNS = Segment(ZERO, 64, HALF), Segment(ZERO, 256, HALF)
PARTITIONS = {
    "whole": (Partition.whole(ZERO, 128, HALF), (128, 256)),
    "whole input": (Partition("input", (COLUMNS,)), (128, 256)),
    "output-split": (Partition("output", (ROWS, Segment(DENSE, 40))), (104, 256)),
    "input-split": (Partition("input", (COLUMNS, Segment(DENSE, 8))), (128, 264)),
    "three kinds": (
        Partition("output", (ROWS, Segment(SPARSE, 8), Segment(DENSE, 8))),
        (80, 256),
    ),
}


def weight_for(partition: Partition, shape: tuple[int, int]) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if SPARSE in partition.spans():
        start, size = partition.spans()[SPARSE]
        weight[start : start + size].view(size, -1, 4)[..., :2] = 0
    region = random_tiles(shape[0] if partition.split == "input" else 64, HALF)
    if partition.single:
        return random_tiles(shape[0], HALF)
    weight[: region.shape[0], : region.shape[1]] = region
    return weight


@pytest.mark.parametrize("case", PARTITIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules(case, dtype):
    partition, shape = PARTITIONS[case]
    weight = weight_for(partition, shape)
    planes = encode(weight, partition, dtype)
    verify(planes, partition, shape, dtype, "m")
    if case == "output-split":
        scales = {"weight_tiles_scale", "weight_dense_scale"} if dtype == FP8 else set()
        assert set(planes) == {"weight_tiles", "weight_tile_index", "weight_dense"} | scales
    back = decode(planes, partition)
    if dtype == FP8:
        smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
        assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, smallest)).all()
    else:
        assert torch.equal(back, weight.to(dtype).float())
    assert ((back == 0) | (weight != 0)).all()
    assert dense_planes(planes, partition)["weight"].shape == shape


@pytest.mark.parametrize(
    ("plane", "change", "match"),
    [
        ("weight_tile_index", lambda t: t - 1, "m.weight_tile_index: index -1 at row block 0"),
        ("weight_tile_index", lambda t: t + 1, "index 2 at row block .*; needed: 0 … 1, ascending"),
        ("weight_tile_index", lambda t: t.int(), r"weight_tile_index is \[2, 2\] int32; needed"),
        ("weight_tile_index", lambda t: t[:, 1:], r"weight_tile_index is \[2, 1\]"),
        ("weight_tiles", lambda t: t * float("nan"), "weight_tiles: not a finite number"),
        ("weight_tiles", lambda t: t[:, 1:], r"weight_tiles is \[128, 127\] bfloat16; needed"),
        ("weight_tiles", None, "m.weight_tiles is missing"),
    ],
)
def test_verify_names_the_plane(plane, change, match):
    partition, shape = PARTITIONS["whole"]
    planes = encode(weight_for(partition, shape), partition, torch.bfloat16)
    if change is None:
        del planes[plane]
    else:
        planes[plane] = change(planes[plane])
    with pytest.raises(ValueError, match=match):
        verify(planes, partition, shape, torch.bfloat16, "m")


@pytest.mark.parametrize("row", [[1, 0, 2], [0, 0, 1], [0, 1, 4], [-1, 0, 1]])
def test_indices_that_are_not_ascending_and_in_range(row):
    index = torch.tensor([[0, 1, 3], row], dtype=torch.int16)
    assert invalid_index(index, Tiles(64, 64, kept=3, total=4))[0] == 1
