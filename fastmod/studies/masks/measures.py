"""What is counted of masks, as JSON has it, and which beta accuracies speak for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastmod.masks import MaskedModel, pick_beta
from fastmod.runs.config import StudyError

BINS = 20  # of the histogram of mask probabilities


def shares(found: Mapping[str, Any]) -> dict[str, float | None]:
    """By layer; None where no weight of a layer is kept, so that there is no share."""
    return {name: None if math.isnan(share) else float(share) for name, share in found.items()}


def with_total(counts: dict[str, int]) -> dict[str, int]:
    return {**counts, "total": sum(counts.values())}


def histogram(masked: MaskedModel) -> list[int]:
    """How many weights are kept with a probability in each of ``BINS`` equal parts of 0..1."""
    probabilities = torch.cat([logits.detach().flatten().sigmoid().cpu() for logits in masked.parameters()])
    return [int(count) for count in torch.histc(probabilities, BINS, 0, 1)]


def settle(betas: Sequence[float], original: float, tried: Mapping[float, float]) -> tuple[float | None, float | None]:
    """What :func:`fastmod.masks.pick_beta` says to the accuracies so far: the beta that it settles on, or else the one
    that it wants to see next.

    Args:
        betas: to try, rising.
        original: accuracy of the net without masks.
        tried: beta -> accuracy under a mask of the whole problem.
    """

    if not original > 0:
        raise StudyError("beta: without masks the net has no validation example right to pick it by; train it longer")

    def accuracy(beta: float) -> float:
        if beta not in tried:
            raise _UntriedError(beta)
        return tried[beta]

    try:
        return pick_beta(accuracy, original, betas=betas)[0], None
    except _UntriedError as untried:
        return None, untried.beta
    except ValueError as error:
        raise StudyError(f"beta: {error}") from None


class _UntriedError(Exception):
    """A beta that no mask was trained with yet."""

    def __init__(self, beta: float) -> None:
        super().__init__(beta)
        self.beta = beta
