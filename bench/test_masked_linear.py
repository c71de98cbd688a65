"""masked_linear, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench._suite import contenders, measure
from bench.cases import MASKED_LINEAR, Case


@contenders(MASKED_LINEAR)
def test_masked_linear(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
