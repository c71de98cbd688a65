"""The folder of a run: who may write what, and how it is read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastmod.runs import checkpoint
from fastmod.runs.config import StudyError

try:
    import fcntl
except ImportError:  # not a POSIX system: runs are not guarded against a second writer
    fcntl = None  # type: ignore[assignment]


HERE, RAY = "here", "ray"


@dataclass(frozen=True)
class Plan:
    """config.json: everything that is run, so that resuming needs nothing else."""

    study: str
    models: list[str]
    seeds: list[int]
    settings: dict[str, Any]  # of the study's Config
    device: str = "cpu"
    threads: int = 1  # of torch, in each job: the last bit of sums depends on it
    jobs: int = 1
    together: int = 1  # trials of one model that train in one batched step
    versions: dict[str, str] = field(default_factory=dict)
    track: list[str] = field(default_factory=list)  # trackers, see tracking.py
    on: str = HERE  # where trials run: on this machine, or "ray"
    address: str | None = None  # of the Ray cluster; None: the one of this machine, or a new one

    def trials(self) -> list[tuple[str, int]]:
        """(model, seed), in the order they are run."""
        return [(model, seed) for model in self.models for seed in self.seeds]

    def sound(self) -> bool:
        """Whether the values have the right types, after reading."""
        return (
            all(isinstance(value, str) for value in (self.study, self.device, self.address or ""))
            and all(isinstance(value, list) for value in (self.models, self.seeds, self.track))
            and all(isinstance(name, str) for name in (*self.models, *self.track))
            and self.on in (HERE, RAY)
            and all(isinstance(count, int) for count in (*self.seeds, self.threads, self.jobs, self.together))
            and isinstance(self.settings, dict)
            and min(self.threads, self.jobs, self.together) > 0
        )

    def owner(self, model: str, seed: int) -> str:
        """Marks a checkpoint as that of this trial: same study, model, seed and settings."""
        relevant = {k: v for k, v in self.settings.items() if k != "checkpoint_seconds"}
        if relevant.get("typed") is None:  # runs of old versions have none
            relevant.pop("typed", None)
        return f"{self.study}/{trial_key(model, seed)}/{checkpoint.digest(relevant)[:16]}"


def trial_key(model: str, seed: int) -> str:
    return f"{model}-s{seed}"


def file_name(text: str) -> str:
    """Without characters that are special in a file system or shell."""
    return re.sub(r"[^\w.=-]+", "_", text)


class RunFolder:
    """config.json, metrics/*.jsonl, checkpoints/, events/, figures/, result.json, report.html."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_folder = path / "metrics"
        self.result_file = path / "result.json"
        self.report_file = path / "report.html"
        self.figures = path / "figures"
        self.events = path / "events"

    @staticmethod
    def create(path: Path, plan: Plan) -> RunFolder:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StudyError(
                f"--out {path}: exists and is not an empty folder; use --resume {path} to go on with a run"
            )
        folder = RunFolder(path)
        folder.lay_out(plan)
        return folder

    def lay_out(self, plan: Plan) -> None:
        for sub in (self.checkpoints, self.figures, self.metrics_folder):
            sub.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(self.path / "config.json", json.dumps(asdict(plan), indent=2).encode())

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def plan(self) -> Plan:
        file = self.path / "config.json"
        try:
            plan = Plan(**json.loads(file.read_text()))
            if not plan.sound():
                raise ValueError("values of other types than expected")
            return plan
        except FileNotFoundError:
            raise StudyError(f"{self.path}: not the folder of a run, it has no config.json") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise StudyError(f"{file}: damaged or written by another version ({error})") from None

    def checkpoint_file(self, key: str) -> Path:
        return self.checkpoints / f"{key}.pt"

    def metrics_file(self, key: str) -> Path:
        return self.metrics_folder / f"{key}.jsonl"

    def append(self, line: Mapping[str, Any]) -> None:
        """Append to the file of the trial, which nothing else writes to."""
        self.metrics_folder.mkdir(exist_ok=True)  # runs of earlier versions have none
        handle = os.open(self.metrics_file(line["trial"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = (json.dumps(line) + "\n").encode()
            while content:  # a second time only if the disk is full, for the error
                content = content[os.write(handle, content) :]
        finally:
            os.close(handle)

    def sync(self, key: str) -> None:
        """Metrics reach the disk before the checkpoint that counts on them."""
        for path in (self.metrics_file(key), self.metrics_folder, self.path):
            if path.is_file() or (path.is_dir() and os.name == "posix"):  # no file before the first evaluation
                handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines, trial after trial, without lines cut off by a crash or a full disk."""
        return [line for file in self._metrics_files() for line in _lines(file)]

    def _metrics_files(self) -> list[Path]:
        """metrics.jsonl of earlier versions has the lines of all trials; they come first, as they were first."""
        earlier = [self.path / "metrics.jsonl"] if (self.path / "metrics.jsonl").exists() else []
        return [*earlier, *sorted(self.metrics_folder.glob("*.jsonl"))]

    def rewind(self, steps: Mapping[str, int], only: str | None = None) -> None:
        """Drop metrics after the checkpoints, as they will be measured again. ``steps``: trial -> step; ``only``: that
        of one trial."""
        for file in self._metrics_files():
            kept = [
                line
                for line in _lines(file)
                if line["step"] <= steps.get(line["trial"], -1) or only not in (None, line["trial"])
            ]
            content = "".join(json.dumps(line) + "\n" for line in kept).encode()
            if content != file.read_bytes():
                checkpoint.write_atomically(file, content)

    @contextmanager
    def alone(self, patience: float = 10.0) -> Iterator[None]:
        """Lock the run; jobs of a run whose main process was killed end by themselves within ``patience`` seconds."""
        if fcntl is None:
            yield
            return
        with (self.path / ".lock").open("w") as lock:
            end = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise StudyError(f"{self.path}: another process is at work on this run") from None
                    time.sleep(0.2)
            fcntl.flock(lock, fcntl.LOCK_SH)  # the jobs share the lock
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Keep the lock while a job works on the run."""
        if fcntl is None:
            yield
            return
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for line in file.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and found.keys() >= {"trial", "model", "seed", "step"}:
                lines.append(found)
    return lines
