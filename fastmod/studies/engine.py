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
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

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


class _Events:
    """TensorBoard's file of a trial. Its own ``SummaryWriter`` writes in a thread, where a full disk is nobody's error;
    the file is made when there is something to tell."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._file: BinaryIO | None = None
        self._wanted = find_spec("tensorboard") is not None  # the command says so if not; metrics.jsonl has it all

    def add(self, metrics: dict[str, float], step: int) -> None:
        if not self._wanted:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        events = [{"step": step, "summary": Summary(value=values)}]
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            self._file = (self._folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}").open("wb")
            # What an earlier session told of later steps than its checkpoint holds is not valid any more.
            begin = {"step": self._step + 1, "session_log": SessionLog(status=SessionLog.START)}
            events = [{"file_version": "brain.Event:2"}, begin, *events]
        for event in events:
            RecordWriter(self._file).write(Event(wall_time=time.time(), **event).SerializeToString())

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
    events = _Events(folder.events / key, trial.step)

    def save() -> None:
        nonlocal on_disk
        if trial.step == on_disk:
            return
        events.flush()
        folder.sync()
        checkpoint.save(file, owner, {**trial.state(), "metrics": metrics})
        on_disk = trial.step

    try:
        saved = time.monotonic()
        while not trial.finished:
            begin = time.perf_counter()
            try:
                loss = float(trial.chunk())  # the only wait for the device, once a chunk
            except (MemoryError, RuntimeError) as error:  # torch has a class of its own for a GPU's memory only
                if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error):
                    raise StudyError(f"{key}: out of memory; try a smaller batch or chunk") from error
                raise
            fresh = None
            if not math.isfinite(loss):
                raise StudyError(f"{key}: the loss is {loss} at step {trial.step}; try a smaller lr")
            if trial.step % trial.config.evaluate_every == 0 or trial.finished:
                fresh = {"loss": loss, **trial.metrics()}
                trial.after_evaluation(fresh)
                metrics = fresh
                folder.append({"trial": key, "model": model, "seed": seed, "step": trial.step, **fresh})
                events.add(fresh, trial.step)
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
        events.close()
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


@dataclass(frozen=True)
class _Wire:
    """Between the main process and its jobs. No manager process: it would outlive a main process that is killed."""

    news: Connection  # its sending end
    turn: Any  # lock: one job sends at a time
    halt: Any  # shared number, 1 when the jobs have to stop; without a lock, which a killed job might keep

    def tell(self, progress: Progress) -> None:
        with self.turn:
            self.news.send(progress)

    def stopped(self) -> bool:
        return bool(self.halt.value)


_wire: _Wire  # of this process, if it is a job


def _run_jobs(folder: RunFolder, plan: Plan, tell: Listener, stop: threading.Event) -> list[Record]:
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang in its threads
    news, sender = spawn.Pipe(duplex=False)
    wire = _Wire(sender, spawn.Lock(), spawn.RawValue("b", 0))
    over = threading.Event()
    trouble: list[BaseException] = []
    listener = threading.Thread(target=_pass_on, args=(news, tell, stop, wire, over, trouble), daemon=True)
    listener.start()
    with ProcessPoolExecutor(
        plan.jobs, mp_context=spawn, initializer=_begin_job, initargs=(plan.threads, wire)
    ) as pool:
        with _interrupts_blocked():
            futures = [pool.submit(_job, folder.path, plan, *trial) for trial in plan.trials()]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise ChildProcessError("a job was killed, perhaps because memory ran out") from None
        except BaseException:
            wire.halt.value = 1
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            over.set()
            listener.join()
            if trouble:
                raise trouble[0]


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A job inherits this: until it has set its own ways, in the seconds that importing takes, Ctrl-C would kill it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(
    news: Connection,
    tell: Listener,
    stop: threading.Event,
    wire: _Wire,
    over: threading.Event,
    trouble: list[BaseException],
) -> None:
    """Runs in a thread. What ``tell`` raises ends the run, as it does without jobs."""
    while True:
        last = over.is_set()  # before looking: what the jobs have sent until then is shown
        if stop.is_set():
            wire.halt.value = 1
        if news.poll(0 if last else 0.2):
            progress = news.recv()  # also where nobody listens any more: jobs would wait for a full pipe
            try:
                if not trouble:
                    tell(progress)
            except BaseException as error:  # rich ends the program where a pipe is closed
                trouble.append(error)
                wire.halt.value = 1
        elif last:
            return


def _begin_job(threads: int, wire: _Wire) -> None:
    global _wire
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _wire = wire


def _end_with_parent() -> None:
    """The main process was killed: leave the run to whoever resumes it, wherever this job is, without work too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _job(path: Path, plan: Plan, model: str, seed: int) -> Record:
    if _wire.stopped():
        raise Interrupted
    folder = RunFolder(path)
    with folder.together():
        return run_trial(folder, plan, model, seed, _wire.tell, _wire.stopped)
