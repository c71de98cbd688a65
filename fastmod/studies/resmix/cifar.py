"""CIFAR-10, CIFAR-100 and SVHN: is a mixture of experts worse than a plain net with as many parameters?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastmod.data import Photographs, cifar, load_cifar10, load_cifar100, load_svhn, svhn
from fastmod.data.cached import cached
from fastmod.data.photographs import PLACES, crop_and_flip
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row, Study
from fastmod.studies.resmix import nets, reports
from fastmod.studies.resmix.training import ResMixConfig, ResMixTrial
from fastmod.tasks import Labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _DataSet:
    title: str
    load: Callable[[str | None], Photographs]
    classes: tuple[str, ...]
    rate: float
    moved: bool  # crops and flips
    epochs: int  # the paper's
    images: str = "50000 training and 10000 test images"  # of the whole data set


#: The paper prints the rate only for SVHN; for CIFAR it tried five.
DATASETS = {
    "cifar10": _DataSet("CIFAR-10", load_cifar10, cifar.CLASSES, 0.1, True, 200),
    "cifar100": _DataSet("CIFAR-100", load_cifar100, tuple(map(str, range(cifar.FINE_CLASSES))), 0.1, True, 200),
    "svhn": _DataSet("SVHN", load_svhn, svhn.CLASSES, 0.01, False, 40, "73257 training and 26032 test images"),
}


@dataclass(frozen=True)
class ResMixCifarConfig(ResMixConfig):
    epochs: int = 6
    decays: tuple[float, ...] = (0.5, 0.75)
    dataset: str = "cifar10"  # or cifar100, svhn
    data: str | None = None  # folder of the data set; none: FASTMOD_DATA
    train_images: int = 0  # number of first images to use; 0: all
    test_images: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_images", "test_images"):
            if not 0 <= getattr(self, name) < 2**31:
                raise StudyError(f"{name}: expected 0 or more, below 2**31, got {getattr(self, name)}")
        if self.dataset not in DATASETS:
            raise StudyError(f"dataset: expected one of {', '.join(DATASETS)}, got {self.dataset!r}")


@cached(1)
def _images(dataset: str, root: str | None) -> Photographs:
    return DATASETS[dataset].load(root)


def _data(config: ResMixCifarConfig) -> Photographs:
    found = _images(config.dataset, config.data)
    train, test = (slice(count or None) for count in (config.train_images, config.test_images))
    return found._replace(
        train_images=found.train_images[train], train_labels=found.train_labels[train],
        test_images=found.test_images[test], test_labels=found.test_labels[test],
    )  # fmt: skip


class ResMixCifarTrial(ResMixTrial):
    config: ResMixCifarConfig
    most = 2000

    def moves(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        if not DATASETS[self.config.dataset].moved:
            return ()
        return (torch.randint(PLACES, (*shape, 3), generator=generator, device=self.device),)

    def moved(self, images: Tensor, *moves: Tensor) -> Tensor:
        return crop_and_flip(images, *moves) if moves else images

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        return {**super().result(last), "images": _data(self.config).described}


class ResMixCifar(Study):
    name = "resmix-cifar"
    title = "CIFAR-10, CIFAR-100, SVHN: what does a mixture of experts cost where features are shared?"
    paper = "ResMixNet, section 4.3, Table 3"
    models = ("ResMixNet_3_5", "ResNet50", "ResNet26")
    default_models = ("ResMixNet_3_5", "ResNet50")
    default_seeds = "0"
    criterion = ""  # there are no validation images
    defaults = ResMixCifarConfig()
    quick: ClassVar = {"steps": 20, "train_images": 640, "test_images": 250}

    #: Test accuracy in percent, one seed; the paper writes ResMixNet(3,5) as (5,3), depth first.
    _PRINTED: ClassVar[Mapping[tuple[str, str], str]] = {
        ("ResNet50", "cifar10"): "93.48",
        ("ResMixNet_3_5", "cifar10"): "92.74",
        ("ResNet50", "cifar100"): "71.81",
        ("ResMixNet_3_5", "cifar100"): "66.35",
        ("ResNet50", "svhn"): "95.45",
        ("ResMixNet_3_5", "svhn"): "95.58",
    }

    def prepare(self, config: ResMixCifarConfig) -> None:
        _data(config)

    def preset_of(self, config: ResMixCifarConfig, model: str) -> Mapping[str, Any]:
        return {"epochs": DATASETS[config.dataset].epochs}

    def printed_of(self, config: ResMixCifarConfig, model: str) -> Mapping[str, Any]:
        return {**self.preset_of(config, model), "dataset": config.dataset}  # the paper has all data sets

    def shortfall(self, config: ResMixCifarConfig, result: Mapping[str, Any]) -> str:
        whole = DATASETS[config.dataset].images
        images = result.get("images", whole)
        return "" if images == whole else f"{images} of {whole}"

    def trial(self, config: ResMixCifarConfig, model: str, seed: int, device: torch.device) -> ResMixCifarTrial:
        config = self.config_of(config, model)
        found, kind = _data(config), DATASETS[config.dataset]
        pixels = found.train_images.transpose(0, 1).flatten(1).float()  # [3, ...]
        scale = pixels.mean(1).view(3, 1, 1), pixels.std(1).view(3, 1, 1).clamp(min=1.0)
        parts = {
            "train": Labelled(found.train_images, found.train_labels),
            "test": Labelled(found.test_images, found.test_labels),
        }
        groups = {name: found.test_labels == number for number, name in enumerate(kind.classes)}
        return ResMixCifarTrial(
            config, model, seed, device, rate=kind.rate, classes=len(kind.classes), stem_stride=1, parts=parts,
            watched="test", groups=groups, scale=scale,
        )  # fmt: skip

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        kind = DATASETS[outcome.config.dataset]
        for model in outcome.models():
            records = outcome.of(model)
            note = (
                f"{records[0].parameters:,} parameters, {reports.epochs(records)} epochs, "
                f"{records[0].result['images']}; paper: {kind.epochs} epochs, all images"
            )
            accuracies = [100 - record.result["error_test"] for record in records]
            printed = self._PRINTED.get((model, outcome.config.dataset), "-")
            name = f"{nets.TITLES[model]}, {kind.title}, test accuracy (%)"
            rows += reports.with_deviation(name, printed, "-", records, accuracies, note)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        return reports.figures(
            outcome,
            {
                "train_loss": "Training loss, the mean of each epoch.",
                "error_test": "Test error, of 2,000 images before the last epoch.",
            },
        )
