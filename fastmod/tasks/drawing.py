"""Common parts of tasks with coloured shapes on a grid: random choices, colours, drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Red, green, blue of the ten colours; none is dark, as the background is black.
COLOURS = (
    (255, 255, 255), (255, 0, 0), (0, 255, 0), (64, 96, 255), (255, 255, 0),
    (255, 0, 255), (0, 255, 255), (255, 128, 0), (160, 96, 255), (160, 160, 160),
)  # fmt: skip
_SOME = 2048  # images computed at once
_FINE = 256  # positions between two pixels at which an image can be read


class Labelled(NamedTuple):
    images: Tensor  # uint8 [n, 3, H, W]
    labels: Tensor  # int64 [n]


def check(n: int, seed: int) -> None:
    for name, value in (("n", n), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if n < 0:
        raise ValueError(f"n: expected 0 or more images, got {n}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: expected 0 or more, below 2**63, got {seed}")


def choices(n: int, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """For each size, int64 ``[n]`` of uniform random numbers below it.

    Drawn row by row in one thread, so that no row depends on ``n`` or on the number of threads.
    """
    uniform = torch.rand(n, len(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return list((uniform * torch.tensor(sizes, dtype=torch.float64)).long().unbind(1))


def different(*columns: Tensor) -> Tensor:
    """Turn numbers below k, k - 1, k - 2, ... into distinct numbers below k: ``[n, columns]``.

    Each column counts among the numbers not yet taken, so uniform columns make all orders equally likely.
    """
    found: list[Tensor] = []
    for column in columns:
        for number in torch.stack(found).sort(0).values if found else ():
            column = column + (column >= number)
        found.append(column)
    return torch.stack(found, 1)


def paste(shapes: Tensor, blocks: Tensor, colours: Tensor, grid: int) -> Tensor:
    """Draw k shapes into ``grid`` x ``grid`` blocks of each image.

    Args:
        shapes: uint8 ``[n, k, S, S]``, the brightness of each pixel.
        blocks: int64 ``[n, k]`` in 0..grid*grid-1, all different in a row.
        colours: int64 ``[n, k]``, numbers of :data:`COLOURS`.

    Returns:
        uint8 ``[n, 3, grid * S, grid * S]``.
    """
    n, _, side, _ = shapes.shape
    images = torch.zeros(n, 3, grid, side, grid, side, dtype=torch.uint8)
    palette = torch.tensor(COLOURS, dtype=torch.int32)
    for first in range(0, n, _SOME):
        some = slice(first, first + _SOME)
        bright = shapes[some].to(torch.int32)[:, :, None] * palette[colours[some]][..., None, None]  # [n, k, 3, S, S]
        bright = bright.add_(127).div_(255, rounding_mode="floor").to(torch.uint8)
        image = torch.arange(len(bright))[:, None]
        images[some][image, :, blocks[some] // grid, :, blocks[some] % grid, :] = bright
    return images.view(n, 3, grid * side, grid * side)


def resampling(row: Tensor, column: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear reading of an image of ``side`` x ``side`` pixels at points ``[P]``, for :func:`resampled`.

    Returns for each point the four pixels around it, ``[4, P]``, and their weights, which sum to 256 * 256. Pixel
    ``side * side`` stands for all beyond the edge. Integer weights make equal images on every machine and with any
    number of threads.
    """
    row_share, column_share = ((x - x.floor()).mul(_FINE).round().int() for x in (row, column))
    places, shares = [], []
    for below in (0, 1):
        for beside in (0, 1):
            r, c = row.floor().long() + below, column.floor().long() + beside
            inside = (r >= 0) & (r < side) & (c >= 0) & (c < side)
            places.append(torch.where(inside, r * side + c, side * side))
            shares.append(
                (row_share if below else _FINE - row_share) * (column_share if beside else _FINE - column_share)
            )
    return torch.stack(places), torch.stack(shares)


def resampled(images: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Read images uint8 ``[n, side, side]`` at the S * S points of :func:`resampling`: ``[n, S, S]``."""
    size = math.isqrt(places.shape[1])
    padded = torch.cat([images.flatten(1), images.new_zeros(len(images), 1)], 1).int()
    total = sum(padded[:, place] * share for place, share in zip(places, shares, strict=True))
    return torch.as_tensor(total).add(_FINE**2 // 2).div(_FINE**2, rounding_mode="floor").view(-1, size, size).byte()
