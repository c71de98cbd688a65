"""Runs of studies in processes that can be killed.

Starting Python with torch takes seconds, so one warmed-up process forks a child for every command. Children are real
processes: they are killed, interrupted and limited like any other, and end with real exit codes. *Hooks* run in the
child before the command; most of them act at *moments*, the points in a run at which it matters what is already on
the disk.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import hashlib
import io
import json
import os
import re
import resource
import signal
import struct
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

ROOT = Path(__file__).parent.parent
Hook = tuple[str, dict[str, Any]]


# ---- commands, in children of a warmed-up process


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
        code = _forge().ask({"wait": self.pid})["code"]
        return Finished(code, Path(self.folder, "out").read_text(), Path(self.folder, "err").read_text())


def start(*args: object, hooks: tuple[Hook, ...] = (), env: dict[str, str] | None = None) -> Running:
    """Start ``fastmod ARGS``, not on a terminal."""
    forge = _forge()
    folder = tempfile.mkdtemp(dir=forge.folder)
    request = {"args": [str(arg) for arg in args], "hooks": hooks, "env": env or {}, "folder": folder}
    return Running(forge.ask(request)["pid"], folder)


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


class _Forge:
    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="fastmod-studies-")
        self.folder = self._kept.name
        # One thread: a process with several must not be forked. No GPU: CUDA does not survive a fork.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.studies import serve; serve()", self.folder],
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
def _forge() -> _Forge:
    return _Forge()


def serve() -> None:
    """The warmed-up process: answers a line of JSON with a line of JSON."""
    from fastmod import cli

    _warm_up(cli, sys.argv[1])
    gc.collect()
    gc.freeze()  # children that collect garbage would copy all of the memory they share
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            assert len(os.listdir("/proc/self/task")) == 1
            pid = os.fork()
            if pid == 0:
                answers.close()
                _be_the_command(cli, request)
            answer = {"pid": pid}
        print(json.dumps(answer), file=answers, flush=True)


def _warm_up(cli: Any, folder: str) -> None:
    """Import all that is imported late, by one run of the smallest kind."""
    from fastmod.studies import registry

    for name in registry.names():
        registry.get(name)
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        for args in (["study", *SMALL["doubleadd"], "--out", f"{folder}/warm"], ["inspect", f"{folder}/warm"]):
            assert not cli.app(args, standalone_mode=False), args
        sys.stdout = shown


def _be_the_command(cli: Any, request: dict[str, Any]) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        signal.alarm(100)  # what hangs ends
        for stream, flags in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{request['folder']}/{flags}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", 0), write_through=True) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(request["env"])
        import torch

        torch.manual_seed(int.from_bytes(os.urandom(6), "big"))  # as little in common with other children as can be
        for name, arguments in request["hooks"]:
            HOOKS[name](**arguments)
        cli.app(request["args"], prog_name="fastmod")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


# ---- moments


_actions: list[Callable[[str], None]] = []
_instrumented = False
_several_jobs = False


def _moment(label: str) -> None:
    for action in _actions:
        action(label)


class _Instead:
    """A module with some of its functions replaced, for one user of it."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _instrument() -> None:
    """Moments: ``told KEY STEP``, ``half line``, ``line``, ``half FILE.new``, ``before FILE``, ``after FILE``,
    ``finished KEY`` and ``half FILE.png``."""
    global _instrumented
    if _instrumented:
        return
    _instrumented = True
    from fastmod.studies import checkpoint, display, draw, engine, folder

    show = display.Display.__call__

    def told(self: Any, now: Any) -> None:
        show(self, now)
        _moment(f"told {now.key} {now.step}")

    def write(handle: int, content: bytes) -> int:
        if _several_jobs:  # halves of two jobs would get mixed up, which whole lines do not
            return os.write(handle, content)
        half = os.write(handle, content[: len(content) // 2])
        _moment("half line")
        whole = half + os.write(handle, content[half:])
        _moment("line")
        return whole

    def replace(source: Any, target: Any) -> None:
        _moment(f"before {Path(target).name}")
        os.replace(source, target)
        _moment(f"after {Path(target).name}")

    run_trial = engine.run_trial

    def finished(*args: Any) -> Any:
        record = run_trial(*args)
        _moment(f"finished {record.key}")
        return record

    save = draw.save

    def half_a_figure(figure: Any, path: Path) -> None:
        save(figure, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        _moment(f"half {path.name}")
        path.write_bytes(content)

    display.Display.__call__ = told  # type: ignore[method-assign]
    folder.os = _Instead(os, write=write)  # type: ignore[assignment]
    checkpoint.os = _Instead(os, replace=replace)  # type: ignore[assignment]
    engine.run_trial = finished  # type: ignore[assignment]
    draw.save = half_a_figure
    _halve_writes(lambda name: _moment(f"half {name}"))


def _halve_writes(between: Callable[[str], None]) -> None:
    """Temporary files are written in two halves."""
    ordinary = Path.open

    class Halved(io.RawIOBase):
        def __init__(self, path: Path) -> None:
            self._name, self._file = path.name, ordinary(path, "wb", 0)

        def write(self, content: Any) -> int:
            half = self._file.write(content[: len(content) // 2])
            between(self._name)
            return half + self._file.write(content[half:])

        def fileno(self) -> int:
            return self._file.fileno()

        def close(self) -> None:
            self._file.close()
            super().close()

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Halved(self) if mode == "wb" and self.suffix == ".new" else ordinary(self, mode, *args, **kwargs)

    Path.open = opened  # type: ignore[method-assign]


def _at(label: str, nth: int, act: Callable[[], None]) -> None:
    _instrument()
    seen = 0

    def action(moment: str) -> None:
        nonlocal seen
        if re.fullmatch(label, moment):
            seen += 1
            if seen == nth:
                act()

    _actions.append(action)


# ---- hooks


def kill(label: str = ".*", nth: int = 1) -> Hook:
    """SIGKILL at the nth moment that matches."""
    return "kill", {"label": label, "nth": nth}


def interrupt(label: str = ".*", nth: int = 1) -> Hook:
    return "interrupt", {"label": label, "nth": nth}


def hold(file: Path, label: str = ".*", nth: int = 1) -> Hook:
    """Make the file at the moment, go on when it is gone."""
    return "hold", {"file": str(file), "label": label, "nth": nth}


def full_disk(label: str, nth: int = 1) -> Hook:
    """ENOSPC at a moment that is inside of a write."""
    return "full_disk", {"label": label, "nth": nth}


def trace(file: Path) -> Hook:
    """Append each moment to the file."""
    return "trace", {"file": str(file)}


def ticks() -> Hook:
    """The engine's clock counts its readings, so that ``checkpoint_seconds`` means every so many chunks."""
    return "ticks", {}


def without_figures() -> Hook:
    """Drawing takes longer than a small run."""
    return "without_figures", {}


def largest_file(size: int) -> Hook:
    """A limit by the system, as a quota: writes beyond it fail. Until the trials end: messages are also a file."""
    return "largest_file", {"size": size}


def memory(more: int) -> Hook:
    """So many bytes more than the process has now, and no more."""
    return "memory", {"more": more}


def unprivileged() -> Hook:
    """Root may write anywhere; somebody else may not."""
    return "unprivileged", {}


def inside(folder: Path) -> Hook:
    return "inside", {"folder": str(folder)}


def no_mnist_package() -> Hook:
    return "no_mnist_package", {}


def forked_jobs() -> Hook:
    """Jobs are forked, which costs nothing, and so have the hooks too; only safe because nothing has run yet."""
    return "forked_jobs", {}


def hold_jobs(file: Path) -> Hook:
    """Jobs make the file before they begin, and begin when it is gone."""
    return "hold_jobs", {"file": str(file)}


def patience(seconds: float) -> Hook:
    return "patience", {"seconds": seconds}


def _wait_at(file: str) -> None:
    Path(file).touch()
    while Path(file).exists():
        time.sleep(0.01)


def _hold_jobs(file: str) -> None:
    from fastmod.studies import engine

    begin = engine._begin_job

    def held(*args: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
        _wait_at(file)
        begin(*args)

    engine._begin_job = held  # type: ignore[assignment]


def _full_disk(label: str, nth: int) -> None:
    def act() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _at(label, nth, act)


def _trace(file: str) -> None:
    def action(label: str) -> None:
        with open(file, "a") as lines:
            lines.write(label + "\n")

    _instrument()
    _actions.append(action)


def _ticks() -> None:
    from fastmod.studies import engine

    count = iter(range(10**9))
    engine.time = _Instead(time, monotonic=lambda: next(count))  # type: ignore[assignment]


def _without_figures() -> None:
    from fastmod.studies import registry

    for name in registry.names():
        type(registry.get(name)).figures = lambda self, outcome: {}  # type: ignore[method-assign]


def _largest_file(size: int) -> None:
    from fastmod.studies import engine

    run, (soft, hard) = engine.run, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            return run(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    engine.run = limited  # type: ignore[assignment]


def limit_memory(more: int) -> tuple[int, int]:
    """Allow so many bytes more than this process has; the limits that were."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    return before


def _no_mnist_package() -> None:
    sys.modules["fastmod.data.mnist"].HUB_PACKAGE = "fastmod-no-such-package"  # type: ignore[attr-defined]


def _forked_jobs() -> None:
    global _several_jobs
    import multiprocessing

    _several_jobs = True
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]


def _patience(seconds: float) -> None:
    from fastmod.studies.folder import RunFolder

    RunFolder.alone.__wrapped__.__defaults__ = (seconds,)  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[..., Any]] = {
    "kill": lambda label, nth: _at(label, nth, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "interrupt": lambda label, nth: _at(label, nth, lambda: os.kill(os.getpid(), signal.SIGINT)),
    "hold": lambda file, label, nth: _at(label, nth, lambda: _wait_at(file)),
    "hold_jobs": _hold_jobs,
    "full_disk": _full_disk,
    "trace": _trace,
    "ticks": _ticks,
    "without_figures": _without_figures,
    "largest_file": _largest_file,
    "memory": limit_memory,
    "unprivileged": lambda: os.setresuid(65534, 65534, 65534) if os.getuid() == 0 else None,
    "inside": lambda folder: os.chdir(folder),
    "no_mnist_package": _no_mnist_package,
    "forked_jobs": _forked_jobs,
    "patience": _patience,
}


# ---- runs to test with


def _settings(**values: Any) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


_TINY = _settings(batch=4, hidden=4, width=2, depth=1, layers=1, chunk=2, fnn_width=6, fnn_depth=1)
SMALL: dict[str, list[str]] = {
    "doubleadd": [
        "doubleadd", "--model", "SMFR_gumbel", "--model", "FNN", "--seeds", "3", "--steps", "12", *_TINY,
        *_settings(evaluate_every=4, checkpoint_seconds=3),
    ],
    # Passed at once, passed by the same preparation, never passed: every way from one stage to another.
    "addmul": [
        "addmul", "--model", "SMFR_gumbel", "--model", "FNN", "--seeds", "0", "--steps", "8", *_TINY,
        *_settings(evaluate_every=2, interference=4, thresholds="0,0.0001,1", lr=0.01, checkpoint_seconds=3),
    ],
    "algo": [
        "algo", "--model", "SMFR", "--seeds", "0-1", "--steps", "8", *_TINY,
        *_settings(evaluate_every=4, noisy="true", checkpoint_seconds=3),
    ],
    # The routing loss ends in the middle of a chunk and of the run.
    "bpmnist": [
        "bpmnist", "--model", "SMFR_bias", "--model", "Transformer", "--seeds", "0", "--steps", "8", *_TINY,
        *_settings(evaluate_every=4, width=4, bias_steps=3, verify="false", checkpoint_seconds=3, inner=4, heads=1,
                   transformer_layers=1),
    ],
}  # fmt: skip


def digits(folder: Path, train: int = 30, test: int = 20, side: int = 28) -> Path:
    """Made-up images in the files of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        pixels = hashlib.shake_128(name.encode()).digest(count * side * side)
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, side, side)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels)
        labels = bytes(i % 10 for i in range(count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)
    return folder


def arguments(study: str) -> list[str]:
    return [*SMALL[study], *(["--set", f"data={_digits()}"] if study == "bpmnist" else [])]


@functools.cache
def _digits() -> Path:
    return digits(Path(_forge().folder, "digits"))


@functools.cache
def untouched(study: str) -> Path:
    """The small run of a study, from its beginning to its end in one go."""
    folder = Path(_forge().folder, f"untouched-{study}")
    done = fastmod("study", *arguments(study), "--out", folder, hooks=(ticks(), trace(folder.with_suffix(".moments"))))
    assert done.code == 0, done.text
    return folder


def moments(study: str) -> list[str]:
    """What happens in :func:`untouched`, in this order."""
    return untouched(study).with_suffix(".moments").read_text().splitlines()


# ---- what is compared


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """Trial -> all that its checkpoint holds, except for the time it took."""
    import torch

    found = {}
    for file in sorted(folder.glob("checkpoints/*")):
        assert file.suffix == ".pt", f"left behind: {file}"
        state = torch.load(file, weights_only=True)["state"]
        state.pop("seconds")
        found[file.stem] = state
    return found


def outcome(folder: Path, *, in_order: bool = True) -> dict[str, Any]:
    """All that two equal runs have in common, byte for byte; several jobs write their lines in any order."""
    from fastmod.studies import checkpoint

    result = json.loads((folder / "result.json").read_text())
    for trial in result["trials"]:
        del trial["seconds"]
    for row in result["table"]:
        del row["minutes"]
    del result["config"]["jobs"]
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return {
        "metrics": lines if in_order else sorted(lines, key=lambda line: json.loads(line)["trial"]),
        "states": {name: checkpoint.digest(state) for name, state in states(folder).items()},
        "result": result,
        "figures": {file.name: file.read_bytes() for file in sorted(folder.glob("figures/*"))},
        "files": sorted(file.name for file in folder.iterdir()),
    }


def contents(folder: Path) -> dict[str, str]:
    """File -> hash, the lock aside, which says nothing."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
        for file in sorted(folder.rglob("*"))
        if file.name != ".lock"
    }


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
