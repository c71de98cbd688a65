"""Commands of studies, in children of a warmed-up process (``study_server``) that can be killed."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.study_hooks import Hook

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """``code``: as a shell sees it without the 128: negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


@dataclass(frozen=True)
class Running:
    pid: int  # also the process group of the command and its jobs
    folder: str

    def finish(self) -> Finished:
        code = server().ask({"wait": self.pid})["code"]
        return Finished(code, Path(self.folder, "out").read_text(), Path(self.folder, "err").read_text())


def start(*args: object, hooks: tuple[Hook, ...] = (), env: dict[str, str] | None = None) -> Running:
    """Start ``fastmod ARGS``, not on a terminal."""
    folder = tempfile.mkdtemp(dir=server().folder)
    request = {"args": [str(arg) for arg in args], "hooks": hooks, "env": env or {}, "folder": folder}
    return Running(server().ask(request)["pid"], folder)


def fastmod(*args: object, hooks: tuple[Hook, ...] = (), env: dict[str, str] | None = None) -> Finished:
    return start(*args, hooks=hooks, env=env).finish()


def in_process(*args: object) -> Finished:
    """``fastmod ARGS`` in this process: quicker, for what does not get as far as training."""
    from typer.testing import CliRunner

    from fastmod import cli

    done = CliRunner().invoke(cli.app, [str(arg) for arg in args], prog_name="fastmod")
    unexpected = done.exception if not isinstance(done.exception, SystemExit) else None
    trace = "".join(traceback.format_exception(unexpected)) if unexpected else ""
    return Finished(done.exit_code, done.stdout, done.stderr + trace)


class _Server:
    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="fastmod-studies-")
        self.folder = self._kept.name
        # One thread: a process with several must not be forked. No GPU: CUDA does not survive a fork.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.helpers.study_server import serve; serve()", self.folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **alone},
        )  # fmt: skip
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._kept.cleanup()


@functools.cache
def server() -> _Server:
    return _Server()


def refused(done: Finished, *words: str) -> None:
    """One clear line, exit code 2, and no traceback."""
    assert done.code == 2, done.text
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and done.err.endswith("\n"), done.text
    for word in words:
        assert word in done.err, done.text


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def group_lives(group: int) -> bool:
    """Whether any process is left of a command and its jobs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def cleaned_up(running: Running) -> Iterator[None]:
    """Nothing of the command outlives the test, whatever the test found."""
    try:
        yield
    finally:
        if group_lives(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
