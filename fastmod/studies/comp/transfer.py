"""A new task for an existing bank: it gets its own mixture weights, norms and head. Where should they start?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.models import IsometricNet
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Record, Row, Study
from fastmod.studies.comp import reports, sources
from fastmod.studies.comp.sources import Task
from fastmod.studies.comp.stages import Stage, StagedTrial, recalibrate
from fastmod.studies.comp.training import CompConfig, measure
from fastmod.tasks import Labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"mixture": "mixture", "trunk_patches": "shared trunk with patches", "digits": "mixture, one set of labels"}
_FROZEN = "_frozen"  # suffix of stages that do not train the mixture weights
#: Initial shares of the new task if all tasks have the same labels (Table 9).
_INITS = ("random", "accuracy", "learned", "best")
_LEARNING_STEPS = 50
_RATED = 1000  # training images of the new task to rate each source's shares by


@dataclass(frozen=True)
class TransferConfig(CompConfig):
    steps: int = 1000  # on the first tasks
    tune_steps: int = 200  # on the new task, for each way to start
    tune_lr: float = 0.01
    batch: int = 16
    evaluate_every: int = 200
    train_images: int = 7000
    tune_images: int = 2000  # training images of the new task
    known: tuple[str, ...] = ("mnist", "mnist_boundary", "fashion", "fashion_boundary")
    related: str = "mnist"  # the known task most similar to the new one
    new: str = "kmnist"
    domains: tuple[str, ...] = ("original", "shear", "scale", "shot_noise")  # of MNIST, for the model digits

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune_steps < 1 or self.tune_steps % self.chunk:
            raise StudyError(f"tune_steps: expected a multiple of chunk = {self.chunk}, got {self.tune_steps}")
        if not self.tune_lr > 0 or not self.tune_images > 0:
            raise StudyError(
                f"tune_lr and tune_images: expected more than 0, got {self.tune_lr} and {self.tune_images}"
            )
        for name in (*self.known, self.new):
            if split(name)[0] not in sources.DATASETS:
                raise StudyError(f"known and new: expected data sets {', '.join(sources.DATASETS)}, got {name!r}")
        if self.related not in self.known or self.new in self.known:
            raise StudyError(f"related: expected one of known, and new none of them, got {self.related}, {self.new}")

    def new_task(self, dataset: str, domain: str = "original") -> Task:
        task = self.task(dataset, domain)
        return task._replace(train=Labelled(*(part[: self.tune_images] for part in task.train)))


def split(name: str) -> tuple[str, str]:
    """``fashion_boundary`` -> data set and domain."""
    dataset, _, domain = name.partition("_")
    return dataset, domain or "original"


class TransferTrial(StagedTrial):
    """Train only the new task's own shares, norms and head."""

    config: TransferConfig

    def __init__(self, config: TransferConfig, name: str, seed: int, device: torch.device) -> None:
        tasks = {task: config.task(*split(task)) for task in config.known}
        ways = [config.related] if name == "trunk_patches" else [*config.known, "random"]
        if name == "mixture":
            ways += [f"{way}{_FROZEN}" for way in ways]
        stages = [Stage("pretrained", config.steps), *(Stage(way, config.tune_steps) for way in ways)]
        super().__init__(config, name, seed, device, tasks, config.new_task(*split(config.new)), stages)

    def build(self, config: TransferConfig, name: str, seed: int) -> IsometricNet:
        trunk = name == "trunk_patches"
        return IsometricNet(
            config.channels, config.layers, config.layers if trunk else config.templates,
            [sources.classes_of(split(task)[0]) for task in config.known], len(config.known), config.se,
            in_channels=config.colours, patch=config.patch, dropout=config.dropout, norm="per_task",
            signature="sequential" if trunk else None, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def add_new(self, stage: Stage, resumed: bool) -> None:
        net, way = self.model, stage.name.removesuffix(_FROZEN)
        init: int | str = "uniform" if way == "random" else self.config.known.index(way)
        net.add_task(init, classes=self.new.classes)
        for name, parameter in net.named_parameters():
            own = name.startswith("head.") or "norm" in name
            parameter.requires_grad_(own or (name == "body.logits" and not stage.name.endswith(_FROZEN)))

    def make_optimizer(self) -> torch.optim.Optimizer:
        if not self.extra["stage"]:
            return super().make_optimizer()
        optimizer = self.rmsprop(self.model, self.config.tune_lr)
        for group in optimizer.param_groups:  # decay would shrink the other tasks' rows, which have no gradient
            group["weight_decay"] = 0.0
        return optimizer

    def outcome(self) -> dict[str, Any]:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad) // self.model.tasks
        found = {**super().outcome(), "trained": trained}
        if self.model.body.logits is not None:
            self.extra["mixtures"][f"new, from {self.stage.name}"] = self.evaluated.mixture(self.number).tolist()
        return found


class DigitsTrial(StagedTrial):
    """MNIST in several domains, then USPS, with a common head: train only the new task's shares."""

    config: TransferConfig

    def __init__(self, config: TransferConfig, name: str, seed: int, device: torch.device) -> None:
        tasks = {domain: config.task("mnist", domain) for domain in config.domains}
        stages = [Stage("pretrained", config.steps), *(Stage(way, config.tune_steps) for way in _INITS)]
        super().__init__(config, name, seed, device, tasks, config.new_task("usps"), stages)

    def build(self, config: TransferConfig, name: str, seed: int) -> IsometricNet:
        return IsometricNet(
            config.channels, config.layers, config.templates, 10, len(config.domains), config.se,
            in_channels=config.colours, patch=config.patch, dropout=config.dropout, output=(128, 256),
            shared_head=True, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def after_pretraining(self) -> None:
        """Rate each source's shares for the new task on some of its training images."""
        some = Labelled(*(part[:_RATED] for part in self.new.train))
        found = []
        for source in range(len(self.tasks)):
            net = self.pretrained()
            net.add_task(source)
            self._recalibrate(net)
            found.append(measure(net.eval(), self.new._replace(test=some), self.number, None, self.device)[1])
        self.extra["accuracies"] = found

    def _recalibrate(self, net: IsometricNet) -> None:
        recalibrate(net, self.number, self.new_data.images, self.config.batch * len(self.tasks), self.seed)

    def add_new(self, stage: Stage, resumed: bool) -> None:
        net, accuracies = self.model, self.extra.get("accuracies", [1.0] * len(self.tasks))
        if resumed:
            net.add_task(0)
        elif stage.name == "random":
            net.add_task("uniform")
        elif stage.name == "accuracy":
            net.add_task("accuracy", accuracies=accuracies)
        elif stage.name == "best":
            net.add_task(max(range(len(accuracies)), key=accuracies.__getitem__))
        else:
            net.add_task("learned", loss=self._learning_loss(), steps=_LEARNING_STEPS)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name == "body.logits")
        if not resumed:
            self._recalibrate(net)
            accuracy = measure(net.eval(), self.new, self.number, None, self.device)[1]
            net.train()
            self.extra["results"][stage.name] = {"initial": accuracy}

    def _learning_loss(self) -> Any:
        generator = self.generator("learned")
        index = self.new_data.draw(_LEARNING_STEPS, self.config.batch * len(self.tasks), generator)
        batches = iter(index[:, 0])

        def loss() -> Tensor:
            images, labels = self.new_data(next(batches))
            return F.cross_entropy(self.scores(self.model, images), labels)

        return loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.rmsprop(self.model, self.config.tune_lr if self.extra["stage"] else self.config.lr)

    def outcome(self) -> dict[str, Any]:
        self.extra["mixtures"][f"USPS, {self.stage.name}"] = self.evaluated.mixture(self.number).tolist()
        return {**super().outcome(), "trained": self.model.body.layers * self.model.body.bank.templates}


class CompTransfer(Study):
    name = "comp-transfer"
    title = "A new task for a bank of templates: where should its mixture begin, and is it worth training?"
    paper = "Compositional models, Tables 2, 9, 10"
    models = tuple(TITLES)
    default_models = models
    default_seeds = "0"
    criterion = ""  # there are no validation images
    defaults = TransferConfig()
    quick: ClassVar[dict[str, Any]] = {
        "steps": 20, "tune_steps": 10, "evaluate_every": 10, "batch": 4, "layers": 3, "templates": 3,
        "train_images": 200, "test_images": 100, "tune_images": 100,
    }  # fmt: skip
    #: The paper's printed settings; its photographs are not among our data sets.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        model: {
            "channels": 40, "layers": 16, "templates": 16, "batch": 32, "schedule": "paper", "steps": 100_000,
            "lr": 0.02, "logit_rate": 1.0,
            "tune_steps": 20_000, "average": 0.999, "train_images": 0, "tune_images": 60_000,
        }
        for model in models
    }  # fmt: skip

    def prepare(self, config: TransferConfig) -> None:
        for dataset in dict.fromkeys(["mnist", "usps", *(split(name)[0] for name in (*config.known, config.new))]):
            sources.read(dataset, config.place)

    def shortfall(self, config: TransferConfig, result: Mapping[str, Any]) -> str:
        return "not the paper's data"

    def trial(self, config: TransferConfig, model: str, seed: int, device: torch.device) -> StagedTrial:
        kind = DigitsTrial if model == "digits" else TransferTrial
        return kind(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows: list[Row] = []
        for model in outcome.models():
            config, records = self.config_of(outcome.config, model), outcome.of(model)
            rows += _digits_rows(config, records) if model == "digits" else _new_rows(config, model, records)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        return dict(reports.mixture_figures(outcome, TITLES))


def _accuracies(records: Sequence[Record], stage: str, key: str = "accuracy") -> list[float]:
    return [record.result["results"][stage][key] for record in records]


def _new_rows(config: TransferConfig, model: str, records: Sequence[Record]) -> list[Row]:
    """Compare the new task with Stanford Dogs, the paper's new task with the largest differences."""
    new, known = sources.title_of(*split(config.new)), [sources.title_of(*split(name)) for name in config.known]
    where = f"{config.tune_images:,} images, {config.tune_steps:,} steps; first {', '.join(known)}"
    if model == "trunk_patches":
        trained = records[0].result["results"][config.related]["trained"]
        note = f"{trained:,} parameters trained: norms and head; {where}; not the paper's data"
        printed = "55.6 (Dogs, Table 2), 63.2 (Table 10)"
        return [
            reports.row(
                f"{new}, BN + head of the trunk (%)", printed, records, _accuracies(records, config.related), note
            )
        ]
    rows = []
    beside = {
        config.related: "57.6 (Dogs, from the related ImageNet), 64.0 (Table 10)",
        "random": "significantly worse",
    }
    for way in [*config.known, "random"]:
        name = "random xi" if way == "random" else f"xi of {sources.title_of(*split(way))}"
        for suffix, kind in (("", "tuned"), (_FROZEN, "frozen")):
            trained = records[0].result["results"][way + suffix]["trained"]
            paper = beside.get(way, "36.5 to 42.4 (Dogs, from others)") if not suffix else "-"
            note = f"{trained:,} parameters trained; {where}; not the paper's data"
            values = _accuracies(records, way + suffix)
            rows.append(reports.row(f"{new}, {name}, {kind} (%)", paper, records, values, note))
    for suffix, kind in (("", "tuned"), (_FROZEN, "frozen")):
        pairs = zip(*(_accuracies(records, way + suffix) for way in (config.related, "random")), strict=True)
        name = f"{new}, xi of {sources.title_of(*split(config.related))} - random xi, {kind} (points)"
        rows.append(reports.row(name, "more than 0", records, [a - b for a, b in pairs]))
    return rows


def _digits_rows(config: TransferConfig, records: Sequence[Record]) -> list[Row]:
    printed = {"random": ("93.76", "96.05"), "accuracy": ("95.50", "96.37"), "learned": ("95.95", "96.61"),
               "best": ("95.81", "-")}  # fmt: skip
    rows = []
    for way in _INITS:
        trained = records[0].result["results"][way]["trained"]
        note = f"{trained} parameters trained; sources {', '.join(config.domains)} of MNIST; the paper has SVHN too"
        for key, name, paper in zip(("initial", "accuracy"), ("at first", "tuned"), printed[way], strict=True):
            values = _accuracies(records, way, key)
            rows.append(reports.row(f"USPS, xi by {_WAYS[way]}, {name} (%)", paper, records, values, note))
    return rows


_WAYS = {
    "random": "chance", "accuracy": "accuracy-based interpolation", "learned": "learned interpolation",
    "best": "the source that is best at first",
}  # fmt: skip
