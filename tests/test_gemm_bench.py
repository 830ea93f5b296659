"""The GEMM benchmark on the CPU: fake kernels with scripted times, real operands and gates."""

import pytest
import torch
from fake_gpu import RUNNING, fake_gpu
from layers import FP8, gate_up, output_split

from vllm_spense.format.partition import RegionKind
from vllm_spense.format.tiles import Tiles
from vllm_spense.kernels import block_sparse, decode, reference
from vllm_spense.kernels.gemm_bench import GemmBench, bytes_of, floor_us
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Layout, Region

__all__ = ["fake_gpu"]  # a fixture

FULL = Layout(256, 128, output_split(256, 128, 0), FP8)
TILED = Layout(256, 256, (Region(RegionKind.ZERO_TILES, 0, 256, 0, 256, Tiles(64, 64, 1, 4)),), FP8)
HALF = Layout(256, 128, gate_up(256, 128, 128), FP8)


def test_bytes_and_floor():
    assert bytes_of(FULL) == 256 * 128 * 0.625
    assert bytes_of(HALF) == 256 * 128 * (0.625 + 1) / 2
    assert floor_us(FULL) == pytest.approx(256 * 128 * 0.625 / 4.3e6)


def bench(layout, path):
    return GemmBench(layout, Table(), path, repetitions=3, device="cpu")


def test_the_dispatched_path_against_dense(fake_gpu):
    row = bench(FULL, "dispatch").row("model", "o", 0.0, 16)
    assert row.path == "cusparselt" and row.us == 7.0
    assert (row.dense_path, row.dense_us) == ("cublaslt", 6.0)
    assert row.ratio == pytest.approx(6 / 7, abs=1e-3)
    assert row.cusparselt_us == 7.0 and row.rel_err < 3e-3


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_decode_path_and_its_gate(fake_gpu, monkeypatch, factor):
    def run(problem, x, weights, y, *, alpha, accumulate, config):
        RUNNING.append("decode")
        weight = reference.expand(problem.layout, weights)
        y.copy_(x.float() @ weight.float().t() * factor)

    monkeypatch.setattr(decode, "run", run)
    if factor != 1.0:
        with pytest.raises(RuntimeError, match="decode.*wrong: error"):
            bench(HALF, "decode").row("model", "gate_up", 0.5, 8)
        return
    row = bench(HALF, "decode").row("model", "gate_up", 0.5, 8)
    assert row.path.startswith("decode warps=") and row.cusparselt_us is None
    assert row.M == 8 and row.dense_share == 0.5


def test_the_block_sparse_path(fake_gpu, monkeypatch):
    """It can be measured before it is used; zero tiles have rows of their own kind."""

    def run(problem, x, weights, y, *, alpha, accumulate, config):
        RUNNING.append("block_sparse")
        y.copy_(x.float() @ reference.expand(problem.layout, weights).t())

    monkeypatch.setattr(block_sparse, "run", run)
    assert bytes_of(TILED) == 256 * 256 * 0.25
    row = bench(TILED, "block_sparse").row("model", "down", 0.0, 300)
    assert row.path.startswith("block_sparse block_m=") and row.rel_err < 3e-3
    assert (row.kind, row.tile, row.zero_share) == ("block", "64x64", 0.75)
    with pytest.raises(RuntimeError, match="block_sparse cannot run.*zero tiles at a time"):
        bench(FULL, "block_sparse").row("model", "o", 0.0, 16)


def test_what_decode_cannot_run_is_said(fake_gpu):
    with pytest.raises(RuntimeError, match="decode cannot run.*M = 33"):
        bench(HALF, "decode").row("model", "gate_up", 0.5, 33)


def test_device_is_a_parameter(fake_gpu):
    assert bench(FULL, "dispatch").operands.copies[0][0].device == torch.device("cpu")
