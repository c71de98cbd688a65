"""Triton kernels and launchers of a squeeze-excite in training, see ``fastmod/ops/_squeeze_excite.py``.

Forward: programs pool, and the last one of each expert computes both layers. Backward: one program per expert does the
layers, then ``norm_pool``'s kernel the pool. Layers have few numbers; what they exchange goes through global memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, each_contiguous, guard, sigmoid, tickets_for
from fastmod.kernels._images import (
    IEEE,
    TF32_THRICE,
    innermost,
    is_last,
    precision,
    product,
    rectified,
    refuse,
    rounded,
    through,
)
from fastmod.kernels.batch_affine import inverse_root, moved
from fastmod.kernels.norm_pool import launch_backward as pool_backward
from fastmod.kernels.norm_pool import mean_of_pixels
from fastmod.kernels.norm_sum import tile
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype

SIZES = ["B", "E", "PIXELS", "step1", "step2", "norm_step1", "norm_step2"]
#: Rows, columns and depth of a step of a product: 16 is the least that tl.dot takes; in fp64, and on AMD, more spill.
STEP, FEW = 32, 16
#: Left to itself ptxas spills registers to run more programs at once, of which there are few.
LIMITED = {**OPTIONS, "num_stages": 1, **({"maxnreg": 255} if torch.version.hip is None else {})}


@triton.jit
def multiply(
    a_ptr, a_row, a_depth, a_scale_ptr, a_shift_ptr, b_ptr, b_depth, b_column, b_scale_ptr, b_shift_ptr, to_ptr, to_row,
    to_column, hidden_ptr, rows, columns, depth, PRECISION: tl.constexpr, STEP: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``to[rows, columns] = a[rows, depth] @ b[depth, columns]``; a's and b's neighbours lie as far apart as it says.
    With scale and shift, per depth of a or column of b, a factor goes through batch norm and ReLU first; ``hidden_ptr``
    [rows, columns] with those of b: the result goes back through them, and b itself does not."""
    for first in range(0, rows, STEP):
        m = first + tl.arange(0, STEP).to(tl.int64)
        for start in range(0, columns, STEP):
            n = start + tl.arange(0, STEP)
            there = (m < rows)[:, None] & (n < columns)[None, :]
            total = tl.zeros([STEP, STEP], CT)
            for at in range(0, depth, STEP):
                k = at + tl.arange(0, STEP).to(tl.int64)
                of_a = (m < rows)[:, None] & (k < depth)[None, :]
                a = tl.load(a_ptr + m[:, None] * a_row + k[None, :] * a_depth, mask=of_a, other=0.0)
                if a_scale_ptr is not None:
                    scale = tl.load(a_scale_ptr + k, mask=k < depth, other=0.0)
                    a = rectified(a * scale[None, :] + tl.load(a_shift_ptr + k, mask=k < depth, other=0.0)[None, :])
                of_b = (k < depth)[:, None] & (n < columns)[None, :]
                b = tl.load(b_ptr + k[:, None] * b_depth + n[None, :] * b_column, mask=of_b, other=0.0)
                if b_scale_ptr is not None and hidden_ptr is None:
                    scale = tl.load(b_scale_ptr + n, mask=n < columns, other=0.0)
                    b = rectified(b * scale[None, :] + tl.load(b_shift_ptr + n, mask=n < columns, other=0.0)[None, :])
                # Beyond the ends ReLU may have left a shift; the sums of short parts lose fewer digits.
                a, b = tl.where(of_a, a, 0.0), tl.where(of_b, b, 0.0)
                total += product(a, b, tl.zeros([STEP, STEP], CT), PRECISION)
            if hidden_ptr is not None:
                hidden = tl.load(hidden_ptr + m[:, None] * columns + n[None, :], mask=there, other=0.0)
                scale = tl.load(b_scale_ptr + n, mask=n < columns, other=0.0)
                shift = tl.load(b_shift_ptr + n, mask=n < columns, other=0.0)
                total = through(hidden * scale[None, :] + shift[None, :], total)
            tl.store(to_ptr + m[:, None] * to_row + n[None, :] * to_column, total, mask=there)
    tl.debug_barrier()


@triton.jit
def mean_of_rows(ptr, n, B, columns, STEP: tl.constexpr):
    """The mean of each column ``[B, columns]``, in fp64: differences cancel before they meet a large scale."""
    total = tl.zeros([STEP, STEP], tl.float64)
    for first in range(0, B, STEP):
        b = first + tl.arange(0, STEP).to(tl.int64)
        mask = (b < B)[:, None] & (n < columns)[None, :]
        total += tl.load(ptr + b[:, None] * columns + n[None, :], mask=mask, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0) / B.to(tl.float64)


@triton.jit
def normalise(
    values_ptr, columns_ptr, step, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, momentum, eps, bessel, B,
    columns, STEP: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Statistics over the batch of values ``[B, columns]``, and the scale and shift of their batch norm: the four into
    ``columns_ptr``, ``step`` apart."""
    for start in range(0, columns, STEP):
        n = start + tl.arange(0, STEP)
        known = n < columns
        middle = mean_of_rows(values_ptr, n, B, columns, STEP)
        total = tl.zeros([STEP, STEP], tl.float64)
        for first in range(0, B, STEP):
            b = first + tl.arange(0, STEP).to(tl.int64)
            mask = (b < B)[:, None] & known[None, :]
            value = tl.load(values_ptr + b[:, None] * columns + n[None, :], mask=mask, other=0.0).to(tl.float64)
            apart = tl.where(mask, value - middle[None, :], 0.0)
            total += apart * apart
        mean, var = middle.to(CT), (tl.sum(total, axis=0) / B.to(tl.float64)).to(CT)
        weight = tl.load(weight_ptr + n, mask=known, other=0.0)
        scale = inverse_root(var + tl.full([], eps, CT)) * weight
        shift = tl.load(bias_ptr + n, mask=known, other=0.0) - mean * scale
        tl.store(columns_ptr + n, mean, mask=known)
        tl.store(columns_ptr + step + n, var, mask=known)
        tl.store(columns_ptr + 2 * step + n, scale, mask=known)
        tl.store(columns_ptr + 3 * step + n, shift, mask=known)
        moved(running_mean_ptr, n, known, mean, momentum, CT)
        moved(running_var_ptr, n, known, var * bessel.to(CT), momentum, CT)
    tl.debug_barrier()


@triton.jit
def normalise_backward(
    grads_ptr, values_ptr, var_ptr, scale_ptr, dweight_ptr, dbias_ptr, eps, B, columns, STEP: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Gradients of a batch norm's results ``[B, columns]`` become those of its ``values``, in place."""
    for start in range(0, columns, STEP):
        n = start + tl.arange(0, STEP)
        known = n < columns
        middle = mean_of_rows(values_ptr, n, B, columns, STEP)
        of_shift = mean_of_rows(grads_ptr, n, B, columns, STEP)
        total = tl.zeros([STEP, STEP], tl.float64)
        for first in range(0, B, STEP):
            b = first + tl.arange(0, STEP).to(tl.int64)
            mask = (b < B)[:, None] & known[None, :]
            at = b[:, None] * columns + n[None, :]
            apart = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float64) - middle[None, :]
            total += tl.where(mask, tl.load(grads_ptr + at, mask=mask, other=0.0).to(tl.float64) * apart, 0.0)
        whole = tl.sum(total, axis=0)
        count = B.to(tl.float64)
        variance = tl.load(var_ptr + n, mask=known, other=1.0).to(tl.float64) + eps
        scale = tl.load(scale_ptr + n, mask=known, other=0.0).to(tl.float64)
        tl.store(dbias_ptr + n, (of_shift * count).to(CT), mask=known)
        tl.store(dweight_ptr + n, (whole * inverse_root(variance)).to(CT), mask=known)
        slope = whole / (variance * count)
        for first in range(0, B, STEP):
            b = first + tl.arange(0, STEP).to(tl.int64)
            mask = (b < B)[:, None] & known[None, :]
            at = b[:, None] * columns + n[None, :]
            apart = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float64) - middle[None, :]
            grad = tl.load(grads_ptr + at, mask=mask, other=0.0).to(tl.float64) - of_shift[None, :]
            tl.store(grads_ptr + at, (scale[None, :] * (grad - slope[None, :] * apart)).to(CT), mask=mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr, scale_ptr, shift_ptr, weight1_ptr, norm_weight1_ptr, norm_bias1_ptr, weight2_ptr, norm_weight2_ptr,
    norm_bias2_ptr, running_mean1_ptr, running_var1_ptr, running_mean2_ptr, running_var2_ptr, gate_ptr, pooled_ptr,
    first_ptr, second_ptr, columns1_ptr, columns2_ptr, tickets_ptr, momentum1: tl.float64, momentum2: tl.float64,
    B: tl.int64, E: tl.int32, PIXELS: tl.int32, step1: tl.int64, step2: tl.int64, norm_step1: tl.int64,
    norm_step2: tl.int64, EPS1: tl.constexpr, EPS2: tl.constexpr, C: tl.constexpr, SQUEEZED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STEP: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Steps lead from one expert's weight, or from one's batch norm, to the next one's. Columns: each layer's mean,
    var, scale and shift ``[4, E, width]``."""
    image = tl.program_id(0).to(tl.int64)  # of [B, E]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = mean_of_pixels(x_ptr, scale_ptr, shift_ptr, image, c, E, PIXELS, C, True, BLOCK_R, BLOCK_C, CT)
    expert = image % E
    pooled_ptr += expert * B * C
    tl.store(pooled_ptr + image // E * C + c, mean, mask=c < C)
    if is_last(tickets_ptr + expert, B.to(tl.int32) * tl.num_programs(1)):
        first_ptr += expert * B * SQUEEZED
        second_ptr += expert * B * C
        small, large = expert * SQUEEZED, expert * C
        columns1_ptr += small
        columns2_ptr += large
        bessel = B.to(tl.float64) / tl.maximum(B - 1, 1).to(tl.float64)
        apart1, apart2 = E.to(tl.int64) * SQUEEZED, E.to(tl.int64) * C
        multiply(
            pooled_ptr, C, 1, None, None, weight1_ptr + expert * step1, 1, C, None, None, first_ptr, SQUEEZED, 1, None,
            B, SQUEEZED, C, PRECISION, STEP, CT,
        )  # fmt: skip
        normalise(
            first_ptr, columns1_ptr, apart1, norm_weight1_ptr + expert * norm_step1,
            norm_bias1_ptr + expert * norm_step1, running_mean1_ptr + small, running_var1_ptr + small, momentum1, EPS1,
            bessel, B, SQUEEZED, STEP, CT,
        )  # fmt: skip
        multiply(
            first_ptr, SQUEEZED, 1, columns1_ptr + 2 * apart1, columns1_ptr + 3 * apart1, weight2_ptr + expert * step2,
            1, SQUEEZED, None, None, second_ptr, C, 1, None, B, C, SQUEEZED, PRECISION, STEP, CT,
        )  # fmt: skip
        normalise(
            second_ptr, columns2_ptr, apart2, norm_weight2_ptr + expert * norm_step2,
            norm_bias2_ptr + expert * norm_step2, running_mean2_ptr + large, running_var2_ptr + large, momentum2, EPS2,
            bessel, B, C, STEP, CT,
        )  # fmt: skip
        for start in range(0, C, STEP):
            n = start + tl.arange(0, STEP)
            scale = tl.load(columns2_ptr + 2 * apart2 + n, mask=n < C, other=0.0)
            shift = tl.load(columns2_ptr + 3 * apart2 + n, mask=n < C, other=0.0)
            for begin in range(0, B, STEP):
                b = begin + tl.arange(0, STEP).to(tl.int64)
                mask = (b < B)[:, None] & (n < C)[None, :]
                value = tl.load(second_ptr + b[:, None] * C + n[None, :], mask=mask, other=0.0)
                value = rounded(sigmoid(value * scale[None, :] + shift[None, :]), gate_ptr.dtype.element_ty)
                tl.store(gate_ptr + (b * E + expert)[:, None] * C + n[None, :], value, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr, weight1_ptr, weight2_ptr, pooled_ptr, first_ptr, second_ptr, var1_ptr, scale1_ptr, shift1_ptr, var2_ptr,
    scale2_ptr, shift2_ptr, of_first_ptr, of_second_ptr, of_pooled_ptr, dweight1_ptr, dnorm_weight1_ptr,
    dnorm_bias1_ptr, dweight2_ptr, dnorm_weight2_ptr, dnorm_bias2_ptr, B: tl.int64, E: tl.int32, step1: tl.int64,
    step2: tl.int64, EPS1: tl.constexpr, EPS2: tl.constexpr, C: tl.constexpr, SQUEEZED: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """One expert. ``of_first_ptr`` and ``of_second_ptr``: scratch of the size of first and second."""
    expert = tl.program_id(0).to(tl.int64)
    small, large = expert * SQUEEZED, expert * C
    pooled_ptr += large * B
    second_ptr += large * B
    of_second_ptr += large * B
    first_ptr += small * B
    of_first_ptr += small * B
    scale1_ptr += small
    shift1_ptr += small
    weights = expert * (C * SQUEEZED)
    for start in range(0, C, STEP):
        n = start + tl.arange(0, STEP)
        scale = tl.load(scale2_ptr + large + n, mask=n < C, other=0.0)
        shift = tl.load(shift2_ptr + large + n, mask=n < C, other=0.0)
        for begin in range(0, B, STEP):
            b = begin + tl.arange(0, STEP).to(tl.int64)
            mask = (b < B)[:, None] & (n < C)[None, :]
            value = tl.load(second_ptr + b[:, None] * C + n[None, :], mask=mask, other=0.0)
            value = sigmoid(value * scale[None, :] + shift[None, :])
            grad = tl.load(grad_ptr + (b * E + expert)[:, None] * C + n[None, :], mask=mask, other=0.0).to(CT)
            tl.store(of_second_ptr + b[:, None] * C + n[None, :], grad * value * (1 - value), mask=mask)
    tl.debug_barrier()
    normalise_backward(
        of_second_ptr, second_ptr, var2_ptr + large, scale2_ptr + large, dnorm_weight2_ptr + large,
        dnorm_bias2_ptr + large, EPS2, B, C, STEP, CT,
    )  # fmt: skip
    multiply(
        of_second_ptr, 1, C, None, None, first_ptr, SQUEEZED, 1, scale1_ptr, shift1_ptr, dweight2_ptr + weights,
        SQUEEZED, 1, None, C, SQUEEZED, B, PRECISION, STEP, CT,
    )  # fmt: skip
    multiply(
        of_second_ptr, C, 1, None, None, weight2_ptr + expert * step2, SQUEEZED, 1, scale1_ptr, shift1_ptr,
        of_first_ptr, SQUEEZED, 1, first_ptr, B, SQUEEZED, C, PRECISION, STEP, CT,
    )  # fmt: skip
    normalise_backward(
        of_first_ptr, first_ptr, var1_ptr + small, scale1_ptr, dnorm_weight1_ptr + small, dnorm_bias1_ptr + small, EPS1,
        B, SQUEEZED, STEP, CT,
    )  # fmt: skip
    multiply(
        of_first_ptr, 1, SQUEEZED, None, None, pooled_ptr, C, 1, None, None, dweight1_ptr + weights, C, 1, None,
        SQUEEZED, C, B, PRECISION, STEP, CT,
    )  # fmt: skip
    multiply(
        of_first_ptr, SQUEEZED, 1, None, None, weight1_ptr + expert * step1, C, 1, None, None, of_pooled_ptr + large,
        E.to(tl.int64) * C, 1, None, B, C, SQUEEZED, PRECISION, STEP, CT,
    )  # fmt: skip


# ---- Launchers


#: Results of the forward but the gate, in this order: those of ``[E, B, ...]``, then of ``[E, ...]``.
KEPT = (
    "pooled_ptr", "first_ptr", "second_ptr", "mean1_ptr", "var1_ptr", "scale1_ptr", "shift1_ptr", "mean2_ptr",
    "var2_ptr", "scale2_ptr", "shift2_ptr",
)  # fmt: skip
LAYERS = ("weight1_ptr", "norm_weight1_ptr", "norm_bias1_ptr", "weight2_ptr", "norm_weight2_ptr", "norm_bias2_ptr")
RUNNING = ("running_mean1_ptr", "running_var1_ptr", "running_mean2_ptr", "running_var2_ptr")


def _sizes_of_layers(x: Tensor, layers: Sequence[Tensor]) -> list[tuple[int, ...]]:
    experts, channels = x.shape[1:3]
    squeezed = layers[0].shape[1]
    return [(experts, squeezed, channels), *[(experts, squeezed)] * 2, (experts, channels, squeezed),
            *[(experts, channels)] * 2]  # fmt: skip


def _arguments(x: Tensor, scale: Tensor, shift: Tensor, layers: Sequence[Tensor]) -> tuple[dict[str, Any], list[int]]:
    """For both kernels, and the steps of the layers; refuses tensors that would be read beyond their end."""
    if x.dim() != 5 or len(layers) != len(LAYERS) or layers[0].dim() != 3:
        raise ValueError(f"expected x [B, E, C, H, W] and six tensors of layers, got {list(x.shape)}")
    batch, experts, channels, high, wide = x.shape
    if not 0 < high * wide < 2**31:
        raise ValueError(f"x: expected less than 2**31 pixels, and at least one, got shape {list(x.shape)}")
    refuse(x, scale=(scale, [(experts, channels)]), shift=(shift, [(experts, channels)]))
    steps = []
    given: dict[str, Any] = {}
    for name, tensor, size in zip(LAYERS, layers, _sizes_of_layers(x, layers), strict=True):
        if tuple(tensor.shape) != size:
            raise ValueError(f"layers: expected shape {size}, got {tuple(tensor.shape)}")
        if tensor.dtype != compute_dtype(x):
            raise TypeError(f"layers: expected {compute_dtype(x)}, got {tensor.dtype}")
        given[name], step = _by_experts(tensor)
        steps.append(step)
    shared = {
        "B": batch, "E": experts, "C": channels, "SQUEEZED": layers[0].shape[1],
        "PRECISION": precision(x.new_empty(0, dtype=compute_dtype(x))), "step1": steps[0], "step2": steps[3],
        "STEP": FEW if torch.version.hip is not None or x.dtype == torch.float64 else STEP, "CT": compute_type(x),
        **LIMITED,
    }  # fmt: skip
    return {**given, **shared}, steps


def _by_experts(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor, whose experts may be apart, and the distance between them."""
    if tensor.shape[0] > 0 and tensor[0].is_contiguous():
        return tensor, tensor.stride(0)
    return each_contiguous(tensor, tensor.shape[0])


def squeeze_excite_forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    layers: Sequence[Tensor],
    running: Sequence[Tensor],
    momentum: Sequence[float],
    eps: Sequence[float],
) -> tuple[Tensor, ...]:
    """The gate ``[B, E, C]``, and what the backward reads; running statistics are updated."""
    shared, steps = _arguments(x, scale, shift, layers)
    batch, experts, channels, high, wide = x.shape
    squeezed, dtype = shared["SQUEEZED"], compute_dtype(x)
    for i, t in enumerate(running):
        if t.shape != layers[1 if i < 2 else 4].shape:
            raise ValueError(f"running: expected shape {tuple(layers[1 if i < 2 else 4].shape)}, got {tuple(t.shape)}")
    for i in (1, 4):
        if steps[i] != steps[i + 1]:
            for j in (i, i + 1):
                shared[LAYERS[j]], steps[j] = layers[j].contiguous(), layers[j].shape[1]
    gate = x.new_empty((batch, experts, channels))
    kept = [x.new_empty((experts, batch, width), dtype=dtype) for width in (channels, squeezed, channels)]
    made = x.new_empty if batch > 0 else x.new_zeros
    of_columns = [made((4, experts, width), dtype=dtype) for width in (squeezed, channels)]
    results = (gate, *kept, *of_columns[0].unbind(), *of_columns[1].unbind())
    if gate.numel() == 0:
        return results
    moving = [t.to(dtype).contiguous() for t in running]
    block = tile(channels, high * wide, compute_type(x))
    with guard(x):
        forward_kernel[(batch * experts, triton.cdiv(channels, block["BLOCK_C"]))](
            x_ptr=innermost(x), scale_ptr=scale.contiguous(), shift_ptr=shift.contiguous(), gate_ptr=gate,
            tickets_ptr=tickets_for(x, experts), momentum1=momentum[0], momentum2=momentum[1], EPS1=eps[0], EPS2=eps[1],
            PIXELS=high * wide, norm_step1=steps[1], norm_step2=steps[4],
            columns1_ptr=of_columns[0], columns2_ptr=of_columns[1], **dict(zip(KEPT, kept, strict=False)),
            **dict(zip(RUNNING, moving, strict=True)), **shared, **block,
        )  # fmt: skip
    for own, moved_on in zip(running, moving, strict=True):
        if own is not moved_on:
            own.copy_(moved_on)
    return results


def squeeze_excite_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    layers: Sequence[Tensor],
    kept: Sequence[Tensor],
    eps: Sequence[float],
) -> list[Tensor]:
    """Gradients of x, scale, shift and the layers."""
    shared, _ = _arguments(x, scale, shift, layers)
    refuse(x, grad=(grad, [tuple(x.shape[:3])]))
    found = [x.new_empty(t.shape, dtype=t.dtype) for t in layers]
    if grad.numel() == 0:
        return [x.new_zeros(t.shape, dtype=t.dtype) for t in (x, scale, shift, *layers)]
    read = dict(zip(KEPT, (t.contiguous() for t in kept), strict=True))
    of_pooled = x.new_empty(grad.shape, dtype=compute_dtype(x))
    for name in (*LAYERS[1:3], *LAYERS[4:]):
        del shared[name]
    with guard(x):
        backward_kernel[(x.shape[1],)](
            grad_ptr=grad.contiguous(), EPS1=eps[0], EPS2=eps[1], of_pooled_ptr=of_pooled,
            of_first_ptr=x.new_empty(kept[1].shape, dtype=kept[1].dtype),
            of_second_ptr=x.new_empty(kept[2].shape, dtype=kept[2].dtype),
            **{f"d{name}": t for name, t in zip(LAYERS, found, strict=True)},
            **{name: t for name, t in read.items() if name not in ("mean1_ptr", "mean2_ptr")}, **shared,
        )  # fmt: skip
    return [*pool_backward(of_pooled, x, scale, shift, True, [True] * 3), *found]


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """As in a net of 24 channels, whose blocks have 144."""
    p, w = dtype.pointer, dtype.wide_pointer
    on_amd = {"PRECISION": IEEE, "STEP": FEW, "num_stages": 1, "maxnreg": None}
    shared = {
        "EPS1": 1e-5, "EPS2": 1e-5, "C": 144, "SQUEEZED": 36,
        "PRECISION": IEEE if dtype.name == "fp64" else TF32_THRICE,
        "STEP": FEW if dtype.name == "fp64" else STEP, "CT": dtype.compute,
    }  # fmt: skip
    names = ("scale_ptr", "shift_ptr", *LAYERS, *RUNNING, *KEPT[:3], "columns1_ptr", "columns2_ptr")
    forward = {**dict.fromkeys(names, w), **shared, **tile(144, 64, dtype.compute)}
    forward |= {"x_ptr": p, "gate_ptr": p, "tickets_ptr": "*i32"}
    left = (LAYERS[0], LAYERS[3], *(name for name in KEPT if name not in ("mean1_ptr", "mean2_ptr")))
    scratch = ("of_first_ptr", "of_second_ptr", "of_pooled_ptr", *(f"d{name}" for name in LAYERS))
    backward = {**dict.fromkeys((*left, *scratch), w), **shared, "grad_ptr": p}
    return [
        Specialisation(forward_kernel, forward, LIMITED, "", on_amd),
        Specialisation(backward_kernel, backward, LIMITED, "", on_amd),
    ]
