"""CIFAR-10 under weight masks: which weights of a CNN serve one class alone?

A control mask is learned on all classes, then one mask per class on the images of the nine others. In these the output
layer keeps the control's mask, or the class would lose its way out; what is missing are feature detectors that no
other class needs. The change of the confusion matrix shows what that class is taken for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.data.cached import cached
from fastmod.data.cifar import CIFAR10, CLASSES, load_cifar10
from fastmod.data.photographs import PLACES, crop_and_flip
from fastmod.masks import MaskedModel
from fastmod.models import CNN, ResNet
from fastmod.optim import Adam
from fastmod.runs import draw
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import class_removal as removal
from fastmod.studies.masks import figures, masking, settings, tables
from fastmod.studies.masks.class_removal import ALL
from fastmod.studies.masks.figures import bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CERTAIN = 30.0  # a logit that no draw contradicts
_EVALUATED = 2000  # test images in the course of training; all of them at the end
_SGD_LR = 0.1  # of the ResNet, to begin with

#: The paper's C.7, of 50000 images; C.1 for what it does not print there. The sweep that its authors published for the
#: CNN has a beta of 3e-4.
_ALL = {
    "batch": 128, "clip": 1.0, "lr": 1e-3, "lr_end": 1.0, "mask_lr_end": 1.0, "mask_init": 2.0, "samples": 4,
    "removed": CLASSES,
}  # fmt: skip
_CNN = {
    **_ALL, "steps": 20_000, "mask_steps": 20_000, "mask_batch": None, "mask_lr": 1e-3, "beta": 1e-4,
    "channels": (32, 64, 128, 256),
}  # fmt: skip
PAPER: Mapping[str, Mapping[str, Any]] = {
    "CNN": _CNN,
    "CNN_dropout": _CNN,
    "ResNet110": {
        **_ALL, "steps": 64_000, "mask_steps": 30_000, "mask_batch": 256, "mask_lr": 0.03, "beta": 2e-5, "depth": 110,
    },
}  # fmt: skip


_FIGURE = {"CNN_dropout": "Figure 19", "CNN": "Figure 20", "ResNet110": "Figure 21"}


@dataclass(frozen=True)
class MaskCifarConfig(settings.MaskConfig):
    steps: int = 2400
    mask_steps: int = 400
    evaluate_every: int = 200
    mask_lr: float = 3e-2  # of fewer steps than the paper's, so each is longer
    beta: float | str = 5e-4
    channels: tuple[int, ...] = (16, 32, 64, 128)  # of the CNN's convolutions; the paper's: 32,64,128,256
    depth: int = 110  # of the ResNet
    removed: tuple[str, ...] = CLASSES  # classes to learn a mask without
    data: str | None = None  # folder of CIFAR-10; none: FASTMOD_DATA

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.channels) != 4 or min(self.channels) < 1:
            raise StudyError(f"channels: expected four sizes of 1 or more, got {self.channels}")
        if not self.removed or len(set(self.removed)) < len(self.removed) or not set(self.removed) <= set(CLASSES):
            raise StudyError(f"removed: expected different classes of {', '.join(CLASSES)}, got {self.removed}")


@cached()
def _images(root: str | None) -> CIFAR10:
    return load_cifar10(root)


def read(config: MaskCifarConfig) -> CIFAR10:
    return _images(config.data)


_WHOLE = "50000 training and 10000 test images"


def shortfall(result: Mapping[str, Any]) -> str:
    """What was not there of CIFAR-10's images."""
    images = result.get("images", _WHOLE)
    return "" if images == _WHOLE else f"{images} (50000 and 10000)"


class MaskCifarTrial(masking.MaskTrial):
    config: MaskCifarConfig

    def __init__(self, config: MaskCifarConfig, name: str, seed: int, device: torch.device) -> None:
        self.tasks = self.tasks_of(config, seed)
        data = CIFAR10(*(tensor.to(device) for tensor in read(config)))
        self.data = data
        pixels = data.train_images.transpose(0, 1).flatten(1).float()  # [3, ...]
        self.mean, self.deviation = pixels.mean(1).view(3, 1, 1), pixels.std(1).view(3, 1, 1).clamp(min=1.0)
        learned = torch.arange(len(data.train_labels), device=device)
        # To pick beta on: images that nothing is learned from, the last ones.
        self.held = learned[len(learned) - len(learned) // 10 if config.auto else len(learned) :]
        learned = learned[: len(learned) - len(self.held)]
        self.images_of: dict[str | None, Tensor] = {None: learned}
        for task in self.tasks:
            classes = torch.tensor([CLASSES.index(name) for name in self.classes_of(task)], device=device)
            self.images_of[task] = learned[torch.isin(data.train_labels[learned], classes)]
            if not len(self.images_of[task]):
                raise StudyError(f"CIFAR-10: no training images for the mask of {task}")
        super().__init__(config, name, seed, device)

    def tasks_of(self, config: MaskCifarConfig, seed: int) -> tuple[str, ...]:
        return (ALL, *config.removed)

    def classes_of(self, task: str) -> Sequence[str]:
        """Whose images the mask of a task is learned on."""
        return [name for name in CLASSES if name != task]

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.name != "ResNet110":
            return super().make_optimizer()
        return torch.optim.SGD(self.model.parameters(), _SGD_LR, 0.9, weight_decay=1e-4)  # unclipped, as He et al.

    @property
    def lr(self) -> float:
        if self.name != "ResNet110":
            return self.config.lr
        return _SGD_LR / 10 ** sum(self.step >= self.config.steps * part for part in (0.5, 0.75))

    def net(self) -> nn.Module:
        if self.name == "ResNet110":
            return ResNet(self.config.depth)
        return CNN(self.config.channels, dropout=self.name == "CNN_dropout")

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Which images ``[chunk, B]``, and for the ResNet where to crop and whether to flip them ``[chunk, B, 3]``."""
        shape = (self.config.chunk, self.batch_of(task))
        shown = self.images_of[task]
        index = shown[torch.randint(len(shown), shape, generator=generator, device=self.device)]
        if self.name != "ResNet110":
            return (index,)
        return index, torch.randint(PLACES, (*shape, 3), generator=generator, device=self.device)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        index, *places = batch
        images = self._scaled(self.data.train_images[index])
        if places:
            images = crop_and_flip(images, places[0])
        return F.cross_entropy(model(images), self.data.train_labels[index])

    def _scaled(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.deviation

    # ---- masks

    def mask_options(self) -> dict[str, Any]:
        return {"mask_bias": True}

    def begin_mask(self, task: str) -> None:
        """Without a class, the output layer has the control's masks and keeps them."""
        if task == ALL:
            return
        assert self.masked is not None
        control = self.masks()[ALL]
        for name, logits in self.masked.named_logits():
            if name.startswith("output."):
                with torch.no_grad():
                    logits.copy_(torch.where(control[name], _CERTAIN, -_CERTAIN))
                logits.requires_grad_(False)

    def make_mask_optimizer(self, masked: MaskedModel) -> Adam:
        free = [logits for logits in masked.parameters() if logits.requires_grad]
        return Adam(free, self.config.mask_lr, max_norm=self.config.clip)

    # ---- measures

    def confusion(self, model: nn.Module) -> Tensor:
        """Shares ``[10, 10]`` of each true class (rows) that are taken for each class."""
        count = None if self.finished else _EVALUATED
        return self._confusion(model, self.data.test_images[:count], self.data.test_labels[:count])

    def validation_accuracy(self, model: nn.Module) -> float:
        held = self._confusion(model, self.data.train_images[self.held], self.data.train_labels[self.held])
        return held.diagonal().mean().item()

    def _confusion(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        predictions = torch.cat([model(self._scaled(some)).argmax(-1) for some in images.split(500)])
        counts = torch.bincount(labels * len(CLASSES) + predictions, minlength=len(CLASSES) ** 2)
        counts = counts.view(len(CLASSES), -1).double()
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Per class, and their mean as ``all``."""
        each = self.confusion(model).diagonal()
        return {ALL: each.mean().item(), **dict(zip(CLASSES, each.tolist(), strict=True))}

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``confusion``: mask -> matrix, and ``images``: how many there were."""
        found = super().result(last)
        confusion = {}
        for task, mask in self.masks().items():
            assert self.masked is not None
            with self.masked.using(mask):
                confusion[task] = self.confusion(self.masked).tolist()
        return {**found, "confusion": confusion, "images": self.data.described}


class MaskCifar(settings.MaskStudy):
    name = "mask-cifar"
    title = "CIFAR-10 under weight masks: which weights serve one class alone?"
    paper = "Weight masks, section 5 and C.7, Figures 6 and 18 to 21"
    models = ("CNN", "CNN_dropout", "ResNet110")
    default_models = ("CNN", "CNN_dropout")
    default_seeds = "0"
    defaults = MaskCifarConfig()
    read: ClassVar = {"CNN": ("channels",), "ResNet110": ("depth",)}
    presets = PAPER
    quick: ClassVar = {
        "steps": 200, "mask_steps": 100, "evaluate_every": 100, "removed": ("airplane", "cat"),
        "channels": (8, 16, 32, 64),
    }  # fmt: skip

    _DROPS: ClassVar = {
        "CNN": "30-40 % less than with dropout",
        "CNN_dropout": "- (as accuracy, 0.4 to 0.6: Figure 19)",
        "ResNet110": "up to almost 1",
    }

    def prepare(self, config: MaskCifarConfig) -> None:
        read(config)

    def shortfall(self, config: MaskCifarConfig, result: Mapping[str, Any]) -> str:
        return shortfall(result)

    def trial(self, config: MaskCifarConfig, model: str, seed: int, device: torch.device) -> MaskCifarTrial:
        return MaskCifarTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows: list[Row] = []
        for model in outcome.models():
            lines: list[tuple[str, str, Callable[[dict[str, Any]], float | None]]]
            first = outcome.of(model)[0]
            results = [record.result for record in outcome.of(model)]
            note = f"{first.result['images']}; {self.setting_of(outcome.config, model, results)}"
            printed = "0.93" if model == "ResNet110" else "-"
            lines = [
                ("test, no mask", printed, lambda r: r["accuracy"][ALL]),
                ("test, mask of all classes", printed, lambda r: r["masked"][ALL][ALL]),
                ("removed class: share of its accuracy lost", self._DROPS[model], removal.mean_relative),
                ("other classes: accuracy lost", "a small drop", removal.mean_others),
                ("largest drop of another class / the removed one's", "Figure 6b", removal.mean_ratio),
                ("removed classes that lose most of all", "1 (Figure 6)", removal.lose_most),
            ]
            for name in removal.removed_classes(first.result):
                lines.append((f"without {name}: its accuracy lost", _FIGURE[model], removal.own_drop(name)))
                lines.append((f"without {name}: largest other drop / its drop", "Figure 6b", removal.other(name)))
            rows += [tables.row(outcome, model, *line, note) for line in lines]
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        found: figures.Figures = {}
        names = [name for name in CLASSES if name in outcome.config.removed]
        models = outcome.models()
        for stem, measure, label, caption in (
            ("drops", removal.relative, "share of its accuracy lost", "under the mask learned without it (Figure 6a)"),
            (
                "others",
                removal.other,
                "other / its drop",
                "of another class, relative to the removed one's (Figure 6b)",
            ),
        ):
            if models:
                groups = {model: [bar(outcome.of(model), measure(name)) for name in names] for model in models}
                figure = draw.bars(names, groups, "removed class", label)
                figure.axes[0].tick_params(axis="x", labelrotation=45)
                what = "Share of its accuracy that a class loses" if stem == "drops" else "Largest relative drop"
                found[stem] = (figure, f"{what} {caption}.")
        if models:
            control = {model: removal.mean_confusion(outcome.of(model)) for model in models}
            found["control"] = (
                figures.confusion(control, CLASSES, signed=False),
                "Confusion matrix (rows: true class) under the mask of all classes (Figure 18).",
            )
        for model in models:
            records = outcome.of(model)
            changes = {name: removal.mean_confusion(records, name) for name in names}
            what = (
                f"change of the confusion matrix (rows: true class) when the class above is removed ({_FIGURE[model]})"
            )
            found[f"confusion_{model}"] = (figures.confusion(changes, CLASSES), f"{model}: {what}.")
            found[f"histogram_{model}"] = (
                figures.probabilities(records),
                f"{model}: how sure the masks are of what they keep.",
            )
        return found
