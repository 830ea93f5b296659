"""Random operands for measurements: valid planes, copies beyond L2, and what to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spense.format import sparse24
from vllm_spense.format.partition import META_GROUP, RegionKind
from vllm_spense.format.planes import expand_region
from vllm_spense.format.tiles import INDEX_DTYPE, Tiles
from vllm_spense.kernels import ops, timing
from vllm_spense.kernels.problem import Layout, Region

__all__ = ["Operands", "random_input"]

FP8 = torch.float8_e4m3fn
Device = torch.device | str
_CHANNELS = 128  # compared at either end of a region
_TOKENS = 1024  # the last ones are compared


def _random(shape: tuple[int, int], spread: float, dtype: torch.dtype, device: Device) -> Tensor:
    return (torch.randn(shape, device=device) * spread).clamp_(-448, 448).to(dtype)


def random_input(m: int, k: int, dtype: torch.dtype, device: Device) -> Tensor:
    """X [m, k]; FP8 spread as per-token scales leave it (amax 448)."""
    return _random((m, k), 100.0 if dtype == FP8 else 1.0, dtype, device)


def random_planes(region: Region, dtype: torch.dtype, device: Device) -> tuple[Tensor, ...]:
    """Valid planes of a region; FP8 spread as per-channel scales leave it."""
    spread = 100.0 if dtype == FP8 else 0.02
    if region.kind is RegionKind.DENSE:
        return (_random((region.rows, region.cols), spread, dtype, device),)
    if region.tiles is not None:
        return _random_tiles(region.rows, region.tiles, spread, dtype, device)
    valid = torch.tensor(sparse24.VALID_NIBBLES, dtype=torch.uint8, device=device)
    shape = (region.rows, region.cols // META_GROUP)
    low, high = (valid[torch.randint(6, shape, device=device)] for _ in range(2))
    return _random((region.rows, region.cols // 2), spread, dtype, device), low | high << 4


def _random_tiles(
    rows: int, tiles: Tiles, spread: float, dtype: torch.dtype, device: Device
) -> tuple[Tensor, ...]:
    order = torch.rand(rows // tiles.rows, tiles.k_shards, tiles.shard_total, device=device)
    kept = order.argsort(-1)[..., : tiles.shard_kept].sort(-1).values
    index = kept.reshape(-1, tiles.kept).to(INDEX_DTYPE)
    return _random((rows, tiles.stored_columns), spread, dtype, device), index


def _rows_of(region: Region, planes: tuple[Tensor, ...], first: int, size: int) -> Tensor:
    """Rows first … first+size of a region, dense."""
    if region.tiles is None:
        return expand_region(region.kind, tuple(plane[first : first + size] for plane in planes))
    step = region.tiles.rows
    blocks = slice(first // step, -(-(first + size) // step))
    values, index = planes[0][blocks.start * step : blocks.stop * step], planes[1][blocks]
    dense = expand_region(region.kind, (values, index), region.tiles)
    return dense[first % step : first % step + size]


@dataclass
class Operands:
    """Kernel tensors of a layer, in enough copies to exceed L2, and the planes they come from."""

    layout: Layout
    copies: list[list[Tensor]]
    planes: list[tuple[Tensor, ...]]

    @classmethod
    def random(cls, layout: Layout, device: Device) -> Operands:
        planes = [random_planes(region, layout.weight_dtype, device) for region in layout.regions]
        weights = ops.prepare(layout, planes)
        count = timing.copies_beyond_l2(sum(weight.nbytes for weight in weights), device)
        copies = [weights, *([w.clone() for w in weights] for _ in range(count - 1))]
        return cls(layout, copies, planes)

    def alpha(self, out_dtype: torch.dtype) -> float:
        return ops.alpha_for(self.layout.weight_dtype, out_dtype)

    def error(self, indices: Iterable[int], x: Tensor, y: Tensor) -> float:
        """Largest ‖y − ref‖ / ‖ref‖ over channels at the ends of the given regions.

        ref = alpha · X · Wᵀ of those regions alone, in float32. x [M, K], y [M, N].
        """
        indices = tuple(indices)
        x, y = x[-_TOKENS:], y[-_TOKENS:]
        alpha = self.alpha(y.dtype)
        worst = 0.0
        for index in indices:
            region = self.layout.regions[index]
            size = min(_CHANNELS, region.rows)
            for start in {region.y_start, region.y_stop - size}:
                expected = self._product(indices, x, start, size) * alpha
                found = y[:, start : start + size].float()
                worst = max(worst, ((found - expected).norm() / expected.norm()).item())
        return worst

    def _product(self, indices: tuple[int, ...], x: Tensor, start: int, size: int) -> Tensor:
        """X · Wᵀ of channels start … start+size, float32."""
        total = torch.zeros(x.shape[0], size, device=x.device)
        for index in indices:
            region = self.layout.regions[index]
            if not region.y_start <= start < region.y_stop:
                continue
            first = start - region.y_start
            weight = _rows_of(region, self.planes[index], first, size)
            total += x[:, region.x_start : region.x_stop].float() @ weight.float().t()
        return total
