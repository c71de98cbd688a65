"""A training step of many SMFRs, forward, backward and optimiser, in one nn.Ensemble: against the same nets of fastmod
one after the other, and against plain PyTorch's under vmap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, RandomStep, Step
from fastmod.nn import SMFR, Ensemble
from fastmod.race import FIRST, Sizes

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

#: A step that returns the loss of every net, and the parameters: of each net, or once with the copies in front.
Training = tuple[Callable[[], list[Tensor]], list[list[nn.Parameter]]]


def loss_of(out: Tensor, target: Tensor, penalty: Tensor) -> Tensor:
    """Of every net, if there are several."""
    return (out - target).square().mean((-1, -2, -3)) + penalty


def one_by_one(nets: Ensemble, x: Tensor, target: Tensor) -> Training:
    alone: list[Any] = [nets.copy(i) for i in range(nets.copies)]
    optimizers = [fastmod.optim.Adam(net.parameters(), 1e-3) for net in alone]

    def run() -> list[Tensor]:
        losses = []
        for net, optimizer in zip(alone, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(net(x), target, net.penalty())
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    return run, [list(net.parameters()) for net in alone]


def together(nets: Ensemble, x: Tensor, target: Tensor, optimizer: Any) -> Callable[[], list[Tensor]]:
    def outputs(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found = net(x)  # the plain twin returns its penalty too
        return found if isinstance(found, tuple) else (found, net.penalty())

    def run() -> list[Tensor]:
        optimizer.zero_grad()
        out, penalty = nets.map(outputs, x)
        losses = loss_of(out, target, penalty)
        losses.sum().backward()
        optimizer.step()
        return list(losses)

    return run


def steps(sizes: Sizes, batch: int, copies: int, rival: str, *, compiled: bool) -> dict[str, Step]:
    torch.manual_seed(0)
    first = Ensemble(lambda: SMFR(*sizes), copies)
    x, target = torch.randn(batch, sizes[0], sizes[2]), torch.randn(batch, sizes[1], sizes[2])

    def made(name: str) -> Training:
        if name == "eager" and rival == "one by one":
            return one_by_one(first, x, target)
        plain = name == "eager"
        nets = Ensemble(lambda: baselines.SMFR(*sizes, threshold=20.0) if plain else SMFR(*sizes), copies)
        nets.load_state_dict(first.state_dict())
        adam = partial(torch.optim.Adam, fused=True) if plain else fastmod.optim.Adam
        return together(nets, x, target, adam(nets.parameters(), 1e-3)), [list(nets.parameters())]

    def step(name: str) -> RandomStep:
        """The one that is timed trains; what it began with is compared, in another: losses and gradients."""
        run, params = made(name)

        def compared() -> list[Tensor]:
            losses = run()
            grads = [[p.grad for p in same if p.grad is not None] for same in zip(*params, strict=True)]
            joined = [torch.stack(same) if len(params) > 1 else same[0] for same in grads]
            return [torch.stack(losses), *joined]

        return RandomStep(made(name)[0], compared)

    return {name: step(name) for name in ("eager", "fastmod")}


def ensemble(sizes: Sizes, batch: int, copies: int, rival: str, target: float | None = None) -> Case:
    label = f"{copies} x SMFR({','.join(map(str, sizes))}) B{batch}, one step, {rival}"
    return Case("nn.Ensemble", label, target, partial(steps, sizes, batch, copies, rival), compiles=False)


CASES = (
    ensemble(FIRST, 128, 8, "one by one", 1.3),
    ensemble(FIRST, 128, 8, "plain vmap"),
)
SMOKE = (
    ensemble((2, 3, 4, 3, 1), 3, 3, "one by one"),
    ensemble((2, 3, 4, 3, 1), 3, 3, "plain vmap"),
)


def test_ensemble(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
