"""The end of a gater or of a net in one launch: ReLU, mean over regions, linear layer, softmax.

For the CUDA kernels; elsewhere plain PyTorch computes it. Not public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod._private import has_kernel
from fastmod.ops import _autograd, _checks, _images

#: Features and outputs have to fit into the shared memory of a block.
MOST_BYTES = 32 * 1024


def served(x: Tensor, head: nn.Module) -> bool:
    """Whether one launch can compute it: ``head`` is a linear layer without hooks, the device has CUDA C++ kernels."""
    if x.device.type == "meta" or type(head) is not nn.Linear:
        return False
    if not has_kernel("fastmod::pool_linear_forward", x.device.type):
        return False
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return False
    wide = 8 if x.dtype == torch.float64 else 4
    same = head.weight.dtype == x.dtype or backend.autocasts(x)
    return same and sum(head.weight.shape) * wide <= MOST_BYTES and backend.resolve("norm_conv", x) == "native"


def pool_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
    pooled: int = 1,
    softmax: bool = False,
) -> Tensor:
    """x ``[B, C, H, W]``, scale and shift ``[C]``, weight ``[outputs, C * pooled * pooled]`` -> ``[B, outputs]``."""
    wide = _checks.compute_dtype(x)
    low: tuple[Any, ...] = (x, weight, bias)
    if backend.autocasts(x):
        low = backend.lowered(*low)
    factor, added = (None if t is None else t.to(wide) for t in (scale, shift))
    return _run(low[0], factor, added, low[1], low[2], relu, pooled, softmax)


def reference(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    pooled: int,
    softmax: bool,
) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    value = x.to(wide)
    if scale is not None and shift is not None:
        value = value * _images.per_channel(scale) + _images.per_channel(shift)
    value = F.adaptive_avg_pool2d(value.relu() if relu else value, pooled).flatten(1)
    found = F.linear(value, weight.to(wide), None if bias is None else bias.to(wide))
    return (found.softmax(-1) if softmax else found).to(x.dtype)


def fake_forward(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    pooled: int,
    softmax: bool,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def fake_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    pooled: int,
    softmax: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    return _images.blanks((x, scale, shift, weight, bias), needs, images=(0,))


FORWARD = _autograd.define(
    "pool_linear_forward(Tensor x, Tensor? scale, Tensor? shift, Tensor weight, Tensor? bias, bool relu, int pooled, "
    "bool softmax) -> Tensor",
    fake_forward,
)
#: gradients of the five tensors, empty where not needed
BACKWARD = _autograd.define(
    "pool_linear_backward(Tensor grad, Tensor x, Tensor? scale, Tensor? shift, Tensor weight, "
    "Tensor? bias, bool relu, int pooled, bool softmax, bool[5] needs) -> Tensor[]",
    fake_backward,
)


class PoolLinear(_autograd.Op):
    @staticmethod
    def forward(
        numbers: tuple[bool, int, bool],
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        return FORWARD[0](x, scale, shift, weight, bias, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        numbers = (*ctx.numbers, needs)
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grad, *ctx.saved_tensors)
        return None, *_autograd.spread(found, [i for i, need in enumerate(needs) if need], 5)


def _by_kernel(numbers: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
    *form, needs = numbers
    return _images.chosen(BACKWARD[0](*tensors, *form, needs), needs)


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *form, needs = numbers

    def function(*values: Any) -> Tensor:
        return reference(*values, *form)

    return _autograd.vjp_at(function, [i for i, need in enumerate(needs) if need], grad, *inputs)


@in_graph
def _run(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    pooled: int,
    softmax: bool,
) -> Tensor:
    if _autograd.wanted(x, scale, shift, weight, bias):
        return _autograd.apply(PoolLinear, (relu, pooled, softmax), x, scale, shift, weight, bias)
    return FORWARD[0](x, scale, shift, weight, bias, relu, pooled, softmax)
