"""Figures. Only this module uses matplotlib, which is imported when the first figure is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmod.runs.config import StudyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: One colour per model, the same in every figure; chosen to be told apart without colour vision.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
MOST_GROUPS = len(_COLOURS)


def available() -> bool:
    """Whether matplotlib is installed; without it a run has no figures, but works."""
    return find_spec("matplotlib") is not None


def needed() -> None:
    """For commands that are useless without figures."""
    if not available():
        raise StudyError('figures need matplotlib: pip install "fastmod[study]"')


def _axes(size: tuple[float, float] = (6.4, 3.8)) -> tuple[Figure, Any]:
    needed()
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    # Without date and version, so that the same run gives the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def lines(
    x: Sequence[float],
    groups: Mapping[str, Sequence[Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    mark: float | None = None,
) -> Figure:
    """Per group the mean of several lines over the same x, with the single lines faint; ``mark``: a vertical line."""
    figure, axes = _axes()
    for colour, (name, several) in zip(_COLOURS, groups.items(), strict=False):
        for values in several if len(several) > 1 else []:
            axes.plot(x, values, color=colour, alpha=0.25, linewidth=1)
        mean = [sum(column) / len(column) for column in zip(*several, strict=True)]
        axes.plot(x, mean, color=colour, marker="o", markersize=4, label=name)
    if mark is not None:
        axes.axvline(mark, color="0.6", linestyle=":", linewidth=1)
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(-0.03, 1.05))
    axes.legend(frameon=False)
    return figure


def curves(
    groups: Mapping[str, Mapping[int, tuple[Sequence[float], Sequence[float]]]],
    y_label: str,
    *,
    x_label: str = "steps",
    whole_range: bool = True,
) -> Figure:
    """One line per trial: group -> seed -> (x, y)."""
    figure, axes = _axes()
    for colour, (name, trials) in zip(_COLOURS, groups.items(), strict=False):
        for i, (x, y) in enumerate(trials.values()):
            axes.plot(x, y, color=colour, alpha=0.8, linewidth=1.2, label=name if i == 0 else None)
    axes.set(xlabel=x_label, ylabel=y_label)
    if whole_range:
        axes.set_ylim(-0.03, 1.05)
    if groups:
        axes.legend(frameon=False)
    return figure


def bars(
    labels: Sequence[str], groups: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> Figure:
    """Grouped bars with error bars: group -> one (mean, error) per label."""
    figure, axes = _axes()
    width = 0.8 / max(1, len(groups))
    for i, (colour, (name, values)) in enumerate(zip(_COLOURS, groups.items(), strict=False)):
        places = [n + (i - (len(groups) - 1) / 2) * width for n in range(len(labels))]
        means, errors = [v for v, _ in values], [e for _, e in values]
        axes.bar(places, means, width, yerr=errors, color=colour, label=name, error_kw={"linewidth": 1})
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(frameon=False)
    return figure


def heat_maps(rows: Sequence[tuple[str, Sequence[tuple[str, Any, Sequence[str], Sequence[str]]]]]) -> Figure:
    """A grid of weights in 0..1: rows of (row title, [(title, matrix, row names, column names), ...])."""
    columns = max(len(panels) for _, panels in rows)
    figure, places = grid(len(rows), columns, (0.6 + 2.6 * columns, 0.4 + 2.5 * len(rows)))
    image = None
    for r, (row_title, panels) in enumerate(rows):
        for axes in places[r]:
            axes.axis("off")
        for c, (title, matrix, row_names, column_names) in enumerate(panels):
            axes = places[r][c]
            axes.axis("on")
            image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set_xticks(range(len(column_names)), column_names, fontsize=6, rotation=90)
            axes.set_yticks(range(len(row_names)), row_names, fontsize=6)
            axes.axhline(len(row_names) - 1.5, color="white", linewidth=2)  # the last row is not a source but the gate
            axes.set_title(title if r == 0 else "", fontsize=8)
            if c == 0:
                axes.set_ylabel(row_title, fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=places, shrink=0.6, aspect=40, pad=0.02, label="weight")
    return figure


def grid(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and its axes ``[rows, columns]``."""
    needed()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def weights(
    axes: Any, title: str, matrix: Sequence[Sequence[float]], row_names: Sequence[str], column_names: Sequence[str]
) -> None:
    """A map of weights in 0..1, each written into its cell unless there are too many to read."""
    axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    small = 7 if len(row_names) <= _READABLE else 4
    axes.set_xticks(range(len(column_names)), column_names, fontsize=7, rotation=90)
    axes.set_yticks(range(len(row_names)), row_names, fontsize=small)
    axes.set_title(title, fontsize=9)
    for r, values in enumerate(matrix if len(row_names) <= _READABLE else ()):
        for c, value in enumerate(values):
            axes.text(c, r, f"{value:.2f}", ha="center", va="center", fontsize=6, color="black" if value > 0.6 else "w")


_READABLE = 20  # rows of a map with numbers in it


def images(pictures: Sequence[Any], titles: Sequence[str]) -> Figure:
    """A sheet of small pictures ``[H, W, 3]`` of bytes, each below its title, no pixel smoothed."""
    columns = math.ceil(math.sqrt(len(pictures) * 1.5))
    rows = math.ceil(len(pictures) / columns)
    figure, places = grid(rows, columns, (1.3 * columns, 1.5 * rows))
    for axes in places.flatten():
        axes.axis("off")
    for axes, picture, title in zip(places.flatten(), pictures, titles, strict=False):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(title, fontsize=7)
    return figure
