"""inverted_residual, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def inverted_residual(b: int, c: int, size: int, expansion: int = 6) -> Case:
    m = expansion * c
    weights = [(1, m, c), (1, m, 3, 3), (1, m // 4, m), (1, m, m // 4), (1, c, m)]
    shapes = [(b, 1, size, size, c), *[shape for w in weights for shape in (w, w[:2], w[:2])]]

    def as_images(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """With the channels innermost in memory, and a calm last batch norm: the gate of random weights is noisy."""
        return lambda x, *params: function(x.movedim(-1, 2), [*params[:-2], 0.2 * params[-2], params[-1]])

    ours = as_images(lambda x, params: fastmod.ops.inverted_residual(x, params).y)
    steps = partial(op_steps, ours, as_images(baselines.inverted_residual), shapes)
    return Case("inverted_residual", f"B{b} C{c} {size}x{size}", None, steps)


CASES = (inverted_residual(128, 24, 8), inverted_residual(64, 24, 16))
SMOKE = (inverted_residual(9, 4, 3),)


def test_inverted_residual(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
