"""Losses that align the features of a new domain with those of known ones: adversary, moments, two heads."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOMENT_WEIGHT = 0.0005
ADVERSARY_LR = (2e-4, 1e-5)  # of the discriminator: first and last
HEADS_LR = (1e-4, 1e-5)


class Discriminator(nn.Module):
    """Features ``[B, C, H, W]`` -> ``[B]``: above 0 if they seem to come from the new domain."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, padding=1),
            nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(1)


def discriminator_loss(known: Tensor, new: Tensor) -> Tensor:
    """``1/2 [BCE(known, 0 + 0.1 u) + BCE(new, 1 + 0.1 u)]`` of the discriminator's scores, u uniform."""
    parts = [
        F.binary_cross_entropy_with_logits(scores, goal + 0.1 * torch.rand_like(scores))
        for scores, goal in ((known, 0.0), (new, 1.0))
    ]
    return (parts[0] + parts[1]) / 2


def fooling_loss(new: Tensor) -> Tensor:
    """``BCE(new, 0)``: low if the discriminator takes the new domain's features for known ones."""
    return F.binary_cross_entropy_with_logits(new, torch.zeros_like(new))


def moment_distance(known: Tensor, new: Tensor) -> Tensor:
    """Distance between the first two raw moments of N domains ``known [N, B, F]`` and of ``new [B', F]``.

    ``1/2 sum_k [1/N sum_i |m_i - m|^2 + 2 / (N (N - 1)) sum_{i<j} |m_i - m_j|^2]``, where m is the mean of k-th powers.
    """
    total = new.new_zeros(())
    count = len(known)
    for power in (1, 2):
        each, other = known.pow(power).mean(1), new.pow(power).mean(0)  # [N, F], [F]
        total = total + (each - other).square().sum(1).mean()
        pairs = [(each[i] - each[j]).square().sum() for i, j in itertools.combinations(range(count), 2)]
        if pairs:
            total = total + torch.stack(pairs).mean()
    return total / 2


class TwoHeads(nn.Module):
    """Two linear layers on the same features ``[..., F]`` -> scores ``[2, ..., classes]``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        """The first starts as a copy of an existing head, the second at random."""
        super().__init__()
        classes, features = weight.shape
        self.first, self.second = (nn.Linear(features, classes, device=weight.device) for _ in range(2))
        with torch.no_grad():
            self.first.weight.copy_(weight)
            self.first.bias.copy_(bias)

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([self.first(features), self.second(features)])

    def together(self, features: Tensor) -> Tensor:
        """The mean of both predictions, as scores ``[..., classes]``."""
        return self(features).softmax(-1).mean(0).clamp(min=1e-30).log()


def discrepancy(scores: Tensor) -> Tensor:
    """Mean ``|p1 - p2|`` of the scores ``[2, B, classes]`` of two heads."""
    first, second = scores.softmax(-1)
    return (first - second).abs().mean()


def linear_rate(ends: tuple[float, float], done: int, whole: int) -> float:
    return ends[0] + (ends[1] - ends[0]) * done / max(1, whole)
