"""inverted_residual, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench.steps import Case, op_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def plain(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Of one task, ``x`` [B, 1, C, H, W], with squeeze-excite, as the block is written with torch's functions."""
    expand, depthwise, squeeze, excite, project = (
        (weight[0], norm[0], bias[0])
        for weight, norm, bias in zip(params[::3], params[1::3], params[2::3], strict=True)
    )
    inner = depthwise[0].shape[0]

    def conv(value: Tensor, layer: tuple[Tensor, ...], groups: int = 1) -> Tensor:
        weight = layer[0].unsqueeze(1) if groups > 1 else layer[0][..., None, None]
        found = F.conv2d(value, weight, padding=weight.shape[-1] // 2, groups=groups)
        return F.batch_norm(found, None, None, layer[1], layer[2], training=True)

    y = conv(conv(x.squeeze(1), expand).relu(), depthwise, inner).relu()
    gate = conv(conv(y.mean((2, 3), keepdim=True), squeeze).relu(), excite).sigmoid()
    return x + conv(y * gate, project).unsqueeze(1)


def inverted_residual(b: int, c: int, size: int, expansion: int = 6) -> Case:
    m = expansion * c
    weights = [(1, m, c), (1, m, 3, 3), (1, m // 4, m), (1, m, m // 4), (1, c, m)]
    shapes = [(b, 1, size, size, c), *[shape for w in weights for shape in (w, w[:2], w[:2])]]

    def as_images(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """With the channels innermost in memory, and a calm last batch norm: the gate of random weights is noisy."""
        return lambda x, *params: function(x.movedim(-1, 2), [*params[:-2], 0.2 * params[-2], params[-1]])

    ours = as_images(lambda x, params: fastmod.ops.inverted_residual(x, params).y)
    steps = partial(op_steps, ours, as_images(plain), shapes)
    return Case("inverted_residual", f"B{b} C{c} {size}x{size}", None, steps)


CASES = (inverted_residual(128, 24, 8), inverted_residual(64, 24, 16))
SMOKE = (inverted_residual(9, 4, 3),)


def test_inverted_residual(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
