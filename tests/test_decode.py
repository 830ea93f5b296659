"""The decode kernel on the CPU: emulated launches, refusals, plans."""

import numpy as np
import pytest
import torch
from decode_cases import BF16, CASES, DENSE, FP8, SPARSE, problem_of, stored
from gluon_emulator import Pointer, V, load
from layers import gate_up, input_split, make_layer, output_split, random_input

from vllm_spense.kernels import decode
from vllm_spense.kernels.decode_plan import CONFIGS, Config, estimate, fits, kinds_of, plan
from vllm_spense.kernels.problem import Layout, Problem, Region


def emulate(case, lazy):
    """Y [M, N] (float32) of one launch, and the product in float64."""
    layer = make_layer(case.n, case.k, case.regions, case.dtype, "cpu")
    x = random_input(case.m, case.k, case.dtype, "cpu")
    launch = plan(problem_of(case.layout, case.m), case.config, case.processors)
    machine, module, _ = load(lazy)
    weights = [Pointer(machine, w.numpy()).value() for w in stored(case.layout, layer.planes)]
    px = Pointer(machine, x.view(torch.uint8).numpy()).value()
    y = np.full((case.config.split, case.m, case.n), np.nan, np.float32)
    py = Pointer(machine, y, "f32").value()

    def side(regions):
        if not regions:
            return (px,), (V(0),), (V(0),)
        mine = tuple(w for r, w in zip(case.regions, weights, strict=True) if r in regions)
        return mine, tuple(V(r.rows) for r in regions), tuple(V(r.y_start) for r in regions)

    sides = [side(regions) for regions in kinds_of(problem_of(case.layout, case.m))]
    numbers = [V(i) for i in (case.m, case.n, *launch.programs, *launch.groups)]
    for split in range(launch.grid[1]):
        for program in range(launch.grid[0]):
            machine.start(program, split, launch.shared_rows * launch.cut.warps**2 * 128)
            module.decode_kernel(px, py, *sides, *numbers, launch.shared_rows, launch.cut)
    return torch.from_numpy(y.sum(0)), layer.product(x)


@pytest.mark.parametrize("lazy", [False, True], ids=["copies_land_at_once", "copies_land_late"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_launch(case, lazy):
    found, expected = emulate(case, lazy)
    assert found.isfinite().all()
    assert (found.double() - expected).norm() / expected.norm() < 1e-6


def test_every_output_is_written_once():
    # The emulator refuses two threads that store one element; NaN marks what nobody stored.
    case = next(c for c in CASES if c.name == "many_groups")
    found, _ = emulate(case, False)
    assert not found.isnan().any()


def layout(regions, n=256, k=512, dtype=FP8):
    return Layout(n, k, regions, dtype)


@pytest.mark.parametrize(
    ("regions", "m", "capability", "reason"),
    [
        (output_split(256, 512, 0), 33, (9, 0), "M = 33"),
        (output_split(256, 512, 0), 8, (8, 9), "unmeasured on capability"),
        ((Region(SPARSE, 0, 256, 0, 504), Region(DENSE, 0, 256, 504, 8)), 8, (9, 0), "steps of 32"),
        ((Region(SPARSE, 0, 40, 0, 512), Region(DENSE, 40, 216, 0, 512)), 8, (9, 0), "rows"),
    ],
)
def test_refusals(regions, m, capability, reason):
    possible, why = decode.can_implement(problem_of(layout(regions), m, capability))
    assert not possible and reason in why


def test_one_region_of_a_layer_is_refused():
    problem = problem_of(layout(output_split(256, 512, 64)), 8).only(0)
    assert decode.can_implement(problem) == (False, "the decode kernel takes a whole layer")


QWEN3_32B = {
    "qkv": Layout(10240, 5120, output_split(10240, 5120, 0), FP8),
    "o": Layout(5120, 8192, output_split(5120, 8192, 0), FP8),
    "gate_up": Layout(51200, 5120, output_split(51200, 5120, 0), FP8),
    "gate_up_50": Layout(51200, 5120, gate_up(51200, 5120, 25600), FP8),
    "down": Layout(5120, 25600, output_split(5120, 25600, 0), FP8),
    "down_25": Layout(5120, 25600, input_split(5120, 25600, 6400), FP8),
}


@pytest.mark.parametrize("m", [1, 16, 24, 32])
@pytest.mark.parametrize("name", QWEN3_32B)
def test_candidates(name, m):
    problem = problem_of(QWEN3_32B[name], m)
    assert decode.can_implement(problem) == (True, "")
    found = decode.candidates(problem)
    assert 4 <= len(found) <= len(CONFIGS) and len(set(found)) == len(found)
    launches = [plan(problem, Config(**dict(c)), 132) for c in found]
    times = [estimate(problem, launch) for launch in launches]
    assert times == sorted(times)
    for launch, config in zip(launches, found, strict=True):
        assert fits(launch, Config(**dict(config)))
        assert launch.cut.slot % 16 == launch.cut.ring_start % 16 == 0
        if not launch.cut.mixed:  # else the first programs take both kinds
            assert all(p or not g for p, g in zip(launch.programs, launch.groups, strict=True))


def test_m_within_a_token_tile_compiles_nothing_new():
    for m in range(9, 17):
        assert plan(problem_of(QWEN3_32B["qkv"], m), CONFIGS[0], 132).cut == (
            plan(problem_of(QWEN3_32B["qkv"], 16), CONFIGS[0], 132).cut
        )


def test_programs_are_shared_by_bytes():
    launch = plan(problem_of(QWEN3_32B["gate_up_50"], 8), Config(), 132)
    sparse, dense = launch.programs
    assert sum(launch.programs) == 132 and sparse < dense  # 5 bytes against 8 for as many weights


def test_scale_free_alpha_is_part_of_the_plan():
    problem = Problem.whole(QWEN3_32B["o"], 8, torch.float16, (9, 0))
    assert plan(problem, CONFIGS[0], 132, 2.0**-12).cut.alpha == 2.0**-12
    assert plan(problem_of(QWEN3_32B["o"], 8), CONFIGS[0], 132).cut.alpha == 1.0


def test_bf16_layer_is_taken():
    problem = problem_of(layout(output_split(256, 512, 64), dtype=BF16), 8)
    assert decode.can_implement(problem) == (True, "")
