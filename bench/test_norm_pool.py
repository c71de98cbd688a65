"""norm_pool, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def plain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.relu(x * scale[..., None, None] + shift[..., None, None]).mean((-1, -2))


def norm_pool(b: int, e: int, c: int, size: int) -> Case:
    shapes = [(b, size, size, e, c), (e, c), (e, c)]

    def as_images(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """With the channels innermost in memory, as the convolution before it leaves them."""
        return lambda x, scale, shift: function(x.permute(0, 3, 4, 1, 2), scale, shift)

    steps = partial(op_steps, as_images(fastmod.ops.norm_pool), as_images(plain), shapes)
    return Case("norm_pool", f"B{b} E{e} C{c} {size}x{size}", None, steps)


CASES = (norm_pool(128, 1, 144, 8), norm_pool(64, 1, 144, 16))
SMOKE = (norm_pool(3, 2, 5, 2),)


def test_norm_pool(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
