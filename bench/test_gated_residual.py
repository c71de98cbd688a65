"""gated_residual, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def gated_residual(b: int, n: int, d: int) -> Case:
    shapes = [(b, n, d), (b, n, d), (b, n)]
    steps = partial(op_steps, fastmod.ops.gated_residual, baselines.gated_residual, shapes)
    return Case("gated_residual", f"B{b} N{n} D{d}", None, steps)


CASES = (gated_residual(128, 8, 10), gated_residual(1024, 8, 10), gated_residual(512, 4, 196))
SMOKE = (gated_residual(3, 2, 5),)


def test_gated_residual(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
