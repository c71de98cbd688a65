"""Common parts of Pentomino and MNIST Parity: a binary label that depends on a relation between shown objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row, Study
from fastmod.studies.resmix import reports
from fastmod.studies.resmix.training import ResMixConfig, ResMixTrial
from fastmod.tasks import Labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_EPOCHS = 200


@dataclass(frozen=True)
class RelationConfig(ResMixConfig):
    images: int = 20_000
    valid_images: int = 5000
    test_images: int = 5000
    data_seed: int = 0  # of the images; weights and order depend on the trial's seed

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("images", "valid_images", "test_images"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise StudyError(f"{name}: expected 1 to a million, got {getattr(self, name)}")
        if not 0 <= self.data_seed < 2**31:
            raise StudyError(f"data_seed: expected 0 or more, below 2**31, got {self.data_seed}")

    @property
    def counts(self) -> dict[str, int]:
        return {"train": self.images, "valid": self.valid_images, "test": self.test_images}

    @property
    def seeds(self) -> dict[str, int]:
        """Seed of each part; no two parts share one, even for different values of ``data_seed``."""
        return {part: 3 * self.data_seed + number for number, part in enumerate(self.counts)}


class RelationStudy(Study):
    """Base of studies that define :meth:`pictures` and the numbers the paper prints."""

    models = ("ResMixNet_4_1", "ResMixNet_2_2", "ResNet26", "ResNet50", "ResNet152", "VGG19_BN")
    default_seeds = "0"
    criterion = "error_valid"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {model: {"epochs": PAPER_EPOCHS} for model in models}
    quick: ClassVar = {"epochs": 2, "images": 640, "valid_images": 250, "test_images": 250}
    #: Model -> rate in the paper's Table 4.
    rates: ClassVar[Mapping[str, float]]
    #: Model -> the paper's parameters, mean error and its deviation.
    printed: ClassVar[Mapping[str, tuple[str, str, str]]]
    #: Metric to draw -> caption.
    drawn: ClassVar[Mapping[str, str]]

    def pictures(self, config: Any) -> tuple[dict[str, Labelled], dict[str, torch.Tensor]]:
        """The parts, and groups of test images (name -> bool ``[N]``) to average gate weights over."""
        raise NotImplementedError

    def trial(self, config: Any, model: str, seed: int, device: torch.device) -> ResMixTrial:
        config = self.config_of(config, model)
        parts, groups = self.pictures(config)
        return ResMixTrial(
            config, model, seed, device, rate=self.rates[model], classes=2, stem_stride=2, parts=parts,
            watched="valid", groups=groups,
        )  # fmt: skip

    def table(self, outcome: Outcome) -> list[Row]:
        return reports.error_rows(outcome, self.printed, PAPER_EPOCHS)

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        return reports.figures(outcome, self.drawn)
