"""How stable are masks? Two of them for the same pair of CIFAR-10's classes, over the same net: what do they share?

They differ by the masks that are sampled and by the order of the images. The intersection over the union of their
weights would be 1 if chance had no part in them. Pairs, because their masks are the sparsest.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastmod.masks import iou
from fastmod.runs import draw
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import cifar, figures, measures, settings, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TWICE = ("first", "second")


@dataclass(frozen=True)
class MaskStabilityConfig(cifar.MaskCifarConfig):
    pairs: int = 3  # of classes, drawn by the trial's seed; two masks each

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.pairs <= 45:
            raise StudyError(f"pairs: expected 1 to 45, got {self.pairs}")


class MaskStabilityTrial(cifar.MaskCifarTrial):
    """Tasks are called ``cat+dog, first`` and ``cat+dog, second``."""

    config: MaskStabilityConfig

    def tasks_of(self, config: cifar.MaskCifarConfig, seed: int) -> tuple[str, ...]:
        assert isinstance(config, MaskStabilityConfig)
        drawn = random.Random(seed).sample(list(combinations(cifar.CLASSES, 2)), config.pairs)
        return tuple(f"{a}+{b}, {which}" for a, b in drawn for which in TWICE)

    def classes_of(self, task: str) -> Sequence[str]:
        return task.partition(",")[0].split("+")

    def begin_mask(self, task: str) -> None:
        """Every layer is free."""

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``iou``: pair -> layer -> intersection over union of its two masks, and ``pair_accuracy``: pair -> mean
        accuracy on its two classes, under both masks."""
        found, masks = super().result(last), self.masks()
        pairs = list(dict.fromkeys(task.partition(",")[0] for task in self.tasks))
        accuracy = {
            pair: statistics.fmean(found["masked"][f"{pair}, {w}"][c] for w in TWICE for c in pair.split("+"))
            for pair in pairs
        }
        both = {pair: iou(*(masks[f"{pair}, {which}"] for which in TWICE)) for pair in pairs}
        return {**found, "iou": {pair: measures.shares(s) for pair, s in both.items()}, "pair_accuracy": accuracy}


class MaskStability(settings.MaskStudy):
    name = "mask-stability"
    title = "Two masks for the same pair of classes: how much do they share?"
    paper = "Weight masks, B.1"
    models = ("CNN",)
    default_models = models
    default_seeds = "0"
    defaults = MaskStabilityConfig()
    presets: ClassVar = {
        "CNN": {**{k: v for k, v in cifar.PAPER["CNN"].items() if k != "removed"}, "pairs": 10},
    }
    quick: ClassVar = {
        "steps": 200, "mask_steps": 100, "evaluate_every": 100, "pairs": 2, "channels": (8, 16, 32, 64),
    }  # fmt: skip

    def prepare(self, config: MaskStabilityConfig) -> None:
        cifar.read(config)

    def shortfall(self, config: MaskStabilityConfig, result: Mapping[str, Any]) -> str:
        return cifar.shortfall(result)

    def trial(self, config: MaskStabilityConfig, model: str, seed: int, device: torch.device) -> MaskStabilityTrial:
        return MaskStabilityTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            records = outcome.of(model)
            note = f"{records[0].result['images']}; {self.note(outcome, model)}"
            totals = [share["total"] for record in records for share in record.result["iou"].values()]
            every = [total for total in totals if total is not None]
            minutes = sum(record.seconds for record in records) / 60
            name = f"{model}, intersection over union of two masks of a pair of classes"
            printed = "0.9326 ± 0.0096 (100 pairs)"
            rows.append(Row(name, printed, every, records[0].steps, minutes, note))
            text = "accuracy on the pair under its masks"
            rows.append(tables.row(outcome, model, text, "-", _mean_accuracy, note))
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        found: figures.Figures = {}
        for model in outcome.models():
            records = outcome.of(model)
            layers = [*tables.layer_names(records[0]), "total"]
            bars = [figures.bar(records, _mean_at(layer)) for layer in layers]
            figure = draw.bars(layers, {model: bars}, "layer", "intersection over union")
            figure.axes[0].tick_params(axis="x", labelrotation=45)
            found[f"iou_{model}"] = (figure, f"{model}: what two masks of the same pair of classes share, by layer.")
        return found


def _mean_accuracy(result: dict[str, Any]) -> float:
    return statistics.fmean(result["pair_accuracy"].values())


def _mean_at(layer: str) -> Callable[[dict[str, Any]], float | None]:
    """Of the layer over all pairs, but for those of which neither mask keeps anything there."""

    def pick(result: dict[str, Any]) -> float | None:
        found = [share[layer] for share in result["iou"].values() if share[layer] is not None]
        return statistics.fmean(found) if found else None

    return pick
