"""sample_mask, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench._suite import contenders, measure
from bench.cases import SAMPLE_MASK, Case


@contenders(SAMPLE_MASK)
def test_sample_mask(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
