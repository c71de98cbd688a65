"""A squeeze-excite in training as one launch: pooling, two small layers with batch norm, sigmoid.

For GPUs; on the CPU callers compute it layer by layer. Not public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._norm_convs import Norm
from fastmod.ops.batch_affine import reference as affine_reference

#: The weights of a layer have to fit into the shared memory of a block; in Triton too one program does both layers.
MOST_BYTES = 60 * 1024


def served(x: Tensor, squeezed: int) -> bool:
    """Whether one launch can compute it for ``x`` [B, E, C, H, W]."""
    return _server(x, squeezed) is not None


def _server(x: Tensor, squeezed: int) -> str | None:
    numbers = max(x.shape[2] * (squeezed | 1), squeezed * (x.shape[2] | 1))
    if numbers * (8 if x.dtype == torch.float64 else 4) > MOST_BYTES:
        return None
    return backend.on_gpu("squeeze_excite_forward", "norm_conv", x)


def squeeze_excite(
    x: Tensor, scale: Tensor, shift: Tensor, squeeze: Tensor, first: Norm, excite: Tensor, second: Norm
) -> Tensor:
    """``sigmoid(second(excite relu(first(squeeze pooled))))``; ``pooled`` is the mean of ``relu(scale * x + shift)``.

    x ``[B, E, C, H, W]``, scale and shift ``[E, C]``, squeeze ``[E, R, C]``, excite ``[E, C, R]`` -> ``[B, E, C]``.
    Both batch norms are those of a training step: they use the batch and update their running statistics.
    """
    if x.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape[:3])}")
    wide = _checks.compute_dtype(x)
    layers = (squeeze, *first[:2], excite, *second[:2])
    assert all(layer is not None for layer in layers)
    tensors = [layer.to(wide) for layer in layers if layer is not None]
    running = [t for t in (*first[2:4], *second[2:4]) if t is not None]
    momentum, eps = (first.momentum, second.momentum), (first.eps, second.eps)
    if backend.autocasts(x):
        (x,) = backend.lowered(x)
    triton = _server(x, squeeze.shape[1]) == "triton"
    return _run(triton, x, scale.to(wide), shift.to(wide), tensors, running, momentum, eps)


def reference(x: Tensor, scale: Tensor, shift: Tensor, *layers: Tensor, eps: Sequence[float]) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    value = (x.to(scale.dtype) * _images.per_channel(scale) + _images.per_channel(shift)).relu().mean((-2, -1))
    for i in range(2):
        weight, of_norm, added_by_norm = layers[3 * i : 3 * i + 3]
        value = torch.einsum("bti,toi->bto", value, weight)
        if x.shape[0] == 0:
            mean = var = value.new_zeros(value.shape[1:])
        else:
            var, mean = torch.var_mean(value, 0, correction=0)
        factor, added = affine_reference(mean, var, of_norm, added_by_norm, None, None, 0.0, 0.0, eps[i])
        value = value * factor + added
        value = value.sigmoid() if i else value.relu()
    return value.to(x.dtype)


def fake_forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    layers: Sequence[Tensor],
    running: Sequence[Tensor],
    momentum: Sequence[float],
    eps: Sequence[float],
) -> tuple[Tensor, ...]:
    batch, experts, channels = x.shape[:3]
    squeezed = layers[0].shape[1]
    found = [x.new_empty(x.shape[:3])]
    found += [scale.new_empty((experts, batch, width)) for width in (channels, squeezed, channels)]
    found += [scale.new_empty((experts, width)) for width in [squeezed] * 4 + [channels] * 4]
    return tuple(found)


def fake_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    layers: Sequence[Tensor],
    kept: Sequence[Tensor],
    eps: Sequence[float],
) -> list[Tensor]:
    tensors = (x, scale, shift, *layers)
    return _images.blanks(tensors, [True] * len(tensors), images=(0,))


#: layers: squeeze [E, R, C], its norm's weight and bias [E, R], excite [E, C, R], its norm's weight and bias [E, C], in
#: the dtype of the sums; running: mean and var of both norms, updated -> gate [B, E, C] and what the backward reads
FORWARD = _autograd.define(
    "squeeze_excite_forward(Tensor x, Tensor scale, Tensor shift, Tensor[] layers, Tensor(a!)[] running, "
    f"float[] momentum, float[] eps) -> ({', '.join(['Tensor'] * 12)})",
    fake_forward,
)
#: gradients of x, scale, shift and of all layers
BACKWARD = _autograd.define(
    "squeeze_excite_backward(Tensor grad, Tensor x, Tensor scale, Tensor shift, Tensor[] layers, Tensor[] kept, "
    "float[] eps) -> Tensor[]",
    fake_backward,
)
#: x, scale, shift and six of the layers
INPUTS = 9


class SqueezeExcite(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool, momentum: tuple[float, float], eps: tuple[float, float], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return FORWARD[triton](*tensors[:3], tensors[3:INPUTS], tensors[INPUTS:], momentum, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.triton, ctx.eps = inputs[0], inputs[2]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[3 : 3 + INPUTS], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = ctx.needs_input_grad[3 : 3 + INPUTS]
        found = _autograd.gradients(_by_kernel, _by_reference, (ctx.triton, ctx.eps, needs), grad, *ctx.saved_tensors)
        places = [i for i, need in enumerate(needs) if need]
        return None, None, None, *_autograd.spread(found, places, len(ctx.needs_input_grad) - 3)


def _by_kernel(numbers: tuple[Any, ...], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    triton, eps, needs = numbers
    found = BACKWARD[triton](grad, *tensors[:3], tensors[3:INPUTS], tensors[INPUTS:], eps)
    return _images.chosen(found, needs)


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    _, eps, needs = numbers

    def function(*values: Tensor) -> Tensor:
        return reference(*values, eps=eps)

    return _autograd.vjp_at(function, [i for i, need in enumerate(needs) if need], grad, *tensors[:INPUTS])


@in_graph
def _run(
    triton: bool,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    layers: list[Tensor],
    running: list[Tensor],
    momentum: tuple[float, float],
    eps: tuple[float, float],
) -> Tensor:
    if _autograd.wanted(x, scale, shift, *layers):
        return _autograd.apply(SqueezeExcite, triton, momentum, eps, x, scale, shift, *layers, *running)[0]
    return FORWARD[triton](x, scale, shift, layers, running, momentum, eps)[0]
