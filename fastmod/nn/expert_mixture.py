"""Experts and the gater that weights them: ``ExpertMixture``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fastmod.nn.expert_stack import ExpertStack
from fastmod.nn.gater import Gater


class ExpertMixture(nn.Module):
    """``sum_e gate(x)[:, e] * expert_e(x)``: a :class:`Gater` and an :class:`ExpertStack` that read one input.

    Args:
        in_channels, out_channels, experts, depth, stride: of the experts.
        gate_channels, gate_strides, gate_norm, pooled: of the gater.

    Shapes: ``[B, C, H, W]`` -> ``[B, C', H', W']``. Parameters: ``gate.*`` and ``experts.*``. The sum over the experts
    is formed where the last block ends: the experts' own outputs are never written.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        experts: int,
        depth: int,
        stride: int = 1,
        *,
        gate_channels: Sequence[int] = (16, 16, 32, 64),
        gate_strides: Sequence[int] = (1, 1, 2, 1),
        gate_norm: bool = False,
        pooled: int = 2,
    ) -> None:
        super().__init__()
        self.gate = Gater(in_channels, experts, gate_channels, gate_strides, gate_norm, pooled)
        self.experts = ExpertStack(in_channels, out_channels, experts, depth, stride)

    def forward(self, x: Tensor) -> Tensor:
        # The gater's first convolution could join the experts' in one call. Its output would have to be cut off again,
        # which costs the backward a pass over all E + 1 outputs: no less than to read x, as large as one, once more.
        return self.experts(x, self.gate(x))
