"""What the benchmark files share. Without pytest: ``fastmod bench`` reads the cases of these files too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastmod.bench import clock
from fastmod.bench.steps import Case

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def measure(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    """A group per case, a contender per benchmark, checked before it is timed."""
    torch.set_num_threads(2)
    benchmark.group = case.name if case.per_call == 1 else f"{case.name}, {case.per_call} steps"
    steps = case.steps(compiled=contender.startswith("compile"))
    error = clock.worst_error({"eager": steps["eager"], contender: steps[contender]})
    assert error <= clock.TOLERANCE, f"{contender} differs from eager by {error:.1e}"
    benchmark.extra_info["error"] = error
    benchmark(steps[contender])
