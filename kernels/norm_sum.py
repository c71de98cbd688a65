"""Triton kernels and launchers of ``norm_sum``: one pass over the images, forward and backward.

A program has BLOCK_R pixels and BLOCK_C channels of one expert, or of all experts in turn if they must be summed: in
the forward because of gates, in the backward because they share a residual or the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard, tickets_for
from fastmod.kernels._images import (
    PARTS,
    innermost,
    is_last,
    per_column,
    power,
    rectified,
    refuse,
    rounded,
    store_sums,
    through,
)
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype

SIZES = ["B", "E", "PIXELS"]


@triton.jit
def normalised(ptr, scale_ptr, shift_ptr, place, mask, columns, channel, CT: tl.constexpr):
    """The values at ``place``, before and after their batch norm, if they have one."""
    value = tl.load(ptr + place, mask=mask, other=0.0).to(CT)
    u = value
    if scale_ptr is not None:
        u = u * per_column(scale_ptr, 0, columns, channel, CT) + per_column(shift_ptr, 0, columns, channel, CT)
    return value, u


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr, scale_ptr, shift_ptr, residual_ptr, residual_scale_ptr, residual_shift_ptr, gate_ptr, out_ptr,
    B: tl.int64, E: tl.int32, PIXELS: tl.int32, C: tl.constexpr, RELU: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """SHARED: all experts have one residual."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    local = tl.arange(0, BLOCK_R)
    row = start + local < B * PIXELS
    inner = (start % PIXELS).to(tl.int32) + local
    b, pixel = start // PIXELS + inner // PIXELS, inner % PIXELS
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = c < C
    mask = row[:, None] & channel[None, :]
    begin = tl.program_id(1).to(tl.int64)
    experts = tl.full([], 1, tl.int32)
    if gate_ptr is not None:
        experts = E
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    shared = ((b * PIXELS + pixel) * C)[:, None] + c[None, :]  # [B, H, W, C]
    for each in range(experts):
        expert = begin + each
        place = (((b * E + expert) * PIXELS + pixel) * C)[:, None] + c[None, :]  # [B, E, H, W, C]
        columns = expert * C + c
        u = normalised(x_ptr, scale_ptr, shift_ptr, place, mask, columns, channel, CT)[1]
        if residual_ptr is not None:
            where = shared if SHARED else place
            u += normalised(
                residual_ptr, residual_scale_ptr, residual_shift_ptr, where, mask, columns, channel, CT
            )[1]  # fmt: skip
        if RELU:
            u = rectified(u)
        if gate_ptr is not None:
            total += u * tl.load(gate_ptr + b * E + expert, mask=row, other=0.0).to(CT)[:, None]
        else:
            tl.store(out_ptr + place, rounded(u, out_ptr.dtype.element_ty), mask=mask)
    if gate_ptr is not None:
        tl.store(out_ptr + shared, rounded(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr, x_ptr, scale_ptr, shift_ptr, residual_ptr, residual_scale_ptr, residual_shift_ptr, gate_ptr,
    dx_ptr, dresidual_ptr, dscale_ptr, dshift_ptr, dresidual_scale_ptr, dresidual_shift_ptr, dgate_ptr, sums_ptr,
    gate_sums_ptr, tickets_ptr, B: tl.int64, E: tl.int32, PIXELS: tl.int32, C: tl.constexpr, RELU: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradients of x and residual, and these pixels' part of those of scales and shifts (``sums_ptr``) and of gates
    (``gate_sums_ptr``; then all pixels are from one image), which the last program adds up."""
    part = tl.program_id(0).to(tl.int64)
    group = tl.full([], 0, tl.int64)
    rows = B * PIXELS
    if gate_sums_ptr is not None:
        tiles = tl.cdiv(PIXELS, BLOCK_R)
        group, part = part // tiles, part % tiles
        rows = PIXELS.to(tl.int64)
    start = group * rows + part * BLOCK_R
    local = tl.arange(0, BLOCK_R)
    row = part * BLOCK_R + local < rows
    inner = (start % PIXELS).to(tl.int32) + local
    b, pixel = start // PIXELS + inner // PIXELS, inner % PIXELS
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = c < C
    mask = row[:, None] & channel[None, :]
    begin = tl.program_id(1).to(tl.int64)
    experts = tl.full([], 1, tl.int32)
    if SHARED or gate_ptr is not None:
        experts = E
    of_shared = tl.zeros([BLOCK_R, BLOCK_C], CT)
    shared = ((b * PIXELS + pixel) * C)[:, None] + c[None, :]  # [B, H, W, C]
    for each in range(experts):
        expert = begin + each
        place = (((b * E + expert) * PIXELS + pixel) * C)[:, None] + c[None, :]  # [B, E, H, W, C]
        columns = expert * C + c
        du = tl.load(grad_ptr + (place if gate_ptr is None else shared), mask=mask, other=0.0).to(CT)
        value, u = normalised(x_ptr, scale_ptr, shift_ptr, place, mask, columns, channel, CT)
        other = u
        if residual_ptr is not None:
            where = shared if SHARED else place
            other, more = normalised(
                residual_ptr, residual_scale_ptr, residual_shift_ptr, where, mask, columns, channel, CT
            )  # fmt: skip
            u += more
        if gate_sums_ptr is not None:
            of_gate = tl.sum(tl.sum(tl.where(mask, du * (rectified(u) if RELU else u), 0.0), axis=1), axis=0)
            # [tiles, blocks of channels, B, E]
            at = ((part * tl.num_programs(2) + tl.program_id(2)) * B + group) * E + expert
            tl.store(gate_sums_ptr + at, of_gate)
        if gate_ptr is not None:
            du *= tl.load(gate_ptr + b * E + expert, mask=row, other=0.0).to(CT)[:, None]
        if RELU:
            du = through(u, du)
        if sums_ptr is not None:
            at = (tl.program_id(0).to(tl.int64) * 3 * E + expert) * C + c  # [programs, 3, E, C]
            apart = E.to(tl.int64) * C
            tl.store(sums_ptr + at, tl.sum(tl.where(mask, du * value, 0.0), axis=0), mask=channel)
            tl.store(sums_ptr + at + apart, tl.sum(tl.where(mask, du, 0.0), axis=0), mask=channel)
            if residual_scale_ptr is not None:
                tl.store(sums_ptr + at + 2 * apart, tl.sum(tl.where(mask, du * other, 0.0), axis=0), mask=channel)
        if dx_ptr is not None:
            dx = du * per_column(scale_ptr, 0, columns, channel, CT)
            tl.store(dx_ptr + place, rounded(dx, dx_ptr.dtype.element_ty), mask=mask)
        if dresidual_ptr is not None:
            if residual_scale_ptr is not None:
                du *= per_column(residual_scale_ptr, 0, columns, channel, CT)
            if SHARED:
                of_shared += du
            else:
                tl.store(dresidual_ptr + place, rounded(du, dresidual_ptr.dtype.element_ty), mask=mask)
    if SHARED:
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + shared, rounded(of_shared, dresidual_ptr.dtype.element_ty), mask=mask)
    columns = tl.num_programs(1) * tl.num_programs(2)
    if sums_ptr is not None:
        programs, apart = tl.num_programs(0).to(tl.int64), E.to(tl.int64) * C
        if is_last(tickets_ptr + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), programs):
            for each in range(experts):
                at, step = (begin + each) * C + c, 3 * apart
                store_sums(dscale_ptr, at, sums_ptr, programs, step, at, channel, BLOCK_C, CT)
                # Both shifts have the same gradient.
                store_sums(dshift_ptr, at, sums_ptr + apart, programs, step, at, channel, BLOCK_C, CT)
                store_sums(dresidual_shift_ptr, at, sums_ptr + apart, programs, step, at, channel, BLOCK_C, CT)
                store_sums(dresidual_scale_ptr, at, sums_ptr + 2 * apart, programs, step, at, channel, BLOCK_C, CT)
    if gate_sums_ptr is not None:
        of_image = tl.cdiv(PIXELS, BLOCK_R) * tl.num_programs(2)
        if is_last(tickets_ptr + columns + group, of_image):
            nth = tl.arange(0, PARTS).to(tl.int64)
            for other in range(E):
                found = tl.zeros([PARTS], CT)
                for first in range(0, of_image, PARTS):
                    there = ((first + nth) * B + group) * E + other
                    found += tl.load(gate_sums_ptr + there, mask=first + nth < of_image, other=0.0)
                summed = rounded(tl.sum(found, axis=0), dgate_ptr.dtype.element_ty)
                tl.store(dgate_ptr + group * E + other, summed)


def tile(channels: int, rows: int, wide: tl.dtype) -> dict[str, int]:
    """Pixels and channels per program; larger tiles spill registers."""
    block_c = power(channels, 4, 64)
    room = (512 if wide == tl.float64 else 1024) // block_c
    return {"BLOCK_R": min(room, power(rows, 1, room)), "BLOCK_C": block_c}


def _arguments(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
) -> dict[str, Any]:
    """For both kernels; refuses tensors that would be read beyond their end."""
    batch, experts, channels, high, wide = x.shape
    per_expert = (experts, channels)
    refuse(
        x, scale=(scale, [per_expert]), shift=(shift, [per_expert]), gate=(gate, [(batch, experts)]),
        residual=(residual, [tuple(x.shape), (batch, channels, high, wide)]),
        residual_scale=(residual_scale, [per_expert]), residual_shift=(residual_shift, [per_expert]),
    )  # fmt: skip
    if (residual_scale is None) != (residual_shift is None) or (residual is None and residual_scale is not None):
        raise ValueError("residual, residual_scale, residual_shift: expected a residual and both or none")
    if high * wide >= 2**31:
        raise ValueError(f"x: expected less than 2**31 pixels, got shape {list(x.shape)}")
    images = {"x_ptr": x, "residual_ptr": residual}
    others = {
        "scale_ptr": scale, "shift_ptr": shift, "residual_scale_ptr": residual_scale,
        "residual_shift_ptr": residual_shift, "gate_ptr": gate,
    }  # fmt: skip
    return {
        **{name: None if image is None else innermost(image) for name, image in images.items()},
        **{name: None if other is None else other.contiguous() for name, other in others.items()},
        "B": batch, "E": experts, "PIXELS": high * wide, "C": channels, "RELU": relu,
        "SHARED": residual is not None and residual.dim() == 4, "CT": compute_type(x), **OPTIONS,
    }  # fmt: skip


def norm_sum_forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
) -> Tensor:
    """x ``[B, E, C, H, W]`` -> the same shape, or with a gate ``[B, E]`` -> ``[B, C, H, W]``."""
    shared = _arguments(x, scale, shift, residual, residual_scale, residual_shift, gate, relu)
    batch, experts, channels = x.shape[:3]
    out = _images.empty(x, x.shape if gate is None else (batch, *x.shape[2:]))
    if out.numel() == 0:
        return out
    if experts == 0:
        return out.zero_()
    rows = batch * shared["PIXELS"]
    blocks = tile(channels, rows, shared["CT"])
    grid = (
        triton.cdiv(rows, blocks["BLOCK_R"]),
        experts if gate is None else 1,
        triton.cdiv(channels, blocks["BLOCK_C"]),
    )
    with guard(x):
        forward_kernel[grid](out_ptr=out, **shared, **blocks)
    return out


def norm_sum_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of the seven tensors, empty where not needed."""
    tensors = (x, scale, shift, residual, residual_scale, residual_shift, gate)
    shared = _arguments(*tensors, relu)
    batch, experts, channels = x.shape[:3]
    expected = tuple(x.shape) if gate is None else (batch, *x.shape[2:])
    refuse(x, grad=(grad, [expected]))
    found = _images.blanks(tensors, needs, images=(0, 3))
    if x.numel() == 0:
        return [each.zero_() for each in found]
    wanted = [each if need and each.numel() > 0 else None for need, each in zip(needs, found, strict=True)]
    names = ("dx", "dscale", "dshift", "dresidual", "dresidual_scale", "dresidual_shift", "dgate")
    results = {f"{name}_ptr": each for name, each in zip(names, wanted, strict=True)}
    images = {name: results.pop(name) for name in ("dx_ptr", "dresidual_ptr")}
    need_gate = results["dgate_ptr"] is not None
    need_sums = any(each is not None for name, each in results.items() if name != "dgate_ptr")
    rows = shared["PIXELS"] if need_gate else batch * shared["PIXELS"]
    blocks = tile(channels, rows, shared["CT"])
    tiles = triton.cdiv(rows, blocks["BLOCK_R"])
    programs, columns = tiles * (batch if need_gate else 1), triton.cdiv(channels, blocks["BLOCK_C"])
    one = 1 if shared["SHARED"] or gate is not None else experts
    wide = compute_dtype(x)
    sums = x.new_empty((programs, 3, experts, channels), dtype=wide) if need_sums else None
    gate_sums = x.new_empty((tiles * columns, batch, experts), dtype=wide) if need_gate else None
    tickets = one * columns + batch if need_sums or need_gate else 0
    with guard(x):
        backward_kernel[(programs, one, columns)](
            grad_ptr=innermost(grad), sums_ptr=sums, gate_sums_ptr=gate_sums,
            tickets_ptr=tickets_for(x, tickets) if tickets else None, **images, **results, **shared, **blocks,
        )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """The end of a mixture, with gates, batch norms and a shared residual; the end of a block, without these."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    for case, channels in (("mixture", 64), ("block", 5)):
        every = case == "mixture"
        shared = {
            "x_ptr": p, "scale_ptr": w, "shift_ptr": w, "residual_ptr": p, "residual_scale_ptr": w if every else None,
            "residual_shift_ptr": w if every else None, "gate_ptr": p if every else None, "RELU": True,
            "SHARED": every, "C": channels, "CT": dtype.compute, **tile(channels, 1 << 16, dtype.compute),
        }  # fmt: skip
        names = ("dscale_ptr", "dshift_ptr", "dresidual_scale_ptr", "dresidual_shift_ptr")
        backward = {
            **shared, **dict.fromkeys(names, w), "grad_ptr": p, "dx_ptr": p, "dresidual_ptr": p, "sums_ptr": w,
            "gate_sums_ptr": w if every else None, "dgate_ptr": p if every else None, "tickets_ptr": "*i32",
        }  # fmt: skip
        found.append(Specialisation(forward_kernel, {**shared, "out_ptr": p}, OPTIONS, case))
        found.append(Specialisation(backward_kernel, backward, OPTIONS, case))
    return found
