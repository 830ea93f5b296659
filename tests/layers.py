"""Random layers for kernel tests: the dense weight that was cut into planes is the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spense.format import sparse24
from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels import ops
from vllm_spense.kernels.problem import Layout, Region

FP8 = torch.float8_e4m3fn
DENSE, SPARSE = RegionKind.DENSE, RegionKind.SPARSE_24
NAMES = {FP8: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Layer:
    layout: Layout
    weight: Tensor  # [N, K] in the weight dtype, zeros where 2:4 has them
    planes: list[tuple[Tensor, ...]]

    def kernel_tensors(self) -> list[Tensor]:
        return ops.prepare(self.layout, self.planes)

    def product(self, x: Tensor) -> Tensor:
        """X · Wᵀ in float64."""
        return x.double() @ self.weight.double().t()


def output_split(n: int, k: int, dense: int) -> tuple[Region, ...]:
    """The last `dense` rows are dense."""
    regions = Region(SPARSE, 0, n - dense, 0, k), Region(DENSE, n - dense, dense, 0, k)
    return tuple(r for r in regions if r.rows)


def input_split(n: int, k: int, dense: int) -> tuple[Region, ...]:
    """The last `dense` columns are dense."""
    regions = Region(SPARSE, 0, n, 0, k - dense), Region(DENSE, 0, n, k - dense, dense)
    return tuple(r for r in regions if r.cols)


def gate_up(n: int, k: int, dense: int) -> tuple[Region, ...]:
    """Two output-split modules of n/2 rows, stacked."""
    half = output_split(n // 2, k, dense // 2)
    below = [Region(r.kind, r.y_start + n // 2, r.rows, r.x_start, r.cols) for r in half]
    return (*half, *below)


def random_input(m: int, k: int, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(m, k, generator=generator, device=device).to(dtype)


def prune(weight: Tensor) -> Tensor:
    """Keep the two largest of four consecutive k."""
    groups = weight.view(weight.shape[0], -1, 4)
    kept = groups.abs().topk(2, -1).indices
    return (groups * torch.zeros_like(groups).scatter_(-1, kept, 1.0)).view_as(weight)


def make_layer(
    n: int, k: int, regions: tuple[Region, ...], dtype: torch.dtype, device: str, seed: int = 0
) -> Layer:
    layout = Layout(n, k, regions, dtype)
    full = random_input(n, k, torch.float32, device, seed)
    planes: list[tuple[Tensor, ...]] = []
    for r in regions:
        part = full[r.y_start : r.y_start + r.rows, r.x_start : r.x_start + r.cols]
        if r.kind is SPARSE:
            part.copy_(prune(part.contiguous()))
            planes.append(sparse24.compress(part.to(dtype).contiguous()))
        else:
            planes.append((part.to(dtype).contiguous(),))
    return Layer(layout, full.to(dtype), planes)


def relative_error(y: Tensor, reference: Tensor) -> float:
    """‖y − reference‖ / ‖reference‖; NaN if y holds any."""
    return ((y.double() - reference).norm() / reference.norm()).item()
