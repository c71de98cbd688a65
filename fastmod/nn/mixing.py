"""Shares of templates from logits, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIXINGS = ("softmax", "tanh", "none")
#: The share of the own template of a layer in a net that starts near a signature.
NEAR_ONE = 0.99


def check_mixing(mixing: str) -> None:
    if mixing not in MIXINGS:
        raise ValueError(f"mixing: expected one of {', '.join(map(repr, MIXINGS))}, got {mixing!r}")


def weights_of(logits: Tensor, mixing: str) -> Tensor:
    """xi ``[..., K]``: the share of every template."""
    if mixing == "softmax":
        return logits.softmax(-1)
    return logits.tanh() if mixing == "tanh" else logits


def logits_of(xi: Tensor, mixing: str) -> Tensor:
    """Logits with these shares, for softmax ``log xi``; finite also where a share is 0, or 1 for tanh."""
    info = torch.finfo(xi.dtype)
    if mixing == "softmax":
        return xi.clamp(min=info.tiny).log()
    return xi.clamp(-1 + info.eps, 1 - info.eps).atanh() if mixing == "tanh" else xi


def near_one_hot(templates: Sequence[int], count: int, mixing: str) -> Tensor:
    """Logits [L, K] with a share of 0.99 for the given template of each layer."""
    hot = torch.nn.functional.one_hot(torch.tensor(list(templates), device="cpu"), count).double()
    if mixing == "softmax":
        rest = (1 - NEAR_ONE) / max(count - 1, 1)
        xi = hot * (NEAR_ONE - rest) + rest if count > 1 else hot
        # The others are 0, as only differences between logits count.
        return (xi.log() - xi.log().amin(-1, keepdim=True)).to(torch.get_default_dtype())
    return logits_of(hot * NEAR_ONE, mixing).to(torch.get_default_dtype())
