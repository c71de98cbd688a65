"""Addition and multiplication modulo 10: how much of a skill is forgotten when only another is trained?

Preparation: addition on all pairs, multiplication on restricted ones (one digit low, the other high). Interference:
the other way round. The switch comes when the preparation accuracy reaches a threshold; 2000 steps later the accuracy
on the data that only preparation had (addition, both digits low or both high) is measured.

One trial serves all thresholds: when one is reached, model and optimiser are set aside, interference runs and is
measured, and preparation goes on from what was set aside.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Outcome, Row, Study
from fastmod.runs.trial import Trial
from fastmod.studies.blocks import grids, models
from fastmod.studies.blocks.models import PAPER, UNPRINTED
from fastmod.tasks import arithmetic
from fastmod.tasks.arithmetic import BLOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADD, MULTIPLY = 0, 1


@dataclass(frozen=True)
class AddMulConfig(models.ModelConfig):
    steps: int = 20_000  # of preparation at most; interference comes on top
    evaluate_every: int = 50
    interference: int = 2000
    loss: str = "cross_entropy"  # or squared: error against the one-hot block; with it nets forget far less
    thresholds: tuple[float, ...] = (0.7, 0.8, 0.9, 0.95, 1.0)
    width: int | None = None  # type: ignore[assignment]
    depth: int | None = None  # type: ignore[assignment]
    layers: int | None = None  # type: ignore[assignment]
    fnn_width: int | None = None  # type: ignore[assignment]
    fnn_depth: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "interference"):
            value = getattr(self, name)
            if value < 1 or value % self.evaluate_every:
                raise StudyError(f"{name}: expected a multiple of evaluate_every = {self.evaluate_every}, got {value}")
        if self.loss not in ("squared", "cross_entropy"):
            raise StudyError(f"loss: expected squared or cross_entropy, got {self.loss!r}")
        increasing = all(a < b for a, b in pairwise(self.thresholds))
        if not self.thresholds or not increasing or not all(0 <= t <= 1 for t in self.thresholds):
            raise StudyError(f"thresholds: expected increasing values in 0..1, got {self.thresholds}")


def architecture(config: AddMulConfig, model: str, seed: int) -> dict[str, Any]:
    """The paper averages over a grid of architectures; each seed draws one of them. Values that are set stay as set."""
    drawn = grids.architecture(grids.ADDMUL, model, seed)
    return {key: value for key, value in drawn.items() if getattr(config, key) is None}


def blocks_of(pairs: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Input blocks ``[..., 3, 10]`` and the digit ``[...]``: sum or product modulo 10."""
    digit = torch.where(task == ADD, pairs.sum(-1), pairs.prod(-1)) % 10
    return arithmetic.one_hot_blocks(pairs, task), digit


class AddMulTrial(Trial):
    """``extra``: ``left`` (steps of interference still to do), ``aside`` (model and optimiser of the preparation),
    ``reached`` (thresholds passed), ``prepared`` (steps of preparation), ``accuracies`` (found after interference)."""

    config: AddMulConfig

    def __init__(self, config: AddMulConfig, name: str, seed: int, device: torch.device) -> None:
        full = changed(config, architecture(config, name, seed))
        super().__init__(config, name, models.build(full, name, 3, 1, BLOCK), seed, device)
        self.penalty = models.RangePenalty(full, 3, 1) if name.startswith("SMFR") else None
        self.extra = {"left": 0, "aside": None, "reached": 0, "prepared": 0, "accuracies": []}

    @property
    def finished(self) -> bool:
        done = self.extra["reached"] == len(self.config.thresholds)
        return self.extra["left"] == 0 and (done or self.extra["prepared"] >= self.config.steps)

    @property
    def steps(self) -> int:
        """An upper bound that shrinks: preparation to its limit, and the interference of thresholds not reached yet."""
        if self.finished:
            return self.step
        ahead = len(self.config.thresholds) - self.extra["reached"]
        preparation = self.config.steps - self.extra["prepared"]
        return self.step + self.extra["left"] + preparation + ahead * self.config.interference

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (self.config.chunk, self.config.batch)
        task = torch.randint(2, shape, generator=generator, device=self.device)
        uniform = arithmetic.uniform_pairs(shape, generator)
        restricted = arithmetic.restricted_pairs(shape, generator)
        limited = MULTIPLY if self.extra["left"] == 0 else ADD
        blocks, digit = blocks_of(torch.where((task == limited).unsqueeze(-1), restricted, uniform), task)
        return blocks, digit

    def loss(self, blocks: Tensor, digit: Tensor) -> Tensor:  # type: ignore[override]
        answer = self.model(blocks)[:, 0]
        if self.config.loss == "squared":
            error = F.mse_loss(answer, arithmetic.one_hot(digit))
        else:
            error = F.cross_entropy(answer, digit)
        return error + (self.penalty(self.model, len(blocks)) if self.penalty else 0.0)

    def evaluate(self) -> dict[str, float]:
        every = arithmetic.all_pairs(self.device)
        excluded = arithmetic.excluded_pairs(self.device)
        allowed = arithmetic.allowed_pairs(self.device)
        interfering = self.extra["left"] > 0
        parts = [(every, MULTIPLY if interfering else ADD), (allowed, ADD if interfering else MULTIPLY)]
        return {
            "accuracy": sum(self._accuracy(*part) for part in parts) / 2,
            "preparation_accuracy": self._accuracy(excluded, ADD),
            "interfering": float(interfering),
            **models.gates(self.model),
        }

    def _accuracy(self, pairs: Tensor, task: int) -> float:
        blocks, digit = blocks_of(pairs, torch.full((len(pairs),), task, device=self.device))
        return (self.model(blocks)[:, 0].argmax(-1) == digit).float().mean().item()

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        extra, config = self.extra, self.config
        if extra["left"]:
            extra["left"] -= config.evaluate_every
            if extra["left"] > 0:
                return
            extra["left"] = 0
            extra["accuracies"].append(metrics["preparation_accuracy"])
            aside, extra["aside"] = extra["aside"], None
            self.model.load_state_dict(aside["model"])
            self.optimizer.load_state_dict(aside["optimizer"])
            metrics = {"accuracy": aside["accuracy"]}
        else:
            extra["prepared"] += config.evaluate_every
        # The same preparation may have passed several thresholds at once.
        if extra["reached"] < len(config.thresholds) and metrics["accuracy"] >= config.thresholds[extra["reached"]]:
            kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            extra["aside"] = copy.deepcopy(kept) | {"accuracy": metrics["accuracy"]}
            extra["reached"] += 1
            extra["left"] = config.interference

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        found = zip(self.config.thresholds, self.extra["accuracies"], strict=False)
        return {f"preparation_{t:g}": value for t, value in found} | {
            "architecture": {
                key: drawn if getattr(self.config, key) is None else getattr(self.config, key)
                for key, drawn in grids.architecture(grids.ADDMUL, self.name, self.seed).items()
            },
            "prepared": self.extra["prepared"],
        }


class AddMul(Study):
    name = "addmul"
    title = "Addition and multiplication: how much does interference erase?"
    paper = "Block-Operations, section 5.1, Tables 1, 4 and 5"
    models = ("SMFR_softmax", "SMFR_gumbel", "FNN")
    default_models = models
    default_seeds = "0-11"
    defaults = AddMulConfig()
    unprinted = UNPRINTED
    presets: ClassVar = {
        model: {**PAPER, "thresholds": (0.7, 0.8, 0.9, 0.95, 1.0), "interference": 2000} for model in models
    }
    quick: ClassVar = {"steps": 500, "interference": 100, "thresholds": (0.2, 0.3)}
    grids: ClassVar = grids.named(grids.ADDMUL)
    criterion = ""  # all that it measures is what it reports
    blocks = (("X", "Y", "task"), ("result",))

    _PRINTED: ClassVar = {
        "FNN": ("0.032 ± 0.0034", "0.056 ± 0.0042", "0.123 ± 0.0068", "0.202 ± 0.0105", "0.350 ± 0.0157"),
        "SMFR_softmax": ("0.142 ± 0.0101", "0.184 ± 0.0112", "0.259 ± 0.0137", "0.326 ± 0.0143", "0.434 ± 0.0179"),
        "SMFR_gumbel": ("0.088 ± 0.0080", "0.119 ± 0.0099", "0.208 ± 0.0113", "0.292 ± 0.0158", "0.395 ± 0.0182"),
    }
    _RATIO = ("4.44", "3.29", "2.11", "1.61", "1.24")
    _THRESHOLDS = (0.7, 0.8, 0.9, 0.95, 1.0)
    _BY_SIZE: ClassVar = {  # Table 4: HIGH, MID, LOW
        "FNN": (
            "0.054 0.024 0.035", "0.089 0.053 0.052", "0.179 0.134 0.098", "0.325 0.223 0.150", "0.468 0.413 0.259",
        ),
        "SMFR_softmax": (
            "0.204 0.146 0.107", "0.186 0.205 0.116", "0.300 0.274 0.198", "0.346 0.349 0.245", "0.450 0.448 0.382",
        ),
        "SMFR_gumbel": (
            "0.146 0.094 0.049", "0.118 0.138 0.063", "0.266 0.232 0.109", "0.274 0.333 0.172", "0.408 0.415 0.327",
        ),
    }  # fmt: skip
    _BY_LAYERS = (
        "0.099 0.134 0.192",
        "0.125 0.216 0.210",
        "0.194 0.299 0.284",
        "0.275 0.365 0.338",
        "0.365 0.489 0.449",
    )

    def unused(self, config: AddMulConfig, model: str) -> Collection[str]:
        return models.unused(config, model)

    def trial(self, config: AddMulConfig, model: str, seed: int, device: torch.device) -> AddMulTrial:
        return AddMulTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        thresholds = self._thresholds(outcome)
        for threshold in thresholds:
            place = self._THRESHOLDS.index(threshold) if threshold in self._THRESHOLDS else None
            mean = {}
            for model in outcome.models():
                printed = "-" if place is None else self._PRINTED[model][place]
                name = f"threshold {threshold:g}, {model}"
                row = outcome.row(name, printed, outcome.of(model), f"preparation_{threshold:g}", "Table 1")
                rows.append(row)
                if row.values:
                    mean[model] = row
            if "SMFR_softmax" in mean and "FNN" in mean and mean["FNN"].mean > 0:
                ours, fnn = mean["SMFR_softmax"], mean["FNN"]
                printed = "-" if place is None else self._RATIO[place]
                name = f"threshold {threshold:g}, SMFR_softmax / FNN"
                both = ours.trials + fnn.trials
                minutes = ours.minutes + fnn.minutes
                rows.append(Row(name, printed, [ours.mean / fnn.mean], ours.steps, minutes, "Table 1", both))
        for threshold in thresholds:
            if threshold in self._THRESHOLDS:
                rows += self._breakdown(outcome, threshold, self._THRESHOLDS.index(threshold))
        return rows

    def _thresholds(self, outcome: Outcome) -> tuple[float, ...]:
        """The same for all models."""
        return self.config_of(outcome.config, self.models[0]).thresholds

    def _breakdown(self, outcome: Outcome, threshold: float, place: int) -> list[Row]:
        """The rows of Tables 4 and 5 that some trial falls into."""
        key, rows = f"preparation_{threshold:g}", []
        for model in outcome.models():
            for size, printed in zip(grids.SIZES, self._BY_SIZE[model][place].split(), strict=True):
                some = [record for record in outcome.of(model) if grids.size(record) == size]
                rows.append(outcome.row(f"threshold {threshold:g}, {model}, {size}", printed, some, key, "Table 4"))
        inside = outcome.of("SMFR_softmax") + outcome.of("SMFR_gumbel")
        for layers, printed in zip((1, 2, 3), self._BY_LAYERS[place].split(), strict=True):
            some = [record for record in inside if record.result["architecture"].get("layers") == layers]
            name = f"threshold {threshold:g}, SMFR, {layers} hidden layer{'s' if layers > 1 else ''}"
            rows.append(outcome.row(name, printed, some, key, "Table 5"))
        return [row for row in rows if row.values]

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        from fastmod.runs import draw

        groups = {}
        thresholds = self._thresholds(outcome)
        for model in outcome.models():
            rows = [outcome.row("", "", outcome.of(model), f"preparation_{t:g}") for t in thresholds]
            groups[model] = [(row.mean if row.values else 0.0, row.error or 0.0) for row in rows]
        labels = [f"{t:g}" for t in thresholds]
        figure = draw.bars(labels, groups, "threshold", "preparation-data accuracy")
        return {"interference": (figure, "What is left after interference, by the threshold of the switch (Table 1).")}

    def examples(self, config: AddMulConfig, device: torch.device) -> dict[str, Tensor]:
        pairs = arithmetic.all_pairs(device)
        tasks = {"X + Y": ADD, "X * Y": MULTIPLY}
        return {name: blocks_of(pairs, torch.full((100,), task, device=device))[0] for name, task in tasks.items()}
