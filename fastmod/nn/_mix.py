"""Where the layers of templates get their ops: until ``fastmod.ops`` has them, plain PyTorch stands in."""

from __future__ import annotations

from torch import Tensor

from fastmod.nn.mixing import weights_of


def template_mix(logits: Tensor, bank: Tensor, mixing: str = "softmax") -> Tensor:
    return weights_of(logits, mixing) @ bank


def norm_pool(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = True) -> Tensor:
    y = x * scale[..., None, None].to(x.dtype) + shift[..., None, None].to(x.dtype)
    return (y.relu() if relu else y).mean((-2, -1))


def cluster_penalty(logits: Tensor, bank: Tensor, squared: bool = False) -> Tensor:
    xi = logits.softmax(-1)
    far = ((xi @ bank).unsqueeze(-2) - bank).square().sum(-1)  # [..., K]
    return (xi * (far if squared else (far + 1e-12).sqrt())).sum()


def entropy_penalty(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()


__all__ = ["cluster_penalty", "entropy_penalty", "norm_pool", "template_mix"]
