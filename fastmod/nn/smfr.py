"""A stack of MFNNRs: ``SMFR``."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn.mfnnr import MFNNR, Routing


class SMFR(nn.Module):
    """``depth + 1`` MFNNRs with block counts ``in_blocks, width, ..., width, out_blocks``.

    Args:
        in_blocks, out_blocks: number of blocks that come in and go out.
        block_size: D.
        width: blocks between the layers.
        depth: number of times that ``width`` blocks occur.
        hidden, layers, mode, context, threshold: of every :class:`MFNNR`.

    Shapes: ``[..., in_blocks, D] -> [..., out_blocks, D]``. Parameters: ``stack.{i}.route.{j}.weight|bias`` and
    ``stack.{i}.update.{j}.weight|bias``, with Gumbel also ``stack.{i}.log_tau``.
    """

    def __init__(
        self,
        in_blocks: int,
        out_blocks: int,
        block_size: int,
        width: int,
        depth: int,
        *,
        hidden: int = 100,
        layers: int = 1,
        mode: str = "softmax",
        context: bool = True,
        threshold: float | None = 20.0,
    ) -> None:
        super().__init__()
        _parts.positive_sizes(in_blocks=in_blocks, out_blocks=out_blocks, width=width, depth=depth)
        counts = [in_blocks, *[width] * depth, out_blocks]
        self.stack = nn.ModuleList(
            MFNNR(m, n, block_size, hidden=hidden, layers=layers, mode=mode, context=context, threshold=threshold)
            for m, n in pairwise(counts)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            x = layer(x)
        return x

    def penalty(self) -> Tensor:
        """Sum of the range penalties of the last forward, a differentiable scalar; add it to the loss."""
        first, *rest = (layer.penalty() for layer in self._layers())
        return sum(rest, start=first)

    def routing(self) -> list[Routing]:
        """Per layer the routing and gate weights of the last forward, detached."""
        return [layer.routing() for layer in self._layers()]

    def _layers(self) -> list[MFNNR]:
        return cast("list[MFNNR]", list(self.stack))
