"""Triton kernels and launchers of ``norm_pool``: a program has some channels of one image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, divide, guard, tickets_for
from fastmod.kernels._images import innermost, is_last, per_column, rectified, refuse, store_sums, through
from fastmod.kernels.norm_sum import tile
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype

SIZES = ["E", "PIXELS"]


@triton.jit
def mean_of_pixels(
    x_ptr, scale_ptr, shift_ptr, image, c, E, PIXELS, C: tl.constexpr, RELU: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Of the channels ``c`` of an image of [B, E]."""
    channel = c < C
    local = tl.arange(0, BLOCK_R).to(tl.int64)
    columns = image % E * C + c
    scale = per_column(scale_ptr, 0, columns, channel, CT)
    shift = per_column(shift_ptr, 0, columns, channel, CT)
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    for first in range(0, PIXELS, BLOCK_R):
        pixel = first + local
        mask = (pixel < PIXELS)[:, None] & channel[None, :]
        place = ((image * PIXELS + pixel) * C)[:, None] + c[None, :]  # [B, E, H, W, C]
        u = tl.load(x_ptr + place, mask=mask, other=0.0).to(CT) * scale + shift
        total += tl.where(mask, rectified(u) if RELU else u, 0.0)
    return divide(tl.sum(total, axis=0), tl.zeros([BLOCK_C], CT) + PIXELS.to(CT))


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr, scale_ptr, shift_ptr, out_ptr, E: tl.int32, PIXELS: tl.int32, C: tl.constexpr, RELU: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = mean_of_pixels(x_ptr, scale_ptr, shift_ptr, image, c, E, PIXELS, C, RELU, BLOCK_R, BLOCK_C, CT)
    tl.store(out_ptr + image * C + c, mean, mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr, x_ptr, scale_ptr, shift_ptr, dx_ptr, dscale_ptr, dshift_ptr, sums_ptr, tickets_ptr, E: tl.int32,
    PIXELS: tl.int32, C: tl.constexpr, RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and this image's part of those of scale and shift, which the last program adds up. Every pixel
    has the same gradient. Leaving it out of the sums makes them counts, which are exact, and sums of x."""
    image = tl.program_id(0).to(tl.int64)  # of [B, E]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = c < C
    local = tl.arange(0, BLOCK_R).to(tl.int64)
    columns = image % E * C + c
    scale = per_column(scale_ptr, 0, columns, channel, CT)
    shift = per_column(shift_ptr, 0, columns, channel, CT)
    grad = tl.load(grad_ptr + image * C + c, mask=channel, other=0.0).to(CT)
    grad = divide(grad, tl.zeros([BLOCK_C], CT) + PIXELS.to(CT))
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    count = tl.zeros([BLOCK_R, BLOCK_C], CT)
    for first in range(0, PIXELS, BLOCK_R):
        pixel = first + local
        mask = (pixel < PIXELS)[:, None] & channel[None, :]
        place = ((image * PIXELS + pixel) * C)[:, None] + c[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(CT)
        passed = tl.full([BLOCK_R, BLOCK_C], 1.0, CT)
        du = passed * grad[None, :]
        if RELU:
            u = x * scale + shift
            passed = through(u, passed)
            du = through(u, du)
        count += tl.where(mask, passed, 0.0)
        total += tl.where(mask, passed * x, 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + place, du * scale, mask=mask)
    if sums_ptr is not None:
        passed = tl.sum(count, axis=0)
        factor = tl.where(passed > 0, grad, 0.0)  # 0 where none passed: NaNs count as passed
        apart = E.to(tl.int64) * C
        at = sums_ptr + image // E * 2 * apart + columns  # [B, 2, E, C]
        tl.store(at, tl.sum(total, axis=0) * factor, mask=channel)
        tl.store(at + apart, passed * factor, mask=channel)
        batch = tl.num_programs(0) // E
        if is_last(tickets_ptr + image % E * tl.num_programs(1) + tl.program_id(1), batch):
            store_sums(dscale_ptr, columns, sums_ptr, batch, 2 * apart, columns, channel, BLOCK_C, CT)
            store_sums(dshift_ptr, columns, sums_ptr + apart, batch, 2 * apart, columns, channel, BLOCK_C, CT)


def _arguments(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> dict[str, Any]:
    """For both kernels; refuses tensors that would be read beyond their end."""
    experts, channels, high, wide = x.shape[1:]
    refuse(x, scale=(scale, [(experts, channels)]), shift=(shift, [(experts, channels)]))
    if not 0 < high * wide < 2**31:
        raise ValueError(f"x: expected less than 2**31 pixels, and at least one, got shape {list(x.shape)}")
    return {
        "x_ptr": innermost(x), "scale_ptr": scale.contiguous(), "shift_ptr": shift.contiguous(), "E": experts,
        "PIXELS": high * wide, "C": channels, "RELU": relu, "CT": compute_type(x),
        **tile(channels, high * wide, compute_type(x)), **OPTIONS,
    }  # fmt: skip


def norm_pool_forward(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    """x ``[B, E, C, H, W]`` -> ``[B, E, C]``"""
    shared = _arguments(x, scale, shift, relu)
    batch, experts, channels = x.shape[:3]
    out = x.new_empty((batch, experts, channels))
    if out.numel() > 0:
        with guard(x):
            forward_kernel[(batch * experts, triton.cdiv(channels, shared["BLOCK_C"]))](out_ptr=out, **shared)
    return out


def norm_pool_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the three tensors, empty where not needed."""
    refuse(x, grad=(grad, [tuple(x.shape[:3])]))
    return launch_backward(grad, x, scale, shift, relu, needs)


def launch_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool, needs: Sequence[bool]
) -> list[Tensor]:
    """The same for gradients of any dtype."""
    shared = _arguments(x, scale, shift, relu)
    batch, experts, channels = x.shape[:3]
    found = _images.blanks((x, scale, shift), needs, images=(0,))
    if x.numel() == 0:
        return [each.zero_() for each in found]
    dx, dscale, dshift = (each if need else None for need, each in zip(needs, found, strict=True))
    sums = x.new_empty((batch, 2, experts, channels), dtype=compute_dtype(x)) if needs[1] or needs[2] else None
    columns = triton.cdiv(channels, shared["BLOCK_C"])
    with guard(x):
        backward_kernel[(batch * experts, columns)](
            grad_ptr=grad.contiguous(), dx_ptr=dx, dscale_ptr=dscale, dshift_ptr=dshift, sums_ptr=sums,
            tickets_ptr=None if sums is None else tickets_for(x, experts * columns), **shared,
        )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    for case, channels in (("c144", 144), ("c5", 5)):
        shared = {
            "x_ptr": p, "scale_ptr": w, "shift_ptr": w, "C": channels, "RELU": True, "CT": dtype.compute,
            **tile(channels, 64, dtype.compute),
        }  # fmt: skip
        sums = dict.fromkeys(("sums_ptr", "dscale_ptr", "dshift_ptr"), w)
        backward = {**shared, **sums, "grad_ptr": p, "dx_ptr": p, "tickets_ptr": "*i32"}
        found.append(Specialisation(forward_kernel, {**shared, "out_ptr": p}, OPTIONS, case))
        found.append(Specialisation(backward_kernel, backward, OPTIONS, case))
    return found
