import itertools

import pytest
import torch

from vllm_spense.format import sparse24

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def random_24(rows, cols, dtype=torch.float32, seed=0):
    """Random 2:4 weight, pattern by rejection-free choice of two positions per group."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    for row, group in itertools.product(range(rows), range(cols // 4)):
        dropped = torch.randperm(4, generator=generator)[:2]
        weight[row, group * 4 + dropped] = 0
    return weight.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (3, 24), (17, 64), (0, 8)])
def test_round_trip(dtype, rows, cols):
    weight = random_24(rows, cols, dtype)
    values, meta = sparse24.compress(weight)
    assert values.shape == (rows, cols // 2) and values.dtype == dtype
    assert meta.shape == (rows, cols // 8) and meta.dtype == torch.uint8
    assert torch.equal(bits(sparse24.expand(values, meta)), bits(weight))
    assert sparse24.invalid_metadata(meta) is None


def test_nibbles_by_hand():
    weight = torch.tensor([[5.0, 0, 7, 0, 0, 0, 0, 9]])
    values, meta = sparse24.compress(weight)
    # group 0 keeps positions 0 and 2; group 1 keeps 3 and, to fill up, the lowest zero
    assert values.tolist() == [[5, 7, 0, 9]]
    assert meta.tolist() == [[(0 | 2 << 2) | (0 | 3 << 2) << 4]]


def test_fewer_than_two_nonzeros():
    weight = torch.zeros(1, 8)
    weight[0, 6] = 1
    values, meta = sparse24.compress(weight)
    assert torch.equal(sparse24.expand(values, meta), weight)
    assert sparse24.invalid_metadata(meta) is None


def test_negative_zero_is_zero():
    weight = torch.tensor([[1.0, 2.0, -0.0, -0.0, 0.0, 0.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
    values, _ = sparse24.compress(weight)
    assert values.float().tolist() == [[1, 2, 3, 4]]


def test_nan_is_kept():
    weight = torch.tensor([[0, float("nan"), 0, 0, 0, 0, 0, 0]])
    values, meta = sparse24.compress(weight)
    assert sparse24.expand(values, meta)[0, 1].isnan()


def test_not_24():
    weight = torch.zeros(2, 16)
    weight[1, 4:7] = 1
    with pytest.raises(ValueError, match="row 1, columns 4–7 hold more than two"):
        sparse24.compress(weight)


def test_columns_not_a_multiple_of_eight():
    with pytest.raises(ValueError, match="12 columns; needed: a multiple of 8"):
        sparse24.compress(torch.zeros(1, 12))


def test_every_metadata_byte():
    """Exactly the 36 bytes made of two ascending pairs are valid."""
    ascending = {a | b << 2 for a in range(4) for b in range(4) if a < b}
    for byte in range(256):
        meta = torch.tensor([[0x44, byte]], dtype=torch.uint8)
        valid = byte & 0xF in ascending and byte >> 4 in ascending
        assert sparse24.invalid_metadata(meta) == (None if valid else (0, 1))


def test_every_mask_and_the_row_of_an_error_past_a_chunk(monkeypatch):
    """All patterns of zeros in a group, and rows that are compressed in several parts."""
    monkeypatch.setattr(sparse24, "_CHUNK", 32)  # four rows
    masks = [mask for mask in range(16) if mask.bit_count() <= 2]
    weight = torch.zeros(9, 8)
    for row in range(9):
        for group, mask in enumerate((masks[row], masks[row + 2])):
            for i in range(4):
                weight[row, 4 * group + i] = (mask >> i & 1) * (4.0 * group + i + 1)
    values, meta = sparse24.compress(weight)
    assert torch.equal(sparse24.expand(values, meta), weight)
    weight[6, 4:7] = 1
    with pytest.raises(ValueError, match="row 6, columns 4–7 hold more than two nonzeros"):
        sparse24.compress(weight)
