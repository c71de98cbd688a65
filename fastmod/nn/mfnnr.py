"""Routing, then gated rewriting, as one op: ``MFNNR``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod.nn import _parts
from fastmod.ops import MFNNROutput, _checks, mfnnr
from fastmod.ops.multiplex import mode_code, routing_weights


class Routing(NamedTuple):
    """How one layer routed its last input."""

    weights: Tensor  # [..., M, N], over M they sum to 1
    gates: Tensor  # [..., N], 0 copies the routed block, 1 replaces it


def describe_routing(logits: Tensor, gate: Tensor, mode: str, tau: float | Tensor) -> Routing:
    """The weights, from the logits that an op returns for inspection."""
    shown = mode_code("argmax" if mode == "argmax" else "softmax")
    tau_tensor, tau_value = _checks.positive_tau(tau, logits)
    weights = routing_weights(logits.to(_checks.compute_dtype(logits)), tau_tensor, tau_value, None, shown)
    return Routing(weights.to(logits.dtype), torch.sigmoid(gate))


class MFNNR(_parts.RoutedLayer):
    """A Multiplexer from M to N blocks, then an FNN with gated residual; forward and backward are one op each.

    Args:
        in_blocks: M.
        out_blocks: N.
        block_size: D.
        hidden, layers: width and number of the hidden layers of both FNNs.
        mode: ``"softmax"``, or ``"gumbel"``: one block per output with a learned temperature, the arg max in eval.
        context: whether the update FNN reads the input besides the routed blocks.
        threshold: beyond which routing and gate logits are penalised; ``None`` for no penalty.

    Shapes: ``[..., M, D] -> [..., N, D]``. Parameters: ``route.{j}.weight|bias``, ``update.{j}.weight|bias``, with
    Gumbel also ``log_tau``. The linear layers hold parameters only: hooks on them do not run.
    """

    last_forward_in = "_last"  # the attribute that keeps it

    def __init__(
        self,
        in_blocks: int,
        out_blocks: int,
        block_size: int,
        *,
        hidden: int = 100,
        layers: int = 1,
        mode: str = "softmax",
        context: bool = True,
        threshold: float | None = 20.0,
    ) -> None:
        super().__init__(in_blocks, out_blocks, block_size, hidden=hidden, layers=layers, mode=mode)
        self.context = context
        self.threshold = None if threshold is None else _checks.threshold(threshold)
        seen = out_blocks + in_blocks if context else out_blocks
        self.update = _parts.make_fnn(seen * block_size, out_blocks * block_size + out_blocks, hidden, layers)
        # What the last forward left for penalty() and routing(): its output, mode and temperature.
        self._last: tuple[MFNNROutput, str, float | Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        _parts.check_blocks("x", x, self.in_blocks, self.block_size, "in_blocks, block_size")
        mode, tau = self.current_routing()
        result = mfnnr(
            x,
            _parts.fnn_tensors(self.route),
            _parts.fnn_tensors(self.update),
            context=self.context,
            mode=mode,
            tau=tau,
            threshold=self.threshold,
        )
        object.__setattr__(self, "_last", (result, mode, tau))  # nn.Module's own first looks for parameters and modules
        return result.out

    def penalty(self) -> Tensor:
        """Range penalty of the last forward, a differentiable scalar."""
        return self._last_forward()[0].penalty

    @torch.no_grad()
    def routing(self) -> Routing:
        """Routing and gate weights of the last forward, detached; Gumbel shows the soft weights when training."""
        result, mode, tau = self._last_forward()
        return describe_routing(result.logits, result.gate, mode, tau)

    def _last_forward(self) -> tuple[MFNNROutput, str, float | Tensor]:
        if self._last is None:
            raise RuntimeError("penalty() and routing() describe the last forward, but there was none yet")
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out the last forward: its tensors belong to an autograd graph."""
        return {**super().__getstate__(), "_last": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, context={self.context}, threshold={self.threshold}"
