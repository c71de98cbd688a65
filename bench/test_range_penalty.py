"""range_penalty, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def range_penalty(*shapes: tuple[int, ...]) -> Case:
    def ours(*logits: Tensor) -> Tensor:
        return fastmod.ops.range_penalty(*logits, threshold=1.0)

    def theirs(*logits: Tensor) -> Tensor:
        return baselines.range_penalty(*logits, threshold=1.0)

    label = " + ".join("x".join(map(str, shape)) for shape in shapes)
    return Case("range_penalty", label, None, partial(op_steps, ours, theirs, shapes))


CASES = (range_penalty((128, 6, 8), (128, 8)), range_penalty((1024, 8, 8), (1024, 8)))
SMOKE = (range_penalty((3, 2)),)


def test_range_penalty(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
