"""Feed-forward nets: over vectors, and over the concatenated blocks of a block model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """``[B, sizes[0]]`` -> ``[B, sizes[-1]]``, the activation between the layers ``layer1``, ``layer2`` ...

    Args:
        sizes: of the input, the hidden layers and the output.
        activation: between two layers.
        init_scale: weights are initialised as in nn.Linear, times this.
        names: of the layers, in place of these.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[Tensor], Tensor] = F.relu,
        init_scale: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        names = names or [f"layer{number}" for number in range(1, len(sizes))]
        for name, (before, after) in zip(names, pairwise(sizes), strict=True):
            layer = nn.Linear(before, after)
            with torch.no_grad():
                layer.weight *= init_scale
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = layer(self.activation(x))
        return x


class FNN(nn.Module):
    """``depth`` hidden layers of ``width`` units with LeakyReLU(0.01) between them.

    Shapes: ``[B, in_blocks, D] -> [B, out_blocks, D]``.
    """

    def __init__(self, in_blocks: int, out_blocks: int, block_size: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [in_blocks * block_size, *[width] * depth, out_blocks * block_size]
        # Numbers, as these are the names in checkpoints of block studies.
        self.layers = MLP(sizes, F.leaky_relu, names=[str(number) for number in range(depth + 1)])
        self.out_blocks, self.block_size = out_blocks, block_size

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(-2)).unflatten(-1, (self.out_blocks, self.block_size))
