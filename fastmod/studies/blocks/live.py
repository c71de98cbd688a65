"""ALGO live: an SMFR learns the rule, beside the same model in plain PyTorch on the same data."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from fastmod.runs import checkpoint, draw, report
from fastmod.runs.config import changed
from fastmod.runs.engine import Listener, Progress, record_of
from fastmod.runs.folder import Plan, RunFolder, trial_key
from fastmod.runs.study import Row
from fastmod.studies.blocks import algo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAST, PLAIN = "SMFR", "SMFR_plain"
#: Larger steps than the paper's: the same rule in a quarter of the time, for a show.
SETTINGS = {"steps": 20_000, "evaluate_every": 500, "until_solved": True}
_SHARE = 0.3  # seconds that the plain model gets for each second of the fast one


@dataclass
class _Runner:
    """One of the two: trained in turns, its clock stopped while the other trains."""

    trial: algo.AlgoTrial
    key: str
    seconds: list[float] = field(default_factory=list)  # of training until each evaluation
    odd: list[float] = field(default_factory=list)  # what was found there
    metrics: dict[str, float] = field(default_factory=dict)

    def turn(self, folder: RunFolder, tell: Listener) -> None:
        """One chunk, and an evaluation where one is due; only the chunk is on the clock."""
        trial = self.trial
        begin = time.perf_counter()
        loss = float(trial.chunk())
        trial.seconds += time.perf_counter() - begin
        fresh = None
        if trial.step % trial.config.evaluate_every == 0:
            fresh = {"loss": loss, **trial.metrics()}
            trial.after_evaluation(fresh)
            self.metrics = fresh
            self.seconds.append(trial.seconds)
            self.odd.append(fresh["ood_odd"])
            line = {"trial": self.key, "model": trial.name, "seed": trial.seed, "step": trial.step}
            folder.append({**line, **fresh})
        tell(Progress(self.key, trial.step, trial.config.steps, trial.seconds, self.rate, fresh, trial.finished))

    @property
    def rate(self) -> float:
        """Steps per second over all its training."""
        return self.trial.step / self.trial.seconds


def plan(seed: int = 0) -> Plan:
    config = changed(algo.Algo.defaults, SETTINGS)
    return Plan("algo", [FAST, PLAIN], [seed], asdict(config), threads=torch.get_num_threads())


def run(folder: RunFolder, plan: Plan, tell: Listener) -> tuple[list[Row], str]:
    """Train until every iteration is solved; the table, and a sentence on the speed of both."""
    runners = {name: _runner(plan, name) for name in (FAST, PLAIN)}
    fast, plain = runners[FAST], runners[PLAIN]
    plain.trial.model.load_state_dict(fast.trial.model.state_dict())
    while not fast.trial.finished:
        fast.turn(folder, tell)
        if plain.trial.seconds < _SHARE * fast.trial.seconds:
            plain.turn(folder, tell)
    if not plain.metrics:
        plain.metrics = plain.trial.metrics()
    file = folder.checkpoint_file(fast.key)
    state = {**fast.trial.state(), "metrics": fast.metrics}
    checkpoint.save(file, plan.owner(FAST, fast.trial.seed), state)
    records = [record_of(runner.trial, name, runner.metrics) for name, runner in runners.items()]
    summary = (
        f"fastmod {fast.rate:.0f} steps/s, plain PyTorch {plain.rate:.0f} steps/s: {fast.rate / plain.rate:.1f} x. "
        f"OOD_odd {fast.odd[-1]:.3f} after {fast.trial.step:,} steps and {fast.trial.seconds:.0f} s of training; "
        f"plain PyTorch had {plain.trial.seconds:.0f} s for {plain.trial.step:,} steps."
    )
    caption = "OOD_odd accuracy against seconds of training, the same model and data."
    figure = {"race": (_figure(runners), caption)} if draw.available() else {}
    return report.finish(folder, plan, records, [summary], figure), summary


def _runner(plan: Plan, name: str) -> _Runner:
    seed = plan.seeds[0]
    torch.manual_seed(seed)
    config = changed(algo.Algo.defaults, plan.settings)
    return _Runner(algo.AlgoTrial(config, name, seed, torch.device(plan.device)), trial_key(name, seed))


def _figure(runners: dict[str, _Runner]) -> Figure:
    names = {FAST: "fastmod", PLAIN: "plain PyTorch"}
    curves = {names[name]: {0: (runner.seconds, runner.odd)} for name, runner in runners.items()}
    return draw.curves(curves, "OOD_odd accuracy", x_label="seconds of training")
