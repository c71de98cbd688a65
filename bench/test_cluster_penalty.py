"""cluster_penalty, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def plain(logits: Tensor, bank: Tensor) -> Tensor:
    xi = logits.softmax(-1)  # [L, K]
    apart = (xi @ bank).unsqueeze(1) - bank  # [L, K, P]
    return (xi * apart.norm(dim=-1)).sum()


def cluster_penalty(rows: int, templates: int, size: int, target: float | None = None) -> Case:
    shapes = [(rows, templates), (templates, size)]
    steps = partial(op_steps, fastmod.ops.cluster_penalty, plain, shapes)
    return Case("cluster_penalty", f"L{rows} K{templates} P{size}", target, steps)


CASES = (
    cluster_penalty(16, 32, 52000, 20.0),
    cluster_penalty(144, 32, 52000, 100.0),
)
SMOKE = (cluster_penalty(3, 2, 5),)


def test_cluster_penalty(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
