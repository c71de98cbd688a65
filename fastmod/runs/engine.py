"""Runs the trials of a study, one after the other or in several jobs, and picks up where a killed run left off."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fastmod.runs import checkpoint
from fastmod.runs.config import StudyError, changed
from fastmod.runs.events import Events
from fastmod.runs.folder import Plan, RunFolder, trial_key
from fastmod.runs.jobs import Wire, run_jobs
from fastmod.runs.signals import stop_on_signals
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
    """Train one trial to its end, from its checkpoint if it has one."""
    key, owner = trial_key(model, seed), plan.owner(model, seed)
    file = folder.checkpoint_file(key)
    trial = prepare_trial(registry.get(plan.study), plan, model, seed)
    metrics: dict[str, float] = {}
    on_disk = -1  # step of the checkpoint
    if file.exists():
        state = checkpoint.load(file, owner)
        trial.load_state(state)
        metrics, on_disk = state["metrics"], trial.step
    events = Events(folder.events / key, trial.step)

    def save() -> None:
        nonlocal on_disk
        if trial.step == on_disk:
            return
        events.flush()
        folder.sync(key)
        checkpoint.save(file, owner, {**trial.state(), "metrics": metrics})
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
                fresh = {"loss": loss, **trial.metrics()}
                trial.after_evaluation(fresh)
                metrics = fresh
                folder.append({"trial": key, "model": model, "seed": seed, "step": trial.step, **fresh})
                events.add(fresh, trial.step)
            spent = time.perf_counter() - begin
            trial.seconds += spent
            rate = (trial.step - before) / spent
            tell(Progress(key, trial.step, trial.steps, trial.seconds, rate, fresh, trial.finished))
            if stopped() and not trial.finished:
                save()
                raise Interrupted
            if time.monotonic() - saved >= trial.config.checkpoint_seconds:
                save()
                saved = time.monotonic()
        save()
    finally:
        events.close()
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
        folder.rewind(_steps_saved(folder, plan))
        try:
            if plan.jobs > 1:
                trials = [(folder.path, plan, *trial) for trial in plan.trials()]
                return run_jobs(_job, trials, plan.jobs, plan.threads, tell, stop)
            torch.set_num_threads(plan.threads)
            return [run_trial(folder, plan, model, seed, tell, stop.is_set) for model, seed in plan.trials()]
        except Interrupted as stopped:
            stopped.number = stop.number
            raise


def _steps_saved(folder: RunFolder, plan: Plan) -> dict[str, int]:
    """Where each trial stands; a bad checkpoint is found here, before anything is touched."""
    files = {(model, seed): folder.checkpoint_file(trial_key(model, seed)) for model, seed in plan.trials()}
    return {
        trial_key(*trial): checkpoint.load(file, plan.owner(*trial))["step"]
        for trial, file in files.items()
        if file.exists()
    }


def _job(wire: Wire, path: Path, plan: Plan, model: str, seed: int) -> Record:
    if wire.stopped():
        raise Interrupted
    folder = RunFolder(path)
    with folder.together():
        return run_trial(folder, plan, model, seed, wire.tell, wire.stopped)
