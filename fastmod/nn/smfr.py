"""A stack of MFNNRs: ``SMFR``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn.mfnnr import MFNNR, Routing, describe_routing
from fastmod.ops import SMFROutput, smfr


def _needs_its_own_call(layer: MFNNR, context: bool, threshold: float | None) -> bool:
    """Whether a layer does something that the op for the whole stack would skip or do differently."""
    if type(layer) is not MFNNR or layer.context != context or layer.threshold != threshold:
        return True
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


class SMFR(nn.Module):
    """``depth + 1`` MFNNRs with block counts ``in_blocks, width, ..., width, out_blocks``, served by one op.

    Args:
        in_blocks, out_blocks: number of blocks that come in and go out.
        block_size: D.
        width: blocks between the layers.
        depth: number of times that ``width`` blocks occur, 0 or more.
        hidden, layers, mode, context, threshold: of every :class:`MFNNR`.

    Shapes: ``[..., in_blocks, D] -> [..., out_blocks, D]``. Parameters: ``stack.{i}.route.{j}.weight|bias`` and
    ``stack.{i}.update.{j}.weight|bias``, with Gumbel also ``stack.{i}.log_tau``. The layers of ``stack`` are called one
    by one, and so slower, if one of them has hooks, is of a subclass, is in another mode (train or eval), or has
    another ``context`` or ``threshold`` than the first.
    """

    last_forward_in = "_last"  # the attribute that keeps it

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
        _parts.positive_sizes(in_blocks=in_blocks, out_blocks=out_blocks, width=width)
        _parts.positive_sizes(depth=depth, least=0)
        counts = [in_blocks, *[width] * depth, out_blocks]
        self.stack = nn.ModuleList(
            MFNNR(m, n, block_size, hidden=hidden, layers=layers, mode=mode, context=context, threshold=threshold)
            for m, n in pairwise(counts)
        )
        self.in_blocks, self.block_size, self.mode = in_blocks, block_size, mode
        # What the last forward left for penalty() and routing(): its output, and mode and temperature of each layer.
        self._last: tuple[SMFROutput, list[tuple[str, float | Tensor]]] | None = None

    @property
    def threshold(self) -> float | None:
        """The value of the first layer; setting it sets that of every layer."""
        return self._layers()[0].threshold

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        for layer in self._layers():
            layer.threshold = value

    def forward(self, x: Tensor) -> Tensor:
        _parts.check_blocks("x", x, self.in_blocks, self.block_size, "in_blocks, block_size")
        layers = self._layers()
        routings = [layer.current_routing() for layer in layers]
        mode = routings[0][0]
        context, threshold = layers[0].context, layers[0].threshold
        by_layers = any(_needs_its_own_call(layer, context, threshold) for layer in layers)
        if by_layers or any(other != mode for other, _ in routings):
            result = self._by_layers(x, layers)
        else:
            result = smfr(
                x,
                [(_parts.fnn_tensors(layer.route), _parts.fnn_tensors(layer.update)) for layer in layers],
                context=context,
                mode=mode,
                taus=None if self.mode == "softmax" else cast("list[Tensor]", [tau for _, tau in routings]),
                threshold=threshold,
            )
        object.__setattr__(self, "_last", (result, routings))  # nn.Module's own first looks for parameters and modules
        return result.out

    @staticmethod
    def _by_layers(x: Tensor, layers: list[MFNNR]) -> SMFROutput:
        for layer in layers:
            x = layer(x)
        found = [layer._last_forward()[0] for layer in layers]
        penalty = torch.stack([f.penalty for f in found]).sum()
        return SMFROutput(x, penalty, [f.logits for f in found], [f.gate for f in found])

    def penalty(self) -> Tensor:
        """Sum of the range penalties of the last forward, a differentiable scalar; add it to the loss."""
        return self._last_forward()[0].penalty

    @torch.no_grad()
    def routing(self) -> list[Routing]:
        """Per layer the routing and gate weights of the last forward, detached."""
        result, routings = self._last_forward()
        parts = zip(result.logits, result.gates, routings, strict=True)
        return [describe_routing(logits, gate, mode, tau) for logits, gate, (mode, tau) in parts]

    def _last_forward(self) -> tuple[SMFROutput, list[tuple[str, float | Tensor]]]:
        if self._last is None:
            raise RuntimeError("penalty() and routing() describe the last forward, but there was none yet")
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out the last forward: its tensors belong to an autograd graph."""
        return {**super().__getstate__(), "_last": None}

    def _layers(self) -> list[MFNNR]:
        return cast("list[MFNNR]", list(self.stack._modules.values()))
