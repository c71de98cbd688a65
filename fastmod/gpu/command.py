"""``fastmod compile``."""

from __future__ import annotations

import os
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from fastmod.gpu import compile as compiling
from fastmod.gpu import manifest, tools
from fastmod.gpu.targets import TARGETS, TargetError
from fastmod.terminal import folded

console = Console()
_errors = Console(stderr=True)
_SECONDS_BETWEEN_LINES = 15.0


def _say(text: str, where: Console = console) -> None:
    """Without markup, which names of folders may resemble."""
    where.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def compile_kernels(
    target: Annotated[list[str], typer.Option(help=f"{', '.join(TARGETS)}; repeat for several.")],
    out: Annotated[Path, typer.Option(help="Folder of the compiled kernels; what it holds already is reused.")],
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at the same time; default: one per core.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only the kernels of this op; repeat for several.")] = None,
) -> None:
    """Compile every GPU kernel, without a GPU, and write what each needs to manifest.json."""
    start = time.monotonic()
    try:
        with _Display() as display:
            report = compiling.build(target, out, jobs=jobs or _cores(), ops=op or (), listener=display)
    except (TargetError, tools.MissingToolError) as error:
        _say(f"error: {error}", _errors)
        raise typer.Exit(2) from None
    except OSError as error:
        _say(f"error: --out {out}: {error.strerror or error}", _errors)
        raise typer.Exit(2) from None
    except BrokenExecutor:
        _say("error: a compiler was killed, perhaps for want of memory: try again with --jobs 1", _errors)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _say("stopped; what was compiled is kept, the same command goes on with the rest")
        raise typer.Exit(130) from None
    if report.kernels:
        console.print(_table(report.kernels))
    for line in report.left_out:
        _say(f"left out: {line}")
    for kernel in report.spilling:
        _say(f"spills: {kernel.name} for {kernel.target}, {kernel.spills} bytes", _errors)
    for name, why in report.failed.items():
        _say(f"failed: {name}: {why}", _errors)
    seconds = time.monotonic() - start
    calls = f"{report.compiled} compiled, {report.reused} reused"  # one call of a compiler may make several kernels
    _say(f"{len(report.kernels)} kernels by calls of compilers, {calls}, {seconds:.1f} s: {out / manifest.NAME}")
    raise typer.Exit(1 if report.failed else 0)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Display:
    """A bar on a terminal, a line now and then elsewhere. No spinner: those have no ASCII form."""

    def __init__(self) -> None:
        columns = (bars.TextColumn("compiling"), bars.BarColumn(20), bars.MofNCompleteColumn())
        last = bars.TextColumn("{task.description}", markup=False)
        self._bar = bars.Progress(*columns, bars.TimeRemainingColumn(), last, console=console, transient=True)
        self._task: bars.TaskID | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> _Display:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._bar.stop()

    def __call__(self, done: int, total: int, name: str) -> None:
        if console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", total=total)
            self._bar.update(self._task, completed=done, description=name)
        elif time.monotonic() - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            _say(f"{done}/{total}  {name}")


def _table(kernels: list[manifest.Kernel]) -> Table:
    """A row per target and source, with the largest value of each resource, as that is what limits."""
    table = Table("target", "source", "kernels", "registers", "spilling", "shared", "tensor core")
    for column in table.columns[2:]:
        column.justify = "right"
    groups: dict[tuple[str, str], list[manifest.Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.target, kernel.source), []).append(kernel)
    for (target, source), members in sorted(groups.items()):
        table.add_row(
            target,
            source,
            str(len(members)),
            str(max(member.registers for member in members)),
            str(sum(member.spills > 0 for member in members)),
            f"{max(member.shared for member in members):,}",
            str(sum(member.tensor_core > 0 for member in members)),
        )
    table.caption = "registers and shared bytes: the most that a kernel has; tensor core: kernels that use it"
    return folded(table)
