"""Rows and figures common to the compositional studies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastmod.runs import draw
from fastmod.runs.study import Outcome, Record, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, tuple["Figure", str]]
Mixture = Sequence[Sequence[float]]  # [layers][templates]
_ACROSS = 5  # maps in a row of a figure


def row(name: str, paper: str, records: Sequence[Record], values: Sequence[float], note: str = "") -> Row:
    steps = max((record.steps for record in records), default=0)
    minutes = sum(record.seconds for record in records) / 60
    return Row(name, paper, [v for v in values if math.isfinite(v)], steps, minutes, note, len(records))


def peak(xi: Mixture) -> list[float]:
    """The largest share of each layer."""
    return [max(layer) for layer in xi]


def above(xi: Mixture, bound: float) -> float:
    """Fraction of layers whose largest share is above a bound."""
    return statistics.fmean(value > bound for value in peak(xi))


def sharing(a: Mixture, b: Mixture) -> list[float]:
    """``sum_k min(xi_a, xi_b)`` of every layer."""
    return [sum(min(x, y) for x, y in zip(one, other, strict=True)) for one, other in zip(a, b, strict=True)]


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last third, each of at least one layer."""
    count = max(1, len(values) // 3)
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])


def mixture_figures(outcome: Outcome, titles: Mapping[str, str]) -> Figures:
    """A figure per trial with a map of shares (layers x templates) per task. ``titles``: model -> title."""
    found: Figures = {}
    for record in outcome.records:
        several: Mapping[str, Mixture] = record.result.get("mixtures", {})
        if several:
            caption = (
                f"{titles[record.model]}, seed {record.seed}: share of each template (columns) in each layer (rows)."
            )
            found[f"mixtures_{record.key}"] = (mixture_maps(several), caption)
    return found


def mixture_maps(several: Mapping[str, Mixture]) -> Figure:
    layers, templates = (max(sizes) for sizes in zip(*((len(xi), len(xi[0])) for xi in several.values()), strict=True))
    columns = min(_ACROSS, len(several))
    rows = math.ceil(len(several) / columns)
    size = (columns * (0.9 + 0.3 * templates), rows * (0.9 + 0.25 * layers))
    figure, grid = draw.grid(rows, columns, size)
    for axes in grid.flatten()[len(several) :]:
        axes.axis("off")
    for axes, (task, xi) in zip(grid.flatten(), several.items(), strict=False):
        names = [str(layer + 1) for layer in range(len(xi))]
        draw.weights(axes, task, xi, names, [str(k + 1) for k in range(len(xi[0]))])
    return figure


def curves(outcome: Outcome, metric: str, titles: Mapping[str, str], label: str, caption: str) -> Figures:
    groups = {titles[model]: outcome.curves(model, metric) for model in outcome.models()}
    groups = {title: trials for title, trials in groups.items() if trials}
    return {metric: (draw.curves(groups, label, whole_range=False), caption)} if groups else {}
