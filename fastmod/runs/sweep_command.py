"""``fastmod sweep``."""

from __future__ import annotations

import datetime
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fastmod.runs import draw, options, parallel, tables
from fastmod.runs.command import (
    clear_errors,
    console,
    device_of,
    make_plan,
    placed,
    say,
)
from fastmod.runs.config import StudyError, settings_of
from fastmod.runs.study import Record
from fastmod.runs.sweep import Cell, Sweep, SweepFolder, grid_of
from fastmod.studies import registry
from fastmod.terminal import folded

_SHOWN = 4  # measures in the table on the terminal; the files have all


def sweep(
    name: Annotated[str | None, typer.Argument(help="Which study.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="width=5..10, depth=1,2, or a grid that the study has.")
    ] = None,
    model: options.Models = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0-11, in every cell.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Also the mean over so many best trials of a model.")] = None,
    by: Annotated[str | None, typer.Option(help="Measure that --best picks by; best one of validation.")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="Measures to show; the files have all.")] = None,
    steps: options.Steps = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="key=value, in every cell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trials that show how it goes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; must not exist or be empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the sweep in this folder.")] = None,
    jobs: options.Jobs = None,
    together: options.Together = None,
    device: options.Device = None,
    track: options.Track = None,
    on: options.On = None,
    address: options.Address = None,
) -> None:
    """Run a study over a grid of settings: a table of cells with mean, standard error and the best trials."""
    with clear_errors():
        if parallel.launched():
            raise StudyError(
                "torchrun: it trains one trial on several processes, with fastmod study; a sweep has --jobs"
            )
        if resume is not None:
            others = (grid, model, seeds, steps, setting, out, jobs, together, device, track)
            if any(option is not None for option in others) or quick:
                raise StudyError(
                    "--resume goes on as begun; it takes no other option but --best, --by, --measure, --on"
                )
            folder = SweepFolder(resume)
            begun = folder.sweep()
            if name not in (None, begun.plan.study):
                raise StudyError(f"{resume} is a sweep of {begun.plan.study!r}, not of {name!r}")
            chosen = replace(begun, plan=placed(begun.plan, on, address), best=best or begun.best, by=by or begun.by)
            _check_best(chosen)
            device_of(chosen.plan.device)
        else:
            if name is None:
                raise StudyError(f"expected the name of a study: {', '.join(registry.names())}")
            study = registry.get(name)
            settings = settings_of(setting or [])
            plan = make_plan(name, model, seeds, steps, settings, quick, jobs or 1, device, track or (), together or 1)
            axes = grid_of(grid or [], study)
            chosen = Sweep(placed(plan, on, address), axes, best or 0, by or study.criterion)
            _check_best(chosen)
            default = Path("runs") / f"sweep-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
            folder = SweepFolder.create(out or default, chosen)
    _run(folder, chosen, measure or ())


def _check_best(sweep: Sweep) -> None:
    """Before anything is trained."""
    if sweep.best and not sweep.by:
        raise StudyError(
            f"--best: none of {sweep.plan.study}'s measures is for picking, expected --by MEASURE; every number in the "
            "result of a trial is one, see result.json of a --quick run"
        )


def _run(folder: SweepFolder, sweep: Sweep, measures: Sequence[str]) -> None:
    from fastmod.runs import engine, signals
    from fastmod.runs import sweep as sweeps
    from fastmod.runs.display import Display

    again = f"fastmod sweep --resume {shlex.quote(str(folder.path))}"
    with clear_errors(f"; go on with: {again}"), signals.terminations_raise():
        try:
            trials = len(sweep.plan.trials()) * len(sweep.cells(folder.cells))
            with Display(console, trials, keep=False) as display:
                found = sweeps.run(folder, sweep, display)
        except (engine.Interrupted, KeyboardInterrupt) as stop:
            say(f"stopped; go on with:\n  {again}")
            raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
        by_trial, by_cell = tables.trial_lines(found), tables.cell_lines(found)
        if sweep.best:
            try:
                some = tables.distinct(registry.get(sweep.plan.study), found)
                by_cell += tables.best_lines(some, sweep.best, sweep.by)
            except StudyError as error:
                raise StudyError(f"{error}; all is trained, choose with: {again} --by MEASURE") from None
        for stem, lines in (("trials", by_trial), ("cells", by_cell)):
            tables.write_csv(folder.path / f"{stem}.csv", lines)
            if tables.parquet_available():
                tables.write_parquet(folder.path / f"{stem}.parquet", lines)
        folder.write(sweep)
        shown = _shown(by_cell, measures, sweep)
        console.print(_table(sweep, by_cell, shown, ascii_only=console.options.ascii_only))
        if not tables.parquet_available():
            say('no parquet: pip install "fastmod[parquet]" adds it')
        _draw(folder, sweep, found, shown)
        say(f"tables: {folder.path / 'cells.csv'}, {folder.path / 'trials.csv'}")


def _shown(lines: Sequence[dict[str, object]], wanted: Sequence[str], sweep: Sweep) -> list[str]:
    have = list(dict.fromkeys(str(line["measure"]) for line in lines))
    for name in wanted:
        if name not in have:
            raise StudyError(f"--measure {name}: there are {', '.join(have)}")
    return list(wanted) or sorted(tables.usual(have), key=lambda name: name != sweep.by)[:_SHOWN]


def _table(sweep: Sweep, lines: Sequence[dict[str, object]], shown: Sequence[str], *, ascii_only: bool) -> Table:
    sign = "+-" if ascii_only else "±"
    table = Table(*sweep.grid, "model", "trials", *shown, title=f"{sweep.plan.study}: mean {sign} standard error")
    rows: dict[tuple[str, ...], dict[str, dict[str, object]]] = {}
    for line in lines:
        axes = [str(line[axis]) for axis in sweep.grid]
        place = axes if line["kind"] == "cell" else [str(line["kind"]), *[""] * (len(axes) - 1)]
        rows.setdefault((*place, str(line["model"])), {})[str(line["measure"])] = line
    for head, by_measure in rows.items():
        cells = []
        for name in shown:
            line = by_measure.get(name, {})
            error = line.get("standard_error")
            cells.append("-" if not line else f"{line['mean']:.3f}" + ("" if error is None else f" {sign} {error:.3f}"))
        trials = max(int(str(line["trials"])) for line in by_measure.values())
        table.add_row(*head, str(trials), *cells)
    return folded(table)


def _draw(folder: SweepFolder, sweep: Sweep, found: Sequence[tuple[Cell, Record]], shown: Sequence[str]) -> None:
    """The first measure against the first axis with several numbers, a line for each of the rest of the cell."""
    from fastmod.runs.sweep import numbers

    if not draw.available() or not shown:
        return
    numeric = [axis for axis in sweep.grid if all(isinstance(c.values[axis], int | float) for c, _ in found)]
    axis = next((axis for axis in numeric if len(sweep.grid[axis]) > 1), None)
    if axis is None:
        return
    x = sorted({cell.values[axis] for cell, _ in found})
    groups: dict[str, dict[int, dict[float, float]]] = {}
    for cell, record in found:
        rest = " ".join([record.model, *(f"{k}={v}" for k, v in cell.values.items() if k != axis)])
        value = numbers(record.result).get(shown[0])
        if value is not None:
            groups.setdefault(rest, {}).setdefault(record.seed, {})[cell.values[axis]] = value
    whole = {
        name: [[line[at] for at in x] for line in by_seed.values() if len(line) == len(x)]
        for name, by_seed in groups.items()
    }
    whole = {name: several for name, several in whole.items() if several}
    if 0 < len(whole) <= draw.MOST_GROUPS:
        draw.save(draw.lines(x, whole, axis, shown[0]), folder.path / "figure.png")
        say(f"figure: {folder.path / 'figure.png'}")
