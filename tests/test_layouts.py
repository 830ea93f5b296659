"""The kernel order of 2:4 regions: bit by bit, both ways."""

import pytest
import torch

from vllm_spense.kernels.layouts import (
    Blob24,
    Metadata24,
    order_metadata,
    restore_metadata,
)

FP8 = torch.float8_e4m3fn


def planes(rows, cols, dtype):
    generator = torch.Generator().manual_seed(rows + cols)
    bits = torch.randint(0, 256, (rows, cols // 2 * dtype.itemsize), generator=generator)
    meta = torch.randint(0, 256, (rows, cols // 8), generator=generator)
    return bits.to(torch.uint8).view(dtype), meta.to(torch.uint8)


def documented_order(meta):
    """The picture in `layouts.py`, loop by loop, nibble by nibble."""
    nibbles = torch.stack([meta & 15, meta >> 4], -1).reshape(meta.shape[0], -1).tolist()
    stored = []
    for rows in range(0, meta.shape[0], 64):
        for tile in range(0, meta.shape[1] // 16):
            for half in range(2):
                for a in range(4):
                    for g in range(8):
                        low, high = rows + 16 * a + g, rows + 16 * a + g + 8
                        for t in range(4):
                            for pair in (2 * t, 8 + 2 * t):
                                group = tile * 32 + half * 16 + pair
                                for row in (low, high):
                                    first, second = nibbles[row][group : group + 2]
                                    stored.append(first | second << 4)
    return torch.tensor(stored, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(64, 128), (128, 384), (192, 256)])
def test_metadata_order_is_as_documented(shape):
    _, meta = planes(*shape, FP8)
    ordered = order_metadata(meta)
    assert torch.equal(ordered, documented_order(meta))
    assert torch.equal(restore_metadata(ordered, *shape), meta)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 128), (576, 1536), (1536, 576), (40, 72), (0, 64)])
def test_round_trip(shape, dtype):
    blob = Blob24(*shape, dtype)
    values, meta = planes(*shape, dtype)
    packed = blob.pack(values, meta)
    assert packed.shape == blob.storage_shape and packed.dtype == torch.uint8
    found_values, found_meta = blob.unpack(packed)
    assert torch.equal(found_values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found_meta, meta)


def test_size_is_five_eighths_of_dense_fp8():
    assert Blob24(512, 1024, FP8).storage_shape == (512 * 1024 * 5 // 8,)


@pytest.mark.parametrize(
    ("shape", "dtype", "ordered"),
    [
        ((64, 128), FP8, True),
        ((1536, 576), FP8, False),
        ((96, 128), FP8, False),
        ((64, 128), torch.bfloat16, False),
    ],
)
def test_which_sizes_are_in_tile_order(shape, dtype, ordered):
    assert Blob24(*shape, dtype).ordered is ordered


def test_wrong_shapes_are_named():
    blob = Blob24(64, 128, FP8)
    values, meta = planes(64, 128, FP8)
    with pytest.raises(ValueError, match=r"planes are \[64, 32\].*needed: \[64, 64\]"):
        blob.pack(values[:, :32], meta)
    with pytest.raises(ValueError, match=r"buffer is \[100\].*needed: \[5120\]"):
        blob.unpack(torch.zeros(100, dtype=torch.uint8))


SIZES = [(64, 128), (96, 160), (160, 288), (32, 64), (203, 592), (0, 64)]


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("shape", SIZES)
def test_metadata_of_any_size_goes_both_ways(shape, itemsize):
    order = Metadata24(*shape, itemsize)
    _, meta = planes(*shape, FP8)
    packed = order.pack(meta)
    assert packed.shape == order.storage_shape and packed.dtype == torch.uint8
    assert torch.equal(order.unpack(packed), meta)


def test_metadata_of_whole_tiles_is_the_same_either_way():
    _, meta = planes(192, 256, FP8)
    assert torch.equal(Metadata24(192, 256, 1).pack(meta), order_metadata(meta))


def test_16_bit_order_is_as_documented():
    _, meta = planes(128, 64, FP8)
    nibbles = torch.stack([meta & 15, meta >> 4], -1).flatten(1).tolist()
    stored = []
    for rows in range(0, 128, 64):
        for tile in range(2):
            for a in range(4):
                for g in range(8):
                    for w in range(2):
                        low = rows + 16 * a + g
                        flat = [
                            nibbles[row][8 * tile + group]
                            for group in (2 * w, 2 * w + 4, 2 * w + 1, 2 * w + 5)
                            for row in (low, low + 8)
                        ]
                        stored += [flat[i] | flat[i + 1] << 4 for i in range(0, 8, 2)]
    assert Metadata24(128, 64, 2).pack(meta).tolist() == stored
