"""What the benchmark files share: a group per case, a contender per benchmark, checked before it is timed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases import CONTENDERS, Case
from fastmod import race


def contenders(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrises a benchmark over cases and contenders."""
    parameters = [pytest.param(case, name, id=f"{case.label}-{name}") for case in cases for name in CONTENDERS]
    return pytest.mark.parametrize(("case", "contender"), parameters)


def measure(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    torch.set_num_threads(2)
    benchmark.group = f"{case.op} {case.label}"
    steps = case.steps(compiled=contender == "compile")
    error = race.worst_error({"eager": steps["eager"], contender: steps[contender]})
    assert error <= 1e-4, f"{contender} differs from eager by {error:.1e}"
    benchmark.extra_info["error"] = error
    benchmark(steps[contender])
