"""Triton kernels of ``norm_conv``: products of tiles that are gathered and normalised while they are loaded.

Forward: rows are the pixels of y, columns its channels, and the sums run over ``k = tap * CIN + ci``. Backward of the
input: rows are the pixels of x, and the sums run over ``k = tap * COUT + co``. With stride 2 the parity of a pixel says
which taps reach it; a program takes pixels of one parity, so that it computes no unnecessary taps. Backward of the
weight: rows are output channels, columns ``tap * CIN + ci``, and the sums run over pixels, in several parts.

If gradients of mean and var are given, they are added to the gradient of y while it is loaded. If a batch norm
follows, its scale and shift are made along with the statistics, and the gradients of these two are given instead.

What many programs have parts of is added up by the last of them (see ``is_last``): there are no launches for sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import divide
from fastmod.kernels._images import (
    PARTS,
    is_last,
    per_column,
    pixels,
    product,
    rectified,
    rounded,
    store_sums,
    through,
)
from fastmod.kernels.batch_affine import inverse_root, moved

SIZES = ["B", "E", "H", "W", "chunk"]


@triton.jit
def taps_at(y, x, H, W, py, px, KSIZE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr):
    """One bit per tap: whether the pixel it leads to is in the image of H x W. It leads from windows that begin at
    (y, x), or if BACK from pixels (y, x) of parity (py, px) to the windows that read them."""
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
    """z ``[rows, columns]``: row r is the window at offset ``base``, column k its pixel ``taps[k]``, ``channels[k]``; 0
    outside of the image."""
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
def norm_columns(of_scale_ptr, of_shift_ptr, mean_ptr, var_ptr, of_channel, known, eps, CT: tl.constexpr):
    """Of a batch norm, per channel: the gradients of ``weight / sqrt(var + eps)`` and of its bias, ``1 / sqrt(var +
    eps)`` and the mean."""
    of_shift = tl.load(of_shift_ptr + of_channel, mask=known, other=0.0)
    mean = tl.load(mean_ptr + of_channel, mask=known, other=0.0)
    of_scale = tl.load(of_scale_ptr + of_channel, mask=known, other=0.0) - mean * of_shift
    inverse = inverse_root(tl.load(var_ptr + of_channel, mask=known, other=1.0) + tl.full([], eps, CT))
    return of_scale, of_shift, inverse, mean


@triton.jit
def grad_columns(
    of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, norm_scale_ptr, eps, of_channel, known, share, CT: tl.constexpr
):
    """What the gradients of mean and var add to that of y, per channel: ``level + slope * (y - mean)``. ``share``: 1 /
    number of values per mean. With ``var_ptr`` a batch norm follows: the gradients are those of shift and scale."""
    level = tl.zeros(of_channel.shape, CT)
    slope, mean = level, level
    if var_ptr is not None:
        of_scale, of_shift, inverse, mean = norm_columns(
            of_var_ptr, of_mean_ptr, mean_ptr, var_ptr, of_channel, known, eps, CT
        )
        scale = tl.load(norm_scale_ptr + of_channel, mask=known, other=0.0)
        level = -scale * of_shift * share
        slope = -0.5 * of_scale * scale * inverse * inverse * (2 * share)
    else:
        if of_mean_ptr is not None:
            level = tl.load(of_mean_ptr + of_channel, mask=known, other=0.0) * share
        if of_var_ptr is not None:
            slope = tl.load(of_var_ptr + of_channel, mask=known, other=0.0) * (2 * share)
            mean = tl.load(mean_ptr + of_channel, mask=known, other=0.0)
    return level, slope, mean


@triton.jit
def store_columns(
    columns_ptr, dnorm_weight_ptr, dnorm_bias_ptr, of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, eps, c, known, N, level,
    slope, mean, CT: tl.constexpr,
):  # fmt: skip
    """What ``grad_columns`` gives, into ``[3, N]``; and the gradients of a batch norm's weight and bias."""
    if columns_ptr is not None:
        tl.store(columns_ptr + c, level, mask=known)
        tl.store(columns_ptr + N + c, slope, mask=known)
        tl.store(columns_ptr + 2 * N + c, mean, mask=known)
    if dnorm_weight_ptr is not None:
        of_scale, _, inverse, _ = norm_columns(of_var_ptr, of_mean_ptr, mean_ptr, var_ptr, c, known, eps, CT)
        tl.store(dnorm_weight_ptr + c, rounded(of_scale * inverse, dnorm_weight_ptr.dtype.element_ty), mask=known)
    if dnorm_bias_ptr is not None:
        of_shift = tl.load(of_mean_ptr + c, mask=known, other=0.0)
        tl.store(dnorm_bias_ptr + c, rounded(of_shift, dnorm_bias_ptr.dtype.element_ty), mask=known)


@triton.jit
def load_columns(columns_ptr, c, known, N, CT: tl.constexpr):
    level = tl.zeros(c.shape, CT)
    slope, mean = level, level
    if columns_ptr is not None:
        level = tl.load(columns_ptr + c, mask=known, other=0.0)
        slope = tl.load(columns_ptr + N + c, mask=known, other=0.0)
        mean = tl.load(columns_ptr + 2 * N + c, mask=known, other=0.0)
    return level, slope, mean


@triton.jit(do_not_specialize=["values", "N"])
def columns_kernel(
    of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, norm_scale_ptr, eps: tl.float64, columns_ptr, dnorm_weight_ptr,
    dnorm_bias_ptr, values: tl.int64, N: tl.int64, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """For frozen weights: what else ``backward_weight_kernel`` leaves for ``backward_x_kernel``."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    share = divide(tl.full([], 1, CT), values.to(CT))
    level, slope, mean = grad_columns(
        of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, norm_scale_ptr, eps, c, c < N, share, CT
    )
    store_columns(
        columns_ptr, dnorm_weight_ptr, dnorm_bias_ptr, of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, eps, c, c < N, N,
        level, slope, mean, CT,
    )  # fmt: skip


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
    x_ptr, weight_ptr, scale_ptr, shift_ptr, gate_ptr, bias_ptr, y_ptr, partials_ptr, tickets_ptr, mean_ptr, var_ptr,
    norm_weight_ptr, norm_bias_ptr, norm_scale_ptr, norm_shift_ptr, running_mean_ptr, running_var_ptr, batches_ptr,
    momentum: tl.float64, bessel: tl.float64, eps: tl.float64, B: tl.int64, E: tl.int32, H: tl.int32, W: tl.int32,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr, DEPTHWISE: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, ONE_AFFINE: tl.constexpr, W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr, RT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of BLOCK_M pixels of one expert, with their mean and sum of squared deviations; of those of all
    tiles the last program makes mean and variance and, with ``norm_scale_ptr``, scale and shift of a batch norm."""
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
        values = tl.where(row[:, None], y.to(CT), 0.0)  # y rounded, as the next layer reads it
        mean = divide(tl.sum(values, axis=0), count)
        away = tl.where(row[:, None], values - mean[None, :], 0.0)
        rest = divide(tl.sum(away, axis=0), count)  # the rounding error of the mean
        place = (expert * tl.num_programs(0) + tile) * 3 * COUT + n  # [E, tiles, 3, COUT]
        tl.store(partials_ptr + place, mean, mask=n < COUT)
        tl.store(partials_ptr + place + COUT, rest, mask=n < COUT)
        tl.store(partials_ptr + place + 2 * COUT, tl.sum(away * away, axis=0) - count * rest * rest, mask=n < COUT)
        tiles = tl.num_programs(0)
        if is_last(tickets_ptr + expert * tl.num_programs(2) + tl.program_id(2), tiles):
            whole = B * HO * WO
            mean, var = combined(partials_ptr + expert * tiles * 3 * COUT, n, whole, tiles, COUT, BLOCK_M, BLOCK_N, CT)
            c = expert * COUT + n
            tl.store(mean_ptr + c, mean, mask=n < COUT)
            tl.store(var_ptr + c, var, mask=n < COUT)
            if norm_scale_ptr is not None:
                scale = inverse_root(var + tl.full([], eps, CT))
                if norm_weight_ptr is not None:
                    scale *= tl.load(norm_weight_ptr + c, mask=n < COUT, other=0.0).to(CT)
                shift = -mean * scale
                if norm_bias_ptr is not None:
                    shift += tl.load(norm_bias_ptr + c, mask=n < COUT, other=0.0).to(CT)
                tl.store(norm_scale_ptr + c, scale, mask=n < COUT)
                tl.store(norm_shift_ptr + c, shift, mask=n < COUT)
            if running_mean_ptr is not None:
                moved(running_mean_ptr, c, n < COUT, mean, momentum, RT)
                moved(running_var_ptr, c, n < COUT, var * tl.full([], bessel, CT), momentum, RT)
            if batches_ptr is not None:
                if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
                    tl.store(batches_ptr, tl.load(batches_ptr) + 1)


@triton.jit
def combined(start, c, values, tiles, COUT: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr):
    """Mean and variance of all tiles ``[tiles, 3, COUT]``, by the formula of Chan et al., which has no differences of
    large numbers. ``values``: in total, TILE of them in each tile but the last."""
    local = tl.arange(0, PARTS).to(tl.int64)
    origin = tl.load(start + c, mask=c < COUT, other=0.0)[None, :]  # means relative to the first lose fewer digits
    whole = values.to(CT) + tl.zeros([BLOCK_C], CT)
    total = tl.zeros([PARTS, BLOCK_C], CT)
    for first in range(0, tiles, PARTS):
        tile = first + local
        mask = (tile < tiles)[:, None] & (c < COUT)[None, :]
        counts = tl.minimum(values - tile * TILE, TILE).to(CT)[:, None]
        place = start + (tile * 3 * COUT)[:, None] + c[None, :]
        away = tl.load(place, mask=mask, other=0.0) - origin + tl.load(place + COUT, mask=mask, other=0.0)
        total += tl.where(mask, counts * away, 0.0)
    centre = divide(tl.sum(total, axis=0), whole)
    total = tl.zeros([PARTS, BLOCK_C], CT)
    for first in range(0, tiles, PARTS):
        tile = first + local
        mask = (tile < tiles)[:, None] & (c < COUT)[None, :]
        counts = tl.minimum(values - tile * TILE, TILE).to(CT)[:, None]
        place = start + (tile * 3 * COUT)[:, None] + c[None, :]
        away = tl.load(place, mask=mask, other=0.0) - origin + tl.load(place + COUT, mask=mask, other=0.0)
        away -= centre[None, :]
        squares = tl.load(place + 2 * COUT, mask=mask, other=0.0)
        total += tl.where(mask, squares + counts * away * away, 0.0)
    mean = tl.load(start + c, mask=c < COUT, other=0.0) + centre
    return mean, divide(tl.sum(total, axis=0), whole)


@triton.jit(do_not_specialize=SIZES)
def backward_x_kernel(
    grad_ptr, y_ptr, columns_ptr, x_ptr, weight_ptr, scale_ptr, shift_ptr, gate_ptr, dx_ptr, dscale_ptr, dshift_ptr,
    dgate_ptr, sums_ptr, gate_sums_ptr, tickets_ptr, B: tl.int64, E: tl.int32, H: tl.int32, W: tl.int32,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr, DEPTHWISE: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, TOGETHER: tl.constexpr, ONE_AFFINE: tl.constexpr,
    W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradient of BLOCK_N channels of BLOCK_M pixels of x, and their part of the gradients of scale and shift
    (``sums_ptr``) and of the gates (``gate_sums_ptr``; then all pixels are from one image), which the last program adds
    up. ``columns_ptr``: see `store_columns`.

    SHARED: one x for all experts, whose gradients are added, in a single sum if they have the same z (TOGETHER).
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
                level, slope, mean = load_columns(columns_ptr, other * COUT + n, channel, E * COUT, CT)
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
                level, slope, mean = load_columns(columns_ptr, other * COUT + co, known, E * COUT, CT)
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
    column = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    columns = tl.num_programs(1) * tl.num_programs(2)
    if sums_ptr is not None:
        if is_last(tickets_ptr + column, tl.num_programs(0)):
            programs = tl.num_programs(0).to(tl.int64)
            if ONE_AFFINE:
                rows = programs * (1 if TOGETHER else E)
                store_sums(dscale_ptr, n, sums_ptr, rows, 2 * CIN, n, channel, BLOCK_N, CT)
                store_sums(dshift_ptr, n, sums_ptr + CIN, rows, 2 * CIN, n, channel, BLOCK_N, CT)
            else:
                for each in range(parts):
                    c = (begin + each) * CIN + n
                    step = E.to(tl.int64) * (2 * CIN)
                    store_sums(dscale_ptr, c, sums_ptr, programs, step, c, channel, BLOCK_N, CT)
                    store_sums(dshift_ptr, c, sums_ptr, programs, step, E * CIN + c, channel, BLOCK_N, CT)
    if gate_sums_ptr is not None:
        parts_of_image = tl.cdiv(HO * WO, BLOCK_M) * PARITIES
        if is_last(tickets_ptr + columns + group * columns + column, parts_of_image):
            for each in range(parts):
                c = (group * E + begin + each) * CIN + n
                store_sums(dgate_ptr, c, gate_sums_ptr, parts_of_image, B * E * CIN, c, channel, BLOCK_N, CT)


@triton.jit(do_not_specialize=SIZES)
def backward_weight_kernel(
    grad_ptr, y_ptr, of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, norm_scale_ptr, eps: tl.float64, x_ptr, scale_ptr,
    shift_ptr, gate_ptr, sums_ptr, tickets_ptr, dweight_ptr, dbias_ptr, columns_ptr, dnorm_weight_ptr, dnorm_bias_ptr,
    B: tl.int64, E: tl.int32, H: tl.int32, W: tl.int32, chunk: tl.int64,
    CIN: tl.constexpr, COUT: tl.constexpr, KSIZE: tl.constexpr, STRIDE: tl.constexpr,
    DEPTHWISE: tl.constexpr, RELU: tl.constexpr, SHARED: tl.constexpr, ONE_AFFINE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """The part of ``chunk`` pixels in BLOCK_O x BLOCK_J of the weight's gradient; for depthwise weights, in one tap of
    BLOCK_O channels. Programs of the first columns also compute the bias. Parts are [weight, bias], one after the
    other; the last program adds them up. For the rest see ``store_columns``."""
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
        of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, norm_scale_ptr, eps, expert * COUT + o, output, share, CT
    )
    if (part == 0) & (column == 0):
        store_columns(
            columns_ptr, dnorm_weight_ptr, dnorm_bias_ptr, of_mean_ptr, of_var_ptr, mean_ptr, var_ptr, eps,
            expert * COUT + o, output, E * COUT, level, slope, mean, CT,
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
    step = E.to(tl.int64) * WIDTH
    weights = (expert * COUT + o) * DEPTH
    biases = E.to(tl.int64) * (COUT * DEPTH if WEIGHT else 0) + expert * COUT + o
    place = (j % CIN * KK + j // CIN)[None, :]
    here = output[:, None] & (j < DEPTH)[None, :]
    ptr = sums_ptr + part * step
    if WEIGHT:
        if DEPTHWISE:
            tl.store(ptr + weights + column, of_taps, mask=output)
        else:
            tl.store(ptr + weights[:, None] + place, total, mask=here)
    if BIAS:
        if column == 0:
            tl.store(ptr + biases, of_bias, mask=output)
    parts = tl.num_programs(0)
    if is_last(tickets_ptr + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), parts):
        if WEIGHT:
            if DEPTHWISE:
                c = weights + column
                store_sums(dweight_ptr, c, sums_ptr, parts, step, c, output, BLOCK_O, CT)
            else:
                found = tl.zeros([BLOCK_O, BLOCK_J], CT)
                for each in range(parts):
                    found += tl.load(sums_ptr + each * step + weights[:, None] + place, mask=here, other=0.0)
                found = rounded(found, dweight_ptr.dtype.element_ty)
                tl.store(dweight_ptr + weights[:, None] + place, found, mask=here)
        if BIAS:
            if column == 0:
                store_sums(dbias_ptr, expert * COUT + o, sums_ptr, parts, step, biases, output, BLOCK_O, CT)
