"""The ResNets of He et al. for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class BasicBlock(nn.Module):
    """``[B, in_channels, H, W]`` -> ``[B, out_channels, H / stride, W / stride]``: two convolutions and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.around: nn.Module = nn.Identity()  # the shortcut; its name in checkpoints and results
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.around = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

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
