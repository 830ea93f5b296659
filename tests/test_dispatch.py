"""Choosing plans, with a faked device, library and table."""

import pytest
import torch
from layers import FP8, gate_up, input_split, output_split

from vllm_spense.kernels import cusparselt, dispatch, scaled_mm
from vllm_spense.kernels.dispatch import BESIDE, DENSE_COPY, REGIONS, make_plan, named_plan
from vllm_spense.kernels.measurements import LayerRow, RegionRow, Table, layer_key
from vllm_spense.kernels.problem import Layout, Problem

BF16 = torch.bfloat16
GATE_UP = Layout(2048, 512, gate_up(2048, 512, 512), FP8)
DOWN = Layout(512, 2048, input_split(512, 2048, 512), FP8)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A cuSPARSELt that is there, and no vLLM."""
    monkeypatch.setattr(cusparselt, "missing", lambda: "")
    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: None)


def problem(layout, m, out_dtype=BF16, capability=(9, 0)):
    return Problem.whole(layout, m, out_dtype, capability)


def steps(plan):
    return [(step.path, step.weights, step.accumulate) for step in plan.steps]


def region_row(m, us, rows=768, cols=512, part=True):
    return RegionRow("fp8", "bf16", m, us, "sparse_24", rows, cols, part)


def layer_row(m, us, layout=GATE_UP):
    return LayerRow("fp8", "bf16", m, us, layer_key(layout))


def test_dense_first_then_sparse_in_place():
    assert steps(make_plan(problem(DOWN, 64))) == [
        ("scaled_mm", (1,), False),
        ("cusparselt", (0,), True),
    ]


def test_one_step_per_region():
    assert steps(make_plan(problem(GATE_UP, 64))) == [
        ("scaled_mm", (1,), False),
        ("scaled_mm", (3,), False),
        ("cusparselt", (0,), False),
        ("cusparselt", (2,), False),
    ]


@pytest.mark.parametrize(("m", "rows"), [(1, 16), (16, 16), (17, 32), (4096, 4096)])
def test_rows_are_padded_for_the_library(m, rows):
    assert make_plan(problem(DOWN, m)).rows == rows


def test_dense_alone_is_not_padded():
    layout = Layout(64, 64, output_split(64, 64, 64), FP8)
    assert make_plan(problem(layout, 17)).rows == 17


@pytest.mark.parametrize("m", [40, 64, 90])
def test_the_fastest_measured_algorithm_runs(m):
    table = Table([region_row(64, {"cusparselt": 5.0, "cusparselt alg=7": 3.0, "gone": 1.0})])
    configs = {
        s.config for s in make_plan(problem(GATE_UP, m), table).steps if s.path != "scaled_mm"
    }
    assert configs == {(("alg", 7),)}


def test_nearest_m_in_log_space():
    table = Table([region_row(16, {"cusparselt alg=1": 1.0}), region_row(64, {"cusparselt": 1.0})])
    chosen = [make_plan(problem(GATE_UP, m), table).steps[-1].config for m in (1, 31, 33, 9000)]
    assert chosen == [(("alg", 1),), (("alg", 1),), (), ()]


def test_an_unknown_shape_borrows_from_the_nearest():
    table = Table(
        [
            region_row(64, {"cusparselt alg=3": 1.0}, rows=700, cols=512),
            region_row(64, {"cusparselt alg=4": 1.0}, rows=9000, cols=512),
        ]
    )
    assert not table.knows(problem(GATE_UP, 64).only(0))
    assert make_plan(problem(GATE_UP, 64), table).steps[-1].config == (("alg", 3),)


def test_fp16_outputs_borrow_from_bf16_ones():
    table = Table([region_row(64, {"cusparselt alg=3": 1.0})])
    plan = make_plan(problem(GATE_UP, 64, torch.float16), table)
    assert plan.steps[-1].config == (("alg", 3),)


@pytest.mark.parametrize(
    ("times", "copy", "beside", "count"),
    [
        ({REGIONS: 5.0, BESIDE: 4.0, DENSE_COPY: 3.0}, True, False, 1),
        ({REGIONS: 5.0, BESIDE: 4.0, DENSE_COPY: 3.0}, False, True, 4),
        ({REGIONS: 5.0, BESIDE: 6.0}, False, False, 4),
        ({"decode warps=8": 1.0, REGIONS: 5.0}, False, False, 4),  # a configuration that is gone
    ],
)
def test_whole_plans_by_measured_time(times, copy, beside, count):
    plan = make_plan(problem(GATE_UP, 64), Table((), [layer_row(64, times)]), copy)
    assert (plan.beside, len(plan.steps)) == (beside, count)


@pytest.mark.parametrize(("m", "path"), [(8, "decode"), (7, "decode"), (33, "scaled_mm")])
def test_a_launch_for_the_whole_layer_runs_where_it_was_measured(m, path):
    name = next(dispatch.whole_candidates(problem(GATE_UP, 8)))
    table = Table((), [layer_row(8, {name: 1.0, REGIONS: 5.0})])
    first = make_plan(problem(GATE_UP, m), table).steps[0]
    assert first.path == path and make_plan(problem(GATE_UP, m)).steps[0].path == "scaled_mm"
    assert path != "decode" or first.weights == (0, 1, 2, 3)


def test_the_dense_copy_follows_the_regions():
    (step,) = named_plan(problem(GATE_UP, 64), DENSE_COPY, Table(), True).steps
    assert (step.path, step.weights) == ("scaled_mm", (4,))
    assert step.problem.region.rows == 2048 and step.problem.region.cols == 512


def test_regions_that_add_up_get_a_buffer_when_side_by_side():
    plan = named_plan(problem(DOWN, 64), BESIDE, Table(), False)
    assert plan.beside and plan.added and not any(step.accumulate for step in plan.steps)
    plan = named_plan(problem(GATE_UP, 64), BESIDE, Table(), False)
    assert plan.beside and not plan.added


def test_one_kind_alone_is_not_put_side_by_side():
    one_kind = Layout(768, 512, output_split(768, 512, 0), FP8)
    assert named_plan(problem(one_kind, 64), BESIDE, Table(), False) is None


def test_a_region_that_no_path_takes_is_refused_with_reasons():
    layout = Layout(40, 64, output_split(40, 64, 0), FP8)
    with pytest.raises(ValueError, match=r"no path runs .*\[40, 64\]: cuSPARSELt wants multiples"):
        make_plan(problem(layout, 8))
    (reason,) = dispatch.region_refusals(layout, BF16, (9, 0))
    assert "multiples of 32" in reason and "dense GEMMs take one dense region" in reason


def test_refusals_by_region():
    mixed = Layout(72, 64, output_split(72, 64, 32), FP8)
    sparse, dense = dispatch.region_refusals(mixed, BF16, (9, 0))
    assert sparse and not dense
