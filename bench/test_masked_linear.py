"""masked_linear, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, mask_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def masked_linear(b: int, inputs: int, outputs: int, samples: int, target: float | None = None) -> Case:
    shapes = {"x": (b, inputs), "weight": (outputs, inputs), "logits": (outputs, inputs)}
    steps = partial(mask_steps, fastmod.ops.masked_linear, baselines.masked_linear, shapes, samples)
    return Case("masked_linear", f"{b}x{inputs}x{outputs} S{samples}", target, steps)


CASES = (masked_linear(128, 2000, 2000, 4, 8.0), masked_linear(128, 400, 400, 4, 4.0))
SMOKE = (masked_linear(6, 5, 7, 3),)


def test_masked_linear(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
