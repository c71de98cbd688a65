"""Several processes that work side by side, tell the main one how they fare, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fastmod import waiting
from fastmod.runs.signals import SIGNALS, signals_blocked


@dataclass(frozen=True)
class Wire:
    """Between the main process and its jobs. No manager process: it would outlive a main process that is killed."""

    news: Connection  # its sending end
    turn: Any  # lock: one job sends at a time
    halt: Any  # shared number, 1 when the jobs have to stop; without a lock, which a killed job might keep

    def tell(self, progress: Any) -> None:
        with self.turn:
            self.news.send(progress)

    def stopped(self) -> bool:
        return bool(self.halt.value)


_wire: Wire  # of this process, if it is a job


def run_jobs(
    work: Callable[..., Any],
    several: Sequence[tuple[Any, ...]],
    jobs: int,
    threads: int,
    tell: Callable[[Any], None],
    stop: threading.Event,
) -> list[Any]:
    """What ``work(wire, *arguments)`` gives for each of the ``several`` arguments, in their order.

    ``work`` is a function of a module. What it sends by the wire reaches ``tell``, here and in the main process.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang in its threads
    news, sender = spawn.Pipe(duplex=False)
    wire = Wire(sender, spawn.Lock(), spawn.RawValue("b", 0))
    over = threading.Event()
    trouble: list[BaseException] = []
    listener = threading.Thread(target=_pass_on, args=(news, tell, stop, wire, over, trouble), daemon=True)
    listener.start()
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin_job, initargs=(threads, wire)) as pool:
        with signals_blocked(), waiting.passively():
            futures = [pool.submit(_work, work, arguments) for arguments in several]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()  # the pool is going to wait for them, and its own SIGTERM they ignore
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


def _pass_on(
    news: Connection,
    tell: Callable[[Any], None],
    stop: threading.Event,
    wire: Wire,
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


def _begin_job(threads: int, wire: Wire) -> None:
    global _wire
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the main process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _wire = wire


def _end_with_parent() -> None:
    """The main process was killed: leave the run to whoever resumes it, wherever this job is, without work too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return work(_wire, *arguments)
