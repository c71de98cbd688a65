"""What the forward of a fused model calls: ordinary Conv2d and BatchNorm2d, run as experts with E = 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.nn._pending import Pending, finish, moved_by, reading
from fastmod.ops._norm_convs import Found, Norm, norm_convs
from fastmod.ops.batch_affine import batch_affine


def normalise(x: Tensor | Pending, conv: nn.Conv2d, norm: nn.BatchNorm2d, relu: bool) -> Pending:
    """``relu(norm(conv(x)))``, where its consumer applies norm and ReLU; modes and statistics as in
    ``nn.BatchNorm2d``."""
    moves = norm.training and norm.track_running_stats
    if moves and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    running = (norm.running_mean, norm.running_var) if moves or not norm.training else (None, None)
    of_batch = norm.training or running[0] is None
    weight, bias, *moving = (_stacked(t) for t in (norm.weight, norm.bias, *running))
    momentum = moved_by(norm.momentum, norm.num_batches_tracked) if moves else 0.0
    whole = Norm(weight, bias, moving[0], moving[1], None, momentum, norm.eps) if of_batch else None
    y, scale, shift, _ = _convolve(x, conv, whole)
    if not of_batch:
        scale, shift = batch_affine(
            None, None, weight, bias, *moving, count=0, training=False, momentum=0.0, eps=norm.eps
        )
    return Pending(y, scale, shift, relu)


def read(x: Pending, conv: nn.Conv2d) -> Tensor:
    """``conv(x)`` ``[B, C, H, W]``, where no batch norm follows."""
    return _convolve(x, conv, None).y.squeeze(1)


def write(x: Pending) -> Tensor:
    """Applies what is pending, for consumers that cannot do it themselves: ``[B, C, H, W]``."""
    return finish(x, relu=x.relu).squeeze(1)


def add(x: Pending, other: Tensor | Pending, relu: bool) -> Tensor:
    """``relu(x + other)`` ``[B, C, H, W]``; torch computes a sum that broadcasts or promotes dtypes."""
    added = other.images.squeeze(1) if isinstance(other, Pending) else other
    images = x.images.squeeze(1)
    if isinstance(added, Tensor) and added.shape == images.shape and added.dtype == images.dtype:
        return finish(x, other, relu=relu).squeeze(1)
    total = write(x) + (write(other) if isinstance(other, Pending) else other)
    return F.relu(total) if relu else total


def _convolve(x: Tensor | Pending, conv: nn.Conv2d, norm: Norm | None) -> Found:
    weight, bias = conv.weight.unsqueeze(0), _stacked(conv.bias)
    return norm_convs([reading(x, weight, bias, stride=conv.stride[0], depthwise=conv.groups > 1, norm=norm)])[0]


def _stacked(value: Tensor | None) -> Tensor | None:
    """[C] as [1, C]; running statistics are written through the view."""
    return None if value is None else value.unsqueeze(0)
