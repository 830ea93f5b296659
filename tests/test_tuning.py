"""The tuner on the CPU: fake kernels with scripted times, real operands and comparisons."""

import pytest
import torch
from fake_gpu import WRONG, fake_gpu
from layers import FP8, gate_up, input_split, output_split

from vllm_spense.kernels import ops, reference, tuning
from vllm_spense.kernels.operands import Operands, random_planes
from vllm_spense.kernels.problem import Layout

__all__ = ["fake_gpu"]  # a fixture

BF16 = torch.bfloat16


@pytest.fixture
def tuner(fake_gpu):
    lines = []
    made = tuning.Tuner(BF16, lines.append, repetitions=3, device=torch.device("cpu"))
    made.lines = lines
    return made


LAYOUTS = {
    "gate_up": Layout(256, 64, gate_up(256, 64, 64), FP8),
    "down": Layout(64, 256, input_split(64, 256, 64), FP8),
    "sparse": Layout(64, 64, output_split(64, 64, 0), FP8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_plan_gets_its_time(tuner, name):
    tuner.layer(LAYOUTS[name], (8, 32, 40))
    regions, layers = tuner.table.rows()
    assert {row.m for row in regions} == {row.m for row in layers} == {8, 32, 40}
    for row in regions:
        best = min(row.us, key=row.us.get)
        assert best == (
            "cusparselt alg=3" if row.kind == "sparse_24" else "scaled_mm gemm=cublaslt"
        )
        assert len(row.us) <= 4 and "cusparselt alg=7" not in row.us
    expected = {
        "gate_up": {"regions": 20.0, "regions beside": 20.0, "dense": 6.0},
        "down": {"regions": 10.0, "regions beside": 10.0, "dense": 6.0},
        "sparse": {"regions": 4.0, "dense": 6.0},
    }[name]
    for row in layers:
        decode = {plan: us for plan, us in row.us.items() if plan.startswith("decode")}
        assert {plan: us for plan, us in row.us.items() if plan not in decode} == expected
        assert (min(decode.values(), default=None) == 3.0) is (row.m <= 32) and len(decode) <= 4


def test_a_wrong_product_is_left_out_and_said(tuner):
    tuner.layer(LAYOUTS["sparse"], (32,))
    assert all(WRONG not in row.us for row in tuner.table.rows()[0])
    assert any(line.startswith(f"{WRONG} left out: error") for line in tuner.lines)


def test_sizes_between_powers_of_two_try_what_was_good_beside_them(tuner):
    tuner.layer(LAYOUTS["sparse"], (32, 40, 64))
    (row,) = (r for r in tuner.table.rows()[0] if r.m == 40 and r.kind == "sparse_24")
    assert "cusparselt alg=3" in row.us


def test_known_regions_are_not_measured_again(tuner):
    tuner.layer(LAYOUTS["sparse"], (32,))
    before = len(tuner.lines)
    tuner.layer(LAYOUTS["sparse"], (32,))
    assert all(line.startswith(("layer ", "compiled ")) for line in tuner.lines[before:])


def test_nothing_starts_after_the_deadline(tuner):
    tuner._deadline = 0.0
    tuner.layer(LAYOUTS["down"], (32,))
    assert tuner.late and tuner.table.rows() == ([], [])


def test_error_is_that_of_the_regions_asked_for():
    layout = LAYOUTS["down"]
    planes = [random_planes(region, FP8, "cpu") for region in layout.regions]
    operands = Operands(layout, [ops.prepare(layout, planes)], planes)
    x = torch.randn(5, 256).to(FP8)
    weight = reference.expand(layout, operands.copies[0])
    y = reference.linear_raw(x, weight, torch.float32)
    assert operands.error((0, 1), x, y) < 1e-6
    assert operands.error((0,), x, y) > 0.1
    y[:, -1] *= 2
    assert operands.error((0, 1), x, y) > 1e-3
