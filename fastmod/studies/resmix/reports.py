"""Rows and figures of the ResMixNet studies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastmod.runs import draw
from fastmod.runs.study import Outcome, Record, Row
from fastmod.studies.resmix import nets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, tuple[Any, str]]  # file stem -> (figure, caption)


def row(name: str, paper: str, records: Sequence[Record], values: Sequence[float], note: str) -> Row:
    steps = max(record.steps for record in records)
    minutes = sum(record.seconds for record in records) / 60
    return Row(name, paper, list(values), steps, minutes, note, len(records))


def with_deviation(
    name: str, paper: str, deviation: str, records: Sequence[Record], values: Sequence[float], note: str
) -> list[Row]:
    """A row with the mean and, for several seeds, one with the standard deviation, the paper's number after ±."""
    rows = [row(name, paper, records, values, note)]
    if len(values) > 1:
        rows.append(row(f"{name}, deviation over seeds", deviation, records, [statistics.stdev(values)], note))
    return rows


def error_rows(outcome: Outcome, printed: Mapping[str, tuple[str, str, str]], paper_epochs: int) -> list[Row]:
    """Rows per model: test error, its deviation over seeds, validation error.

    ``printed``: model -> the paper's parameters, error and deviation.
    """
    rows = []
    for model in outcome.models():
        records, title = outcome.of(model), nets.TITLES[model]
        size, mean, deviation = printed.get(model, ("-", "-", "-"))
        note = f"{records[0].parameters:,} parameters, {epochs(records)} epochs; paper: {size}, {paper_epochs} epochs"
        errors = [record.result["error_test"] for record in records]
        theirs = f"{mean} ± {deviation}" if model in printed else "-"
        rows += with_deviation(f"{title}, test error (%)", theirs, deviation, records, errors, note)
        watched = [record.result["error_valid"] for record in records]
        rows.append(row(f"{title}, validation error (%)", "-", records, watched, note))
    return rows


def epochs(records: Sequence[Record]) -> str:
    return f"{max(record.result['epoch'] for record in records):g}"


def figures(outcome: Outcome, captions: Mapping[str, str]) -> Figures:
    """Curves over epochs for each metric of ``captions``, and the gates of each trial that has some."""
    found: Figures = {}
    for metric, caption in captions.items():
        curves = {nets.TITLES[model]: _curves(outcome, model, metric) for model in outcome.models()}
        groups = {title: trials for title, trials in curves.items() if trials}
        label = metric.replace("_", " ") + (" (%)" if metric.startswith("error") else "")
        if groups:
            found[metric] = (draw.curves(groups, label, x_label="epochs", whole_range=False), caption)
    for record in outcome.records:
        if "gates" in record.result:
            caption = (
                f"{nets.TITLES[record.model]}, seed {record.seed}: mean weight of each expert, test images by class."
            )
            found[f"gates_{record.key}"] = (_gates(record.result["gates"]), caption)
    return found


def _curves(outcome: Outcome, model: str, metric: str) -> dict[int, tuple[list[float], list[float]]]:
    """Seed -> (epochs, values)."""
    epoch, value = outcome.curves(model, "epoch"), outcome.curves(model, metric)
    return {seed: (epoch[seed][1], value[seed][1]) for seed in value}


def _gates(gates: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """A map per module with a row per class and a column per expert."""
    rows = len(next(iter(gates.values())))
    experts = len(next(iter(next(iter(gates.values())).values())))
    size = (1.6 + len(gates) * (0.8 + 0.6 * experts), 1.2 + (0.28 if rows <= 20 else 0.11) * rows)
    figure, grid = draw.grid(1, len(gates), size)
    for axes, (module, groups) in zip(grid[0], gates.items(), strict=True):
        draw.weights(axes, module, list(groups.values()), list(groups), [f"expert {e + 1}" for e in range(experts)])
    return figure
