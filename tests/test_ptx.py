"""The text of each PTX wrapper, interpreted, against what it says it does."""

import numpy as np
import pytest
import torch
from gluon_emulator import V, load

from vllm_spense.format.sparse24 import VALID_NIBBLES
from vllm_spense.kernels.layouts import Metadata24

RNG = np.random.default_rng(0)


@pytest.fixture
def ptx():
    return load(lazy=False)[2]


def words(*shape):
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def e4m3(data):
    return torch.from_numpy(data.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def f16(word):
    raw = np.ascontiguousarray(word.data.astype(np.uint32)).view(np.float16)
    return raw.reshape(-1, 2).astype(np.float32)


def test_conversions(ptx):
    low, high = words(64), words(64)
    bytes_of = [np.stack([w >> 8 * i & 255 for i in range(4)], -1) for w in (low, high)]
    a, b, c, d = ptx.rows_f16(V(low), V(high))
    for found, (word, pair) in zip((a, b, c, d), ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True):
        expected = e4m3(bytes_of[word][:, 2 * pair : 2 * pair + 2])
        np.testing.assert_array_equal(f16(found), expected)
    first, second = ptx.pair_f16(V(low))
    np.testing.assert_array_equal(f16(first), e4m3(bytes_of[0][:, :2]))
    np.testing.assert_array_equal(f16(second), e4m3(bytes_of[0][:, 2:]))
    for selector, at in ((0x5410, 0), (0x7632, 2)):
        found = ptx.pairs_f16(V(low), V(high), V(np.full(64, selector)))
        for word, expected in zip(found, bytes_of, strict=True):
            np.testing.assert_array_equal(f16(word), e4m3(expected[:, at : at + 2]))


def test_select_word(ptx):
    found = ptx.select_word(V(words(4) * 0 + 1), V(words(4) * 0 + 2), V(np.array([0, 1, 0, 1])))
    assert found.data.tolist() == [1, 2, 1, 2]


def block_of_metadata(itemsize):
    """Nibbles [16 rows, 32 groups] of one block, and its words as stored."""
    nibbles = RNG.choice(VALID_NIBBLES, (64, 32)).astype(np.uint8)
    meta = torch.from_numpy(nibbles[:, 0::2] | nibbles[:, 1::2] << 4)
    return nibbles[:16], Metadata24(64, 128, itemsize).pack(meta).numpy().view(np.uint32)


def expected_word(nibbles, g, step, odd):
    """Row g in the low half, row g+8 in the high one: groups 2·step + odd of chunks 0, 2, 1, 3."""
    groups = [chunk * 8 + 2 * step + odd for chunk in (0, 2, 1, 3)]
    parts = [int(nibbles[row, q]) << 4 * i for row in (g,) for i, q in enumerate(groups)]
    parts += [int(nibbles[g + 8, q]) << 16 + 4 * i for i, q in enumerate(groups)]
    return sum(parts)


def test_metadata_word(ptx):
    nibbles, stored = block_of_metadata(1)
    for g in range(8):
        for step in range(4):
            halves = [V(stored[half * 128 + g * 4 + step : half * 128 + g * 4 + step + 1])
                      for half in range(2)]  # fmt: skip
            for odd in range(2):
                found = ptx.metadata_word(*halves, V(np.array([4 * odd])))
                assert int(found.data[0]) == expected_word(nibbles, g, step, odd)


def test_metadata_word_16bit(ptx):
    nibbles, stored = block_of_metadata(2)
    for g in range(8):
        for step in range(4):
            tiles = [stored[tile * 64 + g * 2 + step % 2 :][:1] for tile in range(4)]
            for odd in range(2):
                byte = V(np.array([2 * odd + step // 2]))
                found = ptx.metadata_word_16bit(*(V(t) for t in tiles), byte)
                assert int(found.data[0]) == expected_word(nibbles, g, step, odd)
