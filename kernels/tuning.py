"""Measure every candidate of a layer, so that `dispatch` can choose by figures.

`Tuner.layer` fills tables (`scripts/tune.py`), `Tuner.regions` what is missing at load
(`load_time.py`). A candidate's time counts only after its product agreed with the same operands
multiplied in float32; one that takes more than twice the best time so far is dropped after one
replay.

Weights are random with the magnitudes of quantised ones: zeros would run faster than real data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from types import ModuleType

import torch

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels import compile_ahead, cusparselt, dispatch, execution, timing
from vllm_spense.kernels.measurements import DTYPES, LayerRow, RegionRow, Table, Times, layer_key
from vllm_spense.kernels.measurements import candidate as name_of
from vllm_spense.kernels.operands import Operands, random_input
from vllm_spense.kernels.problem import ROW_STEP, Config, Layout, Problem, Region, padded_rows

__all__ = ["GRID", "ODD", "Tuner"]

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ODD = (24, 48, 72, 100, 136, 200, 264, 300, 392, 520, 768, 1500, 3001)  # past tile boundaries
_FULL = tuple(m for m in GRID if m >= ROW_STEP)  # below, M is padded to 16
_WRONG = 1e-2  # ‖y − ref‖ / ‖ref‖; FP8 tensor cores reach 3e-3 at K = 8192 (fast accumulation)
_KEEP = 4  # candidates that a row keeps
_BY_REGIONS = (dispatch.REGIONS, dispatch.BESIDE)
_HOPELESS = 2.0  # times the best: not measured further
Captures = Mapping[str, Callable[[], timing.Captured | None]]


class Tuner:
    """Measures on one device (by default the current one) and collects rows in `table`."""

    def __init__(
        self,
        out_dtype: torch.dtype,
        report: Callable[[str], None],
        deadline: float = float("inf"),
        repetitions: int = 9,
        device: torch.device | None = None,
        whole: int = 6,
    ) -> None:
        """`report` gets a line per problem; after `deadline` (time.monotonic) nothing starts.
        `whole` is how many launches of a whole layer are tried at each M."""
        self.table = Table()
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._out_dtype = out_dtype
        self._report = report
        self._deadline = deadline
        self._repetitions = repetitions
        self._whole = whole

    @property
    def late(self) -> bool:
        return time.monotonic() > self._deadline

    def layer(self, layout: Layout, ms: Iterable[int]) -> None:
        """Regions first, then whole plans built from the best of them, then one dense GEMM."""
        ms = tuple(ms)
        dense = dense_twin(layout)
        operands = Operands.random(layout, self.device)
        self._regions(operands, ms)
        twin = operands if layout == dense else Operands.random(dense, self.device)
        if layout != dense:
            self._regions(twin, ms)
        self._compile_ahead(layout, ms)
        for m in sorted(ms):
            if not self.late:
                self._plans(operands, twin, m)

    def _compile_ahead(self, layout: Layout, ms: tuple[int, ...]) -> None:
        """Launches of the whole layer that will be tried, several at a time."""
        jobs = []
        for m in ms:
            problem = self._problem(layout, m)
            for name in islice(dispatch.whole_candidates(problem), self._whole):
                (step,) = dispatch.named_plan(problem, name, self.table, False).steps
                jobs.append(compile_ahead.Job.on(self.device, step, self._out_dtype))
        seconds = compile_ahead.compile_ahead(jobs)
        self._report(f"compiled {len(jobs)} launches in {seconds:.1f} s")

    def regions(self, layout: Layout, ms: Iterable[int]) -> None:
        """The regions of a layer alone, those that `table` does not know."""
        self._regions(Operands.random(layout, self.device), tuple(ms))

    def _problem(self, layout: Layout, m: int) -> Problem:
        capability = torch.cuda.get_device_capability(self.device)
        return Problem.whole(layout, m, self._out_dtype, capability)

    def _regions(self, operands: Operands, ms: tuple[int, ...]) -> None:
        layout = operands.layout
        for index in range(len(layout.regions)):
            problem = self._problem(layout, 1).only(index)
            if self.table.knows(problem):
                continue
            found: dict[int, Times] = {}
            # Powers of two try everything, the others what was good next to them.
            for m in sorted(ms, key=lambda m: (m not in _FULL, m)):
                if self.late:
                    break
                near = _neighbours(found, m) if m not in _FULL else None
                found[m] = self._region(self._problem(layout, m).only(index), operands, near)
            self._add_region(problem, found)

    def _add_region(self, problem: Problem, found: dict[int, Times]) -> None:
        region, layout = problem.region, problem.layout
        part = (region.rows, region.cols) != (layout.n, layout.k)
        dtypes = DTYPES[layout.weight_dtype], DTYPES[self._out_dtype]
        shape = (region.label, region.rows, region.cols, part)
        self.table.add(RegionRow(*dtypes, m, us, *shape) for m, us in found.items() if us)

    def _region(self, problem: Problem, operands: Operands, only: set[str] | None) -> Times:
        """Microseconds of the best candidates for one region."""
        named = {
            name_of(path.NAME, config): (path, config)
            for path in dispatch.PATHS
            if not path.WHOLE_LAYER and path.can_implement(problem)[0]
            for config in path.candidates(problem)
        }
        x = random_input(
            *(padded_rows(problem.m), problem.layout.k, operands.layout.weight_dtype, self.device)
        )
        captures = {
            name: partial(self._capture_region, problem, operands, x, path, config)
            for name, (path, config) in named.items()
            if (only is None or name in only) and _accepted(path, problem, config)
        }
        times = self._contest(captures)
        self._report(f"{problem.region.label} {problem.region.rows}x{problem.region.cols} "
                     f"M={problem.m} {times}")  # fmt: skip
        return times

    def _contest(self, captures: Captures, always: Collection[str] = ()) -> Times:
        """Microseconds of the best candidates and of those in `always`; wrong ones are left out."""
        captured: dict[str, timing.Captured] = {}
        first: dict[str, float] = {}
        for name, capture in captures.items():
            graph = capture()
            if graph is None:
                continue
            graph.replay()
            first[name] = graph.replay()
            if name in always or first[name] <= _HOPELESS * min(first.values()):
                captured[name] = graph
        ranked = sorted(captured, key=lambda name: (name not in always, first[name]))
        kept = {name: captured[name] for name in ranked[: len(set(always) & set(captured)) + _KEEP]}
        samples = timing.alternate(kept, self._repetitions)
        return {name: round(sample.median, 2) for name, sample in samples.items()}

    def _capture_region(
        self,
        problem: Problem,
        operands: Operands,
        x: torch.Tensor,
        path: ModuleType,
        config: Config,
    ) -> timing.Captured | None:
        """Graph of one candidate over all copies; None where its product is wrong."""
        (index,) = problem.indices
        accumulate = problem.layout.accumulates(index)
        rows = x.shape[0] if path.PADS_ROWS else problem.m
        shape = (rows, problem.layout.n)
        y = torch.full(shape, 0.0 if accumulate else float("nan"), device=self.device)
        y = y.to(self._out_dtype)

        def run(weights: list[torch.Tensor]) -> None:
            path.run(
                *(problem, x[:rows], [weights[index]], y),
                alpha=operands.alpha(self._out_dtype),
                accumulate=accumulate,
                config=config,
            )

        run(operands.copies[0])
        error = operands.error((index,), x[: problem.m], y[: problem.m])
        if not error <= _WRONG:
            self._report(f"{name_of(path.NAME, config)} left out: error {error:.2e} at {problem}")
            return None
        return timing.capture(
            [lambda w=w: run(w) for w in operands.copies], _rounds(operands, problem.m)
        )

    def _plans(self, operands: Operands, twin: Operands, m: int) -> None:
        """Whole plans of a layer, and its dense twin, alternating."""
        problem = self._problem(operands.layout, m)
        x = random_input(m, operands.layout.k, operands.layout.weight_dtype, self.device)
        plans = {
            name: dispatch.named_plan(problem, name, self.table, False)
            for name in (*_BY_REGIONS, *islice(dispatch.whole_candidates(problem), self._whole))
        }
        captures = {
            name: partial(self._capture_plan, plan, operands, x)
            for name, plan in plans.items()
            if plan
        }
        if operands is not twin:
            plan = dispatch.make_plan(self._problem(twin.layout, m), self.table)
            captures[dispatch.DENSE_COPY] = partial(self._capture_plan, plan, twin, x)
        times = self._contest(captures, (*_BY_REGIONS, dispatch.DENSE_COPY))
        layout = operands.layout
        dtypes = DTYPES[layout.weight_dtype], DTYPES[self._out_dtype]
        self.table.add((), [LayerRow(*dtypes, m, times, layer_key(layout))])
        self._report(f"layer {layer_key(layout)} M={m} {times}")

    def _capture_plan(
        self, plan: dispatch.Plan, operands: Operands, x: torch.Tensor
    ) -> timing.Captured | None:
        layout, alpha = operands.layout, operands.alpha(self._out_dtype)

        def run(weights: list[torch.Tensor]) -> torch.Tensor:
            return execution.run_plan(plan, x, weights, layout.n, self._out_dtype, alpha)

        error = operands.error(range(len(layout.regions)), x, run(operands.copies[0]))
        if not error <= _WRONG:
            self._report(f"{plan.steps[0].path} left out: error {error:.2e}")
            return None
        return timing.capture(
            [lambda w=w: run(w) for w in operands.copies], _rounds(operands, x.shape[0])
        )


def _accepted(path: ModuleType, problem: Problem, config: Config) -> bool:
    """Whether a library takes a candidate: some of its algorithms fail for some sizes."""
    return path is not cusparselt or cusparselt.accepts(problem, config)


def dense_twin(layout: Layout) -> Layout:
    """The same N and K as one dense region."""
    region = Region(RegionKind.DENSE, 0, layout.n, 0, layout.k)
    return Layout(layout.n, layout.k, (region,), layout.weight_dtype)


def _rounds(operands: Operands, m: int) -> int:
    """Enough calls in a graph for its time to be well above that of an event."""
    return max(1, 6 // len(operands.copies)) if m <= 1024 else 1


def _neighbours(found: dict[int, Times], m: int) -> set[str]:
    """Candidates that were good at measured sizes up to four times smaller or larger than `m`."""
    near = [k for k in found if m <= 4 * k and k <= 4 * m] or [min(found, key=lambda k: abs(k - m))]
    return {name for k in near for name in found[k]}
