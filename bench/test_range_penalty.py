"""range_penalty, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench._suite import contenders, measure
from bench.cases import RANGE_PENALTY, Case


@contenders(RANGE_PENALTY)
def test_range_penalty(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
