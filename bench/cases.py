"""Every case: its label, the contenders as steps (forward + backward), and the ratio aimed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastmod
from fastmod import plain, race
from fastmod.race import Step, backward_step

CONTENDERS = ("eager", "compile", "fastmod")


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    target: float | None
    steps: Callable[..., Mapping[str, Step]]  # compiled: bool -> contender -> step


def _op_steps(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], *, compiled: bool
) -> dict[str, Step]:
    """Steps of a function of tensors: each contender has leaves of its own with the same values."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    grad = torch.randn_like(theirs(*values))

    def step(function: Callable[..., Tensor]) -> Step:
        leaves = [value.clone().requires_grad_() for value in values]
        return backward_step(lambda: [function(*leaves)], leaves, [grad])

    steps = {"eager": step(theirs)}
    if compiled:
        steps["compile"] = step(torch.compile(theirs))
    return {**steps, "fastmod": step(ours)}


def multiplex(b: int, m: int, n: int, d: int, target: float | None = None) -> Case:
    shapes = [(b, m, d), (b, m, n)]
    steps = partial(_op_steps, fastmod.ops.multiplex, plain.multiplex, shapes)
    return Case("multiplex", f"B{b} M{m} N{n} D{d}", target, steps)


def gated_residual(b: int, n: int, d: int) -> Case:
    shapes = [(b, n, d), (b, n, d), (b, n)]
    steps = partial(_op_steps, fastmod.ops.gated_residual, plain.gated_residual, shapes)
    return Case("gated_residual", f"B{b} N{n} D{d}", None, steps)


def range_penalty(*shapes: tuple[int, ...]) -> Case:
    def ours(*logits: Tensor) -> Tensor:
        return fastmod.ops.range_penalty(*logits, threshold=1.0)

    def theirs(*logits: Tensor) -> Tensor:
        return plain.range_penalty(*logits, threshold=1.0)

    label = " + ".join("x".join(map(str, shape)) for shape in shapes)
    return Case("range_penalty", label, None, partial(_op_steps, ours, theirs, shapes))


def mfnnr(b: int, m: int, n: int, d: int, **options: Any) -> Case:
    def steps(*, compiled: bool) -> dict[str, Step]:
        torch.manual_seed(0)
        ours = fastmod.nn.MFNNR(m, n, d, threshold=None, **options)
        x, grad = torch.randn(b, m, d), torch.randn(b, n, d)

        def twin() -> nn.Module:
            module = plain.MFNNR(m, n, d, threshold=None, **{"hidden": 100, "layers": 1, **options})
            module.load_state_dict(ours.state_dict())
            return module

        def step(run: Callable[[Tensor], Any], module: nn.Module) -> Step:
            leaf = x.clone().requires_grad_()

            def forward() -> list[Tensor]:
                out = run(leaf)
                return [out[0] if isinstance(out, tuple) else out]

            return backward_step(forward, [leaf, *module.parameters()], [grad])

        eager, other = twin(), twin()
        found = {"eager": step(eager, eager)}
        if compiled:
            found["compile"] = step(torch.compile(other), other)
        return {**found, "fastmod": step(ours, ours)}

    extra = "".join(f" {name}={value}" for name, value in options.items())
    return Case("mfnnr", f"B{b} M{m} N{n} D{d}{extra}", None, steps)


MULTIPLEX = (
    multiplex(128, 6, 8, 10, 2.2),
    multiplex(1024, 8, 8, 10, 2.5),
    multiplex(4096, 16, 16, 32, 2.0),
    multiplex(512, 5, 4, 196, 1.5),
)
GATED_RESIDUAL = (gated_residual(128, 8, 10), gated_residual(1024, 8, 10), gated_residual(512, 4, 196))
RANGE_PENALTY = (range_penalty((128, 6, 8), (128, 8)), range_penalty((1024, 8, 8), (1024, 8)))
MFNNR = (mfnnr(128, 8, 8, 10), mfnnr(1024, 8, 8, 10), mfnnr(128, 5, 4, 196, hidden=400, layers=4))
SMFR = tuple(Case("smfr", case.label, case.target, partial(race.smfr_steps, case)) for case in race.SMFR_CASES)
ALL = (*MULTIPLEX, *GATED_RESIDUAL, *RANGE_PENALTY, *MFNNR, *SMFR)
#: Small enough to run with the tests.
SMOKE = (multiplex(3, 2, 3, 5), gated_residual(3, 2, 5), range_penalty((3, 2)), mfnnr(3, 2, 3, 5))
