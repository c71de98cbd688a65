"""The clock: results are compared first, then contenders take turns. If results differ, nothing is timed."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fastmod.bench.steps import Case, RandomStep, Step

#: A row whose upper quartile is more than this times its lower one was disturbed: its figures are worth little.
NOISY = 1.5
TOLERANCE = 1e-4  # of results in fp32, relative to the largest value
_TURN = 4  # timed steps in a row


@dataclass(frozen=True)
class Times:
    """Quartiles of the seconds per step, and how many steps were timed."""

    lower: float
    median: float
    upper: float
    iterations: int

    @property
    def spread(self) -> float:
        return self.upper / self.lower


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    op: str
    label: str
    target: float | None  # ratio aimed at
    error: float
    tolerance: float
    times: Mapping[str, Times]  # by contender; empty when the results differ

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def noisy(self) -> bool:
        return noisy(self.times.values())

    @property
    def matches(self) -> bool:
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float | None:
        """Time of the better baseline over that of fastmod: above 1 fastmod wins."""
        if not self.times:
            return None
        return min(t.median for name, t in self.times.items() if name != "fastmod") / self.times["fastmod"].median

    @property
    def missed(self) -> bool:
        """Whether there is an aim and the figure falls short of it."""
        return self.target is not None and self.ratio is not None and self.ratio < self.target


def noisy(times: Iterable[Times]) -> bool:
    """Whether something else kept the machine busy."""
    return any(t.spread > NOISY for t in times)


def worst_error(steps: Mapping[str, Step], reference: str = "eager") -> float:
    """Largest difference of any result to the reference, relative to the largest value of that tensor (or to 1)."""
    steps = {name: step.fixed if isinstance(step, RandomStep) else step for name, step in steps.items()}
    expected = [t.detach().clone() for t in steps[reference]()]
    worst = 0.0
    for name, step in steps.items():
        if name == reference:
            continue
        results = step()
        if [r.shape for r in results] != [e.shape for e in expected]:
            return float("inf")
        for result, value in zip(results, expected, strict=True):
            error = (result.detach() - value).abs().max() / value.abs().max().clamp(min=1)
            worst = max(worst, float(error)) if not torch.isnan(error) else float("inf")
    return worst


def interleaved(
    steps: Mapping[str, Step], *, seconds: float = 1.5, least: int = 30, per_call: int = 1, device: str = "cpu"
) -> dict[str, Times]:
    """Quartiles of the seconds per step.

    Contenders take short turns in random order, so that noise of the machine affects all alike and none always runs
    after the same other one: thread pools of compiled code spin on for a while and would slow down the next.

    Args:
        seconds: per contender.
        least: the least number of timed calls of each, however long they take.
        per_call: how many steps one call holds.
        device: where they run; a step on a GPU ends when the GPU has finished it.
    """
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    for step in steps.values():
        for _ in range(5):
            step()
    wait()
    found: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    order = list(steps)
    shuffle = random.Random(0).shuffle
    while time.perf_counter() < end or len(found[order[0]]) < least:
        shuffle(order)
        for name in order:
            steps[name]()  # not timed: caches and spinning threads are still those of the one before
            for _ in range(_TURN):
                wait()
                start = time.perf_counter()
                steps[name]()
                wait()
                found[name].append(time.perf_counter() - start)
    return {name: _quartiles(values, per_call) for name, values in found.items()}


def _quartiles(values: list[float], per_call: int) -> Times:
    # Clocks are no finer than nanoseconds, and shorter numbers are easier to read.
    lower, median, upper = (round(quartile / per_call, 9) for quartile in statistics.quantiles(values, n=4))
    return Times(lower, median, upper, len(values) * per_call)


def _nothing() -> None:
    pass


def run(
    case: Case, *, compiled: bool, seconds: float = 1.5, tolerance: float = TOLERANCE, device: str = "cpu"
) -> Result:
    # New tensors and modules are made there. Not while steps are timed: it slows down every call of torch.
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        steps = case.steps(compiled=compiled and case.compiles)
        error = worst_error(steps)
    within = error <= tolerance
    times = interleaved(steps, seconds=seconds, per_call=case.per_call, device=device) if within else {}
    return Result(case.op, case.label, case.target, error, tolerance, times)
