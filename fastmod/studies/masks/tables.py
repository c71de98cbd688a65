"""Rows of the tables of the weight-mask studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastmod.runs.study import Outcome, Record, Row


def row(
    outcome: Outcome,
    model: str,
    name: str,
    paper: str,
    pick: Callable[[dict[str, Any]], float | None],
    note: str = "",
) -> Row:
    """Ours is what ``pick`` finds in the result of every trial of the model; None does not count."""
    records = outcome.of(model)
    values = [value for record in records if (value := pick(record.result)) is not None]
    steps = max((record.steps for record in records), default=0)
    return Row(f"{model}, {name}", paper, values, steps, sum(record.seconds for record in records) / 60, note)


def layer_names(record: Record) -> list[str]:
    """The masked parameters in the order of the net."""
    return [name for name in record.result["weights"] if name != "total"]


def accuracy_rows(outcome: Outcome, model: str, tasks: Sequence[str], note: str = "") -> list[Row]:
    """Per task: without a mask, under its own, under the other tasks' masks, and under all of them inverted."""
    rows = []
    for task in tasks:
        enough = ">= 95 % of no mask (C.2)"
        rows.append(row(outcome, model, f"{task}, no mask", "nearly perfect", picker("accuracy", task), note))
        for mask in sorted(tasks, key=lambda mask: mask != task):
            paper = enough if mask == task else "-"
            rows.append(row(outcome, model, f"{task}, mask of {mask}", paper, picker("masked", mask, task), note))
        for mask in tasks:
            name = f"{task}, inverted mask of {mask}"
            rows.append(row(outcome, model, name, "-", picker("inverted", mask, task), note))
    return rows


def sharing_rows(outcome: Outcome, model: str, task: str, paper: str, note: str = "", *, only: str = "") -> list[Row]:
    """Per layer and in total, the share of the task's weights that other tasks keep too; ``only``: how names end."""
    names = [*(name for name in layer_names(outcome.of(model)[0]) if name.endswith(only)), "total"]
    return [row(outcome, model, f"{task}, shared in {n}", paper, picker("sharing", task, n), note) for n in names]


def picker(*path: str) -> Callable[[dict[str, Any]], float | None]:
    """Follows keys into a result."""

    def pick(result: dict[str, Any]) -> float | None:
        found: Any = result
        for key in path:
            found = found[key]
        return found

    return pick
