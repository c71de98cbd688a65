"""The SMFR without fastmod's ops, as a model of its own."""

from __future__ import annotations

from torch import Tensor

from fastmod.bench import baselines


class PlainSMFR(baselines.SMFR):
    """The SMFR in plain PyTorch, with the interface of ``fastmod.nn.SMFR``: for races."""

    last_forward_in = "_penalty"  # the attribute that keeps it

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out, penalty = super().forward(x)
        object.__setattr__(self, "_penalty", penalty)
        return out

    def penalty(self) -> Tensor:
        return self._penalty  # type: ignore[return-value]
