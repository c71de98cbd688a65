"""What masks without a class did, from the results of mask-cifar; the control is the mask of all classes.

Functions that take a class return what to look for in the result of a trial, for rows and bars.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastmod.data.cifar import CLASSES
from fastmod.runs.study import Record

ALL = "all"  # the control: no class is removed
Pick = Callable[[dict[str, Any]], float | None]


def drops(result: Mapping[str, Any], removed: str) -> dict[str, float]:
    """Class -> accuracy lost, mask without ``removed`` against the control's."""
    under = result["masked"]
    return {name: under[ALL][name] - under[removed][name] for name in CLASSES}


def relative_drops(result: Mapping[str, Any], removed: str) -> dict[str, float]:
    """Class -> share of its accuracy that it loses; classes that the control never gets right are left out."""
    before = result["masked"][ALL]
    return {name: drop / before[name] for name, drop in drops(result, removed).items() if before[name]}


def relative(removed: str) -> Pick:
    """Figure 6a: share of its accuracy that the removed class loses."""
    return lambda result: relative_drops(result, removed).get(removed)


def other(removed: str) -> Pick:
    """Figure 6b: the largest relative drop of another class, as a share of the removed one's; 0 if none loses."""

    def ratio(result: dict[str, Any]) -> float | None:
        found = relative_drops(result, removed)
        own = found.pop(removed, 0.0)
        return max(0.0, *found.values()) / own if own > 0 and found else None

    return ratio


def own_drop(removed: str) -> Pick:
    return lambda result: drops(result, removed)[removed]


def removed_classes(result: Mapping[str, Any]) -> list[str]:
    return [task for task in result["masked"] if task != ALL]


def mean_relative(result: dict[str, Any]) -> float | None:
    return _mean(result, relative)


def mean_ratio(result: dict[str, Any]) -> float | None:
    return _mean(result, other)


def _mean(result: dict[str, Any], measure: Callable[[str], Pick]) -> float | None:
    found = [value for name in removed_classes(result) if (value := measure(name)(result)) is not None]
    return statistics.fmean(found) if found else None


def mean_others(result: dict[str, Any]) -> float:
    """Accuracy lost by classes that were not removed, on average."""
    return statistics.fmean(
        drop for removed in removed_classes(result) for name, drop in drops(result, removed).items() if name != removed
    )


def lose_most(result: dict[str, Any]) -> float:
    """Share of the removed classes that lose more of their accuracy than any other class does of its own."""
    names = removed_classes(result)
    lost = {name: relative_drops(result, name) for name in names}
    return sum(lost[name].pop(name, 0.0) > max(lost[name].values(), default=0.0) for name in names) / len(names)


def mean_confusion(records: Sequence[Record], removed: str | None = None) -> list[list[float]]:
    """``[10, 10]``, the mean over trials: the control's, or its change when a class is removed."""
    matrices = [torch.tensor(record.result["confusion"][removed or ALL]) for record in records]
    if removed is not None:
        matrices = [m - torch.tensor(r.result["confusion"][ALL]) for m, r in zip(matrices, records, strict=True)]
    return torch.stack(matrices).mean(0).tolist()
