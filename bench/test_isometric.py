"""Whole steps of IsometricNet, training and inference: eager and torch.compile in both memory layouts, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench._suite import measure
from fastmod.bench.steps import Case, image_net_steps
from fastmod.models import IsometricNet, PlainIsometricNet, load_plain_isometric

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def calm(net: PlainIsometricNet) -> PlainIsometricNet:
    """Blocks that change little: sixteen at their full start amplify rounding so that even eager's two memory layouts
    differ by more than a race allows."""
    net.templates["project_norm/weight"].data.mul_(0.2)
    return net


def isometric(
    target: float | None, channels: int, layers: int, templates: int, batch: int, pixels: int, *, train: bool = True
) -> Case:
    ours = partial(IsometricNet, channels, layers, templates, dropout=0.0)
    steps = partial(
        image_net_steps,
        ours,
        lambda: calm(PlainIsometricNet(ours())),
        load_plain_isometric,  # type: ignore[arg-type]  # of these two nets
        (batch, 3, pixels, pixels),
        train=train,
    )
    label = f"C{channels} L{layers} K{templates} B{batch} {pixels} px{'' if train else ', inference'}"
    return Case("IsometricNet", label, target, steps, layouts=True)


CASES = (
    isometric(2.0, 24, 16, 4, 128, 32),
    isometric(2.0, 24, 16, 4, 64, 64),
    isometric(None, 24, 16, 4, 128, 32, train=False),
)
SMOKE = (isometric(None, 4, 2, 2, 9, 16),)  # of fewer images batch norm is too sensitive to compare


def test_isometric(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
