"""How much does it matter which beta is taken? Masks of one net for addition and multiplication, under several.

Of every beta three masks: of the whole task, whose accuracy tells when beta is too large, of addition and of
multiplication, which tell what would be called shared under it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import addmul, arithmetic, figures, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"
CHOSEN = 1e-4  # the paper's, for addition and multiplication


@dataclass(frozen=True)
class MaskBetaConfig(addmul.MaskAddMulConfig):
    betas: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto:
            raise StudyError("beta: expected betas to compare, got auto")


class MaskBetaTrial(addmul.MaskAddMulTrial):
    """Tasks are called ``add at 0.0001`` and so on."""

    config: MaskBetaConfig

    def __init__(self, config: MaskBetaConfig, name: str, seed: int, device: torch.device) -> None:
        kinds = (ALL, *addmul.OPERATIONS)
        self._kinds = {f"{kind} at {beta:g}": (kind, beta) for beta in config.betas for kind in kinds}
        self.tasks = tuple(self._kinds)
        super().__init__(config, name, seed, device)

    @property
    def beta(self) -> float:
        return CHOSEN if self.task is None else self._kinds[self.task][1]

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        kind = None if task is None else self._kinds[task][0]
        return super().batches_of(None if kind == ALL else kind, generator)

    def references(self) -> dict[str, list[str]]:
        other = {"add": "mul", "mul": "add"}
        return {
            task: [f"{other[kind]} at {beta:g}"] if kind in other else [] for task, (kind, beta) in self._kinds.items()
        }

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``sensitivity``: beta -> accuracy under the mask of the whole task, and the share of add's weights that
        mul keeps too."""
        found = super().result(last)
        sensitivity = {
            f"{beta:g}": {
                "accuracy": statistics.fmean(found["masked"][f"{ALL} at {beta:g}"].values()),
                "shared": found["sharing"][f"add at {beta:g}"]["total"],
            }
            for beta in self.config.betas
        }
        return {**found, "sensitivity": sensitivity}


class MaskBeta(arithmetic.ArithmeticStudy):
    name = "mask-beta"
    title = "Addition and multiplication under masks of several betas: does the choice matter?"
    paper = "Weight masks, C.2, Figure 8"
    models = ("FNN_small", "FNN", "FNN_large")
    default_models = ("FNN_small",)
    default_seeds = "0"
    defaults = MaskBetaConfig()
    presets: ClassVar = {model: {**arithmetic.PAPER} for model in models}
    printed_hidden: ClassVar = {"FNN_small": (2000,) * 4}  # Figure 8 has 2000 and 800
    quick: ClassVar = {
        "steps": 500, "mask_steps": 250, "evaluate_every": 250, "hidden": (100, 100), "betas": (1e-4, 1e-3),
    }  # fmt: skip

    def unused(self, config: MaskBetaConfig, model: str) -> Collection[str]:
        return {*super().unused(config, model), "beta"} - {"betas"}

    def trial(self, config: MaskBetaConfig, model: str, seed: int, device: torch.device) -> MaskBetaTrial:
        return MaskBetaTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            note = f"Figure 8; {self.note(outcome, model)}"
            for beta in (f"{beta:g}" for beta in outcome.config.betas):
                for key, text in (("accuracy", "accuracy, mask of the whole task"), ("shared", "shared by add")):
                    pick = tables.picker("sensitivity", beta, key)
                    rows.append(tables.row(outcome, model, f"beta {beta}, {text}", "Figure 8", pick, note))
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        points: dict[str, list[tuple[float, float, float]]] = {}
        for model in outcome.models():
            for beta in outcome.config.betas:
                picked = [tables.picker("sensitivity", f"{beta:g}", key) for key in ("accuracy", "shared")]
                accuracy, shared = (figures.bar(outcome.of(model), pick)[0] for pick in picked)
                points.setdefault(model, []).append((beta, accuracy, shared))
        if not points:
            return {}
        caption = "Accuracy under a mask of the whole task by its beta; colour: the share of add's weights (Figure 8)."
        return {"sensitivity": (figures.sensitivity(points, CHOSEN), caption)}
