"""MNIST Parity: are the two handwritten digits in an image both even or both odd?

Each digit is coloured, scaled, turned and placed anywhere in one of four blocks of 32 x 32 pixels.
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
    """Everything shown in n images."""

    labels: Tensor  # [n]: 1 if both digits are even or both odd
    digits: Tensor  # [n, 2]: indices of images in the split
    classes: Tensor  # [n, 2]: 0 to 9
    sizes: Tensor  # [n, 2]: indices of SIZES
    angles: Tensor  # [n, 2]: indices of ANGLES
    blocks: Tensor  # [n, 2]
    colours: Tensor  # [n, 2]
    tops: Tensor  # [n, 2]: first row in the block
    lefts: Tensor  # [n, 2]


def digits_of(split: str, root: str | os.PathLike[str] | None = None, *, verify: bool = True) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 28, 28]`` and labels ``[N]`` of a split.

    Validation uses the last sixth of the training images, 10000 of MNIST's 60000.
    """
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
    """Pixels and weights that scale a digit to ``size`` x ``size`` and turn it; see :func:`resampling`."""
    along = (torch.arange(size, dtype=torch.float64) + 0.5) * (SIDE / size) - SIDE / 2
    down, right = along[:, None], along[None, :]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    row = (cos * down + sin * right + SIDE / 2 - 0.5).flatten()
    column = (cos * right - sin * down + SIDE / 2 - 0.5).flatten()
    return resampling(row, column, SIDE)


def turned(digits: Tensor, size: int, angle: int) -> Tensor:
    """Scale and turn digits uint8 ``[g, 28, 28]``: uint8 ``[g, size, size]``."""
    return resampled(digits, *_resampling(size, angle))


def scene(n: int, seed: int, classes: Tensor) -> Scene:
    """Draw at random what n images show; ``classes [N]`` are the labels of the available digits."""
    check(n, seed)
    each = (len(classes), len(SIZES), len(ANGLES), len(COLOURS), 2**20, 2**20)
    sizes = [*(GRID * GRID - k for k in range(DIGITS)), *each * DIGITS]
    rest = choices(n, sizes, seed)
    digits, size, angle, colours, down, right = (
        torch.stack(rest[DIGITS + k :: len(each)], 1) for k in range(len(each))
    )
    free = BLOCK - torch.tensor(SIZES)[size]  # [n, 2]: the last pixel at which the digit may begin
    tops, lefts = (part * (free + 1) // 2**20 for part in (down, right))
    shown = classes[digits]
    labels = (shown % 2 == shown[:, :1] % 2).all(1).long()
    return Scene(labels, digits, shown, size, angle, different(*rest[:DIGITS]), colours, tops, lefts)


def mnist_parity(
    n: int, split: str, seed: int, root: str | os.PathLike[str] | None = None, *, verify: bool = True
) -> Labelled:
    """Images of two MNIST digits, and whether they have the same parity.

    Args:
        n: how many images.
        split: which digits to show: ``"train"`` (the first 50000 of MNIST's training set), ``"valid"`` (its last
            10000) or ``"test"``.
        seed: determines the images, whatever the number of threads; a larger ``n`` only adds images.
        root: folder of MNIST; None: the places of :func:`fastmod.data.mnist`.
        verify: compare the files with the official ones; False accepts other data of the same layout.

    Returns:
        ``images`` uint8 ``[n, 3, 64, 64]``, ``labels`` int64 ``[n]``: 1 if both digits are even or both odd, else 0.

    Raises:
        DataError: MNIST is missing or damaged.
    """
    check(n, seed)
    digits, classes = digits_of(split, root, verify=verify)
    return render(scene(n, seed, classes), digits)


def render(shown: Scene, digits: Tensor) -> Labelled:
    """The images of a scene; ``digits [N, 28, 28]`` are those whose classes it was made from."""
    return Labelled(paste(_drawn(digits, shown), shown.blocks, shown.colours, GRID), shown.labels)


def _drawn(digits: Tensor, shown: Scene) -> Tensor:
    """The blocks ``[n, 2, 32, 32]``, made for all digits of one size and angle at once."""
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
