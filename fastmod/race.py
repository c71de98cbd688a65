"""The SMFR against its plain twin: the cases of ``fastmod race``, which needs no checkout, and of ``fastmod bench``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastmod
from fastmod.bench import baselines
from fastmod.bench.steps import Case, Step, module_steps

#: in_blocks, out_blocks, block_size, width, depth
Sizes = tuple[int, int, int, int, int]


def steps(
    sizes: Sizes, batch: int, options: dict[str, Any], threshold: float | None, *, compiled: bool
) -> dict[str, Step]:
    """Contender -> step; with a threshold the step contains the range penalty."""
    torch.manual_seed(0)
    ours = fastmod.nn.SMFR(*sizes, threshold=threshold, **options)
    x = torch.randn(batch, sizes[0], sizes[2])
    grads = [torch.randn(batch, sizes[1], sizes[2])]
    if threshold is not None:
        grads.append(torch.ones(()))

    def twin() -> nn.Module:
        return baselines.SMFR(*sizes, threshold=threshold, **options)

    def forward(model: Callable[..., Any]) -> list[Tensor]:
        found = model(x)
        if isinstance(found, tuple):  # the twin returns its penalty or None, our model keeps it
            return [t for t in found if t is not None]
        return [found] if threshold is None else [found, ours.penalty()]

    return module_steps(ours, twin, forward, grads, compiled=compiled)


def smfr(
    sizes: Sizes, batch: int, target: float | None = None, *, threshold: float | None = None, **options: Any
) -> Case:
    i, o, b, w, d = sizes
    extra = "".join(f" {name[0]}{value}" for name, value in options.items())  # h400: hidden, l4: layers
    penalty = "" if threshold is None else " +penalty"
    label = f"{i},{o},{b} w{w} d{d}{extra} B{batch}{penalty}"
    return Case("smfr", label, target, partial(steps, sizes, batch, options, threshold))


#: The one that ``bench.where`` takes apart.
FIRST: Sizes = (6, 5, 10, 8, 3)
CASES = (
    smfr(FIRST, 128, 3.0),
    smfr(FIRST, 1024, 1.7),
    smfr((6, 5, 10, 10, 5), 128, 2.5, layers=3),
    smfr((5, 1, 196, 4, 1), 128, 1.15, hidden=400, layers=4),
    smfr(FIRST, 128, threshold=20.0),
)
