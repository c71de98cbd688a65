"""entropy_penalty, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def plain(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()


def entropy_penalty(rows: int, templates: int) -> Case:
    steps = partial(op_steps, fastmod.ops.entropy_penalty, plain, [(rows, templates)])
    return Case("entropy_penalty", f"L{rows} K{templates}", None, steps)


CASES = (entropy_penalty(16, 4), entropy_penalty(144, 32))
SMOKE = (entropy_penalty(3, 2),)


def test_entropy_penalty(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
