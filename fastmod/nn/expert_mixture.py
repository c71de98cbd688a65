"""Experts with the gater that weights them: ``ExpertMixture``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fastmod.nn._pending import Pending, finish
from fastmod.nn.expert_layers import side_by_side
from fastmod.nn.expert_stack import ExpertStack
from fastmod.nn.gater import Gater
from fastmod.ops._norm_convs import served


class ExpertMixture(nn.Module):
    """``sum_e gate(x)[:, e] * expert_e(x)``: a :class:`Gater` and an :class:`ExpertStack` that read the same input.

    Args:
        in_channels, out_channels, experts, depth, stride: of the experts.
        gate_channels, gate_strides, gate_norm, pooled: of the gater.

    Shapes: ``[B, C, H, W]`` -> ``[B, C', H', W']``. Parameters: ``gate.*`` and ``experts.*``. The sum over the experts
    is computed by the last block: the outputs of single experts are never written.
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
        # Together only where that saves launches, and not if a hook on one of the two would be skipped.
        if not served(x) or self.gate._forward_hooks or self.gate._forward_pre_hooks or self._hooked():
            return self.experts(x, self.gate(x))
        return self._together(x)

    def _hooked(self) -> bool:
        blocks = list(self.experts.blocks._modules.values())
        return any(m._forward_hooks or m._forward_pre_hooks for m in (self.experts, *blocks))

    def _together(self, x: Tensor) -> Tensor:
        """The i-th convolutions of gater and experts, with the shortcut of a block, are one launch."""
        self.gate.enter(x)
        blocks = self.experts.begin(x)
        read: Tensor | Pending = x  # by the gater
        inside: Tensor = x  # what a block reads
        shortcut: Tensor | Pending = x
        y = Pending(x)
        for i in range(max(len(self.gate.convs), 2 * len(blocks))):
            steps = []
            if i < 2 * len(blocks):
                if i % 2 == 0 and i > 0:
                    inside = shortcut = finish(y, shortcut)
                block = blocks[i // 2]
                steps = block.begin(inside) if i % 2 == 0 else [block.norm2.step(block.conv2, y)]
            if i < len(self.gate.convs):
                steps.append(self.gate.step(i, read))
            found = side_by_side(steps)
            if i < len(self.gate.convs):
                read = found.pop()
            if found:
                y = found[0]
            if len(found) > 1:
                shortcut = found[1]
        assert isinstance(read, Pending)
        return finish(y, shortcut, gate=self.experts.checked(self.gate.leave(read), x))
