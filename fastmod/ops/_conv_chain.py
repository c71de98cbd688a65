"""A chain of convolutions of several experts, in inference, as one op: only the last result is written.

For the CPU kernels, where no gradients are needed. Not public: layers of experts are built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod import backend
from fastmod._private import has_kernel, transformed
from fastmod.ops import _autograd, _checks, _images


class Layer(NamedTuple):
    """``relu(scale * conv(source) + bias + residual)``; value 0 is x, value i the result of layer i - 1."""

    weight: Tensor  # [E, Cout, Cin, k, k]
    scale: Tensor | None  # [E, Cout], of a batch norm
    bias: Tensor | None  # [E, Cout]
    stride: int
    relu: bool
    source: int
    residual: int = -1  # none


def served(x: Tensor) -> bool:
    """Whether the op serves images like ``x``: without gradients or a transform, and not in reduced precision, where
    every layer would have to round its result."""
    if torch.is_grad_enabled() or transformed() or not isinstance(x, Tensor):
        return False
    if x.dtype not in (torch.float32, torch.float64) or not has_kernel("fastmod::conv_chain", x.device.type):
        return False
    return backend.resolve("norm_conv", x) == "native" and not backend.autocasts(x)


def conv_chain(x: Tensor, layers: Sequence[Layer], gate: Tensor | None = None) -> Tensor:
    """x ``[B, E, C, H, W]``, or ``[B, C, H, W]`` if all experts read the same -> the result of the last layer,
    ``[B, E, C', H', W']``; with ``gate`` ``[B, E]``, its sum over the experts weighted by the gate,
    ``[B, C', H', W']``."""
    weights, scales, biases, *_ = zip(*layers, strict=True)
    forms = [int(number) for layer in layers for number in layer[3:]]
    wide = [None if scale is None else scale.to(_checks.compute_dtype(x)) for scale in scales]
    narrow = [None if bias is None else bias.to(x.dtype) for bias in biases]
    return KERNEL[0](x, weights, wide, narrow, forms, gate)


def fake(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    forms: Sequence[int],
    gate: Tensor | None,
) -> Tensor:
    sizes = [x.shape[-2:]]
    for stride, source in zip(forms[::4], forms[2::4], strict=True):
        high, wide = sizes[source]
        sizes.append(torch.Size([(high + stride - 1) // stride, (wide + stride - 1) // stride]))
    experts, channels = weights[-1].shape[:2]
    shape = (x.shape[0], channels) if gate is not None else (x.shape[0], experts, channels)
    return _images.empty(x, (*shape, *sizes[-1]))


#: forms: stride, relu, source and residual of every layer
KERNEL = _autograd.define(
    "conv_chain(Tensor x, Tensor[] weights, Tensor?[] scales, Tensor?[] biases, int[] forms, Tensor? gate) -> Tensor",
    fake,
)
