"""fastmod against plain PyTorch: cases, steps (forward + backward) and an interleaved clock.

A step is checked against the others before it is timed; a case that does not match gets no figure.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fastmod
from fastmod import plain

#: Runs forward and backward and returns ``[outputs..., gradients...]``.
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class RandomStep:
    """A step with noise of its own at every call, which is what is timed, and its twin with fixed noise to compare."""

    step: Step
    fixed: Step

    def __call__(self) -> list[Tensor]:
        return self.step()


NOISY = 1.5
_TURN = 4  # timed steps in a row


@dataclass(frozen=True)
class SMFRCase:
    sizes: tuple[int, int, int, int, int]  # in_blocks, out_blocks, block_size, width, depth
    batch: int
    target: float | None = None  # ratio aimed at
    options: Mapping[str, Any] = field(default_factory=dict)
    threshold: float | None = None  # with one, the step contains the range penalty

    @property
    def label(self) -> str:
        i, o, b, w, d = self.sizes
        extra = "".join(f" {name[0]}{value}" for name, value in self.options.items())  # h400: hidden, l4: layers
        penalty = "" if self.threshold is None else " +penalty"
        return f"{i},{o},{b} w{w} d{d}{extra} B{self.batch}{penalty}"


SMFR_CASES = (
    SMFRCase((6, 5, 10, 8, 3), 128, 3.0),
    SMFRCase((6, 5, 10, 8, 3), 1024, 1.7),
    SMFRCase((6, 5, 10, 10, 5), 128, 2.5, {"layers": 3}),
    SMFRCase((5, 1, 196, 4, 1), 128, 1.15, {"hidden": 400, "layers": 4}),
    SMFRCase((6, 5, 10, 8, 3), 128, None, threshold=20.0),
)


def backward_step(forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Step:
    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        outputs = forward()
        torch.autograd.backward(outputs, grads)
        return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    return step


def smfr_steps(case: SMFRCase, *, compiled: bool) -> dict[str, Step]:
    """Contender -> step; all start from the same parameters and input."""
    torch.manual_seed(0)
    ours = fastmod.nn.SMFR(*case.sizes, threshold=case.threshold, **case.options)
    theirs = plain.SMFR(*case.sizes, threshold=case.threshold, **case.options)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(case.batch, case.sizes[0], case.sizes[2])
    grads = [torch.randn(case.batch, case.sizes[1], case.sizes[2])]
    with_penalty = case.threshold is not None
    if with_penalty:
        grads.append(torch.ones(()))

    def fast() -> list[Tensor]:
        out = ours(x)
        return [out, ours.penalty()] if with_penalty else [out]

    def of(model: Callable[[Tensor], Any], module: nn.Module) -> Step:
        return backward_step(lambda: [t for t in model(x) if t is not None], list(module.parameters()), grads)

    steps = {"eager": of(theirs, theirs)}
    if compiled:
        twin = plain.SMFR(*case.sizes, threshold=case.threshold, **case.options)
        twin.load_state_dict(ours.state_dict())
        steps["compile"] = of(torch.compile(twin), twin)
    steps["fastmod"] = backward_step(fast, list(ours.parameters()), grads)
    return steps


def worst_error(steps: Mapping[str, Step], reference: str = "eager") -> float:
    """Largest difference of any result to the reference, relative to the largest value of that tensor (or to 1)."""
    steps = {name: step.fixed if isinstance(step, RandomStep) else step for name, step in steps.items()}
    expected = [t.detach().clone() for t in steps[reference]()]
    worst = 0.0
    for name, step in steps.items():
        results = step()
        if name == reference:
            continue
        if [r.shape for r in results] != [e.shape for e in expected]:
            return float("inf")
        for result, value in zip(results, expected, strict=True):
            error = (result.detach() - value).abs().max() / value.abs().max().clamp(min=1)
            worst = max(worst, float(error)) if not torch.isnan(error) else float("inf")
    return worst


def interleaved(steps: Mapping[str, Step], *, seconds: float = 1.5, least: int = 30) -> tuple[dict[str, float], float]:
    """Median seconds per step, and the worst ratio of the upper to the lower quartile.

    The contenders take short turns in random order, so that noise of the machine meets all alike and nobody always runs
    after the same neighbour: thread pools of compiled code spin on for a while and would slow down whoever comes next.
    """
    for step in steps.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    order = list(steps)
    shuffle = random.Random(0).shuffle
    while time.perf_counter() < end or len(times[order[0]]) < least:
        shuffle(order)
        for name in order:
            steps[name]()  # not timed: it meets the caches and the still spinning threads of the one before
            for _ in range(_TURN):
                start = time.perf_counter()
                steps[name]()
                times[name].append(time.perf_counter() - start)
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {name: q[1] for name, q in quartiles.items()}, max(q[2] / q[0] for q in quartiles.values())


@dataclass(frozen=True)
class Result:
    label: str
    seconds: Mapping[str, float]  # empty when the results differ
    error: float
    tolerance: float
    target: float | None
    spread: float = 1.0  # worst ratio of the upper to the lower quartile of the times

    @property
    def noisy(self) -> bool:
        """Whether something else kept the machine busy: the figures are then worth little."""
        return self.spread > NOISY

    @property
    def matches(self) -> bool:
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float | None:
        """The better of the baselines over fastmod: above 1 fastmod wins."""
        if not self.seconds:
            return None
        return min(value for name, value in self.seconds.items() if name != "fastmod") / self.seconds["fastmod"]


def run(
    label: str,
    steps: Mapping[str, Step],
    *,
    target: float | None = None,
    seconds: float = 1.5,
    tolerance: float = 1e-4,
) -> Result:
    error = worst_error(steps)
    timed, spread = interleaved(steps, seconds=seconds) if error <= tolerance else ({}, 1.0)
    return Result(label, timed, error, tolerance, target, spread)
