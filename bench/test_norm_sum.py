"""norm_sum, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, channels_last, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def norm_sum(batch: int, experts: int, channels: int, pixels: int) -> Case:
    images, per_channel = (batch, experts, channels, pixels, pixels), (experts, channels)
    shapes = (images, per_channel, per_channel, images, (batch, experts))
    steps = partial(op_steps, _ours, baselines.norm_sum, shapes, layout=channels_last)
    return Case("norm_sum", f"B{batch} E{experts} {channels} channels, {pixels} px", None, steps)


def _ours(x, scale, shift, residual, gate):  # type: ignore[no-untyped-def]
    return fastmod.ops.norm_sum(x, scale, shift, residual, gate=gate)


CASES = (norm_sum(64, 4, 16, 32), norm_sum(64, 2, 32, 16))
SMOKE = (norm_sum(3, 2, 5, 4),)


def test_norm_sum(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
