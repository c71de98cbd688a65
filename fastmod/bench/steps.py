"""Steps, forward + backward, that contenders run: each has leaves of its own, all start from the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.bench import baselines

#: Runs forward and backward and returns ``[outputs..., gradients...]``.
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class RandomStep:
    """A step with noise of its own at every call, which is what is timed, and its twin with fixed noise to compare."""

    step: Step
    fixed: Step

    def __call__(self) -> list[Tensor]:
        return self.step()


@dataclass(frozen=True)
class Case:
    """What is raced under one label."""

    op: str
    label: str
    target: float | None  # ratio aimed at
    steps: Callable[..., Mapping[str, Step]]  # compiled: bool -> contender -> step
    compiles: bool = True  # whether torch.compile is a contender
    per_call: int = 1  # how many steps one call of a step holds; times are those of one

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def contenders(self) -> tuple[str, ...]:
        return ("eager", "compile", "fastmod") if self.compiles else ("eager", "fastmod")


def backward_step(forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Step:
    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        outputs = forward()
        torch.autograd.backward(outputs, grads)
        return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    return step


def op_steps(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], *, compiled: bool
) -> dict[str, Step]:
    """Steps of a function of tensors of these shapes."""
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


def mask_steps(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    samples: int,
    *,
    compiled: bool,
) -> dict[str, RandomStep]:
    """Steps of a mask op of the named tensors. The plain version draws its noise itself, as people write it; to be
    compared both take the noise of one seed. The weight is frozen: masks are searched for in a trained net."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    with torch.no_grad():
        grad = torch.randn_like(ours(**values, samples=samples, seed=0))

    def step(function: Callable[..., Tensor], fixed: Callable[[], dict[str, Any]]) -> RandomStep:
        leaves = {name: value.clone().requires_grad_(name != "weight") for name, value in values.items()}
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]

        def run(**noise: Any) -> list[Tensor]:
            return [function(**leaves, samples=samples, **noise)]

        return RandomStep(backward_step(run, trained, [grad]), backward_step(lambda: run(**fixed()), trained, [grad]))

    def drawn() -> dict[str, Any]:
        """Drawn when it is needed and not kept: as large as all masks."""
        return {"drawn": baselines.drawn_by_fastmod(values["logits"], samples, 0)}

    steps = {"eager": step(theirs, drawn)}
    if compiled:
        steps["compile"] = step(torch.compile(theirs), drawn)
    return {**steps, "fastmod": step(ours, lambda: {"seed": 0})}


def module_steps(
    ours: nn.Module,
    twin: Callable[[], nn.Module],
    forward: Callable[[Callable[..., Any]], list[Tensor]],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
    *,
    compiled: bool,
) -> dict[str, Step]:
    """Steps of a module and of its plain twins, which take its parameters over.

    Args:
        forward: calls the module it is given and returns the outputs that ``grads`` belong to.
        leaves: inputs that get a gradient too.
    """

    def plain() -> nn.Module:
        module = twin()
        module.load_state_dict(ours.state_dict())
        return module

    def step(run: Callable[..., Any], module: nn.Module) -> Step:
        return backward_step(lambda: forward(run), [*leaves, *module.parameters()], grads)

    eager = plain()
    steps = {"eager": step(eager, eager)}
    if compiled:
        other = plain()
        steps["compile"] = step(torch.compile(other), other)
    return {**steps, "fastmod": step(ours, ours)}
