"""Runs the trials of a study, one after the other, together or in several jobs, and continues where a killed run
stopped."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastmod.runs import checkpoint, parallel
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import RAY, Plan, RunFolder, trial_key
from fastmod.runs.jobs import Channel, run_jobs
from fastmod.runs.ledger import FolderLedger, Ledger
from fastmod.runs.side_by_side import SideBySide
from fastmod.runs.signals import Stop, stop_on_signals
from fastmod.runs.study import Record, Study
from fastmod.runs.trial import Trial
from fastmod.studies import registry


@dataclass(frozen=True)
class Progress:
    """Reported after every chunk; ``metrics`` only if the trial was evaluated there."""

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
    """One trial of one run folder; ``label`` distinguishes those of several folders."""

    path: Path
    plan: Plan
    model: str
    seed: int
    label: str = ""

    def named(self, tell: Listener) -> Listener:
        """The listener, called with the label of the trial in its name."""
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
        # Settings for which no model can be built, a missing device, no memory.
        raise StudyError(f"{model} on {plan.device}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def run_trial(
    folder: RunFolder, plan: Plan, model: str, seed: int, tell: Listener, stopped: Callable[[], bool]
) -> Record:
    """Train one trial of a run folder to its end, from its checkpoint if it has one."""
    return train(plan, model, seed, FolderLedger(folder, plan, model, seed), tell, stopped)


def train(plan: Plan, model: str, seed: int, ledger: Ledger, tell: Listener, stopped: Callable[[], bool]) -> Record:
    """Train one trial to its end, from the state in the ledger."""
    return train_all([Course(plan, model, seed, ledger)], tell, stopped)[0]


class Course:
    """A running trial: its ledger, its last metrics, and its own random generators."""

    def __init__(self, plan: Plan, model: str, seed: int, ledger: Ledger) -> None:
        self.key, self.model, self.ledger = trial_key(model, seed), model, ledger
        self.trial = prepare_trial(registry.get(plan.study), plan, model, seed)
        self.metrics: dict[str, float] = {}
        self._on_disk = -1  # step of the checkpoint
        state = parallel.processes.same(ledger.state())
        if state is not None:
            self.trial.load_state(state)
            self.metrics, self._on_disk = state["metrics"], self.trial.step
        self._random = self.trial.random_state()

    @contextlib.contextmanager
    def alone(self) -> Iterator[Trial]:
        """The trial, with torch's generators in the state in which it left them."""
        self.trial.set_random_state(self._random)
        yield self.trial
        self._random = self.trial.random_state()

    def chunk(self) -> float:
        with self.alone() as trial:
            return float(trial.chunk())

    def measure(self, loss: float) -> dict[str, float] | None:
        """Evaluate after a chunk; None where that is not due."""
        with self.alone() as trial:
            if not math.isfinite(loss):
                raise StudyError(f"{self.key}: the loss is {loss} at step {trial.step}; try a smaller lr")
            if not (trial.due or trial.finished):
                return None
            for net in trial.nets():
                parallel.processes.same_buffers(net)
            self.metrics = parallel.processes.same({"loss": loss, **trial.metrics()})
            trial.after_evaluation(self.metrics)
            self.ledger.add(trial.step, self.metrics)
            return self.metrics

    def save(self) -> None:
        if self.trial.step != self._on_disk:
            with self.alone() as trial:
                self.ledger.save({**trial.state(), "metrics": self.metrics})
            self._on_disk = self.trial.step


def train_all(courses: Sequence[Course], tell: Listener, stopped: Callable[[], bool]) -> list[Record]:
    """Train some trials to their end: always those at the lowest step together, so that a trial that fell behind when a
    run was killed catches up first."""
    processes = parallel.processes
    together: SideBySide | None = None
    try:
        saved = time.monotonic()
        while learning := [course for course in courses if not course.trial.finished]:
            begin, before = time.perf_counter(), min(course.trial.step for course in learning)
            group = [course for course in learning if course.trial.step == before]
            try:  # the only wait for the device, once a chunk
                if len(group) == 1:
                    losses = [group[0].chunk()]
                else:
                    trials = [course.trial for course in group]
                    if together is None or together.trials != trials:
                        together = SideBySide(trials)
                    losses = together.chunk().tolist()
            except (MemoryError, RuntimeError) as error:  # torch has its own class only for the memory of a GPU
                if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error):
                    keys = ", ".join(course.key for course in group)
                    raise StudyError(f"{keys}: out of memory; try a smaller batch or chunk") from error
                raise
            fresh = [course.measure(loss) for course, loss in zip(group, losses, strict=True)]
            spent = time.perf_counter() - begin
            for course, metrics in zip(group, fresh, strict=True):
                trial = course.trial
                trial.seconds += spent / len(group)
                rate = (trial.step - before) / spent
                tell(Progress(course.key, trial.step, trial.steps, trial.seconds, rate, metrics, trial.finished))
            if processes.any(stopped()) and not all(course.trial.finished for course in courses):
                for course in courses:
                    course.save()
                raise Interrupted
            if time.monotonic() - saved >= courses[0].trial.config.checkpoint_seconds:
                for course in courses:
                    course.save()
                saved = time.monotonic()
        for course in courses:
            course.save()
    finally:
        for course in courses:
            course.ledger.close()
    return [record_of(course.trial, course.model, course.metrics) for course in courses]


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


def train_along(plan: Plan) -> None:
    """Train along with the first process of a group, which runs the plan."""
    torch.set_num_threads(plan.threads)
    with stop_on_signals() as stop, contextlib.suppress(Interrupted):
        for model, seed in plan.trials():
            train(plan, model, seed, parallel.Silent(), lambda now: None, stop.is_set)


def begin(folder: RunFolder, plan: Plan, label: str = "") -> list[Task]:
    """The trials of a folder, which is locked; metrics after their checkpoints are dropped."""
    folder.rewind(_steps_saved(folder, plan))
    return [Task(folder.path, plan, model, seed, label) for model, seed in plan.trials()]


def run_tasks(tasks: Sequence[Task], tell: Listener, stop: Stop) -> list[Record]:
    """Run all tasks as their plans say, which agree in this; returns their records in the same order."""
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
    """Groups tasks that differ only in the seed, as many as their plan wants to train together, in the order of the
    tasks."""
    found: list[list[Task]] = []
    for task in tasks:
        last = found[-1] if found else []
        if last and len(last) < task.plan.together and (last[0].path, last[0].model) == (task.path, task.model):
            last.append(task)
        else:
            found.append([task])
    return found


def run_bundle(bundle: Sequence[Task], tell: Listener, stopped: Callable[[], bool]) -> list[Record]:
    """Train the tasks of a bundle, the unit of work of a job or a process."""
    if stopped():
        raise Interrupted
    first = bundle[0]
    folder = RunFolder(first.path)
    with folder.together():
        if len(bundle) == 1:
            return [run_trial(folder, first.plan, first.model, first.seed, first.named(tell), stopped)]
        return run_together(folder, bundle, tell, stopped)


def run_together(
    folder: RunFolder, bundle: Sequence[Task], tell: Listener, stopped: Callable[[], bool]
) -> list[Record]:
    """Train several trials together; where that is impossible, one after the other, and a line says why."""
    tell = bundle[0].named(tell)
    courses = [Course(t.plan, t.model, t.seed, FolderLedger(folder, t.plan, t.model, t.seed)) for t in bundle]
    reason = SideBySide.why_not([course.trial for course in courses])
    if reason is None:
        return train_all(courses, tell, stopped)
    _say_once(f"--together: {bundle[0].model} trains one trial after the other, {reason}")
    return [record for course in courses for record in train_all([course], tell, stopped)]


@functools.cache
def _say_once(line: str) -> None:
    """Say it once, as it holds for many bundles of a sweep."""
    print(line, file=sys.stderr)


def _steps_saved(folder: RunFolder, plan: Plan) -> dict[str, int]:
    """The step of each trial; a bad checkpoint is found here, before anything is changed."""
    files = {(model, seed): folder.checkpoint_file(trial_key(model, seed)) for model, seed in plan.trials()}
    return {
        trial_key(*trial): checkpoint.load(file, plan.owner(*trial))["step"]
        for trial, file in files.items()
        if file.exists()
    }


def _job(channel: Channel, bundle: list[Task]) -> list[Record]:
    return run_bundle(bundle, channel.tell, channel.stopped)
