"""Trials as tasks of a Ray cluster: ``--on ray``.

Nodes share no files with this process. A trial is given its checkpoint, and sends metrics and new checkpoints to the
*collector*, an actor on this machine, from which they are written into the run folder. So if a node dies, only the work
since the last checkpoints is lost: its trials are assigned again. A task that was given up but is still alive (its node
was unreachable) is ignored from then on: every assignment has a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastmod.runs import checkpoint
from fastmod.runs.config import StudyError
from fastmod.runs.engine import Interrupted, Listener, Progress, Task, train
from fastmod.runs.folder import Plan, RunFolder, trial_key
from fastmod.runs.ledger import FolderLedger
from fastmod.runs.signals import SIGNALS, Stop
from fastmod.runs.study import Record

_DEATHS = 3  # of one task in a row without a checkpoint in between: then the node is not to blame
_QUIET = 0.5  # seconds between two progress reports without metrics
_ROUND = 0.2  # seconds of waiting before stops and messages are checked again


def _collector_class() -> type:
    """Made in a function, and given bytes only, so that its process need not import torch, which takes seconds."""

    class Collector:
        """Receives the messages of tasks, those of each task in order."""

        def __init__(self) -> None:
            self._news: list[tuple[int, int, bytes]] = []
            self._halt = False

        def put(self, number: int, handed: int, news: bytes) -> bool:
            """Returns whether to stop."""
            self._news.append((number, handed, news))
            return self._halt

        def take(self) -> list[tuple[int, int, bytes]]:
            news, self._news = self._news, []
            return news

        def halt(self) -> None:
            self._halt = True

    return Collector


class Remote:
    """The ledger of a trial on its node: sends everything to the collector. ``sender``: numbers of task and
    assignment."""

    def __init__(self, collector: Any, sender: tuple[int, int], plan: Plan, model: str, seed: int, kept: bytes | None):
        self._collector, self._sender, self._kept = collector, sender, kept
        self._owner, self._file = plan.owner(model, seed), Path(f"{trial_key(model, seed)}.pt")
        self._halt, self._told = False, -1e9

    def state(self) -> dict[str, Any] | None:
        state = None if self._kept is None else checkpoint.load(self._file, self._owner, self._kept)
        self._kept = None
        self._put("begin", {"step": 0 if state is None else state["step"], "node": _node(), "process": os.getpid()})
        return state

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self._put("add", step, metrics)

    def save(self, state: dict[str, Any]) -> None:
        self._put("save", checkpoint.content_of(self._owner, state))

    def close(self) -> None:
        pass

    def tell(self, now: Progress) -> None:
        if now.metrics is not None or now.finished or time.monotonic() - self._told > _QUIET:
            self._put("tell", now)
            self._told = time.monotonic()

    def stopped(self) -> bool:
        return self._halt

    def _put(self, kind: str, *what: Any) -> None:
        import ray

        news = pickle.dumps((kind, *what))
        self._halt = ray.get(self._collector.put.remote(*self._sender, news))  # waits until it has arrived


def _node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _work(collector: Any, sender: tuple[int, int], plan: Plan, model: str, seed: int, kept: bytes | None) -> Record:
    """On a node."""
    torch.set_num_threads(plan.threads)
    ledger = Remote(collector, sender, plan, model, seed, kept)
    return train(plan, model, seed, ledger, ledger.tell, ledger.stopped)


def run_on_ray(bundles: Sequence[Sequence[Task]], tell: Listener, stop: Stop) -> list[list[Record]]:
    """The records of every bundle. Runs as many trials at a time as the cluster has room for."""
    import ray

    tasks = [task for bundle in bundles for task in bundle]
    with _cluster(ray, tasks[0].plan.address):
        records = iter(_Coordinator(ray, tasks, tell, stop).run())
    return [[next(records) for _ in bundle] for bundle in bundles]


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None) -> Any:
    if ray.is_initialized():  # by the surrounding program
        yield
        return
    ours = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray also raises plain ones
        words = next(iter(str(error).splitlines()), type(error).__name__)
        raise StudyError(f"{f'--address {address}' if address else '--on ray'}: {words}") from None
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ours.items():
                signal.signal(number, handler)  # Ray has installed its own, which end the process
        yield
    finally:
        ray.shutdown()


class _Coordinator:
    """The side of this machine."""

    def __init__(self, ray: Any, tasks: Sequence[Task], tell: Listener, stop: Stop) -> None:
        self._ray, self._tasks, self._stop = ray, tasks, stop
        self._tell = [task.named(tell) for task in tasks]
        self._ledgers: dict[int, FolderLedger] = {}
        self._handed = [0] * len(tasks)  # how often each was assigned
        self._deaths = [0] * len(tasks)  # since its last checkpoint
        self._begun: set[int] = set()
        self._records: dict[int, Record] = {}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(_node(), soft=False)
        self._collector = ray.remote(_collector_class()).options(num_cpus=0, scheduling_strategy=here).remote()
        plan = tasks[0].plan
        gpus = 1 if plan.device.startswith("cuda") else 0
        # A task that asks for more than any node has would wait forever.
        room = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        self._work = ray.remote(_work).options(
            num_cpus=min(plan.threads, room) if room else plan.threads, num_gpus=gpus, max_retries=0
        )

    def run(self) -> list[Record]:
        waiting = {self._hand_out(number): number for number in range(len(self._tasks))}
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            while waiting:
                if self._stop.is_set():
                    self._ray.get(self._collector.halt.remote())
                    for reference in [one for one, number in waiting.items() if number not in self._begun]:
                        self._ray.cancel(reference, force=True)
                        del waiting[reference]
                ended, _ = self._ray.wait(list(waiting), timeout=_ROUND) if waiting else ([], [])
                self._read_news()  # after the wait, when everything that ended tasks sent has arrived
                for reference in ended:
                    number = waiting.pop(reference)
                    if not self._ended(reference, number):
                        waiting[self._hand_out(number)] = number
        if len(self._records) < len(self._tasks):
            raise Interrupted
        return [self._records[number] for number in range(len(self._tasks))]

    def _hand_out(self, number: int) -> Any:
        task = self._tasks[number]
        self._handed[number] += 1
        self._begun.discard(number)
        ledger = FolderLedger(RunFolder(task.path), task.plan, task.model, task.seed)
        kept, self._ledgers[number] = ledger.kept(), ledger
        sender = (number, self._handed[number])
        return self._work.remote(self._collector, sender, task.plan, task.model, task.seed, kept)

    def _ended(self, reference: Any, number: int) -> bool:
        """False if its node or process died, so that it has to be assigned again."""
        self._ledgers[number].close()
        errors = self._ray.exceptions
        try:
            self._records[number] = self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Interrupted):
                return True
            raise (error.cause if isinstance(error.cause, StudyError | OSError) else error) from None
        except errors.RayError as error:
            self._deaths[number] += 1
            if self._deaths[number] >= _DEATHS:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                key = trial_key(self._tasks[number].model, self._tasks[number].seed)
                raise StudyError(f"{key}: died {_DEATHS} times without a checkpoint between ({reason})") from None
            return False
        return True

    def _read_news(self) -> None:
        for number, handed, news in self._ray.get(self._collector.take.remote()):
            if handed != self._handed[number]:
                continue
            kind, *what = pickle.loads(news)
            if kind == "begin":
                self._begun.add(number)
                self._note(number, *what)
            elif kind == "add":
                self._ledgers[number].add(*what)
            elif kind == "save":
                self._ledgers[number].keep(*what)
                self._deaths[number] = 0
            else:
                self._tell[number](*what)

    def _note(self, number: int, where: dict[str, Any]) -> None:
        """Write to nodes.jsonl which node trained what, and from which step on."""
        task = self._tasks[number]
        with (task.path / "nodes.jsonl").open("a") as file:
            file.write(json.dumps({"trial": trial_key(task.model, task.seed), **where}) + "\n")

    def _close(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._collector.halt.remote())  # an error of one trial ends the others after their chunk
        for ledger in self._ledgers.values():
            ledger.close()
        self._ray.kill(self._collector)
