"""Images whose batch norm and ReLU are not applied yet: the next layer applies them while it reads.

What the layers of experts (``[B, E, C, H, W]``) and :func:`fastmod.nn.fuse_batch_norm_` (E = 1) share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.ops._norm_convs import Conv, Norm
from fastmod.ops.norm_conv import NormConvOutput, norm_conv
from fastmod.ops.norm_sum import norm_sum


class Pending(NamedTuple):
    """Stands for ``relu(scale * images + shift)``."""

    images: Tensor  # [B, E, C, H, W]; or [B, C, H, W], read by all experts, with at most a ReLU pending
    scale: Tensor | None = None  # [E, C]
    shift: Tensor | None = None
    relu: bool = False


def convolve(
    x: Tensor | Pending,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    depthwise: bool = False,
    stats: bool,
) -> NormConvOutput:
    """One convolution of every expert, ``[B, E, C', H', W']``, which applies what is pending while it reads."""
    images, scale, shift, relu = x if isinstance(x, Pending) else (x, None, None, False)
    return norm_conv(
        images, weight, scale=scale, shift=shift, relu=relu, bias=bias, stride=stride, depthwise=depthwise, stats=stats
    )


def reading(
    x: Tensor | Pending,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    depthwise: bool = False,
    gate: Tensor | None = None,
    norm: Norm | None = None,
) -> Conv:
    """The same convolution as an entry of :func:`fastmod.ops._norm_convs.norm_convs`; ``norm`` only in training."""
    images, scale, shift, relu = x if isinstance(x, Pending) else (x, None, None, False)
    return Conv(images, weight, scale, shift, gate, bias, None, relu, stride, depthwise, norm)


def finish(
    x: Pending, residual: Tensor | Pending | None = None, *, relu: bool = True, gate: Tensor | None = None
) -> Tensor:
    """``relu(x + residual)`` written out, ``[B, E, C, H, W]``; with ``gate`` its mixture, ``[B, C, H, W]``."""
    assert x.scale is not None and x.shift is not None
    if not isinstance(residual, Pending):
        return norm_sum(x.images, x.scale, x.shift, residual, relu=relu, gate=gate)
    return norm_sum(x.images, x.scale, x.shift, residual.images, residual.scale, residual.shift, relu=relu, gate=gate)


def values_per_channel(y: Tensor, training: bool) -> int:
    """How many values enter a statistic of ``y`` [B, E, C, H, W]; a single one is an error, as for batch norm."""
    count = y.shape[0] * y.shape[3] * y.shape[4]
    if training and count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(y.shape)}")
    return count


def moved_by(momentum: float | None, batches: Tensor | None) -> float:
    """The weight of new statistics; None stands for the mean over all batches, as in :class:`torch.nn.BatchNorm2d`."""
    if momentum is not None:
        return momentum
    return 0.0 if batches is None else 1.0 / float(batches)


def count_batch(counters: list[Tensor]) -> None:
    """Increase all counters by one batch, in one launch where foreach has one."""
    if counters:
        torch._foreach_add_(counters, 1)
