"""Coloured Pentomino: are the three sprites in an image all of one class?

The ten classes are five pentominoes and their mirror images. Sprites are turned by any right angle, drawn with cells of
one or of 2 x 2 pixels in one of ten colours, and placed in three different blocks of an 8 x 8 grid.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.tasks.drawing import COLOURS, Labelled, check, choices, different, paste

#: Class -> its cells; mirror images are made from these.
SHAPES = {
    "L": ("#.", "#.", "#.", "##"),
    "N": ("#.", "#.", "##", ".#"),
    "P": ("##", "##", "#."),
    "F": (".##", "##.", ".#."),
    "Y": (".#", "##", ".#", ".#"),
}
MIRRORS = {"J": "L", "N2": "N", "Q": "P", "F2": "F", "Y2": "Y"}
CLASSES = (*SHAPES, *MIRRORS)
TURNS, SCALES = 4, 2
PLACEMENTS = ("center", "corner", "jitter")
GRID = BLOCK = 8  # blocks in a row of the image, pixels in a row of a block
SPRITES = 3
_OFFSETS = BLOCK - 1  # a sprite is at least two pixels wide, so it starts at one of the first seven


class Scene(NamedTuple):
    """Everything shown in n images."""

    labels: Tensor  # [n]: 0 if all are of one class, 1 if one is odd
    classes: Tensor  # [n, 3]: indices of CLASSES
    patterns: Tensor  # [n, 3]: indices of patterns()
    blocks: Tensor  # [n, 3]: places in the grid, counted row by row
    colours: Tensor  # [n, 3]
    tops: Tensor  # [n, 3]: first row in the block
    lefts: Tensor  # [n, 3]


@functools.cache
def patterns() -> tuple[Tensor, Tensor]:
    """The 80 sprites, bool ``[80, 8, 8]`` in the top left corner, and their heights and widths ``[80, 2]``.

    Ordered by class, then turn, then scale.
    """
    drawn, sizes = [], []
    for name in CLASSES:
        rows = SHAPES[MIRRORS.get(name, name)]
        cells = torch.tensor([[cell == "#" for cell in row] for row in rows])
        cells = cells.flip(1) if name in MIRRORS else cells
        for turn in range(TURNS):
            for scale in range(1, SCALES + 1):
                sprite = cells.rot90(turn).repeat_interleave(scale, 0).repeat_interleave(scale, 1)
                height, width = sprite.shape
                block = torch.zeros(BLOCK, BLOCK, dtype=torch.bool)
                block[:height, :width] = sprite
                drawn.append(block)
                sizes.append([height, width])
    return torch.stack(drawn), torch.tensor(sizes)


@functools.cache
def _moved() -> Tensor:
    """The patterns at every possible place in their block: uint8 ``[80, 7, 7, 8, 8]``, 255 where lit."""
    lit = patterns()[0].to(torch.uint8) * 255
    rows = torch.stack([lit.roll(top, 1) for top in range(_OFFSETS)], 1)
    return torch.stack([rows.roll(left, 3) for left in range(_OFFSETS)], 2)


def scene(n: int, seed: int, placement: str = "center") -> Scene:
    """What :func:`pentomino` draws for the same arguments."""
    check(n, seed)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {', '.join(PLACEMENTS)}, got {placement!r}")
    each = (TURNS * SCALES, len(COLOURS), 2**20, 2**20)  # per sprite: form, colour, row and column
    sizes = [2, len(CLASSES), len(CLASSES) - 1, *(GRID * GRID - k for k in range(SPRITES)), *each * SPRITES]
    labels, same, other, *rest = choices(n, sizes, seed)
    blocks = different(*rest[:SPRITES])
    forms, colours, down, right = (torch.stack(rest[SPRITES + k :: len(each)], 1) for k in range(len(each)))
    # The odd one can always be the last: blocks are in random order.
    odd = torch.where(labels == 0, same, (same + 1 + other) % len(CLASSES))
    classes = torch.stack([same, same, odd], 1)
    pattern = classes * (TURNS * SCALES) + forms
    free = BLOCK - patterns()[1][pattern]  # [n, 3, 2]: rows and columns of the block left over by the sprite
    if placement == "center":
        places = free // 2
    elif placement == "corner":
        places = torch.zeros_like(free)
    else:
        places = torch.stack([down, right], -1) * (free + 1) // 2**20
    return Scene(labels, classes, pattern, blocks, colours, places[..., 0], places[..., 1])


def pentomino(n: int, seed: int, placement: str = "center") -> Labelled:
    """Images of three sprites, and whether one of them is of another class.

    Args:
        n: how many images.
        seed: determines the images, whatever the number of threads; a larger ``n`` only adds images.
        placement: of a sprite in its block of 8 x 8 pixels: ``"center"`` (as in the paper), ``"corner"`` (top left, as
            in the first generator of this task) or ``"jitter"`` (anywhere).

    Returns:
        ``images`` uint8 ``[n, 3, 64, 64]``, ``labels`` int64 ``[n]``: 0 if all three are of one class, 1 if one is
        odd; both are equally likely.
    """
    shown = scene(n, seed, placement)
    shapes = _moved()[shown.patterns, shown.tops, shown.lefts]  # [n, 3, 8, 8]
    return Labelled(paste(shapes, shown.blocks, shown.colours, GRID), shown.labels)
