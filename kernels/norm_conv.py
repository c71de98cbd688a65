"""Launchers of ``norm_conv`` in Triton; the kernels are in ``_norm_conv.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard
from fastmod.kernels._images import IEEE, TF32_THRICE, innermost, power, precision, refuse, sums_tile
from fastmod.kernels._norm_conv import (
    backward_weight_kernel,
    backward_x_kernel,
    forward_kernel,
    stats_kernel,
    sums_kernel,
)
from fastmod.kernels.masked_linear import factor_type
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype
from fastmod.ops.norm_conv import out_shape

#: Parts of the weight's gradient: no more programs than a large GPU needs, and at least so many pixels per part.
PROGRAMS, LEAST_PIXELS = 512, 512
#: Tiles of statistics and channels per step.
STATS_TILE = {"BLOCK_R": 32, "BLOCK_C": 32}


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
    tiles = triton.cdiv(values, blocks["BLOCK_M"])
    partials = x.new_empty((experts, tiles, 3, outputs), dtype=wide) if stats else None
    kernel, strides = _weight_strides(weight, depthwise)
    with guard(x):
        forward_kernel[(tiles, experts, triton.cdiv(outputs, blocks["BLOCK_N"]))](
            x_ptr=innermost(x), weight_ptr=kernel, scale_ptr=_contiguous(scale), shift_ptr=_contiguous(shift),
            gate_ptr=_contiguous(channel_gate), bias_ptr=_contiguous(bias), y_ptr=y, partials_ptr=partials,
            **sizes, **constants, **strides, **blocks,
        )  # fmt: skip
        if partials is not None:
            stats_kernel[(triton.cdiv(outputs, STATS_TILE["BLOCK_C"]), experts)](
                partials_ptr=partials, mean_ptr=mean, var_ptr=var, values=values, tiles=tiles, COUT=outputs,
                TILE=blocks["BLOCK_M"], CT=constants["CT"], **STATS_TILE, **OPTIONS,
            )  # fmt: skip
    return y, mean, var


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
    experts, outputs, channels = *weight.shape[:2], x.shape[-3]
    affines, of_y = _affine_shapes(x, weight), [out_shape(x, weight, stride)]
    per_output = [(experts, outputs)]
    _refuse(
        x, weight, stride, depthwise, grad=(grad, of_y), y=(y, of_y),
        grad_mean=(grad_mean, per_output), grad_var=(grad_var, per_output), mean=(mean, per_output),
        scale=(scale, affines), shift=(shift, affines if scale is None else [tuple(scale.shape)]),
        channel_gate=(channel_gate, [(x.shape[0], experts, channels)]),
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
    shared = {
        "grad_ptr": innermost(grad), "y_ptr": None if grad_var is None or y is None else innermost(y),
        "grad_mean_ptr": _contiguous(grad_mean), "grad_var_ptr": _contiguous(grad_var),
        "mean_ptr": None if grad_var is None else _contiguous(mean), "x_ptr": innermost(x),
        "scale_ptr": _contiguous(scale), "shift_ptr": _contiguous(shift), "gate_ptr": _contiguous(channel_gate),
        **sizes, **constants,
    }  # fmt: skip
    wide = compute_dtype(x)
    sums: dict[str, Any] = dict.fromkeys(("weight_sums_ptr", "affine_sums_ptr", "gate_sums_ptr"))
    counts = dict.fromkeys(("weight_parts", "affine_parts", "gate_parts"), 0)
    with guard(x):
        if need_x or need_scale or need_shift or need_gate:
            dx = found[0] if need_x else None
            counts |= _input(x, weight, scale, shared, dx, need_scale or need_shift, need_gate, sums)
        if need_weight or need_bias:
            depth = weight[0, 0].numel()
            blocks = weight_tile(outputs, depth, depthwise, constants["DT"])
            columns = triton.cdiv(outputs, blocks["BLOCK_O"])
            if need_weight:
                columns *= depth if depthwise else triton.cdiv(depth, blocks["BLOCK_J"])
            most = max(PROGRAMS // (columns * experts), 1)
            chunk = triton.cdiv(values, min(most, triton.cdiv(values, LEAST_PIXELS)))
            chunk = triton.cdiv(chunk, blocks["BLOCK_P"]) * blocks["BLOCK_P"]
            parts = counts["weight_parts"] = triton.cdiv(values, chunk)
            weights = weight.numel() if need_weight else 0
            width = weights + (experts * outputs if need_bias else 0)
            sums["weight_sums_ptr"] = x.new_empty((parts, width), dtype=wide)
            backward_weight_kernel[(parts, experts, columns)](
                sums_ptr=sums["weight_sums_ptr"], chunk=chunk, WEIGHT=need_weight, BIAS=need_bias,
                **blocks, **shared,
            )  # fmt: skip
        if any(counts.values()):
            sizes = {
                "weights": weight.numel() if need_weight else 0, "biases": experts * outputs if need_bias else 0,
                "affines": scale.numel() if scale is not None and (need_scale or need_shift) else 0,
                "gates": channel_gate.numel() if channel_gate is not None and need_gate else 0,
            }  # fmt: skip
            most = max(sizes["weights"] + sizes["biases"], 2 * sizes["affines"], sizes["gates"])
            results = {"dweight_ptr": 1, "dscale_ptr": 2, "dshift_ptr": 3, "dgate_ptr": 4, "dbias_ptr": 5}
            step = sums_tile(max(counts.values()))
            sums_kernel[(triton.cdiv(most, step["BLOCK_C"]), 3)](
                **sums, **{name: found[i] if found[i].numel() else None for name, i in results.items()},
                **sizes, **counts, CT=constants["CT"], **step, **OPTIONS,
            )  # fmt: skip
    return found


def _input(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shared: dict[str, Any],
    dx: Tensor | None,
    need_affine: bool,
    need_gate: bool,
    sums: dict[str, Any],
) -> dict[str, int]:
    """Launches ``backward_x_kernel``; enters its partial sums into ``sums`` and returns how many parts they have."""
    batch, experts, channels, stride = shared["B"], shared["E"], shared["CIN"], shared["STRIDE"]
    one = x.dim() == 4
    together = one and shared["gate_ptr"] is None and (scale is None or scale.shape[0] == 1)
    of_parity = triton.cdiv(shared["H"], stride) * triton.cdiv(shared["W"], stride)
    rows = of_parity if need_gate else batch * of_parity
    blocks = pixel_tile(channels, shared["DEPTHWISE"], shared["DT"], power(rows, 16, 64))
    tiles = triton.cdiv(rows, blocks["BLOCK_M"])
    programs = tiles * stride * stride * (batch if need_gate else 1)
    wide = compute_dtype(x)
    counts = {}
    if need_affine and scale is not None:
        each = 1 if together else experts
        counts["affine_parts"] = programs * each if shared["ONE_AFFINE"] else programs
        sums["affine_sums_ptr"] = x.new_empty((programs * each * 2 * channels,), dtype=wide)
    if need_gate:
        counts["gate_parts"] = tiles * stride * stride
        sums["gate_sums_ptr"] = x.new_empty((counts["gate_parts"] * batch * experts * channels,), dtype=wide)
    kernel, weight_strides = _weight_strides(weight, shared["DEPTHWISE"])
    backward_x_kernel[(programs, 1 if one else experts, triton.cdiv(channels, blocks["BLOCK_N"]))](
        weight_ptr=kernel, dx_ptr=dx, sums_ptr=sums["affine_sums_ptr"], gate_sums_ptr=sums["gate_sums_ptr"],
        TOGETHER=together, **weight_strides, **shared, **blocks,
    )  # fmt: skip
    return counts


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Everything at once with 64 channels: stride 2, gates, statistics. A shared input of 3 channels without any of
    that. Depthwise."""
    p, w = dtype.pointer, dtype.wide_pointer
    exact = {"PRECISION": IEEE}
    found = []
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
        grads = dict.fromkeys(("grad_mean_ptr", "grad_var_ptr", "mean_ptr"), w if every else None)
        grads |= {"grad_ptr": p, "y_ptr": p if every else None}
        forward = {
            **read, **strides, "weight_ptr": p, "bias_ptr": p if every else None, "y_ptr": p,
            "partials_ptr": w if every else None, **pixel_tile(outputs, depthwise, dtype.element),
        }  # fmt: skip
        backward_x = {
            **read, **grads, **strides, "weight_ptr": p, "dx_ptr": p, "sums_ptr": w if every else None,
            "gate_sums_ptr": w if every else None, "TOGETHER": shared,
            **pixel_tile(inputs, depthwise, dtype.element),
        }  # fmt: skip
        backward_weight = {
            **read, **grads, "sums_ptr": w, "WEIGHT": True, "BIAS": every,
            **weight_tile(outputs, depth, depthwise, dtype.element),
        }  # fmt: skip
        found += [
            Specialisation(kernel, values, OPTIONS, case, exact)
            for kernel, values in (
                (forward_kernel, forward),
                (backward_x_kernel, backward_x),
                (backward_weight_kernel, backward_weight),
            )
        ]
    stats = {"partials_ptr": w, "mean_ptr": w, "var_ptr": w, "COUT": 64, "TILE": 64, "CT": dtype.compute, **STATS_TILE}
    sums = {
        **dict.fromkeys(("weight_sums_ptr", "affine_sums_ptr", "gate_sums_ptr", "dscale_ptr", "dshift_ptr"), w),
        **dict.fromkeys(("dweight_ptr", "dbias_ptr", "dgate_ptr"), p), "CT": dtype.compute, **sums_tile(100),
    }  # fmt: skip
    if dtype.is_wide:  # it is never mixed with another dtype
        found.append(Specialisation(stats_kernel, stats, OPTIONS))
    return [*found, Specialisation(sums_kernel, sums, OPTIONS)]
