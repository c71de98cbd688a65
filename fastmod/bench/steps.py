"""Steps, forward + backward, that contenders run: each has its own leaves, all with the same initial values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.bench import baselines

#: Runs forward and backward and returns ``[outputs..., gradients...]``.
Step = Callable[[], list[Tensor]]
#: Suffix of a baseline whose images and convolution weights are in channels-last memory.
LAST = "-last"


@dataclass(frozen=True)
class RandomStep:
    """A step that draws new noise at every call, which is timed, and its twin with fixed noise, which is compared."""

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
    per_call: int = 1  # how many steps one call makes; times are per step
    layouts: bool = False  # whether the baselines also run with images in channels-last memory

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def contenders(self) -> tuple[str, ...]:
        plain = ("eager", "compile") if self.compiles else ("eager",)
        return (*plain, *(name + LAST for name in plain if self.layouts), "fastmod")


def backward_step(forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Step:
    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        outputs = forward()
        torch.autograd.backward(outputs, grads)
        return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    return step


def op_steps(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    compiled: bool,
    layout: Callable[[Tensor], Tensor] = lambda value: value,
) -> dict[str, Step]:
    """Steps of a function of tensors of these shapes, in the memory layout that ``layout`` gives them."""
    torch.manual_seed(0)
    values = [layout(torch.randn(shape)) for shape in shapes]
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
    """Steps of a mask op of the named tensors. The plain version draws its own noise, as people write it; for
    the comparison both use the noise of one seed. The weight is frozen, as masks are learned for a trained net."""
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
        """Drawn when needed and not kept, as it is as large as all masks."""
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
    """Steps of a module and of its plain twins, which get its parameters.

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


def channels_last(value: Tensor) -> Tensor:
    """Images ``[..., C, H, W]`` with their channels innermost in memory; others as they are."""
    return value.movedim(-3, -1).contiguous().movedim(-1, -3) if value.dim() >= 4 else value


def image_net_steps(
    ours: Callable[[], nn.Module],
    twin: Callable[[], nn.Module],
    load: Callable[[nn.Module, nn.Module], nn.Module],
    batch: tuple[int, ...],
    *,
    train: bool = True,
    compiled: bool,
) -> dict[str, Step]:
    """Steps of a classifier of images and of its plain twin, in both memory layouts: a training step, forward, loss and
    backward, or inference. Compared are the scores, and the gradients of the first and the last parameter."""
    torch.manual_seed(0)
    plain = twin()
    mine = load(ours(), plain)
    x = torch.randn(batch)
    with torch.no_grad():
        classes = copy.deepcopy(plain).eval()(x[:1]).shape[-1]
    labels = torch.randint(classes, batch[:1])

    def step(run: Callable[..., Tensor], module: nn.Module, images: Tensor) -> Step:
        module.train(train)
        parameters = list(module.parameters())

        def training() -> list[Tensor]:
            for parameter in parameters:
                parameter.grad = None
            scores = run(images)
            nn.functional.cross_entropy(scores, labels).backward()
            ends = [parameter.grad for parameter in (parameters[0], parameters[-1])]
            return [scores, *[grad.flatten() for grad in ends if grad is not None]]

        @torch.inference_mode()
        def inference() -> list[Tensor]:
            return [run(images)]

        return training if train else inference

    def copies(name: str, compiled: bool) -> dict[str, Step]:
        made = {}
        for suffix, memory in (("", torch.contiguous_format), (LAST, torch.channels_last)):
            module = copy.deepcopy(plain).to(memory_format=memory)  # type: ignore[call-overload]  # torch knows it
            run = torch.compile(module) if compiled else module
            made[name + suffix] = step(run, module, x.contiguous(memory_format=memory))
        return made

    steps = copies("eager", False)
    if compiled:
        steps |= copies("compile", True)
    return {**steps, "fastmod": step(mine, mine, x)}
