"""Layers and launches that the tests of the decode kernel share, on the CPU and on a GPU."""

from dataclasses import dataclass

import torch
from layers import DENSE, FP8, SPARSE, gate_up, input_split, output_split
from torch import Tensor

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels.decode_plan import Config
from vllm_spense.kernels.layouts import Metadata24
from vllm_spense.kernels.problem import Layout, Problem, Region

__all__ = ["CASES", "DENSE", "FP8", "SPARSE", "Case", "problem_of", "stored"]

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One launch, small enough for the emulator."""

    name: str
    n: int
    k: int
    regions: tuple[Region, ...]
    m: int
    config: Config
    processors: int = 3
    dtype: torch.dtype = FP8

    @property
    def layout(self) -> Layout:
        return Layout(self.n, self.k, self.regions, self.dtype)

    def __str__(self) -> str:
        return self.name


def _dense(n: int, k: int) -> tuple[Region, ...]:
    return (Region(DENSE, 0, n, 0, k),)


CASES = (
    Case("all_sparse", 160, 512, output_split(160, 512, 0), 3, Config(2, 2, 2)),
    Case("gate_up", 192, 576, gate_up(192, 576, 64), 9, Config(2, 3, 2, 1), 5),
    Case("many_groups", 320, 256, output_split(320, 256, 64), 8, Config(2, 3, 1, 1), 2),
    Case("split_k", 192, 800, input_split(192, 800, 160), 17, Config(2, 2, 3, split=2), 2),
    Case("input_split_m32", 64, 1024, input_split(64, 1024, 512), 32, Config(4, 3, 2), 2),
    Case("half_a_block", 96, 160, output_split(96, 160, 0), 24, Config(4, 2, 1, split=2), 4),
    Case("all_dense_prime_rows", 203, 592, _dense(203, 592), 2, Config(2, 2, 5, 3), 2),
    Case("one_row", 1, 16, _dense(1, 16), 1, Config(2), 2),
    Case("bf16_gate_up", 192, 320, gate_up(192, 320, 64), 9, Config(2, 2, 2, 1), 5, BF16),
    Case("bf16_input_split", 64, 608, input_split(64, 608, 96), 8, Config(2, 3, 2), 2, BF16),
    Case("fp16_input_split", 64, 608, input_split(64, 608, 96), 1, Config(2, 3, 1), 2, FP16),
)  # fmt: skip


def problem_of(layout: Layout, m: int, capability: tuple[int, int] = (9, 0)) -> Problem:
    return Problem.whole(layout, m, BF16, capability)


def stored(layout: Layout, planes: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Kernel tensors as bytes, 2:4 regions as cuSPARSELt makes them."""
    tensors = []
    for region, parts in zip(layout.regions, planes, strict=True):
        raw = parts[0].contiguous().view(torch.uint8).flatten()
        if region.kind is RegionKind.SPARSE_24:
            order = Metadata24(region.rows, region.cols, layout.weight_dtype.itemsize)
            raw = torch.cat([raw, order.pack(parts[1])])
        tensors.append(raw)
    return tensors
