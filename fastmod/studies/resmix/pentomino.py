"""Coloured Pentomino: is one of three sprites of another class? Nets without modules stay at 30 % errors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from fastmod.runs.config import StudyError
from fastmod.studies.resmix.relations import RelationConfig, RelationStudy
from fastmod.tasks import Labelled, pentomino, sprites


@dataclass(frozen=True)
class PentominoConfig(RelationConfig):
    epochs: int = 40
    placement: str = "center"  # of a sprite in its block: center, corner or jitter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement not in sprites.PLACEMENTS:
            raise StudyError(f"placement: expected one of {', '.join(sprites.PLACEMENTS)}, got {self.placement!r}")


@functools.lru_cache(maxsize=3)  # the parts of a run, which its trials share
def _part(count: int, seed: int, placement: str) -> Labelled:
    return pentomino(count, seed, placement)


def groups_of(shown: sprites.Scene) -> dict[str, torch.Tensor]:
    """Test images grouped by label, and those of one class by that class."""
    same = shown.labels == 0
    by_class = {f"all {name}": same & (shown.classes[:, 0] == k) for k, name in enumerate(sprites.CLASSES)}
    return {"one class": same, "one odd": ~same, **by_class}


class ResMixPentomino(RelationStudy):
    name = "resmix-pentomino"
    title = "Coloured Pentomino: does a mixture of experts learn a relation that other nets do not?"
    paper = "ResMixNet, section 4.2, Table 2, Figure 5"
    default_models = ("ResMixNet_4_1", "ResNet26")
    defaults = PentominoConfig()
    # The paper did not run (2,2) on this task; its rate is the one for MNIST Parity.
    rates: ClassVar = {
        "ResNet26": 0.1, "ResNet50": 0.1, "ResNet152": 0.1, "VGG19_BN": 0.1, "ResMixNet_4_1": 0.01,
        "ResMixNet_2_2": 0.1,
    }  # fmt: skip
    printed: ClassVar = {
        "ResNet26": ("370K", "34.61", "4.67"),
        "ResNet50": ("758K", "30.31", "1.74"),
        "ResNet152": ("3.66M", "31.02", "3.06"),
        "VGG19_BN": ("20M", "34.01", "4.72"),
        "ResMixNet_4_1": ("193K", "0.88", "0.12"),
    }
    drawn: ClassVar = {
        "train_loss": "Training loss, the mean of each epoch (Figure 5, left).",
        "valid_loss": "Validation loss (Figure 5, right).",
        "error_valid": "Validation error.",
    }

    def pictures(self, config: PentominoConfig) -> tuple[dict[str, Labelled], dict[str, torch.Tensor]]:
        seeds = config.seeds
        parts = {part: _part(count, seeds[part], config.placement) for part, count in config.counts.items()}
        return parts, groups_of(sprites.scene(config.test_images, seeds["test"], config.placement))
