"""Triton kernels and launchers of ``norm_conv``: products of tiles that are gathered, and normalised, while loading.

Forward: rows are the pixels of y, columns its channels, and what they sum over is ``k = tap * CIN + ci``. Backward of
the input: rows are the pixels of x, the sum goes over ``k = tap * COUT + co``. With stride 2 only some taps reach a
pixel, by its parity; a program takes pixels of one parity, and no tap in vain. Backward of the weight: rows are output
channels, columns ``tap * CIN + ci``, the sum goes over pixels, in several parts.

Where the gradients of mean and var are given, the gradient of y is completed while it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, divide, guard
from fastmod.kernels._images import (
    IEEE,
    TF32_THRICE,
    column_sums,
    innermost,
    per_column,
    pixels,
    power,
    precision,
    product,
    rectified,
    refuse,
    rounded,
    store_part,
    sums_tile,
    through,
)
from fastmod.kernels.masked_linear import factor_type
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype
from fastmod.ops.norm_conv import out_shape

#: Parts of the weight's gradient: enough programs for a large GPU, as few as it takes of at least so many pixels.
PROGRAMS, LEAST_PIXELS = 512, 512
#: Tiles of statistics and channels of one step.
STATS_TILE = {"BLOCK_R": 32, "BLOCK_C": 32}
SIZES = ["B", "E", "H", "W", "chunk"]


@triton.jit
def taps_at(y, x, H, W, py, px, KSIZE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr):
    """One bit per tap, whether the pixel it leads to lies in the image of H x W: from windows that begin at (y, x), or
    BACK, from the pixels (y, x) among those of parity (py, px) to the windows that they are read in."""
    rows = tl.zeros(y.shape, tl.int32)
    columns = tl.zeros(y.shape, tl.int32)
    for tap in tl.static_range(KSIZE):
        row = y + ((py + KSIZE // 2 - tap) // STRIDE if BACK else tap)
        column = x + ((px + KSIZE // 2 - tap) // STRIDE if BACK else tap)
        rows |= tl.where((row >= 0) & (row < H), ((1 << KSIZE) - 1) << (tap * KSIZE), 0)
        columns |= tl.where((column >= 0) & (column < W), (1 if KSIZE == 1 else 0b001001001) << tap, 0)
    return rows & columns


@triton.jit
def z_tile(
    x_ptr, gate_ptr, scale, shift, bits, base, gates, taps, channels, known, W, CIN: tl.constexpr,
    KSIZE: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """z ``[rows, columns]``: row r at the window of offset ``base``, column k its pixel ``taps[k]``, ``channels[k]``;
    0 beside the image."""
    inside = known[None, :] & (((bits[:, None] >> taps[None, :]) & 1) != 0)
    offset = ((taps // KSIZE).to(tl.int64) * W + taps % KSIZE) * CIN + channels
    z = tl.load(x_ptr + base[:, None] + offset[None, :], mask=inside, other=0.0).to(CT)
    if AFFINE:
        z = z * scale[None, :] + shift[None, :]
    if RELU:
        z = tl.where(z < 0, 0.0, z)
    if gate_ptr is not None:
        z *= tl.load(gate_ptr + gates[:, None] + channels[None, :], mask=inside, other=0.0).to(CT)
    return rounded(tl.where(inside, z, 0.0), x_ptr.dtype.element_ty).to(DT)


@triton.jit
def grad_columns(grad_mean_ptr, grad_var_ptr, mean_ptr, of_channel, known, share, CT: tl.constexpr):
    """What the gradients of mean and var add to that of y, per channel: ``level + slope * (y - mean)``; ``share``:
    1 / values per mean."""
    level = tl.zeros(of_channel.shape, CT)
    slope, mean = level, level
    if grad_mean_ptr is not None:
        level = tl.load(grad_mean_ptr + of_channel, mask=known, other=0.0) * share
    if grad_var_ptr is not None:
        slope = tl.load(grad_var_ptr + of_channel, mask=known, other=0.0) * (2 * share)
        mean = tl.load(mean_ptr + of_channel, mask=known, other=0.0)
    return level, slope, mean


@triton.jit
def grad_tile(grad_ptr, y_ptr, offsets, inside, level, slope, mean, CT: tl.constexpr):
    """The whole gradient of y, ``[rows, columns]``; 0 where not ``inside``."""
    g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(CT) + level[None, :]
    if y_ptr is not None:
        y = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(CT)
        g += slope[None, :] * (y - mean[None, :])
    return tl.where(inside, g, 0.0)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, gate_ptr, bias_ptr, y_ptr, partials_ptr, B: tl.int64, E: tl.int32,
    H: tl.int32, W: tl.int32,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr, DEPTHWISE: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, ONE_AFFINE: tl.constexpr, W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of BLOCK_M pixels of one expert, with their count, mean and sum of squared deviations."""
    HO, WO = (H + STRIDE - 1) // STRIDE, (W + STRIDE - 1) // STRIDE
    tile, expert = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    local = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_M + local < B * HO * WO
    b, yo, xo = pixels(tile * BLOCK_M, local, HO, WO)
    top, left = yo * STRIDE - KSIZE // 2, xo * STRIDE - KSIZE // 2
    bits = tl.where(row, taps_at(top, left, H, W, 0, 0, KSIZE, STRIDE, False), 0)
    image = b if SHARED else b * E + expert
    base = ((image * H + top) * W + left) * CIN
    gates = (b * E + expert) * CIN
    AFFINE: tl.constexpr = scale_ptr is not None
    affine = 0 if ONE_AFFINE else expert * CIN
    total = tl.zeros([BLOCK_M, BLOCK_N], CT)
    if DEPTHWISE:
        scale = tl.zeros([BLOCK_N], CT)
        shift = scale
        if AFFINE:
            scale = tl.load(scale_ptr + affine + n, mask=n < CIN, other=0.0)
            shift = tl.load(shift_ptr + affine + n, mask=n < CIN, other=0.0)
        for tap in range(KSIZE * KSIZE):
            z = z_tile(
                x_ptr, gate_ptr, scale, shift, bits, base, gates, tap + n * 0, n, n < COUT, W,
                CIN, KSIZE, RELU, AFFINE, CT, CT,
            )  # fmt: skip
            w = tl.load(weight_ptr + (expert * COUT + n) * (KSIZE * KSIZE) + tap, mask=n < COUT, other=0.0)
            total += z * w.to(CT)[None, :]
    else:
        for first in range(0, KSIZE * KSIZE * CIN, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            known = k < KSIZE * KSIZE * CIN
            scale = tl.zeros([BLOCK_K], CT)
            shift = scale
            if AFFINE:
                scale = tl.load(scale_ptr + affine + k % CIN, mask=known, other=0.0)
                shift = tl.load(shift_ptr + affine + k % CIN, mask=known, other=0.0)
            z = z_tile(
                x_ptr, gate_ptr, scale, shift, bits, base, gates, k // CIN, k % CIN, known, W,
                CIN, KSIZE, RELU, AFFINE, DT, CT,
            )  # fmt: skip
            place = (k % CIN * W_CHANNEL + k // CIN * W_TAP)[:, None]
            place += ((expert * COUT + n) * (KSIZE * KSIZE * CIN))[None, :]
            w = tl.load(weight_ptr + place, mask=known[:, None] & (n < COUT)[None, :], other=0.0).to(DT)
            total = product(z, w, total, PRECISION)
    if bias_ptr is not None:
        total += per_column(bias_ptr, expert * COUT, n, n < COUT, CT)
    y = rounded(total, y_ptr.dtype.element_ty)
    # [B, E, HO, WO, COUT]
    place = (((b * E + expert) * HO + yo) * WO + xo) * COUT
    tl.store(y_ptr + place[:, None] + n[None, :], y, mask=row[:, None] & (n < COUT)[None, :])
    if partials_ptr is not None:
        count = tl.minimum(B * HO * WO - tile * BLOCK_M, BLOCK_M).to(CT)
        count += tl.zeros([BLOCK_N], CT)
        values = tl.where(row[:, None], y.to(CT), 0.0)  # of y as the next layer reads it
        mean = divide(tl.sum(values, axis=0), count)
        away = tl.where(row[:, None], values - mean[None, :], 0.0)
        rest = divide(tl.sum(away, axis=0), count)  # what the mean lost by rounding
        place = (expert * tl.num_programs(0) + tile) * 3 * COUT + n  # [E, tiles, 3, COUT]
        tl.store(partials_ptr + place, mean, mask=n < COUT)
        tl.store(partials_ptr + place + COUT, rest, mask=n < COUT)
        tl.store(partials_ptr + place + 2 * COUT, tl.sum(away * away, axis=0) - count * rest * rest, mask=n < COUT)


@triton.jit(do_not_specialize=["values", "tiles"])
def stats_kernel(
    partials_ptr, mean_ptr, var_ptr, values: tl.int64, tiles: tl.int64, COUT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Mean and variance of the tiles together (Chan et al.): no difference of large numbers. ``values`` in all, TILE of
    them in each tile but the last."""
    expert = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    local = tl.arange(0, BLOCK_R).to(tl.int64)
    start = partials_ptr + expert * tiles * 3 * COUT
    origin = tl.load(start + c, mask=c < COUT, other=0.0)[None, :]  # means are told from the first: fewer digits lost
    whole = values.to(CT) + tl.zeros([BLOCK_C], CT)
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    for first in range(0, tiles, BLOCK_R):
        tile = first + local
        mask = (tile < tiles)[:, None] & (c < COUT)[None, :]
        counts = tl.minimum(values - tile * TILE, TILE).to(CT)[:, None]
        place = start + (tile * 3 * COUT)[:, None] + c[None, :]
        away = tl.load(place, mask=mask, other=0.0) - origin + tl.load(place + COUT, mask=mask, other=0.0)
        total += tl.where(mask, counts * away, 0.0)
    centre = divide(tl.sum(total, axis=0), whole)
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    for first in range(0, tiles, BLOCK_R):
        tile = first + local
        mask = (tile < tiles)[:, None] & (c < COUT)[None, :]
        counts = tl.minimum(values - tile * TILE, TILE).to(CT)[:, None]
        place = start + (tile * 3 * COUT)[:, None] + c[None, :]
        away = tl.load(place, mask=mask, other=0.0) - origin + tl.load(place + COUT, mask=mask, other=0.0)
        away -= centre[None, :]
        squares = tl.load(place + 2 * COUT, mask=mask, other=0.0)
        total += tl.where(mask, squares + counts * away * away, 0.0)
    mean = tl.load(start + c, mask=c < COUT, other=0.0) + centre
    tl.store(mean_ptr + expert * COUT + c, mean, mask=c < COUT)
    tl.store(var_ptr + expert * COUT + c, divide(tl.sum(total, axis=0), whole), mask=c < COUT)


@triton.jit(do_not_specialize=SIZES)
def backward_x_kernel(
    grad_ptr, y_ptr, grad_mean_ptr, grad_var_ptr, mean_ptr, x_ptr, weight_ptr, scale_ptr, shift_ptr, gate_ptr,
    dx_ptr, sums_ptr, gate_sums_ptr, B: tl.int64, E: tl.int32, H: tl.int32, W: tl.int32,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr, DEPTHWISE: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, TOGETHER: tl.constexpr, ONE_AFFINE: tl.constexpr,
    W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradient of BLOCK_N channels of BLOCK_M pixels of x, with their part of the gradients of scale and shift
    (``sums_ptr``) and of the gates (``gate_sums_ptr``; then all pixels are of one image).

    SHARED: one x for all experts, whose gradients are added: within one sum if they meet the same z (TOGETHER).
    """
    HO, WO = (H + STRIDE - 1) // STRIDE, (W + STRIDE - 1) // STRIDE
    PARITIES: tl.constexpr = STRIDE * STRIDE
    parity = (tl.program_id(0) % PARITIES).to(tl.int32)
    part = (tl.program_id(0) // PARITIES).to(tl.int64)
    py, px = parity // STRIDE, parity % STRIDE
    high, wide = (H - py + STRIDE - 1) // STRIDE, (W - px + STRIDE - 1) // STRIDE  # pixels of that parity
    rows = B * high * wide
    group = tl.full([], 0, tl.int64)
    if gate_sums_ptr is not None:
        tiles = tl.cdiv(HO * WO, BLOCK_M)  # of the largest parity
        group, part = part // tiles, part % tiles
        rows = high.to(tl.int64) * wide
    local = tl.arange(0, BLOCK_M)
    row = part * BLOCK_M + local < rows
    b, y, x = pixels(group * rows + part * BLOCK_M, local, tl.maximum(high, 1), tl.maximum(wide, 1))
    PAD: tl.constexpr = KSIZE // 2
    dy0, dx0 = (py + PAD) % STRIDE, (px + PAD) % STRIDE  # the first taps that reach this parity, then every STRIDE-th
    nx = (KSIZE - dx0 + STRIDE - 1) // STRIDE
    taps = (KSIZE - dy0 + STRIDE - 1) // STRIDE * nx
    bits = tl.where(row, taps_at(y, x, HO, WO, py, px, KSIZE, STRIDE, True), 0)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = n < CIN
    mask = row[:, None] & channel[None, :]
    begin = tl.program_id(1).to(tl.int64)
    parts = tl.full([], 1, tl.int32)
    inner = tl.full([], 1, tl.int32)
    if TOGETHER:
        inner = E.to(tl.int32)
    elif SHARED:
        parts = E.to(tl.int32)
    share = divide(tl.full([], 1, CT), (B * HO * WO).to(CT))
    of_x = tl.zeros([BLOCK_M, BLOCK_N], CT)
    image = b if SHARED else b * E + begin
    place = (((image * H + (y * STRIDE + py)) * W + (x * STRIDE + px)) * CIN)[:, None] + n[None, :]
    for each in range(parts):
        expert = begin + each
        base = (((b * E + expert) * HO + y) * WO + x) * COUT
        dz = tl.zeros([BLOCK_M, BLOCK_N], CT)
        if DEPTHWISE:
            for q in range(inner * taps):
                other, nth = expert + q // taps, q % taps
                dy, dx = dy0 + nth // nx * STRIDE, dx0 + nth % nx * STRIDE
                step = (other - expert) * HO * WO + ((py + PAD - dy) // STRIDE * WO + (px + PAD - dx) // STRIDE)
                tap = dy * KSIZE + dx
                inside = channel[None, :] & (((bits >> tap) & 1) != 0)[:, None]
                level, slope, mean = grad_columns(
                    grad_mean_ptr, grad_var_ptr, mean_ptr, other * COUT + n, channel, share, CT
                )
                offsets = (base + step * COUT)[:, None] + n[None, :]
                g = grad_tile(grad_ptr, y_ptr, offsets, inside, level, slope, mean, CT)
                g = rounded(g, x_ptr.dtype.element_ty).to(CT)
                w = tl.load(weight_ptr + (other * COUT + n) * (KSIZE * KSIZE) + tap, mask=channel, other=0.0)
                dz += g * w.to(CT)[None, :]
        else:
            for first in range(0, inner * taps * COUT, BLOCK_K):
                k = first + tl.arange(0, BLOCK_K)
                known = k < inner * taps * COUT
                co, q = k % COUT, k // COUT
                other, nth = expert + q // taps, q % taps
                dy, dx = dy0 + nth // nx * STRIDE, dx0 + nth % nx * STRIDE
                step = (other - expert) * HO * WO + ((py + PAD - dy) // STRIDE * WO + (px + PAD - dx) // STRIDE)
                tap = dy * KSIZE + dx
                inside = known[None, :] & (((bits[:, None] >> tap[None, :]) & 1) != 0)
                level, slope, mean = grad_columns(
                    grad_mean_ptr, grad_var_ptr, mean_ptr, other * COUT + co, known, share, CT
                )
                offsets = base[:, None] + (step * COUT + co)[None, :]
                g = grad_tile(grad_ptr, y_ptr, offsets, inside, level, slope, mean, CT)
                g = rounded(g, x_ptr.dtype.element_ty).to(DT)
                at = ((other * COUT + co) * (KSIZE * KSIZE * CIN) + tap * W_TAP)[:, None] + (n * W_CHANNEL)[None, :]
                w = tl.load(weight_ptr + at, mask=known[:, None] & channel[None, :], other=0.0).to(DT)
                dz = product(g, w, dz, PRECISION)
        affine = n if ONE_AFFINE else expert * CIN + n
        u = tl.zeros([BLOCK_M, BLOCK_N], CT)
        value = u
        if RELU or sums_ptr is not None or gate_sums_ptr is not None:
            value = tl.load(x_ptr + place, mask=mask, other=0.0).to(CT)
            u = value
            if scale_ptr is not None:
                u = u * per_column(scale_ptr, 0, affine, channel, CT) + per_column(shift_ptr, 0, affine, channel, CT)
        if gate_sums_ptr is not None:
            of_gate = tl.where(mask, dz * (rectified(u) if RELU else u), 0.0)
            at = (part * PARITIES + parity) * B * E * CIN + (group * E + expert) * CIN  # [tiles * PARITIES, B, E, CIN]
            tl.store(gate_sums_ptr + at + n, tl.sum(of_gate, axis=0), mask=channel)
        if gate_ptr is not None:
            gates = ((b * E + expert) * CIN)[:, None] + n[None, :]
            dz *= tl.load(gate_ptr + gates, mask=mask, other=0.0).to(CT)
        if RELU:
            dz = through(u, dz)
        if sums_ptr is not None:
            # [programs, 2, E, CIN]; of a scale that all experts have, [programs, E, 2, CIN]
            many = 1 if TOGETHER else E
            at = tl.program_id(0).to(tl.int64) * many * (2 * CIN) + expert * (2 * CIN if ONE_AFFINE else CIN) + n
            tl.store(sums_ptr + at, tl.sum(tl.where(mask, dz * value, 0.0), axis=0), mask=channel)
            at += CIN if ONE_AFFINE else many * CIN
            tl.store(sums_ptr + at, tl.sum(tl.where(mask, dz, 0.0), axis=0), mask=channel)
        if scale_ptr is not None:
            dz *= per_column(scale_ptr, 0, affine, channel, CT)
        of_x += dz
    if dx_ptr is not None:
        tl.store(dx_ptr + place, rounded(of_x, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def backward_weight_kernel(
    grad_ptr, y_ptr, grad_mean_ptr, grad_var_ptr, mean_ptr, x_ptr, scale_ptr, shift_ptr, gate_ptr, sums_ptr,
    B: tl.int64, E: tl.int32, H: tl.int32, W: tl.int32, chunk: tl.int64,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr,
    DEPTHWISE: tl.constexpr, RELU: tl.constexpr, SHARED: tl.constexpr, ONE_AFFINE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """The part that ``chunk`` pixels have in BLOCK_O x BLOCK_J of the weight's gradient; of depthwise weights, in one
    tap of BLOCK_O channels. The first columns' programs have the bias as well. Parts are [weight, bias], one after the
    other."""
    HO, WO = (H + STRIDE - 1) // STRIDE, (W + STRIDE - 1) // STRIDE
    KK: tl.constexpr = KSIZE * KSIZE
    DEPTH: tl.constexpr = KK if DEPTHWISE else KK * CIN  # weights of one output channel
    COLUMNS: tl.constexpr = (KK if DEPTHWISE else (KK * CIN + BLOCK_J - 1) // BLOCK_J) if WEIGHT else 1
    part, expert = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) % COLUMNS
    o = tl.program_id(2) // COLUMNS * BLOCK_O + tl.arange(0, BLOCK_O)
    output = o < COUT
    j = column * BLOCK_J + tl.arange(0, BLOCK_J)
    local = tl.arange(0, BLOCK_P)
    end = tl.minimum((part + 1) * chunk, B * HO * WO)
    AFFINE: tl.constexpr = scale_ptr is not None
    channels = o if DEPTHWISE else j % CIN
    known = output if DEPTHWISE else j < DEPTH
    scale = tl.zeros(channels.shape, CT)
    shift = scale
    if AFFINE:
        affine = 0 if ONE_AFFINE else expert * CIN
        scale = tl.load(scale_ptr + affine + channels, mask=known, other=0.0)
        shift = tl.load(shift_ptr + affine + channels, mask=known, other=0.0)
    share = divide(tl.full([], 1, CT), (B * HO * WO).to(CT))
    level, slope, mean = grad_columns(
        grad_mean_ptr, grad_var_ptr, mean_ptr, expert * COUT + o, output, share, CT
    )  # fmt: skip
    total = tl.zeros([BLOCK_O, BLOCK_J], CT)
    of_taps = tl.zeros([BLOCK_O], CT)
    of_bias = tl.zeros([BLOCK_O], CT)
    for start in range(part * chunk, end, BLOCK_P):
        row = start + local < end
        b, yo, xo = pixels(start, local, HO, WO)
        place = ((((b * E + expert) * HO + yo) * WO + xo) * COUT)[:, None] + o[None, :]
        g = grad_tile(grad_ptr, y_ptr, place, row[:, None] & output[None, :], level, slope, mean, CT)
        if BIAS:
            of_bias += tl.sum(g, axis=0)
        if WEIGHT:
            top, left = yo * STRIDE - KSIZE // 2, xo * STRIDE - KSIZE // 2
            bits = tl.where(row, taps_at(top, left, H, W, 0, 0, KSIZE, STRIDE, False), 0)
            base = (((b if SHARED else b * E + expert) * H + top) * W + left) * CIN
            gates = (b * E + expert) * CIN
            g = rounded(g, x_ptr.dtype.element_ty)
            taps = column + o * 0 if DEPTHWISE else j // CIN
            z = z_tile(
                x_ptr, gate_ptr, scale, shift, bits, base, gates, taps, channels, known, W,
                CIN, KSIZE, RELU, AFFINE, CT if DEPTHWISE else DT, CT,
            )  # fmt: skip
            if DEPTHWISE:
                of_taps += tl.sum(g.to(CT) * z, axis=0)
            else:
                total = product(tl.trans(g.to(DT)), z, total, PRECISION)
    WIDTH: tl.constexpr = COUT * ((DEPTH if WEIGHT else 0) + (1 if BIAS else 0))  # of a part, for each expert
    ptr = sums_ptr + part * E * WIDTH
    if WEIGHT:
        weights = ptr + (expert * COUT + o) * DEPTH
        if DEPTHWISE:
            tl.store(weights + column, of_taps, mask=output)
        else:
            place = (j % CIN * KK + j // CIN)[None, :]
            tl.store(weights[:, None] + place, total, mask=output[:, None] & (j < DEPTH)[None, :])
    if BIAS:
        if column == 0:
            ptr += E.to(tl.int64) * (COUT * DEPTH if WEIGHT else 0)
            tl.store(ptr + expert * COUT + o, of_bias, mask=output)


@triton.jit(do_not_specialize=["weights", "biases", "affines", "gates", "weight_parts", "affine_parts", "gate_parts"])
def sums_kernel(
    weight_sums_ptr, affine_sums_ptr, gate_sums_ptr, dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr, dgate_ptr,
    weights: tl.int64, biases: tl.int64, affines: tl.int64, gates: tl.int64, weight_parts: tl.int64,
    affine_parts: tl.int64, gate_parts: tl.int64, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Add up the parts of all gradients but that of x. Grid axis 1: of weight and bias, scale and shift, gates."""
    what = tl.program_id(1)
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    if weight_sums_ptr is not None:
        if what == 0:
            found = column_sums(weight_sums_ptr, weight_parts, c, weights + biases, BLOCK_R, BLOCK_C, CT)
            if dweight_ptr is not None:
                store_part(dweight_ptr, c, 0, weights, found)
            if dbias_ptr is not None:
                store_part(dbias_ptr, c, weights, weights + biases, found)
    if affine_sums_ptr is not None:
        if what == 1:
            found = column_sums(affine_sums_ptr, affine_parts, c, 2 * affines, BLOCK_R, BLOCK_C, CT)
            if dscale_ptr is not None:
                store_part(dscale_ptr, c, 0, affines, found)
            if dshift_ptr is not None:
                store_part(dshift_ptr, c, affines, 2 * affines, found)
    if gate_sums_ptr is not None:
        if what == 2:
            found = column_sums(gate_sums_ptr, gate_parts, c, gates, BLOCK_R, BLOCK_C, CT)
            store_part(dgate_ptr, c, 0, gates, found)


# ---- Launchers


def pixel_tile(columns: int, depthwise: bool, factors: tl.dtype, rows: int = 64) -> dict[str, int]:
    """Of forward and input gradient: pixels, channels and what is summed at once; larger ones spill registers. 16 is
    the least that tl.dot takes."""
    if factors == tl.float64:
        return {"BLOCK_M": min(rows, 32), "BLOCK_N": power(columns, 16, 16 if depthwise else 32), "BLOCK_K": 16}
    block_n = power(columns, 16, 32 if depthwise else 64)
    block_k = 16 if factors == tl.float32 and block_n > 16 else 32
    return {"BLOCK_M": min(rows, 32 if depthwise else 64), "BLOCK_N": block_n, "BLOCK_K": block_k}


def weight_tile(outputs: int, depth: int, depthwise: bool, factors: tl.dtype) -> dict[str, int]:
    """Of the weight's gradient: pixels of one step, output channels, weights of one output channel."""
    wide = factors in (tl.float32, tl.float64)
    block_o = power(outputs, 16, 32 if depthwise or factors == tl.float64 else 64)
    block_j = 1 if depthwise else power(depth, 16, 32 if wide else 64)
    return {"BLOCK_P": 16 if wide else 32, "BLOCK_O": block_o, "BLOCK_J": block_j}


def _weight_strides(weight: Tensor, depthwise: bool) -> tuple[Tensor, dict[str, int]]:
    """The weight, and how far its neighbours are; channels may be innermost, which loads best."""
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
    """What kernels are told, and how many values a mean is of."""
    batch, experts, _, high, wide = out_shape(x, weight, stride)
    return {"B": batch, "E": experts, "H": x.shape[-2], "W": x.shape[-1]}, batch * high * wide


def _refuse(x: Tensor, weight: Tensor, stride: int, depthwise: bool, **others: tuple[Tensor | None, Any]) -> None:
    """What would be read beyond its end; ``others`` as in :func:`refuse`."""
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
    """Launch ``backward_x_kernel``; enters its partial sums into ``sums`` and returns the numbers of their parts."""
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
    """Everything at once, 64 channels: stride 2, gates, statistics. A shared input of 3 channels, without any of it.
    Depthwise."""
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
    if dtype.is_wide:  # it never meets another
        found.append(Specialisation(stats_kernel, stats, OPTIONS))
    return [*found, Specialisation(sums_kernel, sums, OPTIONS)]
