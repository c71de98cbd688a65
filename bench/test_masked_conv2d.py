"""masked_conv2d, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench._suite import contenders, measure
from bench.cases import MASKED_CONV2D, Case


@contenders(MASKED_CONV2D)
def test_masked_conv2d(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
