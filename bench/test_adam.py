"""fastmod.optim.Adam against torch's fused Adam after clip_grad_norm_: the engine's own steps of a study, which show
what the optimiser costs in it, and both optimisers alone on the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fastmod
from bench._suite import measure
from fastmod.bench.steps import Case, RandomStep, Step
from fastmod.runs.config import changed
from fastmod.runs.trial import Trial
from fastmod.studies import registry

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


class TwoCalls:
    """As one writes it with torch: a plain object, so that nothing is added to the two calls."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, max_norm: float) -> None:
        self.params, self.max_norm = list(params), max_norm
        self.adam = torch.optim.Adam(self.params, lr, fused=True)
        self.param_groups, self.zero_grad = self.adam.param_groups, self.adam.zero_grad

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.params, self.max_norm, foreach=True)
        self.adam.step()


OPTIMIZERS: dict[str, Callable[..., Any]] = {"eager": TwoCalls, "fastmod": fastmod.optim.Adam}
Maker = Callable[[str], Trial]  # of a contender's trial


def trial(study_name: str, model: str, settings: dict[str, Any], masks: bool, contender: str) -> Trial:
    """``masks``: the training of a mask, not of the net."""
    torch.manual_seed(0)
    study, kind = registry.get(study_name), OPTIMIZERS[contender]
    config: Any = changed(study.defaults, settings)
    made: Any = study.trial(config, model, 0, torch.device("cpu"))
    if masks:
        made.optimizer_of = lambda masked: kind(masked.parameters(), config.mask_lr, max_norm=config.clip)
        made.step = config.steps
    else:
        made.optimizer = kind(made.model.parameters(), config.lr, max_norm=config.clip)
    return made


def trained(trial: Trial) -> list[Tensor]:
    return [p for group in trial.optimizer.param_groups for p in group["params"]]


def study_step(make: Maker, contender: str) -> RandomStep:
    """A chunk; always the same one, as the place in the data decides on stages and learning rates."""
    timed, compared = make(contender), make(contender)
    first = timed.step

    def run() -> list[Tensor]:
        timed.step = first
        return [timed.chunk()]

    def fixed() -> list[Tensor]:
        torch.manual_seed(0)
        return [compared.chunk(), *trained(compared)]

    return RandomStep(run, fixed)


def lone_step(make: Maker, contender: str) -> RandomStep:
    """The optimiser on gradients that lie ready, its state in place and in the stage of the case."""

    def optimiser() -> Step:
        owner = make(contender)
        torch.manual_seed(0)
        owner.chunk()
        params = trained(owner)
        grads = [torch.full_like(p, 0.01) for p in params]

        def run() -> list[Tensor]:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            owner.optimizer.step()
            owner.optimizer.zero_grad()
            return params

        return run

    return RandomStep(optimiser(), optimiser())


def adam(study: str, model: str, chunk: int, *, masks: bool = False, **settings: Any) -> tuple[Case, Case]:
    """In the study, ``chunk`` steps a call, and alone."""
    make = partial(trial, study, model, {"chunk": chunk, **settings}, masks)

    def steps(of: Callable[[Maker, str], Step], *, compiled: bool) -> dict[str, Step]:
        return {name: of(make, name) for name in OPTIMIZERS}

    label = f"{study} {model}" + (" (mask)" if masks else "")
    return (
        Case("optim.Adam", label, None, partial(steps, study_step), compiles=False, per_call=chunk),
        Case("optim.Adam", f"{label}, alone", None, partial(steps, lone_step), compiles=False),
    )


# Short chunks, so that the contenders take turns often enough to meet the same machine.
CASES = (
    *adam("algo", "SMFR", 5),
    *adam("addmul", "SMFR_softmax", 5, width=4, depth=2, layers=1),
    *adam("doubleadd", "SMFR_softmax", 5),
    *adam("mask-addmul", "FNN", 1, masks=True, hidden=(800,) * 4),
)
SMOKE = (*adam("algo", "SMFR", 2), *adam("mask-addmul", "FNN", 2, masks=True, hidden=(20,)))


def test_adam(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
