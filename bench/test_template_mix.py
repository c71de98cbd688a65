"""template_mix, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def template_mix(rows: int, templates: int, size: int, target: float | None = None) -> Case:
    shapes = [(rows, templates), (templates, size)]
    steps = partial(op_steps, fastmod.ops.template_mix, baselines.template_mix, shapes)
    return Case("template_mix", f"L{rows} K{templates} P{size}", target, steps)


CASES = (
    template_mix(16, 4, 20000, 2.0),
    template_mix(16, 32, 52000, 1.2),
    template_mix(144, 32, 52000, 1.1),
)
SMOKE = (template_mix(3, 2, 5),)


def test_template_mix(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
