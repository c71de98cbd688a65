"""Convolutions with batch norm of a block over the weights of several tasks: what ``forward_stacked`` is written with.

``weights`` and ``buffers`` hold the block's tensors by their names in it, each with the tasks in front, ``[T, ...]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.nn._pending import Pending, values_per_channel
from fastmod.ops._checks import compute_dtype
from fastmod.ops.batch_affine import Affine, batch_affine
from fastmod.ops.norm_conv import norm_conv

Tensors = Mapping[str, Tensor]


def stackable(block: nn.Module) -> bool:
    """Whether Compositional may run it by ``forward_stacked``; the mean over all batches has a rate per layer."""
    norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
    return hasattr(block, "forward_stacked") and all(n.momentum is not None and n.track_running_stats for n in norms)


def convolved(
    block: nn.Module,
    conv_name: str,
    norm_name: str,
    x: Tensor | Pending,
    weights: Tensors,
    buffers: Tensors,
    *,
    relu: bool = False,
    gate: Tensor | None = None,
) -> Pending:
    """A convolution of ``[B, T, C, H, W]`` and its batch norm (and ReLU), which are still to be applied."""
    conv: Any = block._modules[conv_name]
    training = block._modules[norm_name].training  # type: ignore[union-attr]
    images, scale, shift, active = x if isinstance(x, Pending) else (x, None, None, False)
    found = norm_conv(
        images,
        weights[f"{conv_name}.weight"],
        scale=scale,
        shift=shift,
        relu=active,
        channel_gate=gate,
        bias=weights.get(f"{conv_name}.bias"),
        stride=conv.stride[0],
        depthwise=conv.groups > 1,
        stats=training,
    )
    count = values_per_channel(found.y, training)
    affine = _affine(block, norm_name, found.mean, found.var, count, weights, buffers)
    return Pending(found.y, affine.scale, affine.shift, relu)


def transformed(
    block: nn.Module, conv_name: str, norm_name: str, x: Tensor, weights: Tensors, buffers: Tensors
) -> Tensor:
    """A 1x1 convolution of single pixels and its batch norm, ``[B, T, C]`` -> ``[B, T, C']`` in fp32 at least."""
    weight = weights[f"{conv_name}.weight"].flatten(2)  # [T, C', C]
    y = torch.einsum("bti,toi->bto", x, weight.to(x.dtype))
    y = y.to(compute_dtype(y))
    mean = var = None
    if block._modules[norm_name].training:  # type: ignore[union-attr]
        mean, var = batch_statistics(y)
    affine = _affine(block, norm_name, mean, var, y.shape[0], weights, buffers)
    return y * affine.scale + affine.shift


def batch_statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of ``[B, T, C]`` over the batch; of one value they are refused, as batch norm does."""
    if y.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(y.shape)}")
    if y.shape[0] == 0:
        return y.new_zeros(y.shape[1:]), y.new_zeros(y.shape[1:])
    var, mean = torch.var_mean(y, 0, correction=0)
    return mean, var


def _affine(
    block: nn.Module,
    name: str,
    mean: Tensor | None,
    var: Tensor | None,
    count: int,
    weights: Tensors,
    buffers: Tensors,
) -> Affine:
    norm: Any = block._modules[name]
    return batch_affine(
        mean,
        var,
        weights[f"{name}.weight"],
        weights[f"{name}.bias"],
        buffers[f"{name}.running_mean"],
        buffers[f"{name}.running_var"],
        count=count,
        training=norm.training,
        momentum=norm.momentum,
        eps=norm.eps,
    )
