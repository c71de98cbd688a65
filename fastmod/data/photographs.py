"""Small photographs with a class each, and their random crops and flips for training."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4  # a crop moves by up to this many pixels in each direction
PLACES = 2 * PADDING + 1


class Photographs(NamedTuple):
    """Images and their labels, in the order of the files."""

    train_images: Tensor  # uint8 [N, 3, 32, 32]; red, green, blue
    train_labels: Tensor  # int64 [N]
    test_images: Tensor  # uint8 [M, 3, 32, 32]
    test_labels: Tensor  # int64 [M]

    @property
    def described(self) -> str:
        """The numbers of images, as text."""
        return f"{len(self.train_labels)} training and {len(self.test_labels)} test images"


def crop_and_flip(images: Tensor, places: Tensor) -> Tensor:
    """Move ``images [B, 3, H, W]`` by up to 4 pixels and mirror some, by ``places [B, 3]``, numbers in 0..8."""
    height, width = images.shape[-2:]
    down = places[:, 0, None] + torch.arange(height, device=images.device)  # [B, H]
    right = places[:, 1, None] + torch.arange(width, device=images.device)
    right = torch.where(places[:, 2, None] % 2 == 0, right, right.flip(1))
    padded = F.pad(images, (PADDING,) * 4)
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.movedim(1, -1)[batch, down[:, :, None], right[:, None, :]].movedim(-1, 1)
