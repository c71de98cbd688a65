"""sample_mask, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, mask_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def sample_mask(weights: int, samples: int, target: float | None = None) -> Case:
    steps = partial(mask_steps, fastmod.ops.sample_mask, baselines.sample_mask, {"logits": (weights,)}, samples)
    return Case("sample_mask", f"{weights} S{samples}", target, steps)


CASES = (sample_mask(4_000_000, 4, 8.0),)
SMOKE = (sample_mask(1001, 3),)


def test_sample_mask(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
