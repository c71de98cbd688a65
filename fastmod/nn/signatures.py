"""Signatures, which template serves which layer: fixed ones, and those near which learned shares start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastmod.nn import _parts
from fastmod.nn.mixing import near_one_hot

KINDS = ("sequential", "cyclic", "random", "progressive")


def make_signature(
    kind: str | Sequence[int], templates: int, layers: int, generator: torch.Generator | None = None
) -> list[int]:
    """The template of every layer, counted from 0.

    ``sequential`` 0 0 1 1, ``cyclic`` 0 1 0 1, ``random`` a shuffled sequential one (drawn by ``generator``),
    ``progressive`` 0 1 1 2 2 2 2 3 3 3 3 3: repeats that grow by equal steps. Explicit numbers are checked.
    """
    _parts.positive_sizes(templates=templates, layers=layers)
    if not isinstance(kind, str):
        return _explicit(kind, templates, layers)
    if kind not in KINDS:
        raise ValueError(f"signature: expected one of {', '.join(map(repr, KINDS))} or template numbers, got {kind!r}")
    if layers < templates:
        raise ValueError(f"signature: expected at least a layer for each of {templates} templates, got {layers} layers")
    if kind == "cyclic":
        return [layer % templates for layer in range(layers)]
    if kind == "progressive":
        return [k for k, count in enumerate(progressive_repeats(templates, layers)) for _ in range(count)]
    found = sequential(templates, layers)
    if kind == "random":
        order = torch.randperm(layers, generator=generator, device="cpu").tolist()
        found = [found[i] for i in order]
    return found


def sequential(templates: int, layers: int) -> list[int]:
    """All templates equally often, one after the other; the first ones, if there are more templates than layers."""
    return [layer if templates >= layers else layer * templates // layers for layer in range(layers)]


def progressive_repeats(templates: int, layers: int) -> list[int]:
    """``1 + (L - K) (k - 1) / (K (K - 1) / 2)`` for k = 1 .. K, rounded so that the sum is L."""
    if templates == 1:
        return [layers]
    from fractions import Fraction  # not at import: it brings decimal, which nothing else here needs

    step = Fraction(2 * (layers - templates), templates * (templates - 1))
    exact = [1 + step * k for k in range(templates)]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(templates), key=lambda k: (exact[k] - counts[k], k), reverse=True)
    for k in by_remainder[: layers - sum(counts)]:
        counts[k] += 1
    return counts


def _explicit(numbers: Sequence[int], templates: int, layers: int) -> list[int]:
    if not isinstance(numbers, (list, tuple)):
        raise TypeError(f"signature: expected a name or a list of template numbers, got {type(numbers).__name__}")
    if len(numbers) != layers:
        raise ValueError(f"signature: expected a template for each of {layers} layers, got {len(numbers)}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"signature: expected ints, got {type(number).__name__}")
        if not 0 <= number < templates:
            raise ValueError(f"signature: expected templates 0 .. {templates - 1}, got {number}")
    return list(numbers)


def first_logits(
    init: str, mixing: str, tasks: int, layers: int, templates: int, generator: torch.Generator | None = None
) -> Tensor:
    """Initial logits ``[T, L, K]``."""
    if init == "uniform":
        drawn = torch.rand(tasks, layers, templates, generator=generator, device="cpu")
        return drawn if tasks == 1 else (2 * drawn - 1) * math.sqrt(6 / (templates + 1))
    if init != "diag":
        raise ValueError(f"init: expected 'uniform' or 'diag', got {init!r}")
    return near_one_hot(sequential(templates, layers), templates, mixing).repeat(tasks, 1, 1)


def signatures_of(
    signature: Any, templates: int, layers: int, tasks: int, generator: torch.Generator | None
) -> list[list[int]]:
    """The signature of every task."""
    if isinstance(signature, (list, tuple)) and signature and all(isinstance(s, (str, list, tuple)) for s in signature):
        if len(signature) != tasks:
            raise ValueError(f"signature: expected one for each of {tasks} tasks, got {len(signature)}")
        return [make_signature(s, templates, layers, generator) for s in signature]
    same = make_signature(signature, templates, layers, generator)
    return [list(same) for _ in range(tasks)]
