"""Compares several runs: one table, the settings in which they differ, one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmod.runs import draw, report
from fastmod.runs.config import StudyError
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.study import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Compared:
    name: str
    folder: RunFolder
    plan: Plan
    rows: Mapping[str, Mapping[str, Any]]  # name -> row of result.json


def read(paths: Sequence[Path]) -> list[Compared]:
    """The runs, with names that distinguish them."""
    runs = []
    for name, path in zip(_names(paths), paths, strict=True):
        folder = RunFolder(path)
        plan = folder.plan()
        runs.append(Compared(name, folder, plan, {row["name"]: row for row in report.read_result(folder)["table"]}))
    return runs


def _names(paths: Sequence[Path]) -> list[str]:
    """As many of the last parts of the paths as are needed."""
    whole = [path.resolve().parts for path in paths]
    if len(set(whole)) != len(whole):
        raise StudyError("expected different runs, got one of them twice")
    count = next(n for n in range(1, 99) if len({parts[-n:] for parts in whole}) == len(whole))
    return ["/".join(parts[-count:]) for parts in whole]


def table(runs: Sequence[Compared]) -> list[list[str]]:
    """Lines: the row, the figure of the paper, and that of each run with its number of trials."""
    lines = []
    for name in dict.fromkeys(name for run in runs for name in run.rows):
        found = [run.rows.get(name) for run in runs]
        paper = next(row["paper"] for row in found if row is not None)
        lines.append([name, paper, *(_ours(row) for row in found)])
    return lines


def _ours(row: Mapping[str, Any] | None) -> str:
    if row is None or row["mean"] is None:
        return "-"
    return f"{shown(row['mean'], row['standard_error'])} ({row['trials']})"


def differences(runs: Sequence[Compared]) -> list[list[str]]:
    """Lines: a setting, and its value in each run; only where they differ."""
    about = [
        {"study": run.plan.study, "seeds": _spans(run.plan.seeds), **run.plan.versions, **run.plan.settings}
        for run in runs
    ]
    keys = dict.fromkeys(key for one in about for key in one)
    lines = [[key, *(str(one.get(key, "-")) for one in about)] for key in keys if key != "typed"]
    return [line for line in lines if len(set(line[1:])) > 1]


def _spans(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))


class NoFigureError(StudyError):
    """What is compared does not fit a figure; the tables are complete without it."""


#: Metrics that say how far a trial is, or is being trained, and not how good it is.
_ASIDE = ("loss", "stage", "epoch", "lr", "interfering")


def figure(runs: Sequence[Compared], measure: str | None) -> tuple[Figure, str]:
    """One line per trial over the steps, a colour per run and model; and the measure."""
    lines = {run.name: run.folder.metrics() for run in runs}
    have = list(dict.fromkeys(key for some in lines.values() for line in some for key in line))
    have = [key for key in have if key not in ("trial", "model", "seed", "step")]
    if not have:
        raise StudyError("no run has metrics yet")
    if measure is not None and measure not in have:
        raise StudyError(f"--measure {measure}: expected one of {', '.join(have)}")
    chosen = measure or next((key for key in have if key not in _ASIDE), have[0])
    groups: dict[str, dict[int, tuple[list[float], list[float]]]] = {}
    for name, some in lines.items():
        for line in some:
            if chosen in line:
                x, y = groups.setdefault(f"{name} {line['model']}", {}).setdefault(line["seed"], ([], []))
                x.append(line["step"])
                y.append(line[chosen])
    if len(groups) > draw.MOST_GROUPS:
        raise NoFigureError(f"it has {draw.MOST_GROUPS} colours, and the runs {len(groups)} models; compare fewer")
    inside = all(0 <= value <= 1 for trials in groups.values() for _, y in trials.values() for value in y)
    return draw.curves(groups, chosen, whole_range=inside), chosen
