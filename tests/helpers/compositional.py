"""Blocks for tests of Compositional, and nets over them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fastmod.nn import BasicBlock, Compositional, IsometricBlock

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "se": lambda: IsometricBlock(4),
    "no se": lambda: IsometricBlock(3, se=False, bias=True, expansion=2, eps=1e-3, momentum=0.3),
    "basic": lambda: BasicBlock(4, 4),
}


class Wrapped(nn.Module):
    """A block that Compositional does not know, around one it knows."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        return self.block(x, *extra)


class Dense(nn.Module):
    """A tied weight, a scalar, a norm, a buffer that is written in place and one that is assigned."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.rand(()))
        self.norm = nn.LayerNorm(size)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.last = x.detach().mean(0)
        return x + self.gain * torch.tanh(self.second(torch.tanh(self.first(self.norm(x)))))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fastmod.nn.Compositional")
        yield


def make(block: Callable[[], nn.Module], *args: Any, **options: Any) -> Compositional:
    torch.manual_seed(0)
    net = Compositional(block, *args, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():  # batch norm not at its start
            p.add_(0.2 * torch.rand(p.shape, generator=generator, dtype=p.dtype))
    return net


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def mixed_by_hand(net: Compositional, task: int, layer: int) -> dict[str, Tensor]:
    xi = net.logits[task, layer].softmax(0)
    templates = [net.bank.template(k) for k in range(net.bank.templates)]
    return {n: sum(xi[k] * t[n] for k, t in enumerate(templates)) for n in templates[0]}
