"""multiplex, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def multiplex(b: int, m: int, n: int, d: int, target: float | None = None) -> Case:
    shapes = [(b, m, d), (b, m, n)]
    steps = partial(op_steps, fastmod.ops.multiplex, baselines.multiplex, shapes)
    return Case("multiplex", f"B{b} M{m} N{n} D{d}", target, steps)


CASES = (
    multiplex(128, 6, 8, 10, 2.0),
    multiplex(1024, 8, 8, 10, 2.5),
    multiplex(4096, 16, 16, 32, 2.0),
    multiplex(512, 5, 4, 196, 1.5),
)
SMOKE = (multiplex(3, 2, 3, 5),)


def test_multiplex(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
