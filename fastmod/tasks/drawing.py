"""What tasks of coloured shapes on a grid share: random choices, colours, shapes put into blocks of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Red, green, blue of the ten colours; none is dark, for the background is black.
COLOURS = (
    (255, 255, 255), (255, 0, 0), (0, 255, 0), (64, 96, 255), (255, 255, 0),
    (255, 0, 255), (0, 255, 255), (255, 128, 0), (160, 96, 255), (160, 160, 160),
)  # fmt: skip
_SOME = 2048  # images whose pixels are computed at once
_FINE = 256  # steps between two pixels, at which an image is read


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
    """For each size an int64 ``[n]`` of numbers below it, all alike.

    Drawn row by row, in one thread: the first rows do not depend on ``n``, nor anything on the number of threads.
    """
    uniform = torch.rand(n, len(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return list((uniform * torch.tensor(sizes, dtype=torch.float64)).long().unbind(1))


def different(*columns: Tensor) -> Tensor:
    """Numbers below k, k - 1, k - 2, ... as different numbers below k, every order alike: ``[n, columns]``.

    Each counts the numbers that those before it have left.
    """
    found: list[Tensor] = []
    for column in columns:
        for number in torch.stack(found).sort(0).values if found else ():
            column = column + (column >= number)
        found.append(column)
    return torch.stack(found, 1)


def paste(shapes: Tensor, blocks: Tensor, colours: Tensor, grid: int) -> Tensor:
    """Images of ``grid`` x ``grid`` blocks with some of them filled.

    Args:
        shapes: uint8 ``[n, k, S, S]``, how bright each pixel of each of k shapes is.
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
    """How an image of ``side`` x ``side`` pixels is read at points ``[P]`` between its pixels: for each point, the four
    pixels around it, ``[4, P]``, and their shares, of 256 * 256; pixel ``side * side`` is beyond the edge.

    In whole numbers, so that every machine and every number of threads makes the same images.
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
    """Images uint8 ``[n, side, side]`` read as :func:`resampling` says, at the points of a square: ``[n, S, S]``."""
    size = math.isqrt(places.shape[1])
    padded = torch.cat([images.flatten(1), images.new_zeros(len(images), 1)], 1).int()
    total = sum(padded[:, place] * share for place, share in zip(places, shares, strict=True))
    return torch.as_tensor(total).add(_FINE**2 // 2).div(_FINE**2, rounding_mode="floor").view(-1, size, size).byte()
