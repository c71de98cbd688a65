"""``fastmod bench``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fastmod.bench import checkout, clock, record, report, table
from fastmod.bench.checkout import BenchError
from fastmod.bench.clock import Result
from fastmod.bench.steps import Case

console = Console()
_errors = Console(stderr=True)


def _say(text: str, where: Console = console) -> None:
    """Without markup, which labels and names of folders may resemble."""
    where.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def bench(
    words: Annotated[list[str] | None, typer.Argument(help="Part of an op or a label; all cases without.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the figures as JSON in docs/speed/.")] = False,
    out: Annotated[Path | None, typer.Option(help="Keep the figures in this file instead; it is overwritten.")] = None,
    seconds: Annotated[float, typer.Option(help="Time per case and contender.")] = 3.0,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave torch.compile out.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda: where the steps run.")] = "cpu",
    as_report: Annotated[bool, typer.Option("--report", help="Measure nothing: write docs/speed.md anew.")] = False,
) -> None:
    """Race every op (forward + backward) against eager PyTorch and torch.compile; results are checked equal first.

    Needs a checkout, whose bench/ folder holds the cases. Exit code 1 when a result differs.
    """
    try:
        top = checkout.root()
        if as_report:
            if words or save or out:
                raise BenchError("--report: expected nothing beside it, as it measures nothing")
            _say(f"wrote {report.write(top)}")
            return
        _check_seconds(seconds)
        check_device(device)
        cases = checkout.chosen(checkout.cases(), words or [])
        torch.set_num_threads(threads)
        started = record.begin(top, seconds, device)
        file = out or (record.default_file(top / report.FOLDER, started) if save else None)
        if file is not None:
            record.check_place(file)  # better to fail now than after the first case

        def keep(results: Sequence[Result]) -> None:
            if file is not None:
                record.write(file, started.extended(results))

        results = measured(cases, compiled=not no_compile, seconds=seconds, after_each=keep, device=device)
    except BenchError as error:
        _say(f"error: {error}", _errors)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _say(f"error: {error.strerror or error}{where}", _errors)
        raise typer.Exit(2) from None
    contenders = ["eager", "fastmod"] if no_compile else ["eager", "compile", "fastmod"]
    wide = console if console.is_terminal else Console(width=110)  # labels are long, and a file is wide enough
    wide.print(table.of(results, contenders))
    if file is not None:
        _say(f"saved: {file}")
    raise typer.Exit(0 if all(result.matches for result in results) else 1)


def measured(
    cases: Sequence[Case],
    *,
    compiled: bool,
    seconds: float,
    after_each: Callable[[Sequence[Result]], None],
    device: str = "cpu",
) -> list[Result]:
    """Runs the cases in turn. ``after_each`` gets the results so far, as a run takes long and may be stopped."""
    results: list[Result] = []
    for case in cases:
        _say(f"{case.name} ...", _errors)
        if compiled:
            torch.compiler.reset()  # otherwise it would compile for dynamic sizes, which is slower
        results.append(clock.run(case, compiled=compiled, seconds=seconds, device=device))
        after_each(results)
    return results


def check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise BenchError(f"--device: expected cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds none"
        raise BenchError(f"--device cuda: expected a GPU, but {why}")


def _check_seconds(seconds: float) -> None:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise BenchError(f"--seconds: expected a number above 0, got {seconds:g}")
