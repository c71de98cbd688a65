"""Samples of one parameter under its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.masks.together import HiddenDimension
from fastmod.ops.sample_mask import _sample


class Noise(NamedTuple):
    """The source of the masks of a parameter."""

    seed: int  # index among the seeds of the forward
    stream: int
    transposed: bool = False  # the parameter is stored as [in, out]


class Draw:
    """One parameter in one forward: the noise of its masks, and which samples this run of the net uses.

    ``first`` is the sample in a run of one part; None if all parts run together under ``vmap``, in which case
    ``hidden`` makes the hidden dimension. ``weight`` and ``logits`` have the form that the fused ops take, [out, in]
    for a linear layer.
    """

    def __init__(
        self,
        weight: Tensor,
        logits: Tensor,
        noise: Noise,
        seed: Tensor,
        tau: float,
        samples: int,
        first: int | None,
        hidden: HiddenDimension | None,
    ) -> None:
        # Logits are fp32, so that small steps change them; kernels take them in the dtype of the weight.
        logits = logits if logits.dtype == weight.dtype else logits.to(weight.dtype)
        if noise.transposed:
            logits = logits.t().contiguous()
        seed = seed if seed.device == weight.device else seed.to(weight.device)  # the net is on several devices
        self.weight, self.logits, self.seed, self.tau = weight, logits, seed, tau
        self.stream, self.transposed = noise.stream, noise.transposed
        self.samples, self.first, self._hidden = samples, first, hidden
        self.used = False
        self._dense: Tensor | None = None

    def sample(self, first: int, count: int) -> Tensor:
        """``[count, ...]``: the parameter under ``count`` of its masks; differentiable."""
        drawn = _sample(self.logits, self.weight, first, count, self.seed, self.stream, self.tau)
        return drawn.transpose(1, 2) if self.transposed else drawn

    def dense(self) -> Tensor:
        """The masked parameter as an ordinary tensor, for any code; drawn once."""
        wanted = self.logits.requires_grad and torch.is_grad_enabled()  # a checkpoint first runs without gradients
        if self._dense is None or (wanted and not self._dense.requires_grad):
            if self.first is None:
                self._dense = self.hide(lambda: self.sample(0, self.samples))
            else:
                self._dense = self.sample(self.first, 1)[0]
        return self._dense

    def hide(self, make: Callable[[], Tensor]) -> Tensor:
        """``[S, ...]`` as a tensor within a run of all parts; ``make`` runs outside vmap."""
        assert self._hidden is not None
        return self._hidden(make)

    def unhidden(self, value: Tensor) -> Tensor | None:
        """``[S, ...]`` of a tensor within a run of all parts; None inside a vmap of the net's own."""
        assert self._hidden is not None
        return self._hidden.unhidden(value)

    def is_hidden(self, value: Tensor) -> bool:
        return self._hidden is not None and self._hidden.is_hidden(value)

    def again(self) -> bool:
        """Whether to compute with ``dense``: from the second use on, as in a decoder that runs step by step.

        Not inside a checkpoint, which expects the same operations when it runs a second time.
        """
        if self.used and not saved_tensors_are_hooked():
            return True
        self.used = True
        return False


def saved_tensors_are_hooked() -> bool:
    """Whether a checkpoint, or another hook, handles the tensors that autograd saves."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("fastmod asks whether there are any"):
            return False
    except RuntimeError:
        return True
