"""smfr, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench._suite import contenders, measure
from bench.cases import SMFR, Case


@contenders(SMFR)
def test_smfr(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
