"""A feed-forward net over the concatenated blocks."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class FNN(nn.Module):
    """``depth`` hidden layers of ``width`` units with LeakyReLU(0.01) between them.

    Shapes: ``[B, in_blocks, D] -> [B, out_blocks, D]``.
    """

    def __init__(self, in_blocks: int, out_blocks: int, block_size: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [in_blocks * block_size, *[width] * depth, out_blocks * block_size]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.out_blocks, self.block_size = out_blocks, block_size

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(-2)
        *hidden, last = self.layers
        for layer in hidden:
            x = F.leaky_relu(layer(x))
        return last(x).unflatten(-1, (self.out_blocks, self.block_size))
