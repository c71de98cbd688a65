"""Nets and numbers of the mask studies on arithmetic: plain layers with names that figures can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.studies.arithmetic import one_hot
from fastmod.studies.config import StudyError
from fastmod.studies.masking import MaskConfig

DIGIT = 10  # values of a digit
LIMIT = 100  # numbers have two digits
HIDDEN: Mapping[str, tuple[int, ...]] = {
    "FNN_small": (400, 400, 200),
    "FNN": (800,) * 4,
    "FNN_large": (2000,) * 4,  # the paper's
}
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
    units: int = 256  # of the LSTM
    time_steps: int = 3  # of the LSTM, for what it sees at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("units", "time_steps"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 < self.init_scale < math.inf:
            raise StudyError(f"init_scale: expected more than 0, got {self.init_scale}")
        if self.hidden is not None and not all(size >= 1 for size in self.hidden):
            raise StudyError(f"hidden: expected sizes of 1 or more, got {self.hidden}")

    def net(self, name: str, inputs: int, outputs: int) -> nn.Module:
        """The net of that name: an LSTM if it begins so, else an FNN."""
        if name.startswith("LSTM"):
            return LSTM(inputs, self.units, outputs)
        return FNN((inputs, *(HIDDEN[name] if self.hidden is None else self.hidden), outputs), self.init_scale)


class FNN(nn.Module):
    """``[B, sizes[0]]`` -> ``[B, sizes[-1]]``, ReLU between the layers ``layer1``, ``layer2`` ... The weights begin as
    nn.Linear's, times ``init_scale``."""

    def __init__(self, sizes: Sequence[int], init_scale: float = 1.0) -> None:
        super().__init__()
        for number, (before, after) in enumerate(pairwise(sizes), 1):
            layer = nn.Linear(before, after)
            with torch.no_grad():
                layer.weight *= init_scale
            self.add_module(f"layer{number}", layer)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = layer(F.relu(x))
        return x


class LSTM(nn.Module):
    """``[B, T, inputs]`` -> what the output layer says at every step, ``[B, T, outputs]``."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, batch_first=True)
        self.output = nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x)[0])


def digits_of(numbers: Tensor) -> Tensor:
    """Numbers below 100 ``[...]`` as their two digits ``[..., 2]``, the least significant first."""
    return torch.stack([numbers % DIGIT, numbers // DIGIT], -1)


def one_hot_digits(numbers: Tensor) -> Tensor:
    """Numbers below 100 ``[..., K]`` as ``[..., K * 20]``: two digits each, the least significant first."""
    return one_hot(digits_of(numbers), DIGIT).flatten(-3)


def digit_loss(scores: Tensor, digits: Tensor) -> Tensor:
    """Mean cross-entropy of ``scores [B, K * 10]`` against ``digits [B, K]``."""
    return F.cross_entropy(scores.reshape(-1, DIGIT), digits.flatten())


def digits_said(scores: Tensor) -> Tensor:
    """The most likely digits ``[B, K]`` by ``scores [B, K * 10]``."""
    return scores.unflatten(-1, (-1, DIGIT)).argmax(-1)


def all_right(scores: Tensor, digits: Tensor) -> float:
    """Share of the rows of which every digit is right."""
    return (digits_said(scores) == digits).all(-1).float().mean().item()
