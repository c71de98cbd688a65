"""What runs in a child before its command; most hooks act at *moments*, the points in a run at which it matters what is
already on the disk.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Hook = tuple[str, dict[str, Any]]

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
    from fastmod.runs import checkpoint, display, draw, engine, folder

    show = display.Display.__call__

    def told(self: Any, now: Any) -> None:
        show(self, now)
        _moment(f"told {now.key} {now.step}")

    def write(handle: int, content: bytes) -> int:
        if _several_jobs:  # each job would count its own lines
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


def terminate(label: str = ".*", nth: int = 1) -> Hook:
    return "terminate", {"label": label, "nth": nth}


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
    from fastmod.runs import jobs

    begin = jobs._begin_job

    def held(*args: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
        _wait_at(file)
        begin(*args)

    jobs._begin_job = held  # type: ignore[assignment]


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
    from fastmod.runs import engine

    count = iter(range(10**9))
    engine.time = _Instead(time, monotonic=lambda: next(count))  # type: ignore[assignment]


def _without_figures() -> None:
    from fastmod.studies import registry

    for name in registry.names():
        type(registry.get(name)).figures = lambda self, outcome: {}  # type: ignore[method-assign]


def _largest_file(size: int) -> None:
    from fastmod.runs import engine

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
    from fastmod.runs.folder import RunFolder

    RunFolder.alone.__wrapped__.__defaults__ = (seconds,)  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[..., Any]] = {
    "kill": lambda label, nth: _at(label, nth, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "interrupt": lambda label, nth: _at(label, nth, lambda: os.kill(os.getpid(), signal.SIGINT)),
    "terminate": lambda label, nth: _at(label, nth, lambda: os.kill(os.getpid(), signal.SIGTERM)),
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
