"""Samples of one parameter under its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.masks.together import Hiding
from fastmod.ops.sample_mask import _sample


class Noise(NamedTuple):
    """Where the masks of a parameter come from."""

    seed: int  # which seed of the forward
    stream: int
    transposed: bool = False  # the parameter lies as [in, out]


class Draw:
    """One parameter in one forward: the noise of its masks, and the samples that this run of the net meets.

    ``first`` is the sample of a run of one part; None when all parts run together under ``vmap``, whose hidden
    dimension ``hiding`` then makes. ``weight`` is given, and ``logits`` kept, as the fused ops want them, a linear
    layer's as [out, in].
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
        hiding: Hiding | None,
    ) -> None:
        # Logits are fp32 so that small steps move them; kernels take them in the weight's dtype.
        logits = logits if logits.dtype == weight.dtype else logits.to(weight.dtype)
        if noise.transposed:
            logits = logits.t().contiguous()
        seed = seed if seed.device == weight.device else seed.to(weight.device)  # a net on several devices
        self.weight, self.logits, self.seed, self.tau = weight, logits, seed, tau
        self.stream, self.transposed = noise.stream, noise.transposed
        self.samples, self.first, self._hiding = samples, first, hiding
        self.used = False
        self._dense: Tensor | None = None

    def sample(self, first: int, count: int) -> Tensor:
        """``[count, ...]``: the parameter under some of its masks; differentiable."""
        drawn = _sample(self.logits, self.weight, first, count, self.seed, self.stream, self.tau)
        return drawn.transpose(1, 2) if self.transposed else drawn

    def dense(self) -> Tensor:
        """The parameter as an ordinary tensor, drawn once: what any code may compute with."""
        wanted = self.logits.requires_grad and torch.is_grad_enabled()  # a checkpoint runs without gradients at first
        if self._dense is None or (wanted and not self._dense.requires_grad):
            if self.first is None:
                self._dense = self.hide(lambda: self.sample(0, self.samples))
            else:
                self._dense = self.sample(self.first, 1)[0]
        return self._dense

    def hide(self, make: Callable[[], Tensor]) -> Tensor:
        """``[S, ...]`` as one of the tensors of a run of all parts; ``make`` runs outside of vmap."""
        assert self._hiding is not None
        return self._hiding(make)

    def shown(self, value: Tensor) -> Tensor | None:
        """``[S, ...]`` of a tensor of a run of all parts; None if the net has a vmap of its own around it."""
        assert self._hiding is not None
        return self._hiding.shown(value)

    def is_hidden(self, value: Tensor) -> bool:
        return self._hiding is not None and self._hiding.is_hidden(value)

    def again(self) -> bool:
        """Whether to compute with ``dense``: from the second use on, as in a decoder that goes step by step.

        Not inside of a checkpoint, which expects the same operations when it runs for the second time.
        """
        if self.used and not saved_tensors_are_hooked():
            return True
        self.used = True
        return False


def saved_tensors_are_hooked() -> bool:
    """Whether a checkpoint, or anybody else, takes what autograd saves."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("fastmod asks whether there are any"):
            return False
    except RuntimeError:
        return True
