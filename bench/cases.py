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


def _random_steps(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    samples: int,
    *,
    compiled: bool,
) -> dict[str, race.RandomStep]:
    """Steps of a mask op of the named tensors. The plain version draws its noise itself, as people write it; to be
    compared both take the noise of one seed. The weight is frozen: masks are searched for in a trained net."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    with torch.no_grad():
        grad = torch.randn_like(ours(**values, samples=samples, seed=0))

    def step(function: Callable[..., Tensor], fixed: Callable[[], dict[str, Any]]) -> race.RandomStep:
        leaves = {name: value.clone().requires_grad_(name != "weight") for name, value in values.items()}
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]

        def run(**noise: Any) -> list[Tensor]:
            return [function(**leaves, samples=samples, **noise)]

        return race.RandomStep(
            backward_step(run, trained, [grad]), backward_step(lambda: run(**fixed()), trained, [grad])
        )

    # Drawn when it is needed and not kept: as large as all masks.
    drawn = lambda: {"drawn": plain.drawn_by_fastmod(values["logits"], samples, 0)}  # noqa: E731
    steps = {"eager": step(theirs, drawn)}
    if compiled:
        steps["compile"] = step(torch.compile(theirs), drawn)
    return {**steps, "fastmod": step(ours, lambda: {"seed": 0})}


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


def sample_mask(weights: int, samples: int, target: float | None = None) -> Case:
    steps = partial(_random_steps, fastmod.ops.sample_mask, plain.sample_mask, {"logits": (weights,)}, samples)
    return Case("sample_mask", f"{weights} S{samples}", target, steps)


def masked_linear(b: int, inputs: int, outputs: int, samples: int, target: float | None = None) -> Case:
    shapes = {"x": (b, inputs), "weight": (outputs, inputs), "logits": (outputs, inputs)}
    steps = partial(_random_steps, fastmod.ops.masked_linear, plain.masked_linear, shapes, samples)
    return Case("masked_linear", f"{b}x{inputs}x{outputs} S{samples}", target, steps)


def masked_conv2d(b: int, inputs: int, size: int, outputs: int, samples: int) -> Case:
    """3 x 3, the size kept."""
    weight = (outputs, inputs, 3, 3)
    shapes = {"x": (b, inputs, size, size), "weight": weight, "logits": weight}
    ours = partial(fastmod.ops.masked_conv2d, padding=1)
    steps = partial(_random_steps, ours, plain.masked_conv2d, shapes, samples)
    return Case("masked_conv2d", f"{b}x{inputs}x{size}x{size} to {outputs} S{samples}", None, steps)


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
SAMPLE_MASK = (sample_mask(4_000_000, 4, 8.0),)
MASKED_LINEAR = (masked_linear(128, 2000, 2000, 4, 8.0), masked_linear(128, 400, 400, 4, 4.0))
MASKED_CONV2D = (masked_conv2d(128, 32, 32, 64, 4),)
MASKS = (*SAMPLE_MASK, *MASKED_LINEAR, *MASKED_CONV2D)
ALL = (*MULTIPLEX, *GATED_RESIDUAL, *RANGE_PENALTY, *MFNNR, *SMFR, *MASKS)
#: Small enough to run with the tests.
SMOKE = (
    multiplex(3, 2, 3, 5),
    gated_residual(3, 2, 5),
    range_penalty((3, 2)),
    mfnnr(3, 2, 3, 5),
    sample_mask(1001, 3),
    masked_linear(6, 5, 7, 3),
    masked_conv2d(6, 2, 5, 3, 3),
)
