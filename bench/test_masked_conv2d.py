"""masked_conv2d, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, mask_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def masked_conv2d(b: int, inputs: int, size: int, outputs: int, samples: int) -> Case:
    """3 x 3, the size kept."""
    weight = (outputs, inputs, 3, 3)
    shapes = {"x": (b, inputs, size, size), "weight": weight, "logits": weight}
    ours = partial(fastmod.ops.masked_conv2d, padding=1)
    steps = partial(mask_steps, ours, baselines.masked_conv2d, shapes, samples)
    return Case("masked_conv2d", f"{b}x{inputs}x{size}x{size} to {outputs} S{samples}", None, steps)


CASES = (masked_conv2d(128, 32, 32, 64, 4),)
SMOKE = (masked_conv2d(6, 2, 5, 3, 3),)


def test_masked_conv2d(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
