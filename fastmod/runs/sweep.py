"""A sweep: one study over a grid of settings. Every cell of the grid is a run folder, in ``cells/``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from fastmod.runs import checkpoint, report
from fastmod.runs.config import StudyError, changed, chosen
from fastmod.runs.engine import Listener, begin, run_tasks
from fastmod.runs.folder import Plan, RunFolder, file_name
from fastmod.runs.signals import stop_on_signals
from fastmod.runs.study import Record, Study
from fastmod.studies import registry

Grid = dict[str, list[Any]]  # setting -> its values, as text or as JSON has them
MOST_CELLS = 1000


def grid_of(words: Sequence[str], study: Study) -> Grid:
    """``["width=5..10", "depth=1,2"]``, or the name of a grid that the study has; values that hold commas themselves
    are set apart by semicolons."""
    grid: Grid = {}
    for word in words:
        key, equals, values = (part.strip() for part in word.partition("="))
        if not equals:
            if word not in study.grids:
                known = f"or a grid of {study.name}: {', '.join(study.grids)}" if study.grids else "such as width=5..10"
                raise StudyError(f"--grid {word}: expected key=values, {known}")
            grid |= {name: list(some) for name, some in study.grids[word].items()}
            continue
        grid[key] = _values(word, values)
    if not grid:
        raise StudyError("--grid: expected at least one, such as width=5..10 or depth=1,2")
    for key, some in grid.items():
        if len(set(map(repr, some))) != len(some):
            raise StudyError(f"--grid {key}: expected distinct values, got {', '.join(map(str, some))}")
    return grid


def _values(word: str, text: str) -> list[Any]:
    found: list[Any] = []
    for part in text.split(";" if ";" in text else ","):
        span = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", part.strip())
        if span:
            first, last = map(int, span.groups())
            if not first <= last < first + MOST_CELLS:
                raise StudyError(f"--grid {word}: expected FIRST..LAST, not more than {MOST_CELLS} values")
            found += map(str, range(first, last + 1))
        elif part.strip():
            found.append(part.strip())
        else:
            raise StudyError(f"--grid {word}: expected something like width=5..10 or depth=1,2")
    return found


@dataclass(frozen=True)
class Cell:
    name: str  # such as "width=5 depth=1"
    values: dict[str, Any]
    plan: Plan
    folder: RunFolder


@dataclass(frozen=True)
class Sweep:
    """sweep.json. ``plan``: what all cells share."""

    plan: Plan
    grid: Grid
    best: int = 0  # how many trials of all cells of a model to pick, by their criterion
    by: str = ""  # the criterion: a measure, best a validation measure that is not reported itself

    def cells(self, path: Path) -> list[Cell]:
        study = registry.get(self.plan.study)
        config = changed(study.defaults, self.plan.settings)
        cells: list[Cell] = []
        for values in product(*self.grid.values()):
            own = dict(zip(self.grid, values, strict=True))
            name = " ".join(f"{key}={value}" for key, value in own.items())
            try:  # of a sweep of an old version it is not known what was chosen
                whole = changed(config, own) if config.typed is None else chosen(config, own)
                for model in self.plan.models:
                    study.config_of(whole, model)
            except StudyError as error:
                raise StudyError(f"--grid, {name}: {error}") from None
            stem = f"{len(cells):03d}-" + file_name(name)[:80]
            plan = replace(self.plan, settings=asdict(whole))
            cells.append(Cell(name, {key: getattr(whole, key) for key in own}, plan, RunFolder(path / stem)))
        if len(cells) > MOST_CELLS:
            raise StudyError(f"--grid: expected at most {MOST_CELLS} cells, got {len(cells)}")
        return cells


class SweepFolder:
    """sweep.json, cells/ (run folders), trials.csv, cells.csv, the same as parquet, figure.png."""

    def __init__(self, path: Path) -> None:
        self.path, self.cells = path, path / "cells"
        self._file = path / "sweep.json"

    @staticmethod
    def create(path: Path, sweep: Sweep) -> SweepFolder:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StudyError(f"--out {path}: exists and is not an empty folder; --resume {path} goes on with a sweep")
        folder = SweepFolder(path)
        sweep.cells(folder.cells)  # every cell's settings are checked before anything is there
        path.mkdir(parents=True, exist_ok=True)
        folder.write(sweep)
        return folder

    def write(self, sweep: Sweep) -> None:
        checkpoint.write_atomically(self._file, json.dumps(asdict(sweep), indent=2).encode())

    def sweep(self) -> Sweep:
        try:
            found = json.loads(self._file.read_text())
            plan = Plan(**found.pop("plan"))
            sweep = Sweep(plan, **found)
            if not (plan.sound() and isinstance(sweep.grid, dict) and isinstance(sweep.best, int)):
                raise ValueError("values of other types than expected")
            return sweep
        except FileNotFoundError:
            raise StudyError(f"{self.path}: not the folder of a sweep, it has no sweep.json") from None
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise StudyError(f"{self._file}: damaged or written by another version ({error})") from None


def run(folder: SweepFolder, sweep: Sweep, tell: Listener) -> list[tuple[Cell, Record]]:
    """Run or resume all cells, and write the result.json of each; stops as :func:`fastmod.runs.engine.run` does."""
    study = registry.get(sweep.plan.study)
    cells = sweep.cells(folder.cells)
    for cell in cells:
        study.prepare(changed(study.defaults, cell.plan.settings))
    with RunFolder(folder.path).alone(), stop_on_signals() as stop:
        tasks = []
        for cell in cells:
            cell.folder.lay_out(cell.plan)
            with cell.folder.alone():
                tasks += begin(cell.folder, cell.plan, cell.name)
        records = run_tasks(tasks, tell, stop)
    count = len(sweep.plan.trials())
    found = []
    for i, cell in enumerate(cells):
        own = records[i * count : (i + 1) * count]
        report.write_result(cell.folder, cell.plan, own)
        found += [(cell, record) for record in own]
    return found


def read(folder: SweepFolder) -> tuple[Sweep, list[tuple[Cell, Record]]]:
    """A finished sweep, from the result.json of its cells."""
    sweep = folder.sweep()
    names = [field.name for field in fields(Record)]
    found = []
    for cell in sweep.cells(folder.cells):
        trials = report.read_result(cell.folder)["trials"]
        found += [(cell, Record(**{name: trial[name] for name in names})) for trial in trials]
    return sweep, found


def numbers(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers of a trial's result, those inside of others with dotted names."""
    found: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found
