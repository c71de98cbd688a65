"""Loss, measure and batches of the mask studies on sequences, padded with ``PAD``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.models.encoder_decoders import PAD


def sequence_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of ``scores [B, T, V]``, the sum over the places of ``target [B, T]`` that are not padding, divided
    by B: what the paper's beta is set against."""
    total = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return total / len(target)


def exact_match(scores: Tensor, target: Tensor) -> Tensor:
    """bool ``[B]``: whether ``scores [B, T, V]`` are right at every place of ``target [B, T]`` but its padding.

    Then the net would have answered the same had it been given its own words instead of the target's.
    """
    return ((scores.argmax(-1) == target) | (target == PAD)).all(1)


def bucketed_by_length(lengths: Tensor, chunk: int, generator: torch.Generator, bucket: int = 5) -> Tensor:
    """Order ``[chunk, B]`` of ``chunk * B`` drawn examples. Those of ``bucket`` batches are sorted by length, so
    that a batch pads little and yet has more than one length, which would make training restless. Inside of a batch
    they are shuffled: each part of it meets a mask of its own, and none is to see short sequences alone."""
    size = len(lengths) // chunk
    places = torch.arange(len(lengths), device=lengths.device).split(bucket * size)
    batches = torch.cat([some[lengths[some].argsort(stable=True)].view(-1, size) for some in places])
    within = torch.rand(batches.shape, generator=generator, device=lengths.device).argsort(1)
    return batches.gather(1, within)[torch.randperm(chunk, generator=generator, device=lengths.device)]


def trim_padding(sequences: Tensor) -> Tensor:
    """``[B, L]`` without the columns that are nothing but padding."""
    return sequences[:, : int((sequences != PAD).sum(1).max())]
