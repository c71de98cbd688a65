"""Domains of a data set: its images sheared, scaled down, noisy, as boundaries or blurred.

Shear, scale and shot noise follow the formulas of MNIST-C. All but the noise use integer sums, so that images are equal
on every machine and with any number of threads.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.tasks.drawing import resampled, resampling

DOMAINS = ("original", "shear", "scale", "shot_noise", "boundary", "blurred")
SHEAR = 0.4  # radians, left or right
SCALE = 0.7
SHOTS = 3  # photons of a white pixel
_BINOMIAL = (1, 4, 6, 4, 1)  # a blur with a standard deviation of about a pixel
_SOME = 4096  # images computed at once


def corrupt(images: Tensor, domain: str, seed: int = 0) -> Tensor:
    """Images uint8 ``[N, S, S]`` as they look in a domain, also uint8 ``[N, S, S]``.

    Args:
        domain: ``"original"``; ``"shear"``, by 0.4 rad to a random side; ``"scale"``, down to 0.7, both about the
            centre; ``"shot_noise"``, Poisson(3 x) / 3 for brightness x; ``"boundary"``, the brightest minus the
            darkest of 2 x 2 pixels; ``"blurred"``, by a binomial filter of 5 x 5 pixels, twice.
        seed: of the random sides and the noise; each image depends only on those before it.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain: expected one of {', '.join(DOMAINS)}, got {domain!r}")
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        raise TypeError(f"images: expected uint8 [N, S, S], got {getattr(images, 'dtype', type(images).__name__)}")
    if images.dim() != 3 or images.shape[1] != images.shape[2]:
        raise ValueError(f"images: expected uint8 [N, S, S], got shape {list(images.shape)}")
    if domain == "original":
        return images.clone()
    generator = torch.Generator().manual_seed(seed)
    parts = [_corrupted(part, domain, generator) for part in images.split(_SOME)]
    return torch.cat(parts) if parts else images.clone()


def _corrupted(images: Tensor, domain: str, generator: torch.Generator) -> Tensor:
    side = images.shape[-1]
    if domain == "shear":
        right = torch.rand(len(images), generator=generator) < 0.5
        one, other = (resampled(images, *_affine(side, 1.0, sign * math.tan(SHEAR))) for sign in (1, -1))
        return torch.where(right[:, None, None], one, other)
    if domain == "scale":
        return resampled(images, *_affine(side, 1 / SCALE, 0.0))
    if domain == "shot_noise":
        rate = images.double() / 255 * SHOTS
        return torch.poisson(rate, generator).mul(255 / SHOTS).clamp(max=255).round().byte()
    if domain == "boundary":
        padded = F.pad(images.float()[:, None], (0, 1, 0, 1))  # bytes are exact in fp32
        return (F.max_pool2d(padded, 2, 1) + F.max_pool2d(-padded, 2, 1))[:, 0].byte()
    return _blurred(_blurred(images))


@functools.cache
def _affine(side: int, zoom: float, slant: float) -> tuple[Tensor, Tensor]:
    """Where to read each pixel of the new image.

    ``zoom`` scales the distance from the centre; rows are shifted by ``slant`` times their height.
    """
    along = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    down, right = along[:, None] * zoom, along[None, :] * zoom
    row, column = torch.broadcast_tensors(down, right + slant * down)
    centre = (side - 1) / 2
    return resampling(row.flatten() + centre, column.flatten() + centre, side)


def _blurred(images: Tensor) -> Tensor:
    weights = torch.tensor(_BINOMIAL, dtype=torch.int32)
    total = F.pad(images.int(), (2, 2, 2, 2))
    total = (total.unfold(1, 5, 1) * weights).sum(-1)  # [N, S, S + 4]
    total = (total.unfold(2, 5, 1) * weights).sum(-1)
    return total.add(128).div(256, rounding_mode="floor").byte()
