"""Gated rewriting of blocks by an FNN: ``FNNR``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.ops.gated_residual import gated_residual
from fastmod.ops.mfnnr import fnn


class FNNR(nn.Module):
    """An FNN proposes new values for N blocks and one gate per block; a closed gate copies the block.

    Args:
        blocks: N.
        block_size: D.
        context_blocks: C, blocks that the FNN reads besides its input.
        hidden, layers: width and number of the hidden layers of the FNN.

    Shapes: x ``[..., N, D]``, context ``[..., C, D]`` -> ``[..., N, D]``. Parameters: ``update.{j}.weight|bias``.
    """

    def __init__(
        self, blocks: int, block_size: int, *, context_blocks: int = 0, hidden: int = 100, layers: int = 1
    ) -> None:
        super().__init__()
        _parts.positive_sizes(blocks=blocks, block_size=block_size, hidden=hidden, layers=layers)
        if context_blocks != 0:
            _parts.positive_sizes(context_blocks=context_blocks)
        self.blocks, self.block_size, self.context_blocks = blocks, block_size, context_blocks
        inputs, outputs = (blocks + context_blocks) * block_size, blocks * block_size + blocks
        self.update = _parts.make_fnn(inputs, outputs, hidden, layers)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        n, d = self.blocks, self.block_size
        _parts.check_blocks("x", x, n, d, "blocks, block_size")
        features = x.flatten(-2)
        if self.context_blocks:
            if context is None:
                raise ValueError(f"context: expected [..., {self.context_blocks}, {d}], got None")
            _parts.check_blocks("context", context, self.context_blocks, d, "context_blocks, block_size")
            if context.shape[:-2] != x.shape[:-2]:
                raise ValueError(
                    f"context: expected the leading sizes of x {list(x.shape[:-2])}, got shape {list(context.shape)}"
                )
            features = torch.cat([features, context.flatten(-2)], dim=-1)
        elif context is not None:
            raise ValueError("context: expected None, as context_blocks is 0")
        update = fnn(features, _parts.fnn_tensors(self.update))  # [..., N*D + N]
        return gated_residual(x, update[..., : n * d].unflatten(-1, (n, d)), update[..., n * d :])

    def extra_repr(self) -> str:
        return f"{self.blocks}, {self.block_size}, context_blocks={self.context_blocks}"
