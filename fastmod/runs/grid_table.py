"""The cells of a sweep as a grid in Markdown: a column per value of one setting, a row per combination of the
others."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fastmod.runs import tables
from fastmod.runs.config import StudyError
from fastmod.runs.study import Record
from fastmod.runs.sweep import Cell, Sweep, numbers

_DIGITS = 6  # of a measure that is kept


def cells(sweep: Sweep, found: Sequence[tuple[Cell, Record]], settings: Mapping[str, str]) -> dict[str, Any]:
    """The record of a sweep: every measure of each cell and model, by trial."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for cell, record in found:
        empty = {"model": record.model, **tables.plain(cell.values), "measures": {}}
        one = kept.setdefault((cell.name, record.model), empty)
        measures = numbers(record.result)
        for name in tables.usual(list(measures)):
            one["measures"].setdefault(name, []).append(float(f"{measures[name]:.{_DIGITS}g}"))
    return {
        "axes": list(sweep.grid), "settings": dict(settings), "steps": max(record.steps for _, record in found),
        "minutes": sum(record.seconds for _, record in found) / 60, "cells": list(kept.values()),
    }  # fmt: skip


def together(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Joins records of sweeps over one grid with the same settings and different seeds into one with all trials.
    ``commits``: those of each."""
    found: list[dict[str, Any]] = []
    for record in records:
        first = next((other for other in found if _goes_on(other, record)), None)
        if first is None:
            found.append({**record, "sweep": copy.deepcopy(record["sweep"]), "commits": [record["versions"]]})
            continue
        first["seeds"] = sorted([*first["seeds"], *record["seeds"]])
        first["commits"].append(record["versions"])
        _add(first["sweep"], record["sweep"])
    return found


def _goes_on(first: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    same = all(first["sweep"][key] == record["sweep"][key] for key in ("axes", "settings", "steps"))
    return same and first["study"] == record["study"] and not {*first["seeds"]} & {*record["seeds"]}


def _add(sweep: dict[str, Any], other: Mapping[str, Any]) -> None:
    sweep["minutes"] += other["minutes"]
    places = {_place(cell): cell for cell in sweep["cells"]}
    for cell in other["cells"]:
        known = places.get(_place(cell))
        if known is None:
            sweep["cells"].append(copy.deepcopy(cell))
            continue
        for name, values in cell["measures"].items():
            known["measures"].setdefault(name, []).extend(values)


def _place(cell: Mapping[str, Any]) -> str:
    """Model and settings of a cell."""
    return repr({key: value for key, value in cell.items() if key != "measures"})


def tables_of(kept: Mapping[str, Any], about: str, measure: str, across: str, at: str | None = None) -> list[str]:
    """A table per model, below a line that describes it. With ``at``, each mean is followed by the number of trials
    that have this value."""
    sweep = kept["sweep"]
    if across not in sweep["axes"]:
        raise StudyError(f"across={across}: expected one of {', '.join(sweep['axes'])}")
    found = []
    for model, setting in sweep["settings"].items():
        own = [cell for cell in sweep["cells"] if cell["model"] == model and measure in cell["measures"]]
        if not own:
            have = ", ".join(dict.fromkeys(name for cell in sweep["cells"] for name in cell["measures"]))
            raise StudyError(f"cells={measure}: {model} has no such measure, only {have}")
        counted = f", in brackets the trials at {at}" if at is not None else ""
        head = (
            f"`{kept['study']}` {model}, {measure}: mean over the trials of a cell{counted}. {about}, "
            f"{sweep['steps']:,} steps, {sweep['minutes']:.0f} minutes in all; {setting}.\n"
        )
        rest = [axis for axis in sweep["axes"] if axis != across]
        found.append("\n".join([head, *_grid(own, rest, across, measure, at)]))
    return found


def _grid(
    own: Sequence[Mapping[str, Any]], rest: Sequence[str], across: str, measure: str, at: str | None
) -> list[str]:
    columns = list(dict.fromkeys(cell[across] for cell in own))
    rows: dict[tuple[Any, ...], dict[Any, str]] = {}
    for cell in own:
        place = rows.setdefault(tuple(cell[axis] for axis in rest), {})
        place[cell[across]] = _shown(cell["measures"][measure], at)
    head = [*rest, *(f"{across} {value}" for value in columns)]
    body = [[*map(str, place), *(row.get(value, "-") for value in columns)] for place, row in sorted(rows.items())]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def _shown(values: Sequence[float], at: str | None) -> str:
    count = "" if at is None else f" ({sum(value == float(at) for value in values)})"
    return f"{statistics.fmean(values):.3f}{count}"
