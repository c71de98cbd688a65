"""norm_conv of several experts, against batch norm, ReLU and convolution one by one: eager, torch.compile, fastmod.

The baselines compute the statistics of what they read, norm_conv those of what it writes: the same work, one layer on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, Step, backward_step, channels_last

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def ours(mean: Tensor, var: Tensor, count: int, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    scale, shift = fastmod.ops.batch_affine(mean, var, count=count, training=True)
    return fastmod.ops.norm_conv(x, weight, scale=scale, shift=shift, relu=True, stride=stride).y


def steps(
    sizes: Sequence[int], experts: int, channels: tuple[int, int], stride: int, train: bool, *, compiled: bool
) -> dict[str, Step]:
    batch, pixels = sizes
    torch.manual_seed(0)
    x = channels_last(torch.randn(batch, experts, channels[0], pixels, pixels))
    weight = torch.randn(experts, channels[1], channels[0], 3, 3) / channels[0] ** 0.5
    var, mean = torch.var_mean(x, (0, 3, 4), correction=0)
    count = batch * pixels * pixels
    grad = channels_last(torch.randn_like(baselines.norm_conv(x, weight, stride)))

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
        leaves = [value.clone().requires_grad_(train) for value in (x, weight)]
        if train:
            return backward_step(lambda: [function(*leaves)], leaves[1:], [grad])
        return lambda: [function(*leaves)]

    plain = partial(baselines.norm_conv, stride=stride)
    made = {"eager": step(plain)}
    if compiled:
        made["compile"] = step(torch.compile(plain))
    return {**made, "fastmod": step(lambda a, b: ours(mean, var, count, a, b, stride))}


def norm_conv(
    target: float | None,
    sizes: tuple[int, int],
    experts: int,
    channels: tuple[int, int],
    stride: int = 1,
    *,
    train: bool,
) -> Case:
    what = f"B{sizes[0]} E{experts} {channels[0]} to {channels[1]}, {sizes[1]} px" + (
        ", stride 2" if stride == 2 else ""
    )
    label = what if train else f"{what}, forward"
    return Case("norm_conv", label, target, partial(steps, sizes, experts, channels, stride, train))


CASES = (
    norm_conv(1.5, (64, 32), 4, (16, 16), train=False),
    norm_conv(None, (64, 32), 4, (16, 16), train=True),
    norm_conv(None, (64, 16), 2, (32, 32), train=True),
    norm_conv(None, (64, 8), 1, (64, 64), train=True),
    norm_conv(None, (64, 32), 2, (16, 32), 2, train=True),
)
SMOKE = (norm_conv(None, (3, 5), 2, (3, 4), train=True),)


def test_norm_conv(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
