"""A contact sheet of a task's images, each with its label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastmod.runs import draw
from fastmod.runs.config import StudyError
from fastmod.tasks.drawing import Labelled
from fastmod.tasks.parity import mnist_parity
from fastmod.tasks.sprites import pentomino

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 400  # images on a sheet
Settings = Mapping[str, str]


@dataclass(frozen=True)
class ImageTask:
    make: Callable[[int, int, Settings], Labelled]  # n, seed and settings
    labels: tuple[str, ...]  # meaning of each label
    settings: Mapping[str, str]  # name -> default


def _pentomino(n: int, seed: int, settings: Settings) -> Labelled:
    return pentomino(n, seed, settings["placement"])


def _parity(n: int, seed: int, settings: Settings) -> Labelled:
    verify = {"true": True, "false": False}.get(settings["verify"].lower())
    if verify is None:
        raise ValueError(f"verify: expected true or false, got {settings['verify']!r}")
    return mnist_parity(n, settings["split"], seed, settings["data"] or None, verify=verify)


TASKS = {
    "pentomino": ImageTask(_pentomino, ("0: one class", "1: one odd"), {"placement": "center"}),
    "mnist_parity": ImageTask(
        _parity, ("0: different", "1: same parity"), {"split": "train", "data": "", "verify": "true"}
    ),
}


def sheet(name: str, n: int, seed: int, settings: Settings) -> Figure:
    task = TASKS.get(name.replace("-", "_"))
    if task is None:
        raise StudyError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    for key in settings:
        if key not in task.settings:
            raise StudyError(f"unknown key {key!r}; known: {', '.join(task.settings)}")
    if not 1 <= n <= MOST:
        raise StudyError(f"--n: expected 1 to {MOST}, got {n}")
    draw.needed()  # fail before making images
    try:
        images, labels = task.make(n, seed, {**task.settings, **settings})
    except ValueError as error:
        raise StudyError(str(error)) from error
    return draw.images(images.movedim(1, -1).tolist(), [task.labels[label] for label in labels.tolist()])
