"""What all layers of a masked model share: which masks are in force, and where the batch lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class MaskState:
    """Settings of a masked model, and what one forward pass adds to them."""

    def __init__(self, logits: nn.ParameterDict, names: list[str], samples: int, tau: float, batch_dim: int) -> None:
        self.logits, self.names = logits, {name: i for i, name in enumerate(names)}
        self.samples, self.tau, self.batch_dim = samples, tau, batch_dim
        self.train_weights = False
        self.sampling = False
        self.fixed: Mapping[str, Tensor] | None = None  # masks in force instead of sampled or thresholded ones
        self.batch = 0
        self.seeds: tuple[Tensor, ...] = ()
        self.drawn: dict[str, Tensor] = {}  # samples that this forward may need again
        self.used: set[str] = set()  # layers that have run in this forward

    def begin(self, sampling: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called once per forward: one seed per parameter, so that a layer that runs twice meets the same masks."""
        self.sampling = sampling and self.fixed is None
        if not self.sampling:
            return
        self.batch = batch_size((*args, *kwargs.values()), self.batch_dim)
        if self.batch % self.samples:
            raise ValueError(
                f"batch: expected a multiple of {self.samples} mask samples in dimension {self.batch_dim} of the "
                f"input, got {self.batch}"
            )
        self.end()
        self.seeds = torch.randint(0, 2**63 - 1, (max(len(self.names), 1),), dtype=torch.int64).unbind()

    def end(self) -> None:
        """Lets go of what was drawn, which holds on to the graph."""
        self.drawn, self.used = {}, set()

    def again(self, name: str) -> bool:
        """Whether this layer has run before in this forward, as in a decoder that goes step by step."""
        if name in self.used:
            return True
        self.used.add(name)
        return False

    def logit(self, name: str) -> Tensor | None:
        """The logits of a parameter; None if it has no mask."""
        return self.logits[key_of(name)] if name in self.names else None

    def seed(self, name: str) -> Tensor:
        return self.seeds[self.names.get(name, 0)]

    def weight(self, value: Tensor) -> Tensor:
        """A weight as it enters the computation: frozen weights get no gradient."""
        return value if self.train_weights else value.detach()

    def masked(self, name: str, value: Tensor) -> Tensor:
        """``value`` under the mask in force when nothing is sampled: a given one, else the thresholded logits."""
        weight = self.weight(value)
        if self.fixed is not None:
            return weight * self.fixed[name] if name in self.fixed else weight
        logits = self.logit(name)
        return weight if logits is None else weight * (logits.detach() > 0)

    def batch_axis(self, x: Tensor, last: int = 1) -> int:
        """Where the batch lies in ``x``, whose ``last`` dimensions are features."""
        for axis in (self.batch_dim, 0, 1):
            if axis < x.dim() - last and x.shape[axis] == self.batch:
                return axis
        if self.batch_dim == 0 and x.dim() > last and self.batch and x.shape[0] % self.batch == 0:
            return 0  # sequences laid end to end: those of a part still lie together
        raise ValueError(
            f"x: cannot tell the batch of {self.batch} in an input of shape {list(x.shape)}; a masked layer expects it "
            f"in dimension {self.batch_dim} (batch_dim), 0 or 1"
        )


def key_of(name: str) -> str:
    """A parameter's name as a key of a ParameterDict, which allows no dots."""
    return name.replace(".", "/")


def batch_size(values: tuple[Any, ...], batch_dim: int) -> int:
    """Size of the batch, told from the first tensor among the arguments."""
    for value in values:
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        if isinstance(value, Tensor) and value.dim() > batch_dim:
            return value.shape[batch_dim]
        if isinstance(value, (tuple, list)):
            try:
                return batch_size(tuple(value), batch_dim)
            except ValueError:
                continue
    raise ValueError(f"input: expected a tensor with the batch in dimension {batch_dim}, got none")
