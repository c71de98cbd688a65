"""MNIST Parity: two handwritten digits in an image; are both even, or both odd?

Each digit is coloured, scaled, turned and put anywhere into one of four blocks of 32 x 32 pixels.
"""

from __future__ import annotations

import functools
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.data.idx import DataError
from fastmod.data.mnist import mnist
from fastmod.tasks.drawing import COLOURS, Labelled, check, choices, different, paste, resampled, resampling

SPLITS = ("train", "valid", "test")
SIZES = (20, 22, 24, 26, 28)
ANGLES = (0, 5, 10, 15, 20, 25, 30)  # degrees, counterclockwise
GRID, BLOCK, SIDE = 2, 32, 28
DIGITS = 2


class Scene(NamedTuple):
    """All that an image shows, of n images."""

    labels: Tensor  # [n]: 1 where both digits are even or both odd
    digits: Tensor  # [n, 2]: which images of the split
    classes: Tensor  # [n, 2]: 0 to 9
    sizes: Tensor  # [n, 2]: numbers of SIZES
    angles: Tensor  # [n, 2]: numbers of ANGLES
    blocks: Tensor  # [n, 2]
    colours: Tensor  # [n, 2]
    tops: Tensor  # [n, 2]: where it begins in its block
    lefts: Tensor  # [n, 2]


def digits_of(split: str, root: str | os.PathLike[str] | None = None, *, verify: bool = True) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 28, 28]`` and labels ``[N]`` of a split: of the 60000 for training, the last 10000 are for
    validation (a sixth, where ``verify`` is False and there are others)."""
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    found = mnist(root, verify=verify)
    if split == "test":
        images, labels = found.test_images, found.test_labels
    else:
        count = len(found.train_labels) * 5 // 6
        part = slice(count) if split == "train" else slice(count, None)
        images, labels = found.train_images[part], found.train_labels[part]
    if not len(images) or images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"mnist_parity: expected digits [N, {SIDE}, {SIDE}] for {split}, got {list(images.shape)}")
    return images, labels


@functools.cache
def _resampling(size: int, angle: int) -> tuple[Tensor, Tensor]:
    """How a digit of 28 x 28 pixels becomes one of ``size`` x ``size``, turned; see :func:`resampling`."""
    along = (torch.arange(size, dtype=torch.float64) + 0.5) * (SIDE / size) - SIDE / 2
    down, right = along[:, None], along[None, :]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    row = (cos * down + sin * right + SIDE / 2 - 0.5).flatten()
    column = (cos * right - sin * down + SIDE / 2 - 0.5).flatten()
    return resampling(row, column, SIDE)


def turned(digits: Tensor, size: int, angle: int) -> Tensor:
    """Digits uint8 ``[g, 28, 28]`` scaled and turned: uint8 ``[g, size, size]``."""
    return resampled(digits, *_resampling(size, angle))


def scene(n: int, seed: int, classes: Tensor) -> Scene:
    """What an image shows: ``classes [N]`` are those of the digits to draw from."""
    check(n, seed)
    each = (len(classes), len(SIZES), len(ANGLES), len(COLOURS), 2**20, 2**20)
    sizes = [*(GRID * GRID - k for k in range(DIGITS)), *each * DIGITS]
    rest = choices(n, sizes, seed)
    digits, size, angle, colours, down, right = (
        torch.stack(rest[DIGITS + k :: len(each)], 1) for k in range(len(each))
    )
    free = BLOCK - torch.tensor(SIZES)[size]  # [n, 2]: the last pixel at which it may begin
    tops, lefts = (part * (free + 1) // 2**20 for part in (down, right))
    shown = classes[digits]
    labels = (shown % 2 == shown[:, :1] % 2).all(1).long()
    return Scene(labels, digits, shown, size, angle, different(*rest[:DIGITS]), colours, tops, lefts)


def mnist_parity(
    n: int, split: str, seed: int, root: str | os.PathLike[str] | None = None, *, verify: bool = True
) -> Labelled:
    """Images of two MNIST digits, and whether these are of the same parity.

    Args:
        n: how many images.
        split: which digits are shown: ``"train"`` (the first 50000 of MNIST's training set), ``"valid"`` (its last
            10000) or ``"test"``.
        seed: the same seed gives the same images, on any number of threads; more of them begin with the same ones.
        root: folder of MNIST; None: as :func:`fastmod.data.mnist` looks for it.
        verify: compare the files with the official ones; False is for other data of the same layout.

    Returns:
        ``images`` uint8 ``[n, 3, 64, 64]``, ``labels`` int64 ``[n]``: 1 where both digits are even or both odd, else 0.

    Raises:
        DataError: MNIST is not there or damaged.
    """
    check(n, seed)
    digits, classes = digits_of(split, root, verify=verify)
    return render(scene(n, seed, classes), digits)


def render(shown: Scene, digits: Tensor) -> Labelled:
    """The images of a scene, of the digits ``[N, 28, 28]`` that it was drawn from."""
    return Labelled(paste(_drawn(digits, shown), shown.blocks, shown.colours, GRID), shown.labels)


def _drawn(digits: Tensor, shown: Scene) -> Tensor:
    """The blocks ``[n, 2, 32, 32]``: all digits of one size and angle at once, at their places."""
    blocks = torch.zeros(shown.digits.numel(), BLOCK * BLOCK, dtype=torch.uint8)
    which, sizes, angles = shown.digits.flatten(), shown.sizes.flatten(), shown.angles.flatten()
    begin = (shown.tops * BLOCK + shown.lefts).flatten()
    for s, size in enumerate(SIZES):
        inside = (torch.arange(size)[:, None] * BLOCK + torch.arange(size)).flatten()
        for a, angle in enumerate(ANGLES):
            group = ((sizes == s) & (angles == a)).nonzero().squeeze(1)
            pixels = turned(digits[which[group]], size, angle).flatten(1)
            blocks[group[:, None], begin[group][:, None] + inside] = pixels
    return blocks.view(*shown.digits.shape, BLOCK, BLOCK)
