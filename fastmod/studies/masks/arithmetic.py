"""Settings, loss and measure of the mask studies on arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.models import LSTM, MLP
from fastmod.runs.config import StudyError, changed
from fastmod.studies.masks.settings import MaskConfig, MaskStudy
from fastmod.tasks.arithmetic import DIGIT, LIMIT

HIDDEN: Mapping[str, tuple[int, ...]] = {
    "FNN_small": (400, 400, 200),
    "FNN": (800,) * 4,
    "FNN_large": (2000,) * 4,  # the paper's, but for Figures 8 and 9
    "FNN_huge": (4000,) * 4,
}
#: The paper's C.1 and C.3, for every net; ``hidden: None`` is that of the model's name.
PAPER: Mapping[str, Any] = {
    "steps": 20_000, "batch": 128, "lr": 1e-3, "lr_end": 1.0, "clip": 1.0,
    "mask_steps": 20_000, "mask_batch": None, "mask_lr": 1e-2, "mask_lr_end": 1.0, "mask_init": 2.0, "samples": 4,
    "hidden": None, "init_scale": 1.0, "units": 256, "lstm_layers": 2, "lstm_init": "xavier", "time_steps": 3,
}  # fmt: skip
_OF_FNNS, _OF_LSTMS = ("hidden", "init_scale"), ("units", "lstm_layers", "lstm_init", "time_steps")
READ: Mapping[str, tuple[str, ...]] = {"FNN": _OF_FNNS, "LSTM": _OF_LSTMS}
SPARSE = 7  # in the course of training, accuracy is taken on every seventh pair of numbers
ROWS = 2500  # evaluated at once


@dataclass(frozen=True)
class ArithmeticConfig(MaskConfig):
    # A net that still swings at the end of its training has no weights to spare.
    lr_end: float = 0.02
    mask_lr: float = 5e-2  # with fewer steps the paper's 20,000 at 1e-2
    mask_lr_end: float = 0.02
    hidden: tuple[int, ...] | None = None  # sizes of the FNN's hidden layers; none: those of the model's name
    init_scale: float = 1.0  # of the FNN's weights to begin with, times torch's default; He's for ReLU: 6 ** 0.5
    units: int = 256  # of each of the LSTM's layers
    lstm_layers: int = 2
    # xavier: as the paper's authors' code has it; with torch's weights a net of two layers long knows one pair only.
    lstm_init: str = "xavier"
    time_steps: int = 3  # of the LSTM, for what it sees at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("units", "lstm_layers", "time_steps"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.lstm_init not in ("xavier", "torch"):
            raise StudyError(f"lstm_init: expected xavier or torch, got {self.lstm_init!r}")
        if not 0 < self.init_scale < math.inf:
            raise StudyError(f"init_scale: expected more than 0, got {self.init_scale}")
        if self.hidden is not None and not all(size >= 1 for size in self.hidden):
            raise StudyError(f"hidden: expected sizes of 1 or more, got {self.hidden}")

    def pairs(self, device: torch.device, *, held: bool = False) -> Tensor:
        """All pairs of numbers ``[10000, 2]``. Where beta is picked, a tenth of them is ``held`` for that, and accuracy
        is reported on the others. Both are in the training data, as all pairs are in the paper's."""
        numbers = torch.arange(LIMIT)
        every = torch.cartesian_prod(numbers, numbers)
        if self.auto:
            order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
            every = every[order[: len(every) // 10] if held else order[len(every) // 10 :].sort().values]
        return every.to(device)

    def net(self, name: str, inputs: int, outputs: int) -> nn.Module:
        """The net of that name: an LSTM if it begins so, else an FNN."""
        if name.startswith("LSTM"):
            return LSTM(inputs, self.units, outputs, self.lstm_layers, xavier=self.lstm_init == "xavier")
        hidden = HIDDEN[name] if self.hidden is None else self.hidden
        return MLP((inputs, *hidden, outputs), init_scale=self.init_scale)


class ArithmeticStudy(MaskStudy):
    """FNNs are held against the sizes that the paper prints for the task, whatever their names stand for."""

    read = READ
    #: Model -> the paper's hidden layers, where they are not those of its name.
    printed_hidden: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def printed_of(self, config: Any, model: str) -> Mapping[str, Any]:
        printed = super().printed_of(config, model)
        return {**printed, "hidden": self.printed_hidden.get(model, HIDDEN[model])} if model in HIDDEN else printed

    def as_trained(self, config: Any, model: str) -> Any:
        trained = super().as_trained(config, model)
        return changed(trained, {"hidden": HIDDEN[model]}) if model in HIDDEN and trained.hidden is None else trained


def digit_loss(scores: Tensor, digits: Tensor) -> Tensor:
    """Mean cross-entropy of ``scores [B, K * 10]`` against ``digits [B, K]``."""
    return F.cross_entropy(scores.reshape(-1, DIGIT), digits.flatten())


def predicted_digits(scores: Tensor) -> Tensor:
    """The most likely digits ``[B, K]`` by ``scores [B, K * 10]``."""
    return scores.unflatten(-1, (-1, DIGIT)).argmax(-1)
