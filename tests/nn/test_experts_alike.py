"""Experts that cannot be stacked, and nets moved or loaded as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fastmod.models import PlainResMixNet, ResMixNet, load_plain
from fastmod.nn import BasicBlock, ExpertStack, Gater


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.requires_grad_(False), "requires_grad"),
        (lambda block: block.eval(), "mode"),
        (lambda block: block.double(), "float64"),
    ],
)
def test_experts_that_differ(change: Callable[[nn.Module], nn.Module], message: str) -> None:
    one, other = BasicBlock(3, 4), BasicBlock(3, 4)
    change(other)
    with pytest.raises(ValueError, match=message):
        ExpertStack.from_experts([one, other])
    change(one)
    assert ExpertStack.from_experts([one, other]).experts == 2


def test_channels_last_as_a_whole() -> None:
    torch.manual_seed(0)
    net, x = ResMixNet(2, 1).eval(), torch.randn(2, 3, 32, 32)
    before = net(x)
    net = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(x.to(memory_format=torch.channels_last)), before)
    assert next(net.double().parameters()).dtype == torch.float64


def test_a_deeper_twin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks\.1"):
        load_plain(ResMixNet(2, 1), PlainResMixNet(2, 2))


@pytest.mark.parametrize("options", [{"channels": 16}, {"strides": 1}])
def test_gaters_take_lists(options: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="expected a list"):
        Gater(3, 2, **options)  # type: ignore[arg-type]
