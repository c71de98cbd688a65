"""smfr, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench._suite import measure
from fastmod import race
from fastmod.bench.steps import Case

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


# `fastmod race` runs them too, also where there is no checkout: that is why they are kept there.
CASES = race.CASES
SMOKE = (race.smfr((2, 3, 4, 3, 1), 3), race.smfr((2, 3, 4, 3, 1), 3, threshold=0.01))


def test_smfr(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
