"""Nets of the mask study on images: the simple CNN of the paper's Table 2 and the ResNets of He et al. for CIFAR."""

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


class BasicBlock(nn.Module):
    """``[B, before, H, W]`` -> ``[B, after, H / stride, W / stride]``: two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """Images ``[B, 3, 32, 32]`` -> scores ``[B, 10]``. Three groups of (depth - 2) / 6 basic blocks."""

    def __init__(self, depth: int = 110, widths: Sequence[int] = (16, 32, 64)) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth: expected 6 n + 2, got {depth}")
        self.conv = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        before = widths[0]
        for group, width in enumerate(widths):
            for place in range((depth - 2) // 6):
                blocks.append(BasicBlock(before, width, 2 if group and not place else 1))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(before, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.output(x.mean((2, 3)))
