"""Several independent convolutions, with the batch norms that follow them, in one launch.

Computes what :func:`fastmod.ops.norm_conv` and :func:`fastmod.ops.batch_affine` compute one after the other. Where the
CUDA kernels serve, a group takes one launch forward and two backward, and batch norm none of its own; in Triton that is
what each convolution takes; elsewhere the two ops are called. The layers of experts and tasks are built on it; it is
not public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops.batch_affine import batch_affine
from fastmod.ops.batch_affine import reference as affine_reference
from fastmod.ops.norm_conv import Form, norm_conv, out_shape
from fastmod.ops.norm_conv import _check as check_conv
from fastmod.ops.norm_conv import reference as conv_reference
from fastmod.ops.norm_sum import norm_sum


class Norm(NamedTuple):
    """A batch norm in training, by the statistics of the batch; all ``[E, C]``. Where :func:`served`, the counter
    ``batches`` is increased by one; elsewhere the caller increases it, for all norms at once."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    momentum: float
    eps: float


class Conv(NamedTuple):
    """Arguments of :func:`fastmod.ops.norm_conv`. With ``residual`` (a 1x1 convolution of stride 1, without ReLU and
    gate) ``scale * x + shift + residual`` is read, and returned as ``sum``."""

    x: Tensor
    weight: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    channel_gate: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    relu: bool = False
    stride: int = 1
    depthwise: bool = False
    norm: Norm | None = None


class Found(NamedTuple):
    y: Tensor
    scale: Tensor | None  # of the batch norm of y
    shift: Tensor | None
    sum: Tensor | None


#: Tensors of a convolution among the arguments of the kernels: x, weight, scale, shift, channel_gate, bias, residual,
#: and the batch norm's weight and bias.
INPUTS = 9
#: And among the results: y, sum, mean, var, scale, shift; empty where there are none.
OUTPUTS = 6
#: The most convolutions in a call, and in a launch.
MOST = 4


def served(x: Tensor) -> bool:
    """Whether convolutions and their batch norms share launches for tensors like ``x``: not on the CPU."""
    return backend.on_gpu("norm_convs_forward", "norm_conv", x) is not None


def norm_convs(convs: Sequence[Conv]) -> list[Found]:
    """What each of them returns on its own."""
    for conv in convs:
        if conv.norm is not None:
            _check_count(conv)
    if len(convs) > MOST:
        return norm_convs(convs[:MOST]) + norm_convs(convs[MOST:])
    kinds = {conv.x.dtype for conv in convs}
    server = backend.on_gpu("norm_convs_forward", "norm_conv", convs[0].x)
    if len(kinds) > 1 or server is None:
        return [_alone(conv) for conv in convs]
    if server == "triton" and any(conv.residual is not None for conv in convs):
        return _residuals_first(convs)
    try:
        tensors: list[Tensor | None] = []
        running: list[Tensor] = []
        forms: list[int] = []
        numbers: list[float] = []
        for conv in convs:
            low: tuple[Any, ...] = (conv.x, conv.weight, conv.channel_gate, conv.bias, conv.residual)
            if backend.autocasts(conv.x):
                low = backend.lowered(*low)
            scales = _images.affine(conv.scale, conv.x), _images.affine(conv.shift, conv.x)
            norm = conv.norm
            tensors += [*low[:2], *scales, *low[2:], *((None, None) if norm is None else norm[:2])]
            tracked = norm is not None and norm.running_mean is not None and norm.running_var is not None
            if tracked:
                running += [t for t in norm[2:5] if t is not None]  # type: ignore[index]
            counted = tracked and norm is not None and norm.batches is not None
            forms += [int(conv.relu), conv.stride, int(conv.depthwise), int(norm is not None), tracked + counted]
            numbers += [0.0, 0.0] if norm is None else [float(norm.momentum), float(norm.eps)]
        found = _run(server == "triton", tensors, running, forms, numbers)
    except Exception:
        for conv in convs:  # the checks of the ops say what was wrong
            arguments = (conv.x, conv.weight, conv.scale, conv.shift, conv.channel_gate, conv.bias)
            check_conv(*arguments, Form(conv.relu, conv.stride, conv.depthwise), True)
        raise
    results = []
    for i, conv in enumerate(convs):
        y, total, _, _, scale, shift = found[OUTPUTS * i : OUTPUTS * (i + 1)]
        own = None if conv.residual is None else total
        results.append(Found(y, None, None, own) if conv.norm is None else Found(y, scale, shift, own))
    return results


def _check_count(conv: Conv) -> None:
    if conv.x.dim() not in (4, 5):
        return  # refused for that
    shape = out_shape(conv.x, conv.weight, conv.stride)
    if shape[0] * shape[3] * shape[4] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")


def _summed(conv: Conv) -> Tensor:
    """What a convolution with a residual reads."""
    assert conv.scale is not None and conv.shift is not None and conv.residual is not None
    return norm_sum(conv.x, conv.scale, conv.shift, conv.residual, relu=False)


def _residuals_first(convs: Sequence[Conv]) -> list[Found]:
    sums = [None if conv.residual is None else _summed(conv) for conv in convs]
    plain = [
        conv if total is None else conv._replace(x=total, scale=None, shift=None, residual=None)
        for conv, total in zip(convs, sums, strict=True)
    ]
    return [found._replace(sum=total) for found, total in zip(norm_convs(plain), sums, strict=True)]


def _alone(conv: Conv) -> Found:
    """Computed by the public ops."""
    x, scale, shift = conv.x, conv.scale, conv.shift
    if conv.residual is not None:
        x, scale, shift = _summed(conv), None, None
    found = norm_conv(
        x,
        conv.weight,
        scale=scale,
        shift=shift,
        relu=conv.relu,
        channel_gate=conv.channel_gate,
        bias=conv.bias,
        stride=conv.stride,
        depthwise=conv.depthwise,
        stats=conv.norm is not None,
    )
    total = None if conv.residual is None else x
    if conv.norm is None:
        return Found(found.y, None, None, total)
    *tensors, _, momentum, eps = conv.norm
    count = found.y.shape[0] * found.y.shape[3] * found.y.shape[4]
    affine = batch_affine(found.mean, found.var, *tensors, count=count, training=True, momentum=momentum, eps=eps)
    return Found(found.y, *affine, total)


# ------------------------------------------------------------------------------------------- as one op


def reference(forms: Sequence[int], numbers: Sequence[float], *tensors: Tensor | None) -> list[tuple[Tensor, ...]]:
    """y, sum, scale and shift of each convolution, as far as it has them; plain PyTorch."""
    results = []
    for i in range(len(tensors) // INPUTS):
        x, weight, scale, shift, gate, bias, residual, factor, added = tensors[INPUTS * i : INPUTS * (i + 1)]
        relu, stride, depthwise, normed, _ = forms[5 * i : 5 * (i + 1)]
        assert x is not None and weight is not None
        found: tuple[Tensor, ...] = ()
        if residual is not None:
            assert scale is not None and shift is not None
            wide = x.to(scale.dtype) * _images.per_channel(scale) + _images.per_channel(shift)
            x, scale, shift = (wide + residual.to(scale.dtype)).to(x.dtype), None, None
            found = (x,)
        form = Form(bool(relu), stride, bool(depthwise))
        y, mean, var = conv_reference(x, weight, scale, shift, gate, bias, form, bool(normed))
        if normed:
            found += affine_reference(mean, var, factor, added, None, None, 0.0, 0.0, numbers[2 * i + 1])
        results.append((y, *found))
    return results


def fake_forward(
    tensors: Sequence[Tensor | None], running: Sequence[Tensor], forms: Sequence[int], numbers: Sequence[float]
) -> tuple[Tensor, ...]:
    results = []
    for i in range(len(tensors) // INPUTS):
        x, weight, *_, residual, _, _ = tensors[INPUTS * i : INPUTS * (i + 1)]
        assert x is not None and weight is not None
        wide = _checks.compute_dtype(x)
        results.append(_images.empty(x, out_shape(x, weight, forms[5 * i + 1])))
        results.append(x.new_empty(0) if residual is None else _images.empty(x, x.shape))
        for _ in range(4):
            results.append(x.new_empty(weight.shape[:2], dtype=wide) if forms[5 * i + 3] else x.new_empty(0))
    return (*results, *(results[0].new_empty(0) for _ in range(MOST * OUTPUTS - len(results))))


def fake_backward(
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    forms: Sequence[int],
    numbers: Sequence[float],
    needs: Sequence[int],
) -> list[Tensor]:
    results = []
    for i in range(0, len(tensors), INPUTS):
        own = [bool(need) for need in needs[i : i + INPUTS]]
        results += _images.blanks(tensors[i : i + INPUTS], own, images=(0, 6))
    return results


#: tensors: INPUTS per convolution; running: mean, var and maybe a counter of each batch norm that has them, updated;
#: forms: relu, stride, depthwise, whether a batch norm follows, whether it has running statistics (2: and a counter);
#: numbers: momentum and eps of the batch norm.
#: -> OUTPUTS per convolution, for MOST of them: torch.compile cannot take a list from an op that writes its arguments
FORWARD = _autograd.define(
    "norm_convs_forward(Tensor?[] tensors, Tensor(a!)[] running, int[] forms, float[] numbers) -> "
    f"({', '.join(['Tensor'] * (MOST * OUTPUTS))})",
    fake_forward,
)
#: grads: of y, sum, scale and shift (the last two both or none) per convolution; kept: the results of the forward;
#: needs: one flag per tensor -> gradients of all tensors, empty where not needed
BACKWARD = _autograd.define(
    "norm_convs_backward(Tensor?[] grads, Tensor?[] tensors, Tensor[] kept, int[] forms, float[] numbers, "
    "int[] needs) -> Tensor[]",
    fake_backward,
)


class NormConvs(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool, forms: tuple[int, ...], numbers: tuple[float, ...], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        return FORWARD[triton](tensors[:count], tensors[count:], forms, numbers)[: count // INPUTS * OUTPUTS]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.triton, ctx.forms, ctx.numbers, ctx.count = inputs[:4]
        ctx.set_materialize_grads(False)
        plain = []
        for i, value in enumerate(output):
            if i % OUTPUTS in (2, 3) or (value.numel() == 0 and i % OUTPUTS != 0):
                plain.append(value)
        ctx.mark_non_differentiable(*plain)
        ctx.save_for_backward(*inputs[4 : 4 + ctx.count], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count, saved = ctx.count, ctx.saved_tensors
        tensors, kept = saved[:count], saved[count:]
        needs = list(ctx.needs_input_grad[4 : 4 + count])
        chosen: list[Tensor | None] = []
        for i in range(count // INPUTS):
            of_y, of_sum, _, _, *of_affine = grads[OUTPUTS * i : OUTPUTS * (i + 1)]
            y, _, _, _, *affine = kept[OUTPUTS * i : OUTPUTS * (i + 1)]
            if of_y is None:
                of_y = torch.zeros_like(y)
            if of_affine == [None, None]:
                needs[INPUTS * i + 7] = needs[INPUTS * i + 8] = False
            else:
                of_affine = [_images.zeros_unless(g, like) for g, like in zip(of_affine, affine, strict=True)]
            chosen += [of_y, of_sum, *of_affine]
        info = (ctx.triton, ctx.forms, ctx.numbers, needs, len(chosen))
        found = _autograd.gradients(_by_kernel, _by_reference, info, *chosen, *tensors, *kept)
        rest = len(ctx.needs_input_grad) - 4
        return None, None, None, None, *_autograd.spread(found, [i for i, need in enumerate(needs) if need], rest)


def _by_kernel(info: tuple[Any, ...], *values: Any) -> tuple[Tensor, ...]:
    triton, forms, numbers, needs, first = info
    grads, tensors, kept = values[:first], values[first : first + len(needs)], values[first + len(needs) :]
    found = BACKWARD[triton](grads, tensors, kept, forms, numbers, [int(need) for need in needs])
    return _images.chosen(found, needs)


def _by_reference(info: tuple[Any, ...], *values: Any) -> tuple[Tensor, ...]:
    _, forms, numbers, needs, first = info
    grads, tensors = values[:first], values[first : first + len(needs)]
    # Only outputs that have a gradient are differentiated: all others are constants.
    places = [(i, j) for i in range(len(grads) // 4) for j in range(4) if grads[4 * i + j] is not None]

    def function(*inputs: Any) -> tuple[Tensor, ...]:
        found = []
        for i, own in enumerate(reference(forms, numbers, *inputs)):
            y, *others = own
            total = [others.pop(0)] if inputs[INPUTS * i + 6] is not None else [None]
            found.append([y, *total, *(others or (None, None))])
        return tuple(found[i][j] for i, j in places)

    given = tuple(grads[4 * i + j] for i, j in places)
    return _autograd.vjp_at(function, [i for i, need in enumerate(needs) if need], given, *tensors)


@in_graph
def _run(
    triton: bool, tensors: list[Tensor | None], running: list[Tensor], forms: list[int], numbers: list[float]
) -> tuple[Tensor, ...]:
    if _autograd.wanted(*tensors):
        return _autograd.apply(NormConvs, triton, tuple(forms), tuple(numbers), len(tensors), *tensors, *running)
    return FORWARD[triton](tensors, running, forms, numbers)
