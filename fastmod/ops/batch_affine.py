"""Batch norm between two convolutions, as a scale and a shift per channel: ``batch_affine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample, Shape


class Affine(NamedTuple):
    """``scale * x + shift`` is the normalised x."""

    scale: Tensor
    shift: Tensor


def batch_affine(
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    count: float,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Affine:
    """The scale and shift of a batch norm: ``weight / sqrt(var + eps)`` and ``bias - mean * scale``.

    In training they are computed from ``mean`` and ``var``, as :func:`fastmod.ops.norm_conv` returns them, and the
    running statistics are updated as by :class:`torch.nn.BatchNorm2d`; else from the running statistics, if there are
    any.

    Args:
        mean, var: ``[E, C]`` (any shape); var without Bessel's correction. May be None where running statistics serve.
        weight, bias: the same shape, any floating-point dtype; None: 1 and 0.
        running_mean, running_var: the same shape; written in training. Both or none.
        count: over how many values each mean was taken.
        momentum: weight of the new statistics.

    Returns:
        ``(scale, shift)``, of the shape and dtype of the statistics, fp32 at least.
    """
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean, running_var: expected both or none, got only one")
    running = (running_mean, running_var)
    if not training and running_mean is not None:
        mean, var, running = _wide(running_mean), _wide(running_var), (None, None)
    chosen = backend.resolve("batch_affine", mean)  # type: ignore[arg-type]
    _check(mean, var, weight, bias, *running, count, training, momentum, eps)
    assert mean is not None and var is not None
    with torch.autocast(mean.device.type, enabled=False) if _autocast(mean) else _nothing():
        numbers = (float(count), float(momentum), float(eps))
        if chosen == "reference":
            return Affine(*reference(mean, var, weight, bias, *running, *numbers))
        return Affine(*_run(mean, var, weight, bias, *running, *numbers, chosen == "triton"))


class _nothing:  # noqa: N801 - contextlib.nullcontext, which torch.compile and a hot path take longer for
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _autocast(mean: Tensor) -> bool:
    return backend.autocasts(mean)


def _wide(running: Tensor | None) -> Tensor | None:
    if running is None or running.dtype in (torch.float32, torch.float64):
        return running
    return running.float()


def _check(
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    _checks.flag("training", training)
    for name, number in (("count", count), ("momentum", momentum), ("eps", eps)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
    if not eps > 0:
        raise ValueError(f"eps: expected a number > 0, got {eps}")
    if mean is None or var is None:
        raise ValueError("mean, var: expected tensors in training and where there are no running statistics, got None")
    _checks.float_tensor("mean", mean, 0, "[E, C]")
    if mean.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"mean: expected float32 or float64, got {mean.dtype}")
    if training and count != 0 and not 1 < count < _checks.INFINITY:  # 0: an empty batch, which updates no statistics
        raise ValueError(f"count: expected more than 1 value per channel when training, got {count:g}")
    others = (("var", var), ("weight", weight), ("bias", bias))
    for name, value in (*others, ("running_mean", running_mean), ("running_var", running_var)):
        if value is None:
            continue
        _checks.float_tensor(name, value, 0, "[E, C]")
        if value.device != mean.device:
            raise RuntimeError(f"{name}: expected the device of mean ({mean.device}), got {value.device}")
        _checks.exact_shape(name, value, mean.shape, "the shape of mean")
    if var.dtype != mean.dtype:
        raise TypeError(f"var: expected the dtype of mean ({mean.dtype}), got {var.dtype}")


def reference(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch."""
    if running_mean is not None and running_var is not None and count > 0:
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
            unbiased = var.detach() * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(mean.dtype)
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias.to(mean.dtype)


def fake_forward(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    _checks.one_device(mean, var, weight, bias, running_mean, running_var)
    return mean.new_empty(mean.shape), mean.new_empty(mean.shape)


def fake_backward(
    grad_scale: Tensor, grad_shift: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = [mean.new_empty(mean.shape) for _ in range(4)]
    return found[0], found[1], found[2], found[3]


#: all of one shape; running statistics are updated where they are given and count > 0
FORWARD = _autograd.define(
    "batch_affine_forward(Tensor mean, Tensor var, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float count, float momentum, float eps) -> (Tensor, Tensor)",
    fake_forward,
)
#: gradients of mean, var, weight and bias, all in the dtype of mean
BACKWARD = _autograd.define(
    "batch_affine_backward(Tensor grad_scale, Tensor grad_shift, Tensor mean, Tensor var, Tensor? weight, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake_backward,
)


class BatchAffine(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool,
        numbers: tuple[float, float, float],
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return FORWARD[triton](mean, var, weight, bias, running_mean, running_var, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.triton, ctx.eps, ctx.dtypes = inputs[0], inputs[1][2], [t if t is None else t.dtype for t in inputs[4:6]]
        ctx.save_for_backward(*inputs[2:5])

    @staticmethod
    def backward(ctx: Any, grad_scale: Tensor, grad_shift: Tensor) -> tuple[Any, ...]:
        numbers = (ctx.triton, ctx.eps)
        tensors = (grad_scale, grad_shift, *ctx.saved_tensors)
        of_mean, of_var, of_weight, of_bias = _autograd.gradients(_by_kernel, _by_reference, numbers, *tensors)
        weight, bias = ctx.dtypes
        return (
            None,
            None,
            of_mean,
            of_var,
            None if weight is None else of_weight.to(weight),
            None if bias is None else of_bias.to(bias),
            None,
            None,
        )


def _by_kernel(numbers: tuple[bool, float], *tensors: Any) -> tuple[Tensor, ...]:
    return BACKWARD[numbers[0]](*tensors, numbers[1])


def _by_reference(
    numbers: tuple[bool, float], grad_scale: Tensor, grad_shift: Tensor, mean: Tensor, var: Tensor, weight: Any
) -> tuple[Tensor, ...]:
    """Written by hand: as short as a call to derive it would be, and simpler where there is no weight."""
    inverse = (var + numbers[1]).rsqrt()
    scale = inverse if weight is None else inverse * weight.to(mean.dtype)
    of_scale = grad_scale - mean * grad_shift
    return -scale * grad_shift, -0.5 * of_scale * scale * inverse * inverse, of_scale * inverse, grad_shift.clone()


@in_graph
def _run(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    momentum: float,
    eps: float,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    tensors = (mean, var, weight, bias, running_mean, running_var)
    if _autograd.wanted(*tensors[:4]):
        return _autograd.apply(BatchAffine, triton, (count, momentum, eps), *tensors)
    return FORWARD[triton](*tensors, count, momentum, eps)


def _sampled(t: Sequence[Tensor]) -> Sequence[Tensor]:
    return list(batch_affine(t[0], t[1].square() + 0.5, *t[2:], count=7, training=True))


SAMPLES = (
    Sample("batch_affine", "odd", ((3, 5), (3, 5), (3, 5), (3, 5)), _sampled),
    Sample("batch_affine", "no parameters", ((7,), (7,)), _sampled),
)
SHAPES = (
    Shape(
        "batch_affine",
        "E4 64 channels",
        ((4, 64),) * 4,
        lambda t: list(batch_affine(t[0], t[1], t[2], t[3], count=1024, training=True)),
        wide=(0, 1, 2, 3),
    ),
)
