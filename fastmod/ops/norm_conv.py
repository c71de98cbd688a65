"""Convolutions of several experts that normalise what they read and return the statistics of what they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._samples import Sample


class NormConvOutput(NamedTuple):
    """``y`` [B, E, Cout, H', W'], ``mean`` and biased ``var`` of it [E, Cout], None if not asked for."""

    y: Tensor
    mean: Tensor | None
    var: Tensor | None


class Form(NamedTuple):
    """The arguments of a kernel besides the tensors."""

    relu: bool
    stride: int
    depthwise: bool


def norm_conv(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
    channel_gate: Tensor | None = None,
    bias: Tensor | None = None,
    stride: int = 1,
    depthwise: bool = False,
    stats: bool = True,
) -> NormConvOutput:
    """``y = conv(z) + bias`` of ``z = relu(scale * x + shift) * channel_gate``, with the mean and variance of ``y``.

    Batch norm without a pass over memory: ``x`` is normalised while it is read, and the statistics of ``y`` for the
    next batch norm are summed while it is written. :func:`fastmod.ops.batch_affine` comes between the two.

    Args:
        x: ``[B, E, Cin, H, W]``, or ``[B, Cin, H, W]`` if all E experts read the same.
        weight: ``[E, Cout, Cin, k, k]``, ``depthwise`` ``[E, C, 1, k, k]``; k 1 or 3. z is padded by k // 2 zeros.
        scale, shift: ``[E, Cin]``, or ``[Cin]`` for shared x; both or none.
        relu: whether negative values of ``scale * x + shift`` become 0.
        channel_gate: ``[B, E, Cin]``, as a squeeze-excite gives it.
        bias: ``[E, Cout]``.
        stride: 1 or 2.
        stats: whether to compute mean and var, in fp64 for fp64, else in fp32.

    Returns:
        ``(y, mean, var)``: ``[B, E, Cout, H', W']`` (channels innermost in memory), ``[E, Cout]`` twice. All three are
        differentiable.
    """
    chosen = backend.resolve("norm_conv", x)
    form = Form(relu, stride, depthwise)
    if backend.checks_first(chosen):
        _check(x, weight, scale, shift, channel_gate, bias, form, stats)
    try:
        tensors: tuple[Any, ...] = (x, weight, channel_gate, bias)
        if backend.autocasts(x):
            tensors = backend.lowered(*tensors)
        tensors = (*tensors[:2], _images.affine(scale, x), _images.affine(shift, x), *tensors[2:])
        if chosen == "reference":
            with backend.reference_autocast(x):
                found = reference(*tensors, form, stats)  # type: ignore[call-arg]
        else:
            found = _run(*tensors, *form, stats, chosen == "triton")  # type: ignore[call-arg]
    except Exception:
        _check(x, weight, scale, shift, channel_gate, bias, form, stats)
        raise
    return NormConvOutput(*found) if stats else NormConvOutput(found[0], None, None)


def _check(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    channel_gate: Tensor | None,
    bias: Tensor | None,
    form: Form,
    stats: bool,
) -> None:
    _checks.flag("relu", form.relu)
    _checks.flag("depthwise", form.depthwise)
    _checks.flag("stats", stats)
    if isinstance(form.stride, bool) or not isinstance(form.stride, int) or form.stride not in (1, 2):
        raise ValueError(f"stride: expected 1 or 2, got {form.stride!r}")
    shape = "[E, C, 1, k, k]" if form.depthwise else "[E, Cout, Cin, k, k]"
    _checks.float_tensor("x", x, 4, "[B, E, Cin, H, W] or [B, Cin, H, W]")
    _images.check_images("weight", weight, shape)
    if x.dim() > 5:
        raise ValueError(f"x: expected [B, E, Cin, H, W] or [B, Cin, H, W], got shape {_checks.shape(x)}")
    experts, outputs, inputs, high, wide = weight.shape
    if high != wide or high not in (1, 3):
        raise ValueError(f"weight: expected {shape} with k = 1 or 3, got shape {_checks.shape(weight)}")
    _checks.same_kind("x", x, "weight", weight)
    if min(weight.shape) == 0:
        raise ValueError(f"weight: expected {shape} without a zero, got shape {_checks.shape(weight)}")
    if x.dim() == 5 and x.shape[1] != experts:
        raise ValueError(f"x: expected [B, E, Cin, H, W] with E = {experts} as in weight, got shape {_checks.shape(x)}")
    if form.depthwise and (inputs != 1 or outputs != x.shape[-3]):
        raise ValueError(f"weight: expected {shape} with C = {x.shape[-3]}, got shape {_checks.shape(weight)}")
    if not form.depthwise and inputs != x.shape[-3]:
        raise ValueError(f"weight: expected {shape} with Cin = {x.shape[-3]}, got shape {_checks.shape(weight)}")
    if 0 in x.shape[-2:]:
        raise ValueError(f"x: expected at least one pixel, got shape {_checks.shape(x)}")
    _images.check_affine("scale", scale, "shift", shift, x, experts, "[E, Cin]")
    for name, value, expected, what in (
        ("channel_gate", channel_gate, (x.shape[0], experts, x.shape[-3]), "[B, E, Cin]"),
        ("bias", bias, (experts, outputs), "[E, Cout]"),
    ):
        if value is not None:
            _checks.float_tensor(name, value, len(expected), what)
            _checks.same_kind("x", x, name, value)
            _checks.exact_shape(name, value, expected, what)


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    channel_gate: Tensor | None,
    bias: Tensor | None,
    form: Form,
    stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch: a grouped convolution; reduced precision is computed in fp32, but z rounded as a layer would."""
    wide = _checks.compute_dtype(x)
    experts, outputs = weight.shape[:2]
    z = x.to(wide)
    if scale is not None and shift is not None:
        if x.dim() == 4 and scale.shape[0] != 1:
            z = z.unsqueeze(1)
        elif x.dim() == 4:
            scale, shift = scale[0], shift[0]
        z = z * _images.per_channel(scale) + _images.per_channel(shift)
    if form.relu:
        z = z.relu()
    if channel_gate is not None:
        z = (z.unsqueeze(1) if z.dim() == 4 else z) * _images.per_channel(channel_gate.to(wide))
    z = z.to(x.dtype).to(wide)
    if z.dim() == 4:
        z = z.unsqueeze(1)
    z = z.expand(-1, experts, -1, -1, -1).flatten(1, 2)  # [B, E * Cin, H, W]
    groups = experts * outputs if form.depthwise else experts
    kernel = weight.to(wide).flatten(0, 1)  # [E * Cout, Cin, k, k]
    y = F.conv2d(z, kernel, None, form.stride, kernel.shape[-1] // 2, groups=groups)
    y = y.unflatten(1, (experts, outputs))
    if bias is not None:
        y = y + _images.per_channel(bias.to(wide))
    y = y.to(x.dtype)
    if not stats:
        return y, y.new_empty(0, dtype=wide), y.new_empty(0, dtype=wide)
    if y.shape[0] == 0:
        none = y.to(wide).sum((0, 3, 4))  # zeros that stay connected to y in the graph; var_mean would give NaN
        return y, none, none.clone()
    var, mean = torch.var_mean(y.to(wide), (0, 3, 4), correction=0)
    return y, mean, var


def out_shape(x: Tensor, weight: Tensor, stride: int) -> tuple[int, ...]:
    """The size of y: rounded up, because of the padding by k // 2."""
    high, wide = ((size + stride - 1) // stride for size in x.shape[-2:])
    return x.shape[0], weight.shape[0], weight.shape[1], high, wide


def fake_forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    channel_gate: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    stride: int,
    depthwise: bool,
    stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.one_device(x, weight, scale, shift, channel_gate, bias)
    y = _images.empty(x, out_shape(x, weight, stride))
    shape = weight.shape[:2] if stats else (0,)
    wide = _checks.compute_dtype(x)
    return y, x.new_empty(shape, dtype=wide), x.new_empty(shape, dtype=wide)


def fake_backward(
    grad: Tensor,
    grad_mean: Tensor | None,
    grad_var: Tensor | None,
    y: Tensor | None,
    mean: Tensor | None,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    channel_gate: Tensor | None,
    relu: bool,
    stride: int,
    depthwise: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    bias = x.new_empty(weight.shape[:2]) if needs[5] else None
    return _images.blanks((x, weight, scale, shift, channel_gate, bias), needs, images=(0,))


#: x [B, E, Cin, H, W] or [B, Cin, H, W], weight [E, Cout, Cin, k, k], scale and shift [E or 1, Cin] in the dtype of the
#: sums, channel_gate [B, E, Cin], bias [E, Cout] -> y, mean, var (both empty unless `stats`)
FORWARD = _autograd.define(
    "norm_conv_forward(Tensor x, Tensor weight, Tensor? scale, Tensor? shift, Tensor? channel_gate, Tensor? bias, "
    "bool relu, int stride, bool depthwise, bool stats) -> (Tensor, Tensor, Tensor)",
    fake_forward,
)
#: gradients of x, weight, scale, shift, channel_gate and bias, empty where not needed; y and mean are read only where
#: there is a grad_var
BACKWARD = _autograd.define(
    "norm_conv_backward(Tensor grad, Tensor? grad_mean, Tensor? grad_var, Tensor? y, Tensor? mean, Tensor x, "
    "Tensor weight, Tensor? scale, Tensor? shift, Tensor? channel_gate, bool relu, int stride, bool depthwise, "
    "bool[6] needs) -> Tensor[]",
    fake_backward,
)


class NormConv(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool,
        form: Form,
        stats: bool,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        channel_gate: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return FORWARD[triton](x, weight, scale, shift, channel_gate, bias, *form, stats)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.triton, ctx.form, ctx.stats = inputs[:3]
        ctx.set_materialize_grads(False)
        if not ctx.stats:
            ctx.mark_non_differentiable(*output[1:])
        # Only the gradient of the statistics reads y; the next layer saves it anyway, as its x.
        kept = output[:2] if ctx.stats else (None, None)
        ctx.save_for_backward(*inputs[3:], *kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_mean: Tensor | None, grad_var: Tensor | None) -> tuple[Any, ...]:
        *inputs, y, mean = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        if grad is None:
            like = inputs[0]
            grad = torch.zeros(out_shape(like, inputs[1], ctx.form.stride), dtype=like.dtype, device=like.device)
        numbers = (ctx.triton, ctx.form, ctx.stats, needs)
        tensors = (grad, grad_mean, grad_var, *inputs, y, mean)
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, *tensors)
        places = [i for i, need in enumerate(needs) if need]
        return None, None, None, *_autograd.spread(found, places, 6)


def _by_kernel(numbers: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
    triton, form, _, needs = numbers
    grad, grad_mean, grad_var, *inputs, y, mean = tensors
    kept = (None, None) if grad_var is None else (y, mean)
    found = BACKWARD[triton](grad, grad_mean, grad_var, *kept, *inputs[:5], *form, needs)
    return _images.chosen(found, needs)


def _by_reference(numbers: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
    _, form, stats, needs = numbers
    grad, grad_mean, grad_var, *inputs, _, mean = tensors

    def function(*values: Any) -> tuple[Tensor, ...]:
        found = reference(*values, form, stats)  # type: ignore[call-arg]
        return found if stats else found[:1]

    grads: tuple[Tensor, ...] = (grad,)
    if stats:
        grads += (_images.zeros_unless(grad_mean, mean), _images.zeros_unless(grad_var, mean))
    return _autograd.vjp_at(function, [i for i, need in enumerate(needs) if need], grads, *inputs)


@in_graph
def _run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    channel_gate: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    stride: int,
    depthwise: bool,
    stats: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (x, weight, scale, shift, channel_gate, bias)
    if _autograd.wanted(*tensors):
        return _autograd.apply(NormConv, triton, Form(relu, stride, depthwise), stats, *tensors)
    return FORWARD[triton](*tensors, relu, stride, depthwise, stats)


def _sample(
    label: str, x: tuple[int, ...], weight: tuple[int, ...], affine: tuple[int, ...] | None, **how: Any
) -> Sample:
    """Tensors: x, weight, scale and shift if ``affine``, and with stride 2 channel_gate and bias."""
    shapes = [x, weight, *([affine, affine] if affine else [])]
    full = how.get("stride") == 2
    shapes += [(x[0], weight[0], x[-3]), weight[:2]] if full else []

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        scale, shift = t[2:4] if affine else (None, None)
        channel_gate, bias = t[-2:] if full else (None, None)
        found = norm_conv(t[0], t[1], scale=scale, shift=shift, channel_gate=channel_gate, bias=bias, **how)
        return [each for each in found if each is not None]

    return Sample("norm_conv", label, tuple(shapes), call)


SAMPLES = (
    _sample("gates, stride 2", (2, 3, 5, 4, 3), (3, 4, 5, 3, 3), (3, 5), relu=True, stride=2),
    _sample("shared, depthwise", (2, 5, 3, 4), (2, 5, 1, 3, 3), (5,), depthwise=True),
    _sample("1x1, no statistics", (3, 2, 3, 1, 5), (2, 7, 3, 1, 1), None, stats=False),
)
