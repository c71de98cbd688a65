"""batch_affine, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def _ours(mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(fastmod.ops.batch_affine(mean, spread.square(), weight, bias, count=1024, training=True))


def _theirs(mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(baselines.batch_affine(mean, spread.square(), weight, bias))


def batch_affine(experts: int, channels: int) -> Case:
    steps = partial(op_steps, _ours, _theirs, ((experts, channels),) * 4)
    return Case("batch_affine", f"E{experts} {channels} channels", None, steps)


CASES = (batch_affine(4, 64),)
SMOKE = (batch_affine(2, 3),)


def test_batch_affine(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
