"""The simple CNN of the weight-mask paper, its Table 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class CNN(nn.Module):
    """Images ``[B, 3, 32, 32]`` -> scores ``[B, 10]``: four convolutions 3x3, pooled to half after each but the last,
    whose channels are averaged over the image. Dropout follows the last two."""

    def __init__(self, channels: Sequence[int] = (32, 64, 128, 256), dropout: bool = False) -> None:
        super().__init__()
        first, second, third, fourth = channels
        self.conv1 = nn.Conv2d(3, first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.conv3 = nn.Conv2d(second, third, 3, padding=1)
        self.conv4 = nn.Conv2d(third, fourth, 3, padding=1)
        self.dropout3 = nn.Dropout(0.25 if dropout else 0.0)
        self.dropout4 = nn.Dropout(0.5 if dropout else 0.0)
        self.output = nn.Linear(fourth, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(self.dropout3(F.relu(self.conv3(x))), 2)
        x = self.dropout4(F.relu(self.conv4(x)))
        return self.output(x.mean((2, 3)))
