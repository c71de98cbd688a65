"""What squeeze-excite reads: ``norm_pool``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks, _images


def norm_pool(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = True) -> Tensor:
    """Mean over the pixels of ``relu(scale * x + shift)``, in one pass over x.

    Args:
        x: ``[B, E, C, H, W]``.
        scale, shift: ``[E, C]``, of the batch norm of x.
        relu: whether negative values become 0.

    Returns:
        ``[B, E, C]``.
    """
    chosen = backend.resolve("norm_pool", x)
    _check(x, scale, shift, relu)
    wide = _images.affine(scale, x), _images.affine(shift, x)
    if backend.autocast_enabled(x.device.type):
        (x,) = backend.lowered(x)
    if chosen == "reference":
        with backend.reference_autocast(x):
            return reference(x, *wide, relu)  # type: ignore[arg-type]
    return _run(x, *wide, relu, chosen == "triton")  # type: ignore[arg-type]


def _check(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> None:
    _checks.flag("relu", relu)
    _images.check_images("x", x)
    if 0 in x.shape[3:]:
        raise ValueError(f"x: expected [B, E, C, H, W] with at least one pixel, got shape {_checks.shape(x)}")
    if scale is None or shift is None:
        raise TypeError("scale, shift: expected tensors [E, C], got None")
    _images.check_affine("scale", scale, "shift", shift, x, x.shape[1], "[E, C]")


def reference(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    value = x.to(_checks.compute_dtype(x)) * _images.per_channel(scale) + _images.per_channel(shift)
    return (value.relu() if relu else value).mean((-2, -1)).to(x.dtype)


def fake_forward(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    _checks.one_device(x, scale, shift)
    return x.new_empty(x.shape[:3])


def fake_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool, needs: Sequence[bool]
) -> list[Tensor]:
    return _images.blanks((x, scale, shift), needs, images=(0,))


#: x [B, E, C, H, W]; scale and shift [E, C] in the dtype of the sums -> [B, E, C]
FORWARD = _autograd.define("norm_pool_forward(Tensor x, Tensor scale, Tensor shift, bool relu) -> Tensor", fake_forward)
#: gradients of the three tensors, empty where not needed
BACKWARD = _autograd.define(
    "norm_pool_backward(Tensor grad, Tensor x, Tensor scale, Tensor shift, bool relu, bool[3] needs) -> Tensor[]",
    fake_backward,
)


class NormPool(_autograd.Op):
    @staticmethod
    def forward(triton: bool, relu: bool, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return FORWARD[triton](x, scale, shift, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.triton, ctx.relu = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        numbers = (ctx.triton, ctx.relu, needs)
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grad, *ctx.saved_tensors)
        return None, None, *_autograd.spread(found, [i for i in range(3) if needs[i]], 3)


def _by_kernel(numbers: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    triton, relu, needs = numbers
    return _images.chosen(BACKWARD[triton](*tensors, relu, needs), needs)


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    _, relu, needs = numbers
    places = [i for i in range(3) if needs[i]]
    return _autograd.pulled(partial(reference, relu=relu), places, grad, *inputs)


@in_graph
def _run(x: Tensor, scale: Tensor, shift: Tensor, relu: bool, triton: bool) -> Tensor:
    if _autograd.wanted(x, scale, shift):
        return _autograd.apply(NormPool, triton, relu, x, scale, shift)
    return FORWARD[triton](x, scale, shift, relu)
