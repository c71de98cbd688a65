"""Routing of blocks by an FNN: ``Multiplexer``."""

from __future__ import annotations

from torch import Tensor

from fastmod.nn import _parts
from fastmod.ops.mfnnr import fnn
from fastmod.ops.multiplex import multiplex


class Multiplexer(_parts.RoutedLayer):
    """Each of N outputs is a weighted average of the M input blocks, the weights given by an FNN.

    Args:
        in_blocks: M.
        out_blocks: N.
        block_size: D.
        hidden, layers: width and number of the hidden layers of the FNN.
        mode: ``"softmax"``, or ``"gumbel"``: one block per output with a learned temperature, the arg max in eval.

    Shapes: ``[..., M, D] -> [..., N, D]``. Parameters: ``route.{j}.weight|bias``, with Gumbel also ``log_tau``.
    """

    def __init__(
        self,
        in_blocks: int,
        out_blocks: int,
        block_size: int,
        *,
        hidden: int = 100,
        layers: int = 1,
        mode: str = "softmax",
    ) -> None:
        super().__init__(in_blocks, out_blocks, block_size, hidden=hidden, layers=layers, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        _parts.check_blocks("x", x, self.in_blocks, self.block_size, "in_blocks, block_size")
        logits = fnn(x.flatten(-2), _parts.fnn_tensors(self.route))  # [..., M*N]
        mode, tau = self.current_routing()
        return multiplex(x, logits.unflatten(-1, (self.in_blocks, self.out_blocks)), mode=mode, tau=tau)
