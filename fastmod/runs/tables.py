"""Tables of a sweep: a line per trial, and per cell with mean and standard error; as csv and, with pyarrow, parquet."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastmod.runs.checkpoint import write_atomically
from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Record, Study, standard_error
from fastmod.runs.sweep import Cell, numbers

Line = dict[str, Any]


def trial_lines(found: Sequence[tuple[Cell, Record]]) -> list[Line]:
    """Settings of the cell, the trial, and every number of its result."""
    return [
        {**plain(cell.values), "model": record.model, "seed": record.seed, "steps": record.steps,
         "seconds": record.seconds, "parameters": record.parameters, **numbers(record.result)}
        for cell, record in found
    ]  # fmt: skip


def cell_lines(found: Sequence[tuple[Cell, Record]]) -> list[Line]:
    """One per cell, model and measure."""
    groups: dict[tuple[str, str], list[tuple[Cell, Record]]] = {}
    for cell, record in found:
        groups.setdefault((cell.name, record.model), []).append((cell, record))
    lines = []
    for some in groups.values():
        cell, record = some[0]
        about = {"kind": "cell", **plain(cell.values), "model": record.model}
        lines += _summaries(about, [record for _, record in some])
    return lines


def distinct(study: Study, found: Sequence[tuple[Cell, Record]]) -> list[tuple[Cell, Record]]:
    """Without trials that are another one again, since their cells differ in what the model does not read."""
    first: dict[tuple[str, int, str], tuple[Cell, Record]] = {}
    for cell, record in found:
        config = changed(study.defaults, cell.plan.settings)
        first.setdefault((record.model, record.seed, study.effective(config, record.model)), (cell, record))
    return list(first.values())


def best_lines(found: Sequence[tuple[Cell, Record]], best: int, by: str) -> list[Line]:
    """Per model, every measure over the ``best`` trials of all cells, picked by the measure ``by``; ``found``:
    distinct ones, or a net that was trained in several cells counts as often."""
    sign = 1 if lower_is_better(by) else -1
    lines = []
    for model in dict.fromkeys(record.model for _, record in found):
        ranked = [(numbers(record.result).get(by), i) for i, (_, record) in enumerate(found) if record.model == model]
        known = sorted((sign * value, i) for value, i in ranked if value is not None)
        if not known:
            have = ", ".join(dict.fromkeys(name for _, record in found for name in numbers(record.result)))
            raise StudyError(f"--by {by}: no trial of {model} has this measure; there are {have}")
        picked = [found[i] for _, i in known[:best]]
        about = {"kind": f"best {len(picked)} by {by}", **dict.fromkeys(found[0][0].values), "model": model}
        lines += _summaries(about, [record for _, record in picked])
    return lines


def usual(measures: Sequence[str]) -> list[str]:
    """Those to show unasked: gates are for inspection, and architectures are settings."""
    aside = ("gate_", "architecture.")
    return [name for name in measures if name != "loss" and not name.startswith(aside)] or list(measures)


def lower_is_better(measure: str) -> bool:
    return any(word in measure.lower() for word in ("loss", "error"))


def _summaries(about: Line, records: Sequence[Record]) -> list[Line]:
    several = [numbers(record.result) for record in records]
    lines = []
    for measure in dict.fromkeys(name for one in several for name in one):
        values = [one[measure] for one in several if measure in one]
        lines.append(
            {**about, "measure": measure, "trials": len(values), "mean": statistics.fmean(values),
             "standard_error": standard_error(values), "lowest": min(values), "highest": max(values)}
        )  # fmt: skip
    return lines


def plain(values: Mapping[str, Any]) -> Line:
    """As a cell of a table: what is no number or word is written as text."""
    return {k: v if isinstance(v, int | float | str | None) else ",".join(map(str, v)) for k, v in values.items()}


# ---- files


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(lines), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue().encode())


def write_parquet(path: Path, lines: Sequence[Line]) -> None:
    if not parquet_available():
        raise StudyError('parquet needs pyarrow: pip install "fastmod[parquet]"')
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: _of_one_kind([line.get(name) for line in lines]) for name in _columns(lines)})
    content = io.BytesIO()
    parquet.write_table(table, content)
    write_atomically(path, content.getvalue())


def _of_one_kind(column: Sequence[Any]) -> list[Any]:
    """Text where words stand among numbers, as in ``beta=auto,1e-4``: a column of parquet has one type."""
    mixed = any(isinstance(value, str) for value in column)
    return [str(value) if mixed and value is not None else value for value in column]


def parquet_available() -> bool:
    return find_spec("pyarrow") is not None


def _columns(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line))
