"""Runs the trials of a study, one after the other or in several jobs, and picks up where a killed run left off."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

import torch

from fastmod.studies import checkpoint, registry
from fastmod.studies.config import StudyError, changed
from fastmod.studies.folder import Plan, RunFolder, trial_key
from fastmod.studies.study import Record, Study
from fastmod.studies.trial import Trial


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


class _EventWriter(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _NoEvents:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def _event_writer(folder: RunFolder, key: str, step: int) -> _EventWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the command says so once; metrics.jsonl has it all
        return _NoEvents()
    return SummaryWriter(str(folder.events / key), purge_step=step)


def prepare_trial(study: Study, plan: Plan, model: str, seed: int) -> Trial:
    """The trial at step 0. The global generator is seeded: it initialises the model and draws the seeds of noise."""
    config = changed(study.defaults, plan.settings)
    torch.manual_seed(seed)
    return study.trial(config, model, seed, torch.device(plan.device))


def run_trial(
    folder: RunFolder, plan: Plan, model: str, seed: int, tell: Listener, stopped: Callable[[], bool]
) -> Record:
    """Train one trial to its end, from its checkpoint if it has one."""
    key, owner = trial_key(model, seed), plan.owner(model, seed)
    file = folder.checkpoint_file(key)
    trial = prepare_trial(registry.get(plan.study), plan, model, seed)
    metrics: dict[str, float] = {}
    if file.exists():
        state = checkpoint.load(file, owner)
        trial.load_state(state)
        metrics = state["metrics"]
    writer = _event_writer(folder, key, trial.step)

    def save() -> None:
        writer.flush()
        folder.sync()
        checkpoint.save(file, owner, {**trial.state(), "metrics": metrics})

    try:
        saved = time.monotonic()
        while not trial.finished:
            begin = time.perf_counter()
            loss = float(trial.chunk())  # the only wait for the device, once a chunk
            fresh = None
            if not math.isfinite(loss):
                raise StudyError(f"{key}: the loss is {loss} at step {trial.step}; try a smaller lr")
            if trial.step % trial.config.evaluate_every == 0 or trial.finished:
                fresh = {"loss": loss, **trial.metrics()}
                trial.after_evaluation(fresh)
                metrics = fresh
                folder.append({"trial": key, "model": model, "seed": seed, "step": trial.step, **fresh})
                for name, value in fresh.items():
                    writer.add_scalar(name, value, trial.step)
            spent = time.perf_counter() - begin
            trial.seconds += spent
            rate = trial.config.chunk / spent
            tell(Progress(key, trial.step, trial.steps, trial.seconds, rate, fresh, trial.finished))
            if stopped() and not trial.finished:
                save()
                raise Interrupted
            if time.monotonic() - saved >= trial.config.checkpoint_seconds:
                save()
                saved = time.monotonic()
        save()
    finally:
        writer.close()
    return record_of(trial, model, metrics)


def record_of(trial: Trial, model: str, metrics: dict[str, float]) -> Record:
    count = sum(p.numel() for p in trial.model.parameters())
    return Record(model, trial.seed, trial.step, trial.seconds, count, trial.result(metrics))


def run(folder: RunFolder, plan: Plan, tell: Listener) -> list[Record]:
    """Run or resume all trials. Ctrl-C stops after the chunk at hand, with :class:`Interrupted`; a second one kills."""
    study = registry.get(plan.study)
    study.prepare(changed(study.defaults, plan.settings))
    with folder.alone(), _stop_on_interrupt() as stop:
        folder.rewind(_steps_saved(folder, plan))
        if plan.jobs == 1:
            torch.set_num_threads(plan.threads)
            return [run_trial(folder, plan, model, seed, tell, stop.is_set) for model, seed in plan.trials()]
        return _run_jobs(folder, plan, tell, stop)


def _steps_saved(folder: RunFolder, plan: Plan) -> dict[str, int]:
    """Where each trial stands; a bad checkpoint is found here, before anything is touched."""
    files = {(model, seed): folder.checkpoint_file(trial_key(model, seed)) for model, seed in plan.trials()}
    return {
        trial_key(*trial): checkpoint.load(file, plan.owner(*trial))["step"]
        for trial, file in files.items()
        if file.exists()
    }


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def first(*_: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _run_jobs(folder: RunFolder, plan: Plan, tell: Listener, stop: threading.Event) -> list[Record]:
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang in its threads
    with spawn.Manager() as manager:
        queue: Queue[Progress | None] = manager.Queue()
        halt = manager.Event()
        listener = threading.Thread(target=_pass_on, args=(queue, tell, stop, halt), daemon=True)
        listener.start()
        with ProcessPoolExecutor(plan.jobs, mp_context=spawn, initializer=_begin_job, initargs=(plan.threads,)) as pool:
            futures = [pool.submit(_job, folder.path, plan, *trial, queue, halt) for trial in plan.trials()]
            try:
                records = [future.result() for future in futures]
            except BaseException:
                halt.set()
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                queue.put(None)
                listener.join()
    return records


def _pass_on(queue: Queue[Progress | None], tell: Listener, stop: threading.Event, halt: Any) -> None:
    while True:
        if stop.is_set():
            halt.set()
        try:
            progress = queue.get(timeout=0.2)
        except Exception:  # Empty
            continue
        if progress is None:
            return
        tell(progress)


def _begin_job(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    torch.set_num_threads(threads)


def _job(path: Path, plan: Plan, model: str, seed: int, queue: Queue[Progress | None], halt: Any) -> Record:
    parent = os.getppid()

    def stopped() -> bool:
        if os.getppid() != parent:  # the main process was killed: leave the run to whoever resumes it
            os._exit(1)
        return halt.is_set()

    if stopped():
        raise Interrupted
    folder = RunFolder(path)
    with folder.together():
        return run_trial(folder, plan, model, seed, queue.put, stopped)
