"""Whole steps of ResMixNet, training and inference: eager and torch.compile in both memory layouts, fastmod."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench._suite import measure
from fastmod.bench.steps import Case, image_net_steps
from fastmod.models import ResMixNet
from fastmod.models.plain_resmixnet import PlainResMixNet
from fastmod.models.resmixnet import load_plain

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def calm(net: PlainResMixNet) -> PlainResMixNet:
    """Residual branches that change little: a ReLU on the other side of zero, which rounding alone can do in any of the
    contenders, then changes the stem's gradient by less than a race allows."""
    for name, parameter in net.named_parameters():
        if name.endswith("norm2.weight"):
            parameter.data.mul_(0.2)
    return net


def resmixnet(target: float | None, experts: int, depth: int, batch: int, pixels: int, *, train: bool = True) -> Case:
    steps = partial(
        image_net_steps,
        partial(ResMixNet, experts, depth),
        lambda: calm(PlainResMixNet(experts, depth)),
        load_plain,
        (batch, 3, pixels, pixels),
        train=train,
    )
    label = f"({experts},{depth}) B{batch} {pixels} px{'' if train else ', inference'}"
    return Case("ResMixNet", label, target, steps, layouts=True)


CASES = (
    resmixnet(1.25, 2, 2, 64, 64),
    resmixnet(1.25, 4, 1, 64, 64),
    resmixnet(1.5, 2, 2, 64, 64, train=False),
)
SMOKE = (resmixnet(None, 2, 1, 3, 12),)


def test_resmixnet(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
