"""Coloured Pentomino: three sprites in an image; are they all of one class?

Ten classes of sprites, five pentominoes and their mirror images, each turned by any right angle and drawn in cells of
one pixel or of two by two, in one of ten colours, in three different blocks of an 8 x 8 grid.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.tasks.drawing import COLOURS, Labelled, check, choices, different, paste

#: Class -> its cells; the mirror images follow from these.
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
_OFFSETS = BLOCK - 1  # a sprite is at least two pixels wide, so it begins at one of the first seven


class Scene(NamedTuple):
    """All that an image shows, of n images."""

    labels: Tensor  # [n]: 0 all of one class, 1 one is odd
    classes: Tensor  # [n, 3]: of each sprite, a number of CLASSES
    patterns: Tensor  # [n, 3]: of each sprite, a number of patterns()
    blocks: Tensor  # [n, 3]: where it is in the grid, row by row
    colours: Tensor  # [n, 3]
    tops: Tensor  # [n, 3]: where it begins in its block
    lefts: Tensor  # [n, 3]


@functools.cache
def patterns() -> tuple[Tensor, Tensor]:
    """The 80 sprites, class by class, turn by turn, scale by scale: bool ``[80, 8, 8]`` in the top left corner, and
    their heights and widths ``[80, 2]``."""
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
    """The patterns at every place in their block that may be asked for: uint8 ``[80, 7, 7, 8, 8]``, lit is 255."""
    lit = patterns()[0].to(torch.uint8) * 255
    rows = torch.stack([lit.roll(top, 1) for top in range(_OFFSETS)], 1)
    return torch.stack([rows.roll(left, 3) for left in range(_OFFSETS)], 2)


def scene(n: int, seed: int, placement: str = "center") -> Scene:
    """What :func:`pentomino` shows for the same arguments."""
    check(n, seed)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {', '.join(PLACEMENTS)}, got {placement!r}")
    each = (TURNS * SCALES, len(COLOURS), 2**20, 2**20)  # of one sprite: its form, colour and two places
    sizes = [2, len(CLASSES), len(CLASSES) - 1, *(GRID * GRID - k for k in range(SPRITES)), *each * SPRITES]
    labels, same, other, *rest = choices(n, sizes, seed)
    blocks = different(*rest[:SPRITES])
    forms, colours, down, right = (torch.stack(rest[SPRITES + k :: len(each)], 1) for k in range(len(each)))
    # Which of the three is the odd one says nothing, as the blocks are in any order.
    odd = torch.where(labels == 0, same, (same + 1 + other) % len(CLASSES))
    classes = torch.stack([same, same, odd], 1)
    pattern = classes * (TURNS * SCALES) + forms
    free = BLOCK - patterns()[1][pattern]  # [n, 3, 2]: pixels that the sprite leaves of its block
    if placement == "center":
        places = free // 2
    elif placement == "corner":
        places = torch.zeros_like(free)
    else:
        places = torch.stack([down, right], -1) * (free + 1) // 2**20
    return Scene(labels, classes, pattern, blocks, colours, places[..., 0], places[..., 1])


def pentomino(n: int, seed: int, placement: str = "center") -> Labelled:
    """Images of three sprites, and whether one of these is of another class.

    Args:
        n: how many images.
        seed: the same seed gives the same images, on any number of threads; more of them begin with the same ones.
        placement: where a sprite is in its block of 8 x 8 pixels: ``"center"`` (as the paper has it), ``"corner"`` (top
            left, as the first generator of this task) or ``"jitter"`` (anywhere).

    Returns:
        ``images`` uint8 ``[n, 3, 64, 64]``, ``labels`` int64 ``[n]``: 0 where all three are of one class, 1 where one
        is odd; both are as likely.
    """
    shown = scene(n, seed, placement)
    shapes = _moved()[shown.patterns, shown.tops, shown.lefts]  # [n, 3, 8, 8]
    return Labelled(paste(shapes, shown.blocks, shown.colours, GRID), shown.labels)
