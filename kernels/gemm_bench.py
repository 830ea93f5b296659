"""Our GEMMs against the best dense one, layer by layer: what `scripts/bench_gemm.py` prints.

Timed as served: CUDA graphs, weights beyond L2, X in L2 and as the quantiser leaves it; whatever
a path does to X, Y or scratch counts. Dense is the fastest of what vLLM and torch bring, on weights
of its own that are not pruned, and alternates with ours inside each repetition. A time is reported
only after the product was right in the same run. Limit: calls follow one another in a graph, so a
launch that may start early (decode) overlaps with the end of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_spense.format.partition import RegionKind
from vllm_spense.kernels import (
    block_sparse,
    cusparselt,
    decode,
    dispatch,
    execution,
    scaled_mm,
    timing,
)
from vllm_spense.kernels.measurements import DTYPES, Table, candidate
from vllm_spense.kernels.operands import Operands, random_input
from vllm_spense.kernels.problem import Layout, Problem, padded_rows
from vllm_spense.kernels.tuning import dense_twin

__all__ = ["GemmBench", "Row", "bytes_of", "floor_us"]

COPY_BYTES_PER_US = 4.3e6  # a device copy on H200, read + written
MAX_ERROR = 3e-3  # ‖y − ref‖ / ‖ref‖ of ours, BF16 output
_LIBRARY_ERROR = 1e-2  # fast accumulation reaches 3e-3
# Paths to measure by themselves; the block-sparse one may be measured before it is used.
PATHS = {
    decode.NAME: (decode, decode.can_implement),
    block_sparse.NAME: (block_sparse, block_sparse.fits),
}
_TRIED = 3  # candidates that a short pass leaves for the comparison


@dataclass(frozen=True)
class Row:
    """One layer at one M, as `benchmarks/gemm-DEVICE.json` has it."""

    model: str
    layer: str
    N: int
    K: int
    M: int
    dtype: str
    kind: str
    dense_share: float
    zero_share: float
    tile: str | None
    path: str
    us: float
    dense_path: str
    dense_us: float
    ratio: float
    cusparselt_us: float | None
    rel_err: float
    quartiles: tuple[float, float]  # of the ratio


def bytes_of(layout: Layout) -> float:
    """Bytes of W that a launch must read."""
    size = layout.weight_dtype.itemsize
    per_weight = {RegionKind.DENSE: size, RegionKind.SPARSE_24: size / 2 + 1 / 8}
    return sum(
        r.rows * r.cols * (size * (1 - r.tiles.sparsity) if r.tiles else per_weight[r.kind])
        for r in layout.regions
    )


def floor_us(layout: Layout) -> float:
    """The time of those bytes at the speed of a device copy."""
    return bytes_of(layout) / COPY_BYTES_PER_US


class GemmBench:
    """Measures one layer; weights are made once for all M."""

    def __init__(
        self,
        layout: Layout,
        table: Table,
        path: str,
        repetitions: int = 20,
        device: torch.device | str = "cuda",
    ) -> None:
        """`path` is a name in `PATHS`, or "dispatch" (what the dispatcher chooses by `table`)."""
        self.layout, self.table, self.path = layout, table, path
        self.repetitions, self.device = repetitions, device
        self.operands = Operands.random(layout, device)
        self.dense = Operands.random(dense_twin(layout), device)
        self._capability = torch.cuda.get_device_capability(device)

    def row(self, model: str, layer: str, dense_share: float, m: int) -> Row:
        """Measure one M.

        Raises:
            RuntimeError: a product is wrong; names the candidate and the error.
        """
        x = random_input(m, self.layout.k, self.layout.weight_dtype, self.device)
        ours, error = self._ours(x)
        graphs = self._dense(x) | ours | self._library(x)
        samples = timing.alternate(graphs, self.repetitions)
        medians = {name: sample.median for name, sample in samples.items()}
        best = min((n for n in graphs if n.startswith("dense ")), key=medians.__getitem__)
        (name,) = ours
        low, ratio, high = timing.ratio(samples[best], samples[name])
        library = medians.get("library")
        tiles = next((r.tiles for r in self.layout.regions if r.tiles), None)
        kind = ("hybrid", dense_share, 0.0, None)
        if tiles:
            kind = ("block", dense_share, round(tiles.sparsity, 4), f"{tiles.rows}x{tiles.cols}")
        return Row(
            *(model, layer, self.layout.n, self.layout.k, m, DTYPES[self.layout.weight_dtype]),
            *(*kind, name, round(medians[name], 2)),
            *(best.removeprefix("dense "), round(medians[best], 2), round(ratio, 3)),
            *(library and round(library, 2), error, (round(low, 3), round(high, 3))),
        )

    def _problem(self, layout: Layout, m: int) -> Problem:
        return Problem.whole(layout, m, torch.bfloat16, self._capability)

    def _ours(self, x: torch.Tensor) -> tuple[dict[str, timing.Captured], float]:
        problem = self._problem(self.layout, x.shape[0])
        if self.path == "dispatch":
            plan = dispatch.make_plan(problem, self.table)
            names = [" + ".join(candidate(s.path, s.config) for s in plan.steps)]
            plans = [plan]
        else:
            path, takes = PATHS[self.path]
            problem = problem if path.WHOLE_LAYER else problem.only(0)
            possible, reason = takes(problem)
            if not possible or len(problem.indices) != len(self.layout.regions):
                raise RuntimeError(f"{path.NAME} cannot run {self.layout}: {reason or 'alone'}")
            configs = path.candidates(problem)
            names = [candidate(path.NAME, config) for config in configs]
            steps = [dispatch.Step(path.NAME, problem, problem.indices, False, c) for c in configs]
            plans = [dispatch.Plan((step,), x.shape[0]) for step in steps]
        found = {n: self._plan(p, self.operands, x) for n, p in zip(names, plans, strict=True)}
        first = {n: graph.replay() for n, (graph, _) in found.items() for _ in range(2)}
        near = {n: found[n][0] for n in sorted(first, key=first.__getitem__)[:_TRIED]}
        samples = timing.alternate(near, 5)
        best = min(samples, key=lambda name: samples[name].median)
        return {best: found[best][0]}, found[best][1]

    def _plan(
        self, plan: dispatch.Plan, operands: Operands, x: torch.Tensor
    ) -> tuple[timing.Captured, float]:
        n = operands.layout.n

        def run(weights: list[torch.Tensor]) -> torch.Tensor:
            if plan.steps[0].path == decode.NAME:
                (step,) = plan.steps
                y = torch.empty((x.shape[0], n), dtype=torch.bfloat16, device=x.device)
                decode.run(
                    step.problem, x, weights, y, alpha=1.0, accumulate=False, config=step.config
                )
                return y
            return execution.run_plan(plan, x, weights, n, torch.bfloat16, 1.0)

        regions = range(len(operands.layout.regions))
        error = operands.error(regions, x, run(operands.copies[0]))
        if not error <= (MAX_ERROR if plan.steps[0].path == decode.NAME else _LIBRARY_ERROR):
            raise RuntimeError(f"{plan.steps[0]} is wrong: error {error:.2e}")
        return self._capture(run, operands), round(error, 5)

    def _dense(self, x: torch.Tensor) -> dict[str, timing.Captured]:
        problem = self._problem(self.dense.layout, x.shape[0])
        graphs = {}
        for config in scaled_mm.candidates(problem):
            step = dispatch.Step(scaled_mm.NAME, problem, (0,), False, config)
            graph, _ = self._plan(dispatch.Plan((step,), x.shape[0]), self.dense, x)
            graphs[f"dense {dict(config)['gemm']}"] = graph
        return graphs

    def _library(self, x: torch.Tensor) -> dict[str, timing.Captured]:
        """cuSPARSELt alone, where the whole layer is 2:4 and the table knows its algorithm."""
        if any(r.kind is not RegionKind.SPARSE_24 for r in self.layout.regions):
            return {}
        whole = self._problem(self.layout, x.shape[0])
        problems = [whole.only(i) for i in whole.indices]
        if not all(cusparselt.can_implement(p)[0] for p in problems):
            return {}
        steps = []
        for index, problem in enumerate(problems):
            times = {n: t for n, t in self.table.region(problem).items() if "cusparselt" in n}
            name = min(times, key=times.__getitem__, default="")
            able = cusparselt.candidates(problem)
            config = next((c for c in able if candidate(cusparselt.NAME, c) == name), able[0])
            steps.append(dispatch.Step(cusparselt.NAME, problem, (index,), False, config))
        plan = dispatch.Plan(tuple(steps), padded_rows(x.shape[0]))
        return {"library": self._plan(plan, self.operands, x)[0]}

    @staticmethod
    def _capture(run: Callable, operands: Operands) -> timing.Captured:
        rounds = max(1, 12 // len(operands.copies))
        return timing.capture([lambda w=w: run(w) for w in operands.copies], rounds)
