"""Ops that round under autocast what they read, instead of casting it first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Ops of torch that change a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten._foreach_copy_):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def assert_casts_nothing(
    op: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    low: torch.dtype,
    wide: Sequence[int],
    left: Sequence[int] = (),
) -> None:
    """Of fp32 ``tensors``, those that are not ``wide`` are cast first, but for those ``left`` as they are. Results are
    those of casts of all, and so are gradients before they were rounded; nothing is cast on the way."""
    found = []
    for kept in (wide, ()):
        own = [t if i in kept or i in left else t.to(low) for i, t in enumerate(tensors)]
        leaves = [t.detach().clone().requires_grad_() for t in own]
        with torch.autocast(leaves[0].device.type, low), Casts() as casts:
            out = op(*leaves)
        with casts:
            grads = torch.autograd.grad(out, leaves, out.detach() + 1)
        assert casts.seen == []
        assert out.dtype == low and [g.dtype for g in grads] == [t.dtype for t in own]
        found.append([out, *[g if i in left else g.to(low) for i, g in enumerate(grads)]])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
