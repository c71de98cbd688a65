"""Figures of the weight-mask studies, drawn from the results of :class:`fastmod.studies.masks.masking.MaskTrial`.

Bars are means over trials, with the standard deviation as the paper has it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastmod.runs import draw
from fastmod.runs.config import StudyError
from fastmod.runs.study import Record
from fastmod.studies.masks.tables import picker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 7  # groups of bars that can be told apart
Figures = dict[str, tuple[Any, str]]  # file stem -> (figure, caption)


def all_of(model: str, records: Sequence[Record]) -> Figures:
    """The four figures that every mask study has, of the trials of one model."""
    if not records:
        return {}
    return {
        f"sharing_{model}": (shared_weights(records), f"{model}: share of a mask's weights that other masks keep too."),
        f"accuracy_{model}": (accuracy_under_masks(records), f"{model}: accuracy under each mask; ¬ is its inverse."),
        f"weights_{model}": (kept_weights(records), f"{model}: weights that each mask keeps."),
        f"histogram_{model}": (probabilities(records), f"{model}: how sure the masks are of what they keep."),
    }


def shared_weights(records: Sequence[Record], tasks: Sequence[str] | None = None) -> Figure:
    """Figures 1, 3, 13 and 15: per layer and task, the share of the kept weights that other tasks keep too."""
    layers, tasks = _layers(records), tasks or _some(list(records[0].result["sharing"]))
    groups = {t: [bar(records, picker("sharing", t, n)) for n in layers] for t in tasks}
    figure = draw.bars([_short(n) for n in layers], groups, "layer", "shared weights")
    figure.axes[0].set_ylim(0, 1.05)
    return figure


def sensitivity(points: Mapping[str, Sequence[tuple[float, float, float]]], chosen: float) -> Figure:
    """Figure 8: a panel per model with accuracy against beta, the colour being what is shared.

    Args:
        points: model -> (beta, accuracy, share) of every beta.
        chosen: the beta of the other studies, marked by a line.
    """
    figure = _figure_class()(figsize=(0.8 + 3.2 * len(points), 3.0), layout="constrained")
    grid = figure.subplots(1, len(points), squeeze=False)
    image = None
    for axes, (model, found) in zip(grid.flat, points.items(), strict=True):
        betas, accuracies, shares = zip(*found, strict=True)
        axes.axvline(chosen, color="tab:red", linewidth=1, zorder=0)
        image = axes.scatter(betas, accuracies, c=shares, vmin=0, vmax=1, cmap="viridis")
        axes.set(xscale="log", xlabel="beta", ylabel="accuracy, mask of the whole task", ylim=(-0.03, 1.05))
        axes.set_title(model, fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=grid, label="shared by add")
    return figure


def accuracy_under_masks(records: Sequence[Record]) -> Figure:
    """Figures 2 and 10: accuracy on every task without a mask, under each task's mask and under its inverse."""
    masks, tasks = list(records[0].result["masked"]), _some(list(records[0].result["accuracy"]))
    groups = {}
    for task in tasks:
        plain = [bar(records, picker("accuracy", task))]
        own = [bar(records, picker("masked", m, task)) for m in masks]
        inverse = [bar(records, picker("inverted", m, task)) for m in masks]
        groups[f"accuracy on {task}"] = plain + own + inverse
    figure = draw.bars(["no mask", *masks, *(f"¬{mask}" for mask in masks)], groups, "mask", "accuracy")
    figure.axes[0].set_ylim(0, 1.05)
    if len(masks) > _MOST:
        figure.axes[0].tick_params(axis="x", labelrotation=90)
    return figure


def kept_weights(records: Sequence[Record]) -> Figure:
    """Figure 11: number of weights per layer that each task's mask keeps."""
    layers, tasks = _layers(records), _some(list(records[0].result["kept"]))
    groups = {t: [bar(records, picker("kept", t, n)) for n in layers] for t in tasks}
    return draw.bars([_short(n) for n in layers], groups, "layer", "weights kept")


def probabilities(records: Sequence[Record]) -> Figure:
    """Figure 7: how many weights have which probability of being kept, on a logarithmic scale."""
    tasks = _some(list(records[0].result["histogram"]))
    bins = len(records[0].result["histogram"][tasks[0]])
    centres = [(i + 0.5) / bins for i in range(bins)]
    figure, axes = _panel()
    for task in tasks:
        counts = [sum(record.result["histogram"][task][i] for record in records) for i in range(bins)]
        axes.step(centres, [count * bins / max(1, sum(counts)) for count in counts], where="mid", label=task)
    axes.set(xlabel="probability of being kept", ylabel="density", yscale="log", xlim=(0, 1))
    axes.legend(frameon=False)
    return figure


def confusion(
    matrices: Mapping[str, Sequence[Sequence[float]]],
    classes: Sequence[str],
    columns: int = 5,
    *,
    predicted: Sequence[str] | None = None,
    signed: bool = True,
) -> Figure:
    """Figures 12 and 18 to 21: a panel per matrix, true classes in rows.

    Args:
        matrices: panel title -> ``[C, P]``, shares of the true class.
        classes: names of the C classes.
        columns: panels in a row.
        predicted: names of the P classes that are predicted; the same if not given.
        signed: whether they are changes, in -1..1; else shares, in 0..1.
    """
    predicted = classes if predicted is None else predicted
    new_figure = _figure_class()
    columns = min(columns, len(matrices))
    rows = -(-len(matrices) // columns)
    figure = new_figure(figsize=(0.8 + 2.4 * columns, 0.5 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axes in grid.flat:
        axes.axis("off")
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        axes.axis("on")
        image = axes.imshow(matrix, vmin=-1 if signed else 0, vmax=1, cmap="RdBu" if signed else "viridis")
        axes.set_title(title, fontsize=8)
        axes.set_xticks(range(len(predicted)), predicted, fontsize=5, rotation=90)
        axes.set_yticks(range(len(classes)), classes, fontsize=5)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.6, aspect=40, pad=0.02, label="change" if signed else "share")
    return figure


def bar(records: Sequence[Record], pick: Callable[[dict[str, Any]], float | None]) -> tuple[float, float]:
    """Height and error: mean and standard deviation of what ``pick`` finds in each trial's result; None does not
    count."""
    values = [value for record in records if (value := pick(record.result)) is not None]
    if not values:
        return 0.0, 0.0
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _some(tasks: list[str]) -> list[str]:
    """All of them, or every second, third ... if there are more than colours; the paper does the same."""
    return tasks[:: -(-len(tasks) // _MOST) or 1]


def _layers(records: Sequence[Record]) -> list[str]:
    """Weights and the total; biases, where they are masked, are too few to be seen."""
    names = [name for name in records[0].result["weights"] if name != "total"]
    return [*(name for name in names if not name.rpartition(".")[2].startswith("bias")), "total"]


def _short(name: str) -> str:
    """Of a parameter's name what tells it apart: ``layer1``, ``lstm ih_l0``, ``layer1 bias``."""
    *module, last = name.split(".")
    place = ".".join(module)
    if last in ("weight", "total"):
        return place or last
    return f"{place} {last.removeprefix('weight_')}".strip()


def _panel() -> tuple[Figure, Any]:
    figure = _figure_class()(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: no window system, no global state
    except ImportError:
        raise StudyError('figures need matplotlib: pip install "fastmod[study]"') from None
    return Figure
