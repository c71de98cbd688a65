"""Runs the trials of a study, one after the other or in several jobs, and picks up where a killed run left off."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastmod.runs import checkpoint, parallel
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import RAY, Plan, RunFolder, trial_key
from fastmod.runs.jobs import Wire, run_jobs
from fastmod.runs.ledger import FolderLedger, Ledger
from fastmod.runs.signals import Stop, stop_on_signals
from fastmod.runs.study import Record, Study
from fastmod.runs.trial import Trial
from fastmod.studies import registry


@dataclass(frozen=True)
class Progress:
    """Told after every chunk; ``metrics`` only when the trial was evaluated there."""

    key: str
    step: int
    steps: int
    seconds: float  # of training so far, all sessions together
    rate: float  # steps per second, lately
    metrics: dict[str, float] | None = None
    finished: bool = False


Listener = Callable[[Progress], None]


@dataclass(frozen=True)
class Task:
    """One trial of one run folder; ``label`` tells those of several folders apart."""

    path: Path
    plan: Plan
    model: str
    seed: int
    label: str = ""

    def named(self, tell: Listener) -> Listener:
        """The listener, told of the trial by its label too."""
        return (lambda now: tell(replace(now, key=f"{self.label} {now.key}"))) if self.label else tell


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user stopped the run; everything is saved."""

    number = int(signal.SIGINT)  # of the signal that did it


def prepare_trial(study: Study, plan: Plan, model: str, seed: int) -> Trial:
    """The trial at step 0. The global generator is seeded: it initialises the model and draws the seeds of noise."""
    config = changed(study.defaults, plan.settings)
    if model not in study.models:
        raise StudyError(f"{study.name} has no model {model!r}, only {', '.join(study.models)}")
    torch.manual_seed(seed)
    try:
        return study.trial(config, model, seed, torch.device(plan.device))
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        # Settings that no model can be built with, a device that is not there, no memory.
        raise StudyError(f"{model} on {plan.device}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def run_trial(
    folder: RunFolder, plan: Plan, model: str, seed: int, tell: Listener, stopped: Callable[[], bool]
) -> Record:
    """Train one trial of a run folder to its end, from its checkpoint if it has one."""
    return train(plan, model, seed, FolderLedger(folder, plan, model, seed), tell, stopped)


def train(plan: Plan, model: str, seed: int, ledger: Ledger, tell: Listener, stopped: Callable[[], bool]) -> Record:
    """Train one trial to its end, from what the ledger has of it."""
    key, team = trial_key(model, seed), parallel.team
    trial = prepare_trial(registry.get(plan.study), plan, model, seed)
    metrics: dict[str, float] = {}
    on_disk = -1  # step of the checkpoint
    state = team.same(ledger.state())
    if state is not None:
        trial.load_state(state)
        metrics, on_disk = state["metrics"], trial.step

    def save() -> None:
        nonlocal on_disk
        if trial.step == on_disk:
            return
        ledger.save({**trial.state(), "metrics": metrics})
        on_disk = trial.step

    try:
        saved = time.monotonic()
        while not trial.finished:
            begin, before = time.perf_counter(), trial.step
            try:
                loss = float(trial.chunk())  # the only wait for the device, once a chunk
            except (MemoryError, RuntimeError) as error:  # torch has a class of its own for a GPU's memory only
                if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error):
                    raise StudyError(f"{key}: out of memory; try a smaller batch or chunk") from error
                raise
            fresh = None
            if not math.isfinite(loss):
                raise StudyError(f"{key}: the loss is {loss} at step {trial.step}; try a smaller lr")
            if trial.due or trial.finished:
                team.same_buffers(trial.model)
                fresh = team.same({"loss": loss, **trial.metrics()})
                trial.after_evaluation(fresh)
                metrics = fresh
                ledger.add(trial.step, fresh)
            spent = time.perf_counter() - begin
            trial.seconds += spent
            rate = (trial.step - before) / spent
            tell(Progress(key, trial.step, trial.steps, trial.seconds, rate, fresh, trial.finished))
            if team.any(stopped()) and not trial.finished:
                save()
                raise Interrupted
            if time.monotonic() - saved >= trial.config.checkpoint_seconds:
                save()
                saved = time.monotonic()
        save()
    finally:
        ledger.close()
    return record_of(trial, model, metrics)


def record_of(trial: Trial, model: str, metrics: dict[str, float]) -> Record:
    count = sum(p.numel() for p in trial.model.parameters())
    return Record(model, trial.seed, trial.step, trial.seconds, count, trial.result(metrics))


def run(folder: RunFolder, plan: Plan, tell: Listener) -> list[Record]:
    """Run or resume all trials. Ctrl-C and SIGTERM stop after the chunk at hand, with :class:`Interrupted`; a second
    one kills."""
    study = registry.get(plan.study)
    study.prepare(changed(study.defaults, plan.settings))
    with folder.alone(), stop_on_signals() as stop:
        return run_tasks(begin(folder, plan), tell, stop)


def assist(plan: Plan) -> None:
    """What the other processes of a team do while the first one runs the plan."""
    torch.set_num_threads(plan.threads)
    with stop_on_signals() as stop, contextlib.suppress(Interrupted):
        for model, seed in plan.trials():
            train(plan, model, seed, parallel.Silent(), lambda now: None, stop.is_set)


def begin(folder: RunFolder, plan: Plan, label: str = "") -> list[Task]:
    """The trials of a folder, which is held; what they measured after their checkpoints is gone."""
    folder.rewind(_steps_saved(folder, plan))
    return [Task(folder.path, plan, model, seed, label) for model, seed in plan.trials()]


def run_tasks(tasks: Sequence[Task], tell: Listener, stop: Stop) -> list[Record]:
    """All of them, in the way that their plans, which agree in this, say; their records in the same order."""
    plan = tasks[0].plan
    together = bundles(tasks)
    try:
        if plan.on == RAY:
            from fastmod.runs.on_ray import run_on_ray

            found = run_on_ray(together, tell, stop)
        elif plan.jobs > 1:
            found = run_jobs(_job, [(bundle,) for bundle in together], plan.jobs, plan.threads, tell, stop)
        else:
            torch.set_num_threads(plan.threads)
            found = [run_bundle(bundle, tell, stop.is_set) for bundle in together]
    except Interrupted as stopped:
        stopped.number = stop.number
        raise
    return [record for records in found for record in records]


def bundles(tasks: Sequence[Task]) -> list[list[Task]]:
    """The place for batched training: tasks that :func:`run_bundle` trains side by side are one bundle, in the order
    of the tasks. Each is alone today."""
    return [[task] for task in tasks]


def run_bundle(bundle: Sequence[Task], tell: Listener, stopped: Callable[[], bool]) -> list[Record]:
    """Train the tasks of a bundle: what a job or a process does at a time."""
    records = []
    for task in bundle:
        if stopped():
            raise Interrupted
        folder = RunFolder(task.path)
        with folder.together():
            records.append(run_trial(folder, task.plan, task.model, task.seed, task.named(tell), stopped))
    return records


def _steps_saved(folder: RunFolder, plan: Plan) -> dict[str, int]:
    """Where each trial stands; a bad checkpoint is found here, before anything is touched."""
    files = {(model, seed): folder.checkpoint_file(trial_key(model, seed)) for model, seed in plan.trials()}
    return {
        trial_key(*trial): checkpoint.load(file, plan.owner(*trial))["step"]
        for trial, file in files.items()
        if file.exists()
    }


def _job(wire: Wire, bundle: list[Task]) -> list[Record]:
    return run_bundle(bundle, wire.tell, wire.stopped)
