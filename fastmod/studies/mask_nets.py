"""Nets and numbers of the mask studies on arithmetic: plain layers with names that figures can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIGIT = 10  # values of a digit
LIMIT = 100  # numbers have two digits


class FNN(nn.Module):
    """``[B, sizes[0]]`` -> ``[B, sizes[-1]]``, ReLU between the layers ``layer1``, ``layer2`` ..."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        for number, (before, after) in enumerate(pairwise(sizes), 1):
            self.add_module(f"layer{number}", nn.Linear(before, after))

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
    return F.one_hot(digits_of(numbers), DIGIT).flatten(-3).float()


def digit_loss(scores: Tensor, digits: Tensor) -> Tensor:
    """Mean cross-entropy of ``scores [B, K * 10]`` against ``digits [B, K]``."""
    return F.cross_entropy(scores.reshape(-1, DIGIT), digits.flatten())


def digits_said(scores: Tensor) -> Tensor:
    """The most likely digits ``[B, K]`` by ``scores [B, K * 10]``."""
    return scores.unflatten(-1, (-1, DIGIT)).argmax(-1)


def all_right(scores: Tensor, digits: Tensor) -> float:
    """Share of the rows of which every digit is right."""
    return (digits_said(scores) == digits).all(-1).float().mean().item()
