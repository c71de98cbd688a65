"""Convert logits to shares of templates and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIXINGS = ("softmax", "tanh", "none")
#: Share of a layer's own template if a net starts near a signature.
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
    """Logits that give these shares; clamped to stay finite for shares of 0 (softmax) or 1 (tanh)."""
    info = torch.finfo(xi.dtype)
    if mixing == "softmax":
        return xi.clamp(min=info.tiny).log()
    return xi.clamp(-1 + info.eps, 1 - info.eps).atanh() if mixing == "tanh" else xi


def near_one_hot(templates: Sequence[int], count: int, mixing: str) -> Tensor:
    """Logits [L, K] that give each layer's template a share of 0.99."""
    hot = torch.nn.functional.one_hot(torch.tensor(list(templates), device="cpu"), count).double()
    if mixing == "softmax":
        rest = (1 - NEAR_ONE) / max(count - 1, 1)
        xi = hot * (NEAR_ONE - rest) + rest if count > 1 else hot
        # Shift the other logits to 0: softmax depends only on differences.
        return (xi.log() - xi.log().amin(-1, keepdim=True)).to(torch.get_default_dtype())
    return logits_of(hot * NEAR_ONE, mixing).to(torch.get_default_dtype())
