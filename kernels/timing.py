"""Time GPU work the way it runs when serving: CUDA graphs, weights that are not in L2.

    captured = {"dense": capture(dense_calls), "ours": capture(our_calls)}
    samples = alternate(captured)
    ratio(samples["dense"], samples["ours"])

`calls` are the same work on copies of the weights that together exceed L2, so each call finds its
weights in memory as a decoder step would. Candidates alternate inside each repetition: clocks and
temperature then drift for all of them alike. Limits: X stays in L2 (it would when serving), and
launch gaps inside a graph are smaller than those of eager execution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

__all__ = ["Captured", "Sample", "alternate", "capture", "copies_beyond_l2", "ratio"]

_L2_FACTOR = 2.5  # bytes of all copies over the L2 size


@dataclass(frozen=True)
class Sample:
    """Microseconds per call, one figure per repetition."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return quartiles(self.us)[1]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = quantiles(values, n=4, method="inclusive")
    return first, median, third


def ratio(base: Sample, other: Sample) -> tuple[float, float, float]:
    """Quartiles of base / other, repetition by repetition: above 1 where `other` is faster."""
    return quartiles([b / o for b, o in zip(base.us, other.us, strict=True)])


def copies_beyond_l2(weight_bytes: int, device: torch.device | str = "cuda") -> int:
    """How many copies of a layer's weights do not fit into L2."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, -(-int(l2 * _L2_FACTOR) // max(weight_bytes, 1)))


class Captured:
    """A CUDA graph of some calls."""

    def __init__(self, calls: Sequence[Callable[[], object]], rounds: int = 1) -> None:
        self._count = len(calls) * rounds
        for call in calls:  # plans and compiled kernels must exist before capture
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def replay(self) -> float:
        """Microseconds per call of one replay."""
        start, end = self._events
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self._count


def capture(calls: Sequence[Callable[[], object]], rounds: int = 1) -> Captured:
    """Capture each of `calls`, `rounds` times over, into one graph."""
    return Captured(calls, rounds)


def alternate(
    captured: Mapping[str, Captured], repetitions: int = 20, warm_up: int = 2
) -> dict[str, Sample]:
    """Replay all candidates in turn, `repetitions` times."""
    for graph in captured.values():
        for _ in range(warm_up):
            graph.replay()
    times: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(repetitions):
        for name, graph in captured.items():
            times[name].append(graph.replay())
    return {name: Sample(tuple(us)) for name, us in times.items()}
