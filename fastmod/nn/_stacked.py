"""Convolutions with batch norm over the weights of several tasks: the parts of a ``forward_stacked``.

``weights`` and ``buffers`` hold the tensors of a block by name, each with tasks as leading dimension, ``[T, ...]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmod.nn._pending import Pending, reading
from fastmod.ops._checks import compute_dtype
from fastmod.ops._norm_convs import Norm, norm_convs
from fastmod.ops.batch_affine import Affine, batch_affine

Tensors = Mapping[str, Tensor]


def stackable(block: nn.Module) -> bool:
    """Whether Compositional may run it by ``forward_stacked(x, weights, buffers)``: not where batch norms average over
    all batches, whose rate would be a layer's own."""
    stacked = getattr(block, "forward_stacked", None)
    if stacked is None or "weights" not in inspect.signature(stacked).parameters:  # Compositional's is another
        return False
    norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
    return all(n.momentum is not None and n.track_running_stats for n in norms)


class Sum(NamedTuple):
    """Stands for ``branch + images``: the end of a residual block, which the next block adds up while it reads."""

    branch: Pending
    images: Tensor


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
    """A convolution of ``[B, T, C, H, W]``, with its batch norm (and ReLU) pending."""
    return _normed(block, conv_name, norm_name, x, weights, buffers, relu, gate, None)[0]


def convolved_sum(
    block: nn.Module,
    conv_name: str,
    norm_name: str,
    x: Tensor | Sum,
    weights: Tensors,
    buffers: Tensors,
    *,
    relu: bool = False,
) -> tuple[Pending, Tensor]:
    """The same for a 1x1 convolution; also returns its input, written out."""
    if isinstance(x, Tensor):
        return convolved(block, conv_name, norm_name, x, weights, buffers, relu=relu), x
    found, total = _normed(block, conv_name, norm_name, x.branch, weights, buffers, relu, None, x.images)
    assert total is not None
    return found, total


def _normed(
    block: nn.Module,
    conv_name: str,
    norm_name: str,
    x: Tensor | Pending,
    weights: Tensors,
    buffers: Tensors,
    relu: bool,
    gate: Tensor | None,
    residual: Tensor | None,
) -> tuple[Pending, Tensor | None]:
    conv: Any = block._modules[conv_name]
    training = block._modules[norm_name].training  # type: ignore[union-attr]
    planned = reading(
        x,
        weights[f"{conv_name}.weight"],
        weights.get(f"{conv_name}.bias"),
        stride=conv.stride[0],
        depthwise=conv.groups > 1,
        gate=gate,
        norm=norm_of(block, norm_name, weights, buffers) if training else None,
    )
    (found,) = norm_convs([planned._replace(residual=residual)])
    affine = (found.scale, found.shift)
    if found.scale is None:
        affine = _affine(block, norm_name, None, None, 0, weights, buffers)
    return Pending(found.y, *affine, relu), found.sum


def transformed(
    block: nn.Module, conv_name: str, norm_name: str, x: Tensor, weights: Tensors, buffers: Tensors
) -> Tensor:
    """A 1x1 convolution of single pixels with its batch norm, ``[B, T, C]`` -> ``[B, T, C']`` in fp32 at least."""
    weight = weights[f"{conv_name}.weight"].flatten(2)  # [T, C', C]
    y = torch.einsum("bti,toi->bto", x, weight.to(x.dtype))
    y = y.to(compute_dtype(y))
    mean = var = None
    if block._modules[norm_name].training:  # type: ignore[union-attr]
        mean, var = batch_statistics(y)
    affine = _affine(block, norm_name, mean, var, y.shape[0], weights, buffers)
    return y * affine.scale + affine.shift


def batch_statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of ``[B, T, C]`` over the batch; a single value is an error, as for batch norm."""
    if y.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(y.shape)}")
    if y.shape[0] == 0:
        return y.new_zeros(y.shape[1:]), y.new_zeros(y.shape[1:])
    var, mean = torch.var_mean(y, 0, correction=0)
    return mean, var


def norm_of(block: nn.Module, name: str, weights: Tensors, buffers: Tensors) -> Norm:
    """A batch norm of the block, in training."""
    norm: Any = block._modules[name]
    parameters = (weights[f"{name}.weight"], weights[f"{name}.bias"])
    running = (buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"])
    return Norm(*parameters, *running, None, norm.momentum, norm.eps)


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
