"""Nine tasks with one bank: three data sets, each as original, boundaries and blurred. Which tasks share what?"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastmod.models import IsometricNet
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Record, Row, Study
from fastmod.studies.comp import reports, sources
from fastmod.studies.comp.training import CompConfig, CompTrial, measure
from fastmod.tasks import corruptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "trunk": "shared trunk",
    "trunk_patches": "shared trunk with patches",
    "mixture": "mixture",
    "mixture_patches": "mixture with patches",
    "diag": "mixture with patches, diag",
}
#: Table 8: final cross-entropy, summed over five data sets of photographs.
_PRINTED = {
    "trunk": "4.59", "trunk_patches": "4.48", "mixture": "4.29 (K = 32)", "mixture_patches": "4.6 (K = 16), 4.4 (32)",
    "diag": "4.48 (K = 16), 4.4 (32)",
}  # fmt: skip
_TRAIN_MEASURED = 1000  # training images per task for the final training loss


@dataclass(frozen=True)
class MultitaskConfig(CompConfig):
    steps: int = 1500
    batch: int = 16
    evaluate_every: int = 500
    layers: int = 9
    templates: int = 9
    channels: int = 16
    train_images: int = 7000
    logit_rate: float = 1.0  # at higher rates shares settle before related tasks meet, which costs accuracy
    datasets: tuple[str, ...] = ("mnist", "fashion", "kmnist")
    domains: tuple[str, ...] = ("original", "boundary", "blurred")
    cluster: float = 1e-4  # weight of the clustering regulariser for mixtures

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("datasets", sources.DATASETS), ("domains", corruptions.DOMAINS)):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or not set(values) <= set(known):
                raise StudyError(f"{name}: expected different ones of {', '.join(known)}, got {', '.join(values)}")
        if not 0 <= self.cluster < math.inf:
            raise StudyError(f"cluster: expected 0 or more, got {self.cluster}")

    @property
    def pairs(self) -> dict[str, tuple[str, str]]:
        """Name of a task -> its data set and domain."""
        return {f"{data}_{domain}": (data, domain) for data in self.datasets for domain in self.domains}


def build(config: MultitaskConfig, model: str, seed: int) -> IsometricNet:
    trunk = model.startswith("trunk")
    classes = [sources.classes_of(dataset) for dataset, _ in config.pairs.values()]
    return IsometricNet(
        config.channels, config.layers, config.layers if trunk else config.templates, classes, len(classes), config.se,
        in_channels=config.colours, patch=config.patch, dropout=config.dropout,
        norm="mixed" if model in ("trunk", "mixture") else "per_task", signature="sequential" if trunk else None,
        init="diag" if model == "diag" else "uniform", generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


class MultitaskTrial(CompTrial):
    config: MultitaskConfig

    def __init__(self, config: MultitaskConfig, name: str, seed: int, device: torch.device) -> None:
        tasks = {key: config.task(*pair) for key, pair in config.pairs.items()}
        super().__init__(config, name, build(config, name, seed), seed, device, tasks)

    def penalty(self) -> Tensor | float:
        if self.model.body.logits is None or not self.config.cluster:
            return 0.0
        return self.config.cluster * self.model.cluster_penalty()

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        found = super().result(last)
        shown = [task._replace(test=task.train) for task in self.tasks.values()]
        losses = [measure(self.evaluated, t, i, _TRAIN_MEASURED, self.device)[0] for i, t in enumerate(shown)]
        found["train_loss"] = sum(losses)
        if self.model.body.logits is not None:
            found |= shares(found["mixtures"], self.config.pairs)
            found["above_0.8"] = statistics.fmean(reports.above(xi, 0.8) for xi in found["mixtures"].values())
        else:
            del found["mixtures"]  # all tasks have the same signature, which the name shows
            found["mixtures"] = {"all tasks": self.mixtures()[next(iter(self.tasks))]}
        return found


def shares(mixtures: Mapping[str, reports.Mixture], pairs: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """``sharing_KIND_PLACE``: mean of ``sum_k min(xi_a, xi_b)`` over layers and pairs of tasks.

    PLACE: the first or the last third of the layers. KIND: pairs with only the domain in common, only the data set, or
    neither.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for a, b in itertools.combinations(pairs, 2):
        same_data, same_domain = (x == y for x, y in zip(pairs[a], pairs[b], strict=True))
        kind = "data" if same_data else "domain" if same_domain else "neither"
        found.setdefault(kind, []).append(reports.thirds(reports.sharing(mixtures[a], mixtures[b])))
    return {
        f"sharing_{kind}_{place}": statistics.fmean(values)
        for kind, several in found.items()
        for place, values in zip(("first", "last"), zip(*several, strict=True), strict=True)
    }


class CompMultitask(Study):
    name = "comp-multitask"
    title = "Nine tasks, one bank: do tasks of one domain share early layers, domains of one task late ones?"
    paper = "Compositional models, Table 8, Figure 2"
    models = tuple(TITLES)
    default_models = models
    default_seeds = "0"
    defaults = MultitaskConfig()
    quick: ClassVar[dict[str, Any]] = {
        "steps": 20, "evaluate_every": 10, "batch": 4, "layers": 3, "templates": 3, "train_images": 200,
        "test_images": 100,
    }  # fmt: skip
    #: The paper's printed settings; its photographs are not among our data sets.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        model: {
            "channels": 40, "layers": 16, "templates": 32, "batch": 32, "schedule": "paper", "steps": 100_000,
            "lr": 0.02, "logit_rate": 1.0,
            "average": 0.999, "train_images": 0,
        }
        for model in models
    }  # fmt: skip

    def prepare(self, config: MultitaskConfig) -> None:
        for dataset in config.datasets:
            sources.read(dataset, config.place)

    def shortfall(self, config: MultitaskConfig, result: Mapping[str, Any]) -> str:
        return "not the paper's data"

    def trial(self, config: MultitaskConfig, model: str, seed: int, device: torch.device) -> MultitaskTrial:
        return MultitaskTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            config, records, title = self.config_of(outcome.config, model), outcome.of(model), TITLES[model]
            note = _note(config, records)
            printed = f"{_PRINTED[model]}, five sets of photographs"
            rows.append(outcome.row(f"{title}, training loss, sum over tasks", printed, records, "train_loss", note))
            rows.append(outcome.row(f"{title}, mean test accuracy (%)", "-", records, "accuracy", note))
            rows += [outcome.row(f"{title}, {name}", paper, records, key) for key, name, paper in _kept(records)]
            rows += _differences(title, records)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        caption = "Test accuracy, the mean of all tasks, of 1,000 images each before the end."
        return {
            **reports.curves(outcome, "accuracy", TITLES, "mean test accuracy (%)", caption),
            **reports.mixture_figures(outcome, TITLES),
        }


def _kept(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Key, name and the paper's claim for each measure of sharing in the records."""
    kinds = {"domain": "same domain, other data set", "data": "same data set, other domain", "neither": "neither"}
    rows = [("above_0.8", "share of layers with max xi > 0.8", "-")]
    for place in ("first", "last"):
        claim = {"first": "domain", "last": "data"}[place]
        for kind, name in kinds.items():
            paper = "shared (Figure 2b)" if kind == claim else "-"
            rows.append((f"sharing_{kind}_{place}", f"sharing in the {place} third: {name}", paper))
    return [row for row in rows if any(row[0] in record.result for record in records)]


def _differences(title: str, records: Sequence[Record]) -> list[Row]:
    """Figure 2b's two claims as a number each: how much more tasks share due to their domain or data set."""
    rows = []
    for place, kind, name in (("first", "domain", "same domain"), ("last", "data", "same data set")):
        keys = (f"sharing_{kind}_{place}", f"sharing_neither_{place}")
        values = [r.result[keys[0]] - r.result[keys[1]] for r in records if all(key in r.result for key in keys)]
        if values:
            text = f"{title}, sharing in the {place} third: {name} - neither"
            rows.append(reports.row(text, "more than 0 (Figure 2b)", records, values))
    return rows


def _note(config: MultitaskConfig, records: Sequence[Record]) -> str:
    mixed = records[0].model not in ("trunk", "trunk_patches")
    return (
        f"K = {config.templates if mixed else config.layers}, L = {config.layers}, {config.channels} channels, "
        f"{records[0].parameters:,} parameters; not the paper's data"
    )
