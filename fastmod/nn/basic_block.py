"""An expert in ordinary PyTorch: the result of ``ExpertStack.to_experts``, and a block for ``Compositional``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.nn._pending import Pending, finish
from fastmod.nn._stacked import Tensors, convolved


class BasicBlock(nn.Module):
    """``[B, Cin, H, W]`` -> ``[B, Cout, H', W']``: the block of :class:`fastmod.nn.ExpertStack` for one expert, with
    the same names."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False) if changes else None
        self.shortcut_norm = nn.BatchNorm2d(out_channels) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(y + x)

    def forward_stacked(self, x: Tensor, weights: Tensors, buffers: Tensors) -> Tensor:
        """``[B, T, C, H, W]`` -> the same for T tasks with weights and statistics of their own, on fused ops."""
        y = convolved(self, "conv1", "norm1", x, weights, buffers, relu=True)
        y = convolved(self, "conv2", "norm2", y, weights, buffers)
        shortcut: Tensor | Pending = x
        if self.shortcut is not None:
            shortcut = convolved(self, "shortcut", "shortcut_norm", x, weights, buffers)
        return finish(y, shortcut)


class Expert(nn.Module):
    """``depth`` basic blocks, the first with the stride."""

    def __init__(self, in_channels: int, out_channels: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        first = BasicBlock(in_channels, out_channels, stride)
        self.blocks = nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)
