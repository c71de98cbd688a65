"""One task: learned mixtures of templates compared with fixed signatures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastmod.data.photographs import PLACES, crop_and_flip
from fastmod.models import IsometricNet
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Record, Row, Study
from fastmod.studies.comp import reports, sources
from fastmod.studies.comp.training import CompConfig, CompTrial, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASETS = ("cifar10", "cifar100", "fashion")
_MOVED = ("cifar10", "cifar100")  # crops and flips
TITLES = {
    "mixture": "mixture",
    "cyclic": "cyclic",
    "sequential": "sequential",
    "random": "random",
    "progressive": "progressive",
    "clustered": "mixture, clustering regulariser",
    "entropy": "mixture, entropy regulariser",
    "tanh": "mixture by tanh",
    "none": "mixture without nonlinearity",
    "few_layers": "as many layers as templates",
}
#: Tables 5 and 6 of the paper, CIFAR-100, 24 channels: (K, L) -> cyclic, sequential, random, mixture.
_TABLE_5 = {
    (2, 4): (60.6, 61.0, 60.5, 61.1), (2, 8): (61.6, 63.2, 61.7, 62.5), (2, 16): (62.4, 64.1, 64.1, 63.4),
    (2, 32): (63.7, 65.2, 64.2, 64.9), (4, 8): (64.0, 65.1, 65.5, 64.1), (4, 16): (63.3, 66.7, 65.1, 66.4),
    (4, 32): (64.9, 65.5, 63.7, 66.2), (8, 16): (65.3, 67.3, 66.5, 67.0), (8, 32): (66.2, 67.4, 66.6, 66.4),
}  # fmt: skip
_TABLE_6 = {(4, 12): (65.7, 67.0, math.nan, 67.3), (4, 16): (64.9, 67.6, math.nan, 67.6)}
_KINDS = ("cyclic", "sequential", "random", "mixture")
#: Table 1, ImageNet: K -> accuracy with K layers, and with K templates in more layers.
_TABLE_1 = {8: ("68.3", "70.6 (8 in 16)"), 16: ("71.7", "72.8 (16 in 48)")}


@dataclass(frozen=True)
class SingleConfig(CompConfig):
    steps: int = 1500
    batch: int = 64
    evaluate_every: int = 500
    side: int = 32
    colours: int = 3
    dataset: str = "cifar10"  # or cifar100, fashion
    cluster: float = 1e-3  # weight of the clustering regulariser in `clustered`
    entropy: float = 1e-2  # weight of the entropy in `entropy`
    into_blocks: bool = False  # each block also reads the input adapter's output (Table 6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset not in DATASETS:
            raise StudyError(f"dataset: expected one of {', '.join(DATASETS)}, got {self.dataset!r}")
        for name in ("cluster", "entropy"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StudyError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.layers < self.templates:
            raise StudyError(f"layers: expected at least templates = {self.templates}, got {self.layers}")


def build(config: SingleConfig, model: str, seed: int) -> IsometricNet:
    fixed = model if model in ("cyclic", "sequential", "random", "progressive") else None
    few = model == "few_layers"
    return IsometricNet(
        config.channels, config.templates if few else config.layers, config.templates,
        sources.classes_of(config.dataset), se=config.se, in_channels=config.colours, patch=config.patch,
        dropout=config.dropout, adapter_into_blocks=config.into_blocks,
        mixing=model if model in ("tanh", "none") else "softmax", signature="sequential" if few else fixed,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


class SingleTrial(CompTrial):
    config: SingleConfig

    def __init__(self, config: SingleConfig, name: str, seed: int, device: torch.device) -> None:
        task = config.task(config.dataset)
        super().__init__(config, name, build(config, name, seed), seed, device, {config.dataset: task})

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        (index,) = super().batches(generator)
        if self.config.dataset not in _MOVED:
            return (index,)
        shape = (len(index), self.config.batch, 3)
        return index, torch.randint(PLACES, shape, generator=generator, device=self.device)

    def moved(self, images: Tensor, *moves: Tensor) -> Tensor:
        return crop_and_flip(images[0], *moves)[None] if moves else images

    def penalty(self) -> Tensor | float:
        if self.name == "clustered":
            return self.config.cluster * self.model.cluster_penalty()
        return self.config.entropy * self.model.entropy_penalty() if self.name == "entropy" else 0.0

    def evaluate(self) -> dict[str, float]:
        found = super().evaluate()
        if self.model.body.logits is not None:
            xi = self.mixtures()[self.config.dataset]
            found |= {"above_0.8": reports.above(xi, 0.8), "above_0.95": reports.above(xi, 0.95)}
        return found

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        if "midway" not in self.extra and 2 * self.step >= self.steps:
            self.extra["midway"] = self.mixtures()[self.config.dataset]

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        found = super().result(last)
        if self.model.body.logits is not None:
            own = found["mixtures"].pop(self.config.dataset)
            found["mixtures"] = {"halfway": self.extra["midway"], "at the end": own}
        net, task = self.evaluated, self.tasks[self.config.dataset]
        if self.model.body.logits is not None and net.body.mixing == "softmax":
            found["hardened"] = measure(net.harden().eval(), task, 0, None, self.device)[1]
        return {**found, **self.reordered(net)}

    def reordered(self, net: IsometricNet) -> dict[str, float]:
        """Accuracy with two neighbouring layers swapped (means over pairs of the same template and of different ones)
        and with all layers reversed or shuffled."""
        count, signature = net.body.layers, net.signature()
        task = self.tasks[self.config.dataset]

        def accuracy(order: list[int]) -> float:
            return measure(net, task, 0, _REORDERED, self.device, order=order)[1]

        swaps: dict[bool, list[float]] = {True: [], False: []}
        for first in range(count - 1):
            order = list(range(count))
            order[first], order[first + 1] = first + 1, first
            swaps[signature[first] == signature[first + 1]].append(accuracy(order))
        generator = torch.Generator().manual_seed(self.seed)
        found = {
            "in_order": accuracy(list(range(count))),
            "reversed": accuracy(list(range(count))[::-1]),
            "shuffled": accuracy(torch.randperm(count, generator=generator).tolist()),
        }
        for same, name in ((True, "swapped_same"), (False, "swapped_different")):
            if swaps[same]:
                found[name] = statistics.fmean(swaps[same])
        return found


_REORDERED = 2000  # test images per order of layers


class CompSingle(Study):
    name = "comp-single"
    title = "One task: is a learned mixture of templates as good as the best order of them by hand?"
    paper = "Compositional models, Tables 1, 5, 6, Figures 3, 4"
    models = tuple(TITLES)
    default_models = ("mixture", "cyclic", "sequential", "random", "clustered")
    default_seeds = "0-1"
    defaults = SingleConfig()
    quick: ClassVar[dict[str, Any]] = {
        "steps": 40, "evaluate_every": 20, "layers": 4, "templates": 2, "train_images": 500, "test_images": 300,
    }  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        model: {
            "dataset": "cifar100",
            "steps": 100_000,
            "batch": 128,
            "schedule": "paper",
            "average": 0.999,
            "lr": 0.02,
            "logit_rate": 1.0,
        }
        for model in models
    }

    def prepare(self, config: SingleConfig) -> None:
        config = self.config_of(config, "mixture")
        sources.read(config.dataset, config.place)

    def trial(self, config: SingleConfig, model: str, seed: int, device: torch.device) -> SingleTrial:
        return SingleTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            config = self.config_of(outcome.config, model)
            records, title = outcome.of(model), TITLES[model]
            note = _note(config, records, self.setting(outcome.config, model))
            rows.append(outcome.row(f"{title}, test accuracy (%)", _printed(config, model), records, "accuracy", note))
            for key, name, paper in _MEASURES:
                if any(key in record.result for record in records) and not (key in _ORDERS and model not in _LOOKED_AT):
                    rows.append(outcome.row(f"{title}, {name}", paper, records, key))
        return rows + _differences(outcome, self.config_of(outcome.config, "mixture"))

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        return {
            **reports.curves(
                outcome, "accuracy", TITLES, "test accuracy (%)", "Test accuracy (Figure 4 shows the last)."
            ),
            **reports.mixture_figures(outcome, TITLES),
        }


_MEASURES = (
    ("above_0.8", "share of layers with max xi > 0.8", "most"),
    ("above_0.95", "share of layers with max xi > 0.95", "-"),
    ("hardened", "accuracy at its signature, one template a layer (%)", "-"),
    ("in_order", f"layers in order, first {_REORDERED:,} test images (%)", "-"),
    ("swapped_same", "two neighbours of one template swapped (%)", "-"),
    ("swapped_different", "two neighbours of different templates swapped (%)", "-"),
    ("reversed", "layers in reverse (%)", "-"),
    ("shuffled", "layers shuffled (%)", "-"),
)
_ORDERS = ("in_order", "swapped_same", "swapped_different", "reversed", "shuffled")
_LOOKED_AT = ("mixture", "sequential")  # models whose other orders are in the table; result.json has all


def _printed(config: SingleConfig, model: str) -> str:
    cell = (config.templates, config.layers)
    if model in ("few_layers", "progressive"):
        pair = _TABLE_1.get(config.templates)
        return f"{pair[model == 'progressive']}, ImageNet" if pair else "-"
    table = _TABLE_6 if config.into_blocks else _TABLE_5
    if model not in _KINDS or cell not in table or math.isnan(value := table[cell][_KINDS.index(model)]):
        return "unstable" if model in ("tanh", "none") else "-"
    return f"{value}, CIFAR-100"


def _note(config: SingleConfig, records: list[Record], setting: str) -> str:
    images = f"{config.train_images:,} images" if config.train_images else "all images"
    return (
        f"{sources.title_of(config.dataset)}, {images}, K = {config.templates}, "
        f"L = {config.templates if records[0].model == 'few_layers' else config.layers}, "
        f"{records[0].parameters:,} parameters; {setting}"
    )


def _differences(outcome: Outcome, config: SingleConfig) -> list[Row]:
    """The claims of the paper's text: mixture minus each fixed signature, over seeds that both have."""
    found = []
    for other, claim in (("sequential", "-0.4 on average, at worst -1.0"), ("cyclic", "+1.1"), ("random", "+0.5")):
        own = {record.seed: record for record in outcome.of("mixture")}
        pairs = [(own[record.seed], record) for record in outcome.of(other) if record.seed in own]
        if pairs:
            values = [a.result["accuracy"] - b.result["accuracy"] for a, b in pairs]
            records = [record for pair in pairs for record in pair]
            note = f"K = {config.templates}, L = {config.layers}"
            row = reports.row(f"mixture - {other} (points)", f"{claim}, CIFAR-100", records, values, note)
            found.append(row)
    return found
