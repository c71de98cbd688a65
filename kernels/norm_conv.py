"""Launchers of ``norm_conv`` and ``norm_convs`` in Triton; the kernels are in ``_norm_conv.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard, tickets_for
from fastmod.kernels._images import IEEE, TF32_THRICE, innermost, power, precision, refuse
from fastmod.kernels._norm_conv import backward_weight_kernel, backward_x_kernel, columns_kernel, forward_kernel
from fastmod.kernels.batch_affine import batch_affine_backward, batch_affine_forward
from fastmod.kernels.masked_linear import factor_type
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype
from fastmod.ops._norm_convs import INPUTS, MOST, OUTPUTS
from fastmod.ops.norm_conv import out_shape

#: Parts of the weight's gradient: no more programs than a large GPU needs, and at least so many pixels per part.
PROGRAMS, LEAST_PIXELS = 512, 512
#: Of ``backward_x_kernel``: without a limit ptxas takes 168 registers on sm_80 and spills two.
OF_INPUT = {**OPTIONS, "maxnreg": 224} if torch.version.hip is None else OPTIONS
#: Channels of a program of ``columns_kernel``.
COLUMNS = 128


class Norm(NamedTuple):
    """The batch norm that follows a convolution, in training; parameters, results and statistics ``[E, Cout]``."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    momentum: float
    eps: float
    scale: Tensor
    shift: Tensor


class NormGrad(NamedTuple):
    """The same in the backward: what the forward has kept, and where the gradients of the parameters go."""

    var: Tensor
    scale: Tensor
    eps: float
    of_weight: Tensor | None
    of_bias: Tensor | None


def pixel_tile(columns: int, depthwise: bool, factors: tl.dtype, rows: int = 64) -> dict[str, int]:
    """For the forward and the input gradient: pixels, channels and depth per step; larger ones spill registers. 16 is
    the least that tl.dot takes."""
    if factors == tl.float64:
        return {"BLOCK_M": min(rows, 32), "BLOCK_N": power(columns, 16, 16 if depthwise else 32), "BLOCK_K": 16}
    block_n = power(columns, 16, 32 if depthwise else 64)
    block_k = 16 if factors == tl.float32 and block_n > 16 else 32
    return {"BLOCK_M": min(rows, 32 if depthwise else 64), "BLOCK_N": block_n, "BLOCK_K": block_k}


def weight_tile(outputs: int, depth: int, depthwise: bool, factors: tl.dtype) -> dict[str, int]:
    """For the weight's gradient: pixels per step, output channels, weights per output channel."""
    wide = factors in (tl.float32, tl.float64)
    block_o = power(outputs, 16, 32 if depthwise or factors == tl.float64 else 64)
    block_j = 1 if depthwise else power(depth, 16, 32 if wide else 64)
    return {"BLOCK_P": 16 if wide else 32, "BLOCK_O": block_o, "BLOCK_J": block_j}


def _weight_strides(weight: Tensor, depthwise: bool) -> tuple[Tensor, dict[str, int]]:
    """The weight and its strides; channels may be innermost, which loads best."""
    inputs, size = weight.shape[2], weight.shape[3] ** 2
    if not depthwise and not weight.is_contiguous() and weight.movedim(2, -1).is_contiguous():
        return weight, {"W_CHANNEL": 1, "W_TAP": inputs}
    return weight.contiguous(), {"W_CHANNEL": size, "W_TAP": 1}


def _constants(x: Tensor, weight: Tensor, scale: Tensor | None, relu: bool, stride: int, depthwise: bool) -> Any:
    return {
        "CIN": x.shape[-3], "COUT": weight.shape[1], "KSIZE": weight.shape[3], "STRIDE": stride,
        "DEPTHWISE": depthwise, "RELU": relu, "SHARED": x.dim() == 4,
        "ONE_AFFINE": scale is not None and scale.shape[0] == 1, "PRECISION": precision(x, convolution=True),
        "DT": factor_type(x), "CT": compute_type(x), **OPTIONS,
    }  # fmt: skip


def _sizes(x: Tensor, weight: Tensor, stride: int) -> tuple[dict[str, int], int]:
    """Size arguments of the kernels, and the number of values per mean."""
    batch, experts, _, high, wide = out_shape(x, weight, stride)
    return {"B": batch, "E": experts, "H": x.shape[-2], "W": x.shape[-1]}, batch * high * wide


def _refuse(x: Tensor, weight: Tensor, stride: int, depthwise: bool, **others: tuple[Tensor | None, Any]) -> None:
    """Refuses tensors that would be read beyond their end; ``others`` as in :func:`refuse`."""
    experts, outputs, inputs, *sides = weight.shape
    channels = x.shape[-3]
    fits = (inputs, outputs) == (1, channels) if depthwise else inputs == channels
    if not fits or sides not in ([1, 1], [3, 3]) or stride not in (1, 2) or (x.dim() == 5 and x.shape[1] != experts):
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)}")
    if x.shape[-2] * x.shape[-1] >= 2**31 or 0 in (*weight.shape, *x.shape[-2:]):
        raise ValueError(f"x: expected between 1 and 2**31 - 1 pixels, got shape {list(x.shape)}")
    refuse(x, weight=(weight, [tuple(weight.shape)]), **others)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _affine_shapes(x: Tensor, weight: Tensor) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(weight.shape[0], x.shape[-3])]
    return shapes if x.dim() == 5 else [*shapes, (1, x.shape[-3])]


def launch_forward(
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
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y ``[B, E, Cout, H', W']``, mean and var ``[E, Cout]``; one launch, which also writes what is in ``norm``. An
    empty batch, which has no statistics, writes nothing there."""
    experts, outputs, channels = *weight.shape[:2], x.shape[-3]
    affines = _affine_shapes(x, weight)
    _refuse(
        x, weight, stride, depthwise, scale=(scale, affines),
        shift=(shift, affines if scale is None else [tuple(scale.shape)]),
        channel_gate=(channel_gate, [(x.shape[0], experts, channels)]), bias=(bias, [(experts, outputs)]),
    )  # fmt: skip
    if (scale is None) != (shift is None):
        raise ValueError("scale, shift: expected both or none")
    wide = compute_dtype(x)
    y = _images.empty(x, out_shape(x, weight, stride))
    if y.numel() == 0:
        shape = (experts, outputs) if stats else (0,)
        return y, x.new_zeros(shape, dtype=wide), x.new_zeros(shape, dtype=wide)
    mean, var = (x.new_empty((experts, outputs) if stats else (0,), dtype=wide) for _ in range(2))
    (sizes, values), constants = _sizes(x, weight, stride), _constants(x, weight, scale, relu, stride, depthwise)
    blocks = pixel_tile(outputs, depthwise, constants["DT"])
    tiles, columns = triton.cdiv(values, blocks["BLOCK_M"]), triton.cdiv(outputs, blocks["BLOCK_N"])
    kernel, strides = _weight_strides(weight, depthwise)
    running = None if norm is None else norm.running_mean
    with guard(x):
        forward_kernel[(tiles, experts, columns)](
            x_ptr=innermost(x), weight_ptr=kernel, scale_ptr=_contiguous(scale), shift_ptr=_contiguous(shift),
            gate_ptr=_contiguous(channel_gate), bias_ptr=_contiguous(bias), y_ptr=y,
            partials_ptr=x.new_empty((experts, tiles, 3, outputs), dtype=wide) if stats else None,
            tickets_ptr=tickets_for(x, experts * columns) if stats else None, mean_ptr=mean, var_ptr=var,
            bessel=values / max(values - 1, 1), RT=tl.float32 if running is None else compute_type(running),
            **_norm_args(norm), **sizes, **constants, **strides, **blocks,
        )  # fmt: skip
    return y, mean, var


def _norm_args(norm: Norm | None) -> dict[str, Any]:
    found: Any = [None] * 7 + [0.0, 0.0]
    if norm is not None:
        parameters = _contiguous(norm.weight), _contiguous(norm.bias)
        kept = norm.running_mean, norm.running_var, norm.batches
        found = [*parameters, norm.scale, norm.shift, *kept, norm.momentum, norm.eps]
    names = ("norm_weight", "norm_bias", "norm_scale", "norm_shift", "running_mean", "running_var", "batches")
    return dict(zip((*(f"{name}_ptr" for name in names), "momentum", "eps"), found, strict=True))


def norm_conv_forward(
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
    """x ``[B, E, Cin, H, W]`` or ``[B, Cin, H, W]`` -> y ``[B, E, Cout, H', W']``, mean and var ``[E, Cout]``."""
    return launch_forward(x, weight, scale, shift, channel_gate, bias, relu, stride, depthwise, stats)


def norm_conv_backward(
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
    """Gradients of x, weight, scale, shift, channel_gate and bias; empty where not needed."""
    return launch_backward(
        grad, grad_mean, grad_var, y, mean, x, weight, scale, shift, channel_gate, relu, stride, depthwise, needs
    )


def launch_backward(
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
    norm: NormGrad | None = None,
) -> list[Tensor]:
    """As ``norm_conv_backward``, in two launches. With ``norm`` the gradients of its shift and scale stand for those of
    mean and var."""
    experts, outputs, channels = *weight.shape[:2], x.shape[-3]
    affines, of_y = _affine_shapes(x, weight), [out_shape(x, weight, stride)]
    per_output = [(experts, outputs)]
    _refuse(
        x, weight, stride, depthwise, grad=(grad, of_y), y=(y, of_y),
        grad_mean=(grad_mean, per_output), grad_var=(grad_var, per_output), mean=(mean, per_output),
        scale=(scale, affines), shift=(shift, affines if scale is None else [tuple(scale.shape)]),
        channel_gate=(channel_gate, [(x.shape[0], experts, channels)]),
        var=(None if norm is None else norm.var, per_output),
        norm_scale=(None if norm is None else norm.scale, per_output),
    )  # fmt: skip
    if (scale is None) != (shift is None) or (grad_var is not None and (y is None or mean is None)):
        raise ValueError("expected scale and shift, grad_var, y and mean: all or none")
    bias = x.new_empty((experts, outputs)) if needs[5] else None
    found = _images.blanks((x, weight, scale, shift, channel_gate, bias), needs, images=(0,))
    if x.shape[0] == 0:
        return [each.zero_() for each in found]
    need_x, need_weight, need_scale, need_shift, need_gate, need_bias = (
        need and each.numel() > 0 for need, each in zip(needs, found, strict=True)
    )
    (sizes, values), constants = _sizes(x, weight, stride), _constants(x, weight, scale, relu, stride, depthwise)
    of_y_added = {
        "of_mean_ptr": _contiguous(grad_mean), "of_var_ptr": _contiguous(grad_var),
        "mean_ptr": None if grad_var is None else _contiguous(mean),
        "var_ptr": None if norm is None else _contiguous(norm.var),
        "norm_scale_ptr": None if norm is None else _contiguous(norm.scale), "eps": 0.0 if norm is None else norm.eps,
    }  # fmt: skip
    shared = {
        "grad_ptr": innermost(grad), "y_ptr": None if grad_var is None or y is None else innermost(y),
        "x_ptr": innermost(x), "scale_ptr": _contiguous(scale), "shift_ptr": _contiguous(shift),
        "gate_ptr": _contiguous(channel_gate), **sizes, **constants,
    }  # fmt: skip
    dx, dweight, dscale, dshift, dgate, dbias = (each if each.numel() > 0 else None for each in found)
    of_input = need_x or need_scale or need_shift or need_gate
    adds = of_input and (grad_mean is not None or grad_var is not None)
    outer = {
        "columns_ptr": x.new_empty((3, experts, outputs), dtype=compute_dtype(x)) if adds else None,
        "dnorm_weight_ptr": None if norm is None else norm.of_weight,
        "dnorm_bias_ptr": None if norm is None else norm.of_bias,
    }  # fmt: skip
    with guard(x):
        if need_weight or need_bias:
            depth = weight[0, 0].numel()
            blocks = weight_tile(outputs, depth, depthwise, constants["DT"])
            columns = triton.cdiv(outputs, blocks["BLOCK_O"])
            if need_weight:
                columns *= depth if depthwise else triton.cdiv(depth, blocks["BLOCK_J"])
            most = max(PROGRAMS // (columns * experts), 1)
            chunk = triton.cdiv(values, min(most, triton.cdiv(values, LEAST_PIXELS)))
            chunk = triton.cdiv(chunk, blocks["BLOCK_P"]) * blocks["BLOCK_P"]
            parts = triton.cdiv(values, chunk)
            width = (weight.numel() if need_weight else 0) + (experts * outputs if need_bias else 0)
            backward_weight_kernel[(parts, experts, columns)](
                sums_ptr=x.new_empty((parts, width), dtype=compute_dtype(x)),
                tickets_ptr=tickets_for(x, experts * columns), dweight_ptr=dweight, dbias_ptr=dbias, chunk=chunk,
                WEIGHT=need_weight, BIAS=need_bias, **outer, **of_y_added, **shared, **blocks,
            )  # fmt: skip
        elif any(each is not None for each in outer.values()):
            columns_kernel[(triton.cdiv(experts * outputs, COLUMNS),)](
                **outer, **of_y_added, values=values, N=experts * outputs, BLOCK=COLUMNS, CT=constants["CT"], **OPTIONS
            )
        if of_input:
            _input(x, weight, shared, outer["columns_ptr"], dx, dscale, dshift, dgate)
    return found


def _input(
    x: Tensor,
    weight: Tensor,
    shared: dict[str, Any],
    of_columns: Tensor | None,
    dx: Tensor | None,
    dscale: Tensor | None,
    dshift: Tensor | None,
    dgate: Tensor | None,
) -> None:
    """Launches ``backward_x_kernel``."""
    batch, experts, channels, stride = shared["B"], shared["E"], shared["CIN"], shared["STRIDE"]
    one = x.dim() == 4
    together = one and shared["gate_ptr"] is None and (shared["scale_ptr"] is None or shared["ONE_AFFINE"])
    of_parity = triton.cdiv(shared["H"], stride) * triton.cdiv(shared["W"], stride)
    rows = of_parity if dgate is not None else batch * of_parity
    blocks = pixel_tile(channels, shared["DEPTHWISE"], shared["DT"], power(rows, 16, 64))
    tiles = triton.cdiv(rows, blocks["BLOCK_M"])
    programs = tiles * stride * stride * (batch if dgate is not None else 1)
    wide, sums, gate_sums = compute_dtype(x), None, None
    if dscale is not None or dshift is not None:
        sums = x.new_empty((programs * (1 if together else experts) * 2 * channels,), dtype=wide)
    if dgate is not None:
        gate_sums = x.new_empty((tiles * stride * stride * dgate.numel(),), dtype=wide)
    kernel, weight_strides = _weight_strides(weight, shared["DEPTHWISE"])
    columns = triton.cdiv(channels, blocks["BLOCK_N"])
    tickets = (1 if one else experts) * columns * (1 if dgate is None else 1 + batch)
    summed = sums is not None or gate_sums is not None
    backward_x_kernel[(programs, 1 if one else experts, columns)](
        weight_ptr=kernel, columns_ptr=of_columns, dx_ptr=dx, dscale_ptr=dscale, dshift_ptr=dshift, dgate_ptr=dgate,
        sums_ptr=sums, gate_sums_ptr=gate_sums, tickets_ptr=tickets_for(x, tickets) if summed else None,
        TOGETHER=together, **weight_strides, **{**shared, **OF_INPUT}, **blocks,
    )  # fmt: skip


# ---- Several with their batch norms: see fastmod/ops/_norm_convs.py. Here each has launches of its own.


def norm_convs_forward(
    tensors: Sequence[Tensor | None], running: Sequence[Tensor], forms: Sequence[int], numbers: Sequence[float]
) -> tuple[Tensor, ...]:
    """The results of each convolution; running statistics are updated."""
    left, results = list(running), []
    for i in range(len(tensors) // INPUTS):
        x, weight, scale, shift, gate, bias, residual, *parameters = tensors[INPUTS * i : INPUTS * (i + 1)]
        relu, stride, depthwise, normed, tracked = forms[5 * i : 5 * (i + 1)]
        assert x is not None and weight is not None
        if residual is not None:
            raise ValueError("residual: expected none, as it is added before")
        norm, given, kept = None, [left.pop(0) for _ in range(tracked + 1 if tracked else 0)], []
        if normed:
            wide = compute_dtype(x)
            expected = tuple(weight.shape[:2])
            for t in (*parameters, *given[:2]):
                if t is not None and tuple(t.shape) != expected:
                    raise ValueError(f"norm: expected shape {expected}, got {tuple(t.shape)}")
            kept = [t.contiguous() for t in given[:2]]
            moved = (None, None) if x.shape[0] == 0 or not kept else (kept[0], kept[1])
            counter = given[2] if len(given) > 2 else None
            made = x.new_empty(expected, dtype=wide), x.new_empty(expected, dtype=wide)
            momentum, eps = numbers[2 * i : 2 * i + 2]
            norm = Norm(parameters[0], parameters[1], moved[0], moved[1], counter, momentum, eps, made[0], made[1])
        y, mean, var = launch_forward(
            x, weight, scale, shift, gate, bias, bool(relu), stride, bool(depthwise), bool(normed), norm
        )
        affine: tuple[Tensor, ...] = (x.new_empty(0), x.new_empty(0))
        if norm is not None:
            affine = (norm.scale, norm.shift)
            if y.numel() == 0:
                affine = batch_affine_forward(mean, var, *parameters, None, None, 0.0, 0.0, norm.eps)
                if norm.batches is not None:
                    norm.batches.add_(1)
        for statistic, copied in zip(given, kept, strict=False):
            if statistic is not copied:
                statistic.copy_(copied)
        results += [y, x.new_empty(0), mean, var, *affine]
    return (*results, *(results[0].new_empty(0) for _ in range(MOST * OUTPUTS - len(results))))


def norm_convs_backward(
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    forms: Sequence[int],
    numbers: Sequence[float],
    needs: Sequence[int],
) -> list[Tensor]:
    """Gradients of all tensors; empty where not needed."""
    results: list[Tensor] = []
    for i in range(len(tensors) // INPUTS):
        x, weight, scale, shift, gate, _, _, *parameters = tensors[INPUTS * i : INPUTS * (i + 1)]
        y, _, mean, var, norm_scale, _ = kept[OUTPUTS * i : OUTPUTS * (i + 1)]
        of_y, _, of_scale, of_shift = grads[4 * i : 4 * (i + 1)]
        relu, stride, depthwise, *_ = forms[5 * i : 5 * (i + 1)]
        own = [bool(need) for need in needs[INPUTS * i : INPUTS * (i + 1)]]
        assert x is not None and weight is not None and of_y is not None
        of_norm = [x.new_empty(0), x.new_empty(0)]
        norm, eps = None, numbers[2 * i + 1]
        if of_scale is not None and of_shift is not None:
            of_norm = [
                mean.new_empty(mean.shape, dtype=t.dtype) if t is not None and need else mean.new_empty(0)
                for t, need in zip(parameters, own[7:], strict=True)
            ]
            norm = NormGrad(var, norm_scale, eps, *(t if t.numel() else None for t in of_norm))
        normed = norm is not None
        found = launch_backward(
            of_y, of_shift, of_scale, y if normed else None, mean if normed else None, x, weight, scale, shift, gate,
            bool(relu), stride, bool(depthwise), own[:6], norm,
        )  # fmt: skip
        if norm is not None and x.shape[0] == 0:
            assert of_scale is not None and of_shift is not None
            *_, of_weight, of_bias = batch_affine_backward(of_scale, of_shift, mean, var, parameters[0], eps)
            for to, value in zip(of_norm, (of_weight, of_bias), strict=True):
                if to.numel():
                    to.copy_(value)
        results += [*found, x.new_empty(0), *of_norm]
    return results


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Everything at once with 64 channels: stride 2, gates, statistics. A shared input of 3 channels without any of
    that. Depthwise."""
    p, w = dtype.pointer, dtype.wide_pointer
    exact = {"PRECISION": IEEE}
    found = []
    of_norm = ("of_mean_ptr", "of_var_ptr", "mean_ptr", "var_ptr", "norm_scale_ptr")
    for case, inputs, outputs, size, stride, depthwise in (
        ("all", 64, 64, 3, 2, False),
        ("shared", 3, 16, 3, 1, False),
        ("depthwise", 64, 64, 3, 1, True),
    ):
        every, shared = case != "shared", case == "shared"
        depth = size * size if depthwise else size * size * inputs
        constants = {
            "CIN": inputs, "COUT": outputs, "KSIZE": size, "STRIDE": stride, "DEPTHWISE": depthwise, "RELU": every,
            "SHARED": shared, "ONE_AFFINE": False, "DT": dtype.element, "CT": dtype.compute,
            "PRECISION": TF32_THRICE if dtype.name == "fp32" else IEEE,
        }  # fmt: skip
        strides = {"W_CHANNEL": size * size, "W_TAP": 1}
        affine = {"scale_ptr": w if every else None, "shift_ptr": w if every else None}
        read = {"x_ptr": p, "gate_ptr": p if every else None, **affine, **constants}
        added = dict.fromkeys(of_norm, w if every else None)
        grads = {"grad_ptr": p, "y_ptr": p if every else None, "tickets_ptr": "*i32"}
        grads["columns_ptr"] = w if every else None
        of_dtype = ("norm_weight_ptr", "norm_bias_ptr", "running_mean_ptr", "running_var_ptr")
        norm = dict.fromkeys(of_dtype, p if every else None)
        of_sums = ("partials_ptr", "mean_ptr", "var_ptr", "norm_scale_ptr", "norm_shift_ptr")
        norm |= dict.fromkeys(of_sums, w if every else None)
        forward = {
            **read, **strides, **norm, "weight_ptr": p, "bias_ptr": p if every else None, "y_ptr": p,
            "tickets_ptr": "*i32" if every else None, "batches_ptr": "*i64" if every else None,
            "RT": dtype.compute, **pixel_tile(outputs, depthwise, dtype.element),
        }  # fmt: skip
        sums = dict.fromkeys(("sums_ptr", "gate_sums_ptr", "dscale_ptr", "dshift_ptr"), w if every else None)
        backward_x = {
            **read, **grads, **strides, **sums, "weight_ptr": p, "dx_ptr": p, "dgate_ptr": p if every else None,
            "TOGETHER": shared, **pixel_tile(inputs, depthwise, dtype.element),
        }  # fmt: skip
        backward_weight = {
            **read, **grads, **added, "sums_ptr": w, "dweight_ptr": p, "dbias_ptr": p if every else None,
            **dict.fromkeys(("dnorm_weight_ptr", "dnorm_bias_ptr"), w if every else None), "WEIGHT": True,
            "BIAS": every, **weight_tile(outputs, depth, depthwise, dtype.element),
        }  # fmt: skip
        found += [
            Specialisation(forward_kernel, forward, OPTIONS, case, exact),
            Specialisation(backward_weight_kernel, backward_weight, OPTIONS, case, exact),
        ]
        # Both gates and stride 2, which no layer has, spill scalars on AMD: there each is compiled without the other.
        on_amd = {**exact, "maxnreg": None}
        apart = {"STRIDE": 1} if case == "all" else {}
        found.append(Specialisation(backward_x_kernel, backward_x, OF_INPUT, case, {**on_amd, **apart}))
        if case == "all":
            ungated = {**backward_x, **dict.fromkeys(("gate_ptr", "gate_sums_ptr", "dgate_ptr"))}
            found.append(Specialisation(backward_x_kernel, ungated, OF_INPUT, "strided", on_amd))
    columns = dict.fromkeys((*of_norm, "columns_ptr", "dnorm_weight_ptr", "dnorm_bias_ptr"), w)
    if dtype.is_wide:  # it is never mixed with another dtype
        found.append(Specialisation(columns_kernel, {**columns, "BLOCK": COLUMNS, "CT": dtype.compute}, OPTIONS))
    return found
