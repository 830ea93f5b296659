"""`--load-format dummy`: planes that are valid and of realistic scale, made in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spense.format.fp8 import FP8
from vllm_spense.format.sparse24 import VALID_NIBBLES
from vllm_spense.format.tiles import INDEX_DTYPE, Tiles

__all__ = ["fill_dummy"]

WEIGHT_STD = 0.02
FP8_STD = 64.0  # stored FP8 numbers; the scale brings them to WEIGHT_STD


def fill_dummy(planes: Mapping[str, Tensor], tiles: Tiles | None = None, seed: int = 1234) -> None:
    """Overwrite planes with random valid contents (the same on every call and rank size).

    `tiles` is how zero tiles are cut, if there are any.
    """
    for tensor in planes.values():
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        if tensor.dtype == torch.uint8:
            tensor.copy_(_random_metadata(tensor.shape, generator))
        elif tensor.dtype == INDEX_DTYPE:
            tensor.copy_(_random_index(tensor.shape[0], tiles, generator))
        elif tensor.dtype == torch.float32:
            tensor.fill_(WEIGHT_STD / FP8_STD)
        else:
            std = FP8_STD if tensor.dtype == FP8 else WEIGHT_STD
            _fill_normal(tensor, std, generator)


def _random_metadata(shape: torch.Size, generator: torch.Generator) -> Tensor:
    device = generator.device
    nibbles = torch.tensor(VALID_NIBBLES, dtype=torch.uint8, device=device)
    pick = torch.randint(0, 6, (2, *shape), generator=generator, device=device)
    low, high = nibbles[pick]
    return low | high << 4


def _random_index(blocks: int, tiles: Tiles, generator: torch.Generator) -> Tensor:
    shape = (blocks, tiles.k_shards, tiles.shard_total)
    order = torch.rand(shape, generator=generator, device=generator.device).argsort(-1)
    return order[..., : tiles.shard_kept].sort(-1).values.reshape(blocks, tiles.kept)


def _fill_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Row chunks, because a float32 copy of a whole plane would be four times its size."""
    for chunk in tensor.split(4096):
        random = torch.randn(chunk.shape, generator=generator, device=tensor.device) * std
        chunk.copy_(random.clamp(-448, 448).to(tensor.dtype))
