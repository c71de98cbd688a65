"""Several processes that work in parallel, report to the main one, and end with it."""

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
class Channel:
    """Between the main process and its jobs. Not a manager process, which would outlive a main process that is
    killed."""

    news: Connection  # its sending end
    turn: Any  # lock: one job sends at a time
    halt: Any  # shared number, 1 if the jobs have to stop; without a lock, which a killed job might hold

    def tell(self, progress: Any) -> None:
        with self.turn:
            self.news.send(progress)

    def stopped(self) -> bool:
        return bool(self.halt.value)


_channel: Channel  # of this process, if it is a job


def run_jobs(
    work: Callable[..., Any],
    several: Sequence[tuple[Any, ...]],
    jobs: int,
    threads: int,
    tell: Callable[[Any], None],
    stop: threading.Event,
) -> list[Any]:
    """The results of ``work(channel, *arguments)`` for each of the ``several`` arguments, in order.

    ``work`` is a function of a module. What it sends through the channel is passed to ``tell``, in the main process.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang in its threads
    news, sender = spawn.Pipe(duplex=False)
    channel = Channel(sender, spawn.Lock(), spawn.RawValue("b", 0))
    over = threading.Event()
    trouble: list[BaseException] = []
    listener = threading.Thread(target=_pass_on, args=(news, tell, stop, channel, over, trouble), daemon=True)
    listener.start()
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin_job, initargs=(threads, channel)) as pool:
        with signals_blocked(), waiting.passively():
            futures = [pool.submit(_work, work, arguments) for arguments in several]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()  # the pool waits for them, and they ignore its SIGTERM
            raise ChildProcessError("a job was killed, perhaps because memory ran out") from None
        except BaseException:
            channel.halt.value = 1
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
    channel: Channel,
    over: threading.Event,
    trouble: list[BaseException],
) -> None:
    """Runs in a thread. An exception in ``tell`` ends the run, as it does without jobs."""
    while True:
        last = over.is_set()  # before polling, so that everything sent until then is shown
        if stop.is_set():
            channel.halt.value = 1
        if news.poll(0 if last else 0.2):
            progress = news.recv()  # even if it is not used any more: jobs would wait for a full pipe
            try:
                if not trouble:
                    tell(progress)
            except BaseException as error:  # rich ends the program if a pipe is closed
                trouble.append(error)
                channel.halt.value = 1
        elif last:
            return


def _begin_job(threads: int, channel: Channel) -> None:
    global _channel
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the main process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _channel = channel


def _end_with_parent() -> None:
    """If the main process is killed, end this job at once, even an idle one: the run belongs to whoever resumes it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return work(_channel, *arguments)
