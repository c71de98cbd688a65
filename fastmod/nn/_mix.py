"""Where the layers of templates get their ops: until ``fastmod.ops`` has them, plain PyTorch stands in."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmod import backend
from fastmod.nn.mixing import weights_of


def template_mix(logits: Tensor, bank: Tensor, mixing: str = "softmax") -> Tensor:
    return weights_of(logits, mixing) @ bank


def mixed(logits: Tensor, bank: Tensor, mixing: str) -> Tensor:
    """``template_mix`` in the dtype of the bank also under autocast, which leaves it to a layer what it lowers."""
    if not backend.autocast_enabled(bank.device.type):
        return template_mix(logits, bank, mixing)
    with torch.autocast(bank.device.type, enabled=False):
        return template_mix(logits, bank, mixing)


def norm_pool(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = True) -> Tensor:
    y = x * scale[..., None, None].to(x.dtype) + shift[..., None, None].to(x.dtype)
    return (y.relu() if relu else y).mean((-2, -1))


def cluster_penalty(logits: Tensor, bank: Tensor, squared: bool = False) -> Tensor:
    xi = logits.softmax(-1)
    far = ((xi @ bank).unsqueeze(-2) - bank).square().sum(-1)  # [..., K]
    return (xi * (far if squared else (far + 1e-12).sqrt())).sum()


def entropy_penalty(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
