"""Triton kernels and launchers of ``masked_conv2d``: implicit products of pixels and masked filters, all samples at
once.

Masks come first, by a small launch of their own: a byte for each weight has a bit for each of seven samples, and one
for a logit that is NaN. Within the products, a weight would be drawn once for every tile of pixels, with registers that
the products need.

The products have result channels as rows and pixels as columns. Forward: they sum over the source's channels and taps.
The gradient of x is the same with the filters' channels exchanged; with a stride, pixels that leave the same remainder
when divided by it are an image of their own, whose pixels all meet the same taps, so that no product is made in vain.
The gradient of the weights sums over pixels, in several parts, which a last launch adds up, with masks and slopes.

Images are read and written where they lie: pixels run along the lanes, or channels if those are innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard, key, noise_word, seed_args, uniform_of
from fastmod.kernels._images import IEEE, TF32_THRICE, pixels, power, precision, product, rounded
from fastmod.kernels.masked_linear import factor_type
from fastmod.kernels.norm_conv import LEAST_PIXELS, PROGRAMS
from fastmod.kernels.sample_mask import EXACT_OPTIONS, noise_words, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.noise import STREAM_MASK, STREAM_MASK_BIAS
from fastmod.ops._checks import compute_dtype
from fastmod.ops.masked_conv2d import fake_backward, fake_forward, out_size

OF_WEIGHTS = tl.constexpr(STREAM_MASK)
OF_BIASES = tl.constexpr(STREAM_MASK_BIAS)
#: Samples of a byte of masks. Its last bit: the logit is NaN.
SAMPLES = 7
BYTE = tl.constexpr(SAMPLES)
NAN_BIT = tl.constexpr(1 << SAMPLES)
#: Weights of a program that draws, or adds up.
BLOCK = 512
#: Programs that a large GPU needs: where there are fewer, each takes a fourth of the pixels.
ENOUGH = 128
#: What loops load ahead takes more registers than there are, and other programs hide the time; left to itself ptxas
#: spills registers for more programs at once. Warps of AMD are twice as large.
NVIDIA = {"num_stages": 1, "maxnreg": 224} if torch.version.hip is None else {"num_stages": 1}
FEWER_WARPS: dict[str, Any] = {**OPTIONS, **NVIDIA}
MORE_WARPS: dict[str, Any] = {**FEWER_WARPS, "num_warps": 8 if torch.version.hip is None else 4}
#: What a kernel is not compiled anew for.
PLACES = [f"{of}_{step}" for of in ("from", "to") for step in ("image", "channel", "row", "column")]
PLACES += ["images", "SOURCE_HIGH", "SOURCE_WIDE", "HIGH", "WIDE"]


# ---- Masks


@triton.jit(do_not_specialize=["first", "samples"])
def draw_kernel(
    logits_ptr, masks_ptr, bias_ptr, bias_logits_ptr, biases_ptr, seed_ptr, seed_value: tl.int64, first: tl.int64,
    samples: tl.int64, P: tl.int64, OUT: tl.int64, QUADS: tl.constexpr, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Masks of BLOCK of the P weights, or masked biases ``[samples, OUT]``, of BYTE samples."""
    blocks = tl.cdiv(P, BLOCK)
    seed = key(seed_ptr, seed_value)
    start = tl.program_id(1).to(tl.int64) * BYTE
    count = tl.minimum(samples - start, BYTE).to(tl.int32)
    if tl.program_id(0) < blocks:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        i = begin + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + i, mask=i < P, other=0.0).to(tl.float32)
        off = words_off(logit)
        byte = tl.where(logit == logit, 0, NAN_BIT)
        for s in range(count):
            words = noise_words(seed, (first + start + s) * P + begin, OF_WEIGHTS, QUADS, BLOCK)
            byte |= tl.where((words >> 9).to(tl.int32) >= off, 1, 0) << s
        tl.store(masks_ptr + tl.program_id(1) * P + i, byte.to(tl.uint8), mask=i < P)
    elif biases_ptr is not None:
        o = (tl.program_id(0) - blocks) * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(bias_logits_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(CT)
        bias = tl.where(logit == logit, bias, float("nan"))
        off = words_off(logit)
        for s in range(count):
            words = noise_word(seed, (first + start + s) * OUT + o, OF_BIASES)
            keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(CT)
            tl.store(biases_ptr + (start + s) * OUT + o, keep * bias, mask=o < OUT)


@triton.jit
def masked_weight(weight_ptr, byte_ptr, row, column, known_rows, known_columns, bit, DT: tl.constexpr):
    """``[rows, columns]`` of the weights at ``row + column``; 0 beyond the edges."""
    at = row[:, None] + column[None, :]
    inside = known_rows[:, None] & known_columns[None, :]
    byte = tl.load(byte_ptr + at, mask=inside, other=0).to(tl.int32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(DT)
    weight = tl.where(byte < NAN_BIT, weight, float("nan")).to(DT)
    return ((byte >> bit) & 1).to(DT) * weight  # a product, not a choice: 0 * inf is NaN here as in torch


# ---- Products


@triton.jit
def axis(
    residue, BACK: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """Of one dimension: the first tap that is met, how many are, and where it reads for result 0. BACK: by pixels
    ``residue + STRIDE * i``."""
    first = tl.full([], 0, tl.int32)
    taps = tl.full([], KERNEL, tl.int32)
    origin = tl.full([], -PADDING, tl.int32)
    if BACK:
        origin = residue + PADDING
        if STRIDE > 1:
            taps = tl.full([], 0, tl.int32)
            for i in tl.static_range(KERNEL):
                met = (residue + PADDING - (KERNEL - 1 - i) * DILATION) % STRIDE == 0
                taps += tl.where(met, 1, 0)
                first = tl.where(met, KERNEL - 1 - i, first)
            # Exact where a tap is met; a class that none meets sums over nothing.
            origin = (residue + PADDING - first * DILATION) // STRIDE
    return first, taps, origin


@triton.jit
def inside_bits(begin, PACE: tl.constexpr, SIZE, KERNEL: tl.constexpr):
    """A bit for each tap, whether ``begin + tap * PACE`` is between 0 and SIZE: those from ``first`` to before ``end``
    are."""
    if PACE > 0:
        first = (tl.maximum(-begin, 0) + (PACE - 1)) // PACE
        end = (tl.maximum(SIZE - begin, 0) + (PACE - 1)) // PACE
    else:
        first = tl.maximum(begin - SIZE - PACE, 0) // -PACE
        end = tl.maximum(begin - PACE, 0) // -PACE
    first, end = tl.minimum(first, KERNEL), tl.minimum(end, KERNEL)
    return tl.where(end > first, (1 << end) - (1 << first), 0)


@triton.jit
def pixel_tile(ptr, base, bits, offset, needed, LAST: tl.constexpr, DT: tl.constexpr):
    """``[depth, pixels]`` at ``base`` of each pixel plus ``offset`` of each pair of a channel and a tap; 0 unless the
    pixel has the bits that the pair needs. LAST: lanes run along the depth, else along the pixels."""
    if LAST:
        inside = (bits[:, None] & needed[None, :]) == needed[None, :]
        return tl.trans(tl.load(ptr + base[:, None] + offset[None, :], mask=inside, other=0.0).to(DT))
    inside = (bits[None, :] & needed[:, None]) == needed[:, None]
    return tl.load(ptr + base[None, :] + offset[:, None], mask=inside, other=0.0).to(DT)


@triton.jit
def added(total, a, b, PRECISION: tl.constexpr, DT: tl.constexpr):
    """``total + a @ b``. Tensor cores cut sums off: those of fp32 begin anew for every step; what is rounded to two
    bytes in the end does not feel it."""
    if tl.float32 == DT:
        return total + product(a, b, tl.zeros(total.shape, total.dtype), PRECISION)
    return product(a, b, total, PRECISION)


@triton.jit(do_not_specialize=[*PLACES, "tiles"])
def product_kernel(
    source_ptr, weight_ptr, masks_ptr, biases_ptr, out_ptr, images: tl.int64, tiles: tl.int32,
    from_image: tl.int64, from_channel: tl.int64, from_row: tl.int64, from_column: tl.int64, to_image: tl.int64,
    to_channel: tl.int64, to_row: tl.int64, to_column: tl.int64, SOURCE_HIGH: tl.int32, SOURCE_WIDE: tl.int32,
    HIGH: tl.int32, WIDE: tl.int32, BIAS_STEP: tl.constexpr, CHANNELS: tl.constexpr, RESULTS: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    TAP_STEP_H: tl.constexpr, TAP_STEP_W: tl.constexpr, PACE_H: tl.constexpr, PACE_W: tl.constexpr,
    BACK: tl.constexpr, SOURCE_LAST: tl.constexpr, OUT_LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of BLOCK_M pixels of a sample's results; ``images`` of a sample, HIGH x WIDE.

    BACK: the gradient of x, from that of the result. TAP_STEP: between taps that a pixel meets; PACE: between what they
    read."""
    across = tl.minimum(WIDE, STRIDE_W) if BACK else 1
    classes = tl.minimum(HIGH, STRIDE_H) * across if BACK else 1
    group = tl.program_id(0) // tiles
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    sample = (group // classes).to(tl.int64)
    down, right = group % classes // across, group % classes % across  # what the division by the stride leaves
    high = (HIGH - down + STRIDE_H - 1) // STRIDE_H if BACK else HIGH
    wide = (WIDE - right + STRIDE_W - 1) // STRIDE_W if BACK else WIDE
    if tile * BLOCK_M < images * high * wide:
        first_y, taps_y, origin_y = axis(down, BACK, KERNEL_H, STRIDE_H, PADDING_H, DILATION_H)
        first_x, taps_x, origin_x = axis(right, BACK, KERNEL_W, STRIDE_W, PADDING_W, DILATION_W)
        local = tl.arange(0, BLOCK_M)
        there = tile * BLOCK_M + local < images * high * wide
        image, y, x = pixels(tile * BLOCK_M, local, high, wide)
        image += sample * images
        top = origin_y + (y if BACK else y * STRIDE_H)
        left = origin_x + (x if BACK else x * STRIDE_W)
        bits = inside_bits(top, PACE_H, SOURCE_HIGH, KERNEL_H)
        bits |= inside_bits(left, PACE_W, SOURCE_WIDE, KERNEL_W) << 8
        bits = tl.where(there, bits, 0)
        base = image * from_image + top * from_row + left * from_column
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        of_n = n * (KERNEL_H * KERNEL_W if BACK else CHANNELS * KERNEL_H * KERNEL_W)
        byte_ptr = masks_ptr + sample // BYTE * (CHANNELS * RESULTS * KERNEL_H * KERNEL_W)
        bit = (sample % BYTE).to(tl.int32)
        taps = taps_y * taps_x
        total = tl.zeros([BLOCK_N, BLOCK_M], CT)
        for start in range(0, CHANNELS * taps, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            if CHANNELS % BLOCK_K == 0:  # one tap a step
                tap = start // CHANNELS + tl.zeros([BLOCK_K], tl.int32)
                channel = start % CHANNELS + tl.arange(0, BLOCK_K)
            else:
                channel = k % CHANNELS if SOURCE_LAST else k // taps
                tap = k // CHANNELS if SOURCE_LAST else k % taps
            tap_y, tap_x = tap // taps_x, tap % taps_x
            known = k < CHANNELS * taps
            offset = channel * from_channel + tap_y * PACE_H * from_row + tap_x * PACE_W * from_column
            needed = tl.where(known, (1 << tap_y) | (256 << tap_x), 1 << 30)
            pixel = pixel_tile(source_ptr, base, bits, offset, needed, SOURCE_LAST, DT)
            of_k = (first_y + tap_y * TAP_STEP_H) * KERNEL_W + (first_x + tap_x * TAP_STEP_W)
            of_k += channel * (RESULTS * KERNEL_H * KERNEL_W if BACK else KERNEL_H * KERNEL_W)
            if BACK:  # lanes run along the channels that are nearer to each other
                weight = tl.trans(masked_weight(weight_ptr, byte_ptr, of_k, of_n, known, n < RESULTS, bit, DT))
            else:
                weight = masked_weight(weight_ptr, byte_ptr, of_n, of_k, n < RESULTS, known, bit, DT)
            total = added(total, weight, pixel, PRECISION, DT)
        if biases_ptr is not None:
            bias = tl.load(biases_ptr + sample * BIAS_STEP + n, mask=n < RESULTS, other=0.0)
            total += bias.to(CT)[:, None]
        row = image * to_image + (down + y * STRIDE_H if BACK else y) * to_row
        place = row + (right + x * STRIDE_W if BACK else x) * to_column
        total = rounded(total, out_ptr.dtype.element_ty)
        if OUT_LAST:
            inside = there[:, None] & (n < RESULTS)[None, :]
            tl.store(out_ptr + place[:, None] + (n * to_channel)[None, :], tl.trans(total), mask=inside)
        else:
            inside = there[None, :] & (n < RESULTS)[:, None]
            tl.store(out_ptr + place[None, :] + (n * to_channel)[:, None], total, mask=inside)


@triton.jit(do_not_specialize=[*PLACES, "splits", "whole", "parts", "chunk"])
def weight_kernel(
    x_ptr, grad_ptr, partials_ptr, images: tl.int64, splits: tl.int32, whole: tl.int32, parts: tl.int32,
    chunk: tl.int32,
    from_image: tl.int64, from_channel: tl.int64, from_row: tl.int64, from_column: tl.int64, to_image: tl.int64,
    to_channel: tl.int64, to_row: tl.int64, to_column: tl.int64, SOURCE_HIGH: tl.int32, SOURCE_WIDE: tl.int32,
    HIGH: tl.int32, WIDE: tl.int32, CHANNELS: tl.constexpr, RESULTS: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, SOURCE_LAST: tl.constexpr,
    OUT_LAST: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """What ``whole`` images of a sample, or ``chunk`` pixels of one that is cut into ``parts``, add to the gradient of
    BLOCK_N x BLOCK_J weights before they are masked, and to that of the biases: ``[samples, splits, weights +
    biases]``. from: x, to: the gradient of the result."""
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    DEPTH: tl.constexpr = CHANNELS * TAPS
    COLUMNS: tl.constexpr = (DEPTH + BLOCK_J - 1) // BLOCK_J if WEIGHT else 1
    sample, split = (tl.program_id(1) // splits).to(tl.int64), tl.program_id(1) % splits
    n = tl.program_id(0) // COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(0) % COLUMNS * BLOCK_J + tl.arange(0, BLOCK_J)
    channel = j % CHANNELS if SOURCE_LAST else j // TAPS
    tap = j // CHANNELS if SOURCE_LAST else j % TAPS
    tap_y, tap_x = tap // KERNEL_W, tap % KERNEL_W
    offset = channel * from_channel + tap_y * DILATION_H * from_row + tap_x * DILATION_W * from_column
    needed = tl.where(j < DEPTH, (1 << tap_y) | (256 << tap_x), 1 << 30)
    local = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_N, BLOCK_J], CT)
    of_bias = tl.zeros([BLOCK_N, BLOCK_P], CT)
    size = HIGH * WIDE
    first = (split // parts).to(tl.int64) * whole
    begin = split % parts * chunk  # of a step, in its first image: no division of 64 bits
    count = tl.minimum(images - first, whole) * size
    if parts > 1:
        count = tl.minimum(size - begin, chunk).to(tl.int64)
    first += sample * images
    for start in range(0, count, BLOCK_P):
        there = start + local < count
        image = first + (begin + local) // size
        y, x = (begin + local) % size // WIDE, (begin + local) % size % WIDE
        begin += BLOCK_P
        first += begin // size
        begin = begin % size
        place = image * to_image + y * to_row + x * to_column
        if OUT_LAST:
            inside = there[:, None] & (n < RESULTS)[None, :]
            grad = tl.trans(tl.load(grad_ptr + place[:, None] + (n * to_channel)[None, :], mask=inside, other=0.0))
        else:
            inside = there[None, :] & (n < RESULTS)[:, None]
            grad = tl.load(grad_ptr + place[None, :] + (n * to_channel)[:, None], mask=inside, other=0.0)
        if BIAS:
            of_bias += grad.to(CT)
        if WEIGHT:
            top, left = y * STRIDE_H - PADDING_H, x * STRIDE_W - PADDING_W
            bits = inside_bits(top, DILATION_H, SOURCE_HIGH, KERNEL_H)
            bits |= inside_bits(left, DILATION_W, SOURCE_WIDE, KERNEL_W) << 8
            base = image * from_image + top * from_row + left * from_column
            pixel = pixel_tile(x_ptr, base, tl.where(there, bits, 0), offset, needed, SOURCE_LAST, DT)
            total = added(total, grad.to(DT), tl.trans(pixel), PRECISION, DT)
    part_ptr = partials_ptr + (sample * splits + split) * (
        (RESULTS * DEPTH if WEIGHT else 0) + (RESULTS if BIAS else 0)
    )
    if WEIGHT:
        at = (n * DEPTH)[:, None] + (channel * TAPS + tap)[None, :]
        tl.store(part_ptr + at, total, mask=(n < RESULTS)[:, None] & (j < DEPTH)[None, :])
    if BIAS:
        if tl.program_id(0) % COLUMNS == 0:
            tl.store(part_ptr + (RESULTS * DEPTH if WEIGHT else 0) + n, tl.sum(of_bias, axis=1), mask=n < RESULTS)


# ---- Gradients of weights, biases and their logits


@triton.jit
def finish(
    partials_ptr, value_ptr, logits_ptr, dvalue_ptr, dlogits_ptr, seed, begin, i, first, samples, splits, width, tau,
    COUNT, STREAM: tl.constexpr, AT_ONE: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Of values ``begin .. begin + BLOCK - 1`` of COUNT, ``i`` of which are masked by logits unless there are none."""
    inside = i < COUNT
    logit = tl.zeros([BLOCK], CT)
    if logits_ptr is not None:
        logit = tl.load(logits_ptr + i, mask=inside, other=0.0).to(CT)
    off = words_off(logit.to(tl.float32))
    decay = tl.exp(-tl.abs(logit))
    of_value = tl.zeros([BLOCK], CT)
    of_logits = tl.zeros([BLOCK], CT)
    for s in range(samples):
        found = tl.zeros([BLOCK], CT)
        for split in range(splits):
            found += tl.load(partials_ptr + (s * splits + split) * width + i, mask=inside, other=0.0)
        if logits_ptr is None:
            of_value += found
        else:
            words = noise_words(seed, (first + s) * COUNT + begin, STREAM, QUADS, BLOCK)
            if dlogits_ptr is not None:
                u = uniform_of(words, CT)
                slope = slope_at_one(u, logit, decay) if AT_ONE else slope_at(u, logit, tl.full([], tau, CT))
                of_logits += found * slope
            if dvalue_ptr is not None:
                keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(CT)
                of_value += keep * tl.where(logit == logit, found, float("nan"))
    if dlogits_ptr is not None:
        of_logits *= tl.load(value_ptr + i, mask=inside, other=0.0).to(CT)
        tl.store(dlogits_ptr + i, rounded(of_logits, dlogits_ptr.dtype.element_ty), mask=inside)
    if dvalue_ptr is not None:
        tl.store(dvalue_ptr + i, rounded(of_value, dvalue_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "samples", "splits"])
def finish_kernel(
    partials_ptr, weight_ptr, logits_ptr, bias_ptr, bias_logits_ptr, dweight_ptr, dlogits_ptr, dbias_ptr,
    dbias_logits_ptr, seed_ptr, seed_value: tl.int64, first: tl.int64, samples: tl.int64, splits: tl.int64,
    tau: tl.float64, P: tl.int64, OUT: tl.int64, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AT_ONE: tl.constexpr,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Add up the parts of BLOCK weights or biases, sample by sample, in a fixed order."""
    seed = key(seed_ptr, seed_value)
    blocks = tl.cdiv(P, BLOCK) if WEIGHT else 0
    weights = P if WEIGHT else 0
    width = weights + (OUT if BIAS else 0)
    if tl.program_id(0) < blocks:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        if WEIGHT:
            finish(
                partials_ptr, weight_ptr, logits_ptr, dweight_ptr, dlogits_ptr, seed, begin,
                begin + tl.arange(0, BLOCK), first, samples, splits, width, tau, P, OF_WEIGHTS, AT_ONE, QUADS, BLOCK,
                CT,
            )  # fmt: skip
    elif BIAS:
        begin = (tl.program_id(0) - blocks).to(tl.int64) * BLOCK
        finish(
            partials_ptr + weights, bias_ptr, bias_logits_ptr, dbias_ptr, dbias_logits_ptr, seed, begin,
            begin + tl.arange(0, BLOCK), first, samples, splits, width, tau, OUT, OF_BIASES, AT_ONE, False, BLOCK, CT,
        )  # fmt: skip


# ---- Launchers


def product_tile(rows: int, factors: tl.dtype, many: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """Channels, pixels and depth of a step, and options."""
    sizes = {
        "BLOCK_N": power(rows, 16, 64),
        "BLOCK_M": 128 if many else 32,
        "BLOCK_K": 16 if factors == tl.float32 else 32,
    }
    return sizes, MORE_WARPS if many else FEWER_WARPS


def weight_tile(rows: int, depth: int, factors: tl.dtype) -> tuple[dict[str, int], dict[str, Any]]:
    """Result channels, pairs of a channel and a tap, and pixels of a step, and options."""
    block_n = power(rows, 16, 64)
    if factors == tl.float32:
        return {"BLOCK_N": block_n, "BLOCK_J": power(depth, 16, 32), "BLOCK_P": 16}, FEWER_WARPS
    return {"BLOCK_N": block_n, "BLOCK_J": power(depth, 16, 64), "BLOCK_P": 32}, MORE_WARPS


def geometry(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> dict[str, Any]:
    """Constants that forward and backward share."""
    found: dict[str, Any] = {
        "CHANNELS": weight.shape[1], "RESULTS": weight.shape[0], "PRECISION": precision(x, convolution=True),
        "DT": factor_type(x), "CT": compute_type(x),
    }  # fmt: skip
    for d, name in enumerate("HW"):
        own = {"KERNEL": weight.shape[2 + d], "STRIDE": stride[d], "PADDING": padding[d], "DILATION": dilation[d]}
        found |= {f"{what}_{name}": value for what, value in own.items()}
    return found


def backward_geometry(constants: dict[str, Any]) -> dict[str, Any]:
    """Of the gradient of x: taps that a pixel meets are ``stride / g`` apart, what they read ``-dilation / g``, g being
    the greatest common divisor."""
    found = {**constants, "CHANNELS": constants["RESULTS"], "RESULTS": constants["CHANNELS"], "BACK": True}
    for name in "HW":
        stride, dilation = constants[f"STRIDE_{name}"], constants[f"DILATION_{name}"]
        shared = gcd(stride, dilation)
        found |= {f"TAP_STEP_{name}": stride // shared, f"PACE_{name}": -dilation // shared}
    return found


def forward_geometry(constants: dict[str, Any]) -> dict[str, Any]:
    paces = {f"PACE_{name}": constants[f"DILATION_{name}"] for name in "HW"}
    return {**constants, **paces, "TAP_STEP_H": 1, "TAP_STEP_W": 1, "BACK": False}


def lies(source: Tensor, result: Tensor) -> dict[str, Any]:
    """Where the pixels of two tensors of images are, and their sizes."""
    names = ("image", "channel", "row", "column")
    found = {f"from_{name}": step for name, step in zip(names, source.stride(), strict=True)}
    found |= {f"to_{name}": step for name, step in zip(names, result.stride(), strict=True)}
    found |= {"SOURCE_HIGH": source.shape[2], "SOURCE_WIDE": source.shape[3]}
    found |= {"HIGH": result.shape[2], "WIDE": result.shape[3]}
    return found | {"SOURCE_LAST": source.stride(1) == 1, "OUT_LAST": result.stride(1) == 1}


def draw(
    weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, seed: Tensor, samples: int,
    first: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Masks ``[bytes, weights]`` and, if they are masked, biases ``[samples, out]``."""
    count, outputs = weight.numel(), weight.shape[0]
    groups = triton.cdiv(samples, SAMPLES)
    masks = torch.empty((groups, count), dtype=torch.uint8, device=weight.device)
    biases = None
    blocks = triton.cdiv(count, BLOCK)
    if bias is not None and bias_logits is not None:
        biases = weight.new_empty((samples, outputs), dtype=compute_dtype(weight))
        blocks += triton.cdiv(outputs, BLOCK)
    draw_kernel[(blocks, groups)](
        logits_ptr=logits.contiguous(), masks_ptr=masks, bias_ptr=None if biases is None else dense(bias),
        bias_logits_ptr=None if biases is None else dense(bias_logits), biases_ptr=biases, first=first,
        samples=samples, P=count, OUT=outputs, QUADS=count % 4 == 0, BLOCK=BLOCK, CT=compute_type(weight),
        **seed_args(seed), **EXACT_OPTIONS,
    )  # fmt: skip
    return masks, biases


def dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def multiply(
    source: Tensor, weight: Tensor, masks: Tensor, biases: Tensor | None, result: Tensor, samples: int,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    """Launch ``product_kernel``; biases are those of every sample, or of all."""
    images, rows = result.shape[0] // samples, constants["RESULTS"]
    steps = [constants[f"STRIDE_{name}"] if constants["BACK"] else 1 for name in "HW"]
    classes, size = 1, images
    for step, length in zip(steps, result.shape[2:], strict=True):
        classes *= min(step, length)
        size *= triton.cdiv(length, step)
    many = triton.cdiv(size, 128) * classes * samples * triton.cdiv(rows, 64) >= ENOUGH
    blocks, options = product_tile(rows, constants["DT"], many)
    tiles = triton.cdiv(size, blocks["BLOCK_M"])
    product_kernel[(tiles * classes * samples, triton.cdiv(rows, blocks["BLOCK_N"]))](
        source_ptr=source, weight_ptr=weight, masks_ptr=masks, biases_ptr=biases, out_ptr=result, images=images,
        tiles=tiles, BIAS_STEP=0 if biases is None or biases.dim() == 1 else rows, **lies(source, result), **constants,
        **blocks, **options,
    )  # fmt: skip


def masked_conv2d_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    first: int = 0,
) -> Tensor:
    """x ``[B, in, H, W]``, weight and logits ``[out, in, h, w]``, bias and its logits ``[out]`` ->
    ``[B, out, H', W']``."""
    refuse(x, weight, logits, bias, bias_logits, samples)
    out = fake_forward(x, weight, logits, bias, bias_logits, seed, samples, stride, padding, dilation, first)
    with guard(x):
        masks, biases = draw(weight, logits, bias, bias_logits, seed, samples, first)
        constants = forward_geometry(geometry(x, weight, stride, padding, dilation))
        multiply(x, weight.contiguous(), masks, dense(bias) if biases is None else biases, out, samples, constants)
    return out


def refuse(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int
) -> None:
    """What would be read beyond its end, or as another dtype."""
    per_output = (weight.shape[0],)
    others = (("weight", weight, (weight.shape[0], x.shape[1], *weight.shape[2:])), ("logits", logits, weight.shape))
    for name, tensor, shape in (*others, ("bias", bias, per_output), ("bias_logits", bias_logits, per_output)):
        if tensor is not None and (tensor.dtype != x.dtype or tuple(tensor.shape) != tuple(shape)):
            raise ValueError(f"{name}: expected {x.dtype} of shape {tuple(shape)}, got {tensor.dtype}, {tensor.shape}")
    if samples < 1 or x.shape[0] % samples or x.dtype == torch.float64:
        raise ValueError(f"x: expected a multiple of {samples} images, not of fp64, got {x.dtype} {tuple(x.shape)}")
    if bias_logits is not None and bias is None:
        raise ValueError("bias_logits: expected none without a bias")


def masked_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tau: float,
    needs: Sequence[bool],
    first: int = 0,
) -> list[Tensor]:
    """Gradients of x, weight, logits, bias and bias_logits; empty where not needed."""
    refuse(x, weight, logits, bias, bias_logits, samples)
    sizes = samples, stride, padding, dilation
    found = fake_backward(grad, x, weight, logits, bias, bias_logits, seed, *sizes, tau, needs, first)
    constants = geometry(x, weight, stride, padding, dilation)
    high, wide = (out_size(x.shape[2 + d], weight.shape[2 + d], stride[d], padding[d], dilation[d]) for d in range(2))
    if tuple(grad.shape) != (x.shape[0], weight.shape[0], high, wide) or grad.dtype != x.dtype:
        raise ValueError(f"grad: expected the result's shape and dtype, got {grad.dtype} {tuple(grad.shape)}")
    need_weight, need_bias = any(needs[1:3]), any(t.numel() for t in found[3:])
    with guard(x):
        if needs[0]:
            masks, _ = draw(weight, logits, None, None, seed, samples, first)
            multiply(grad, weight.contiguous(), masks, None, found[0], samples, backward_geometry(constants))
        if need_weight or need_bias:
            _parameters(grad, x, weight, logits, bias, bias_logits, seed, samples, constants, tau, first, found)
    return found


def _parameters(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    constants: dict[str, Any],
    tau: float,
    first: int,
    found: Sequence[Tensor],
) -> None:
    """Into ``found[1:]``, where those are not empty."""
    outputs, count = weight.shape[0], weight.numel()
    _, dweight, dlogits, dbias, dbias_logits = (t if t.numel() else None for t in found)
    of_weight = dweight is not None or dlogits is not None
    of_bias = dbias is not None or dbias_logits is not None
    images = x.shape[0] // samples
    size = grad.shape[2] * grad.shape[3]
    values = images * size
    blocks, options = weight_tile(outputs, count // outputs, constants["DT"])
    columns = triton.cdiv(outputs, blocks["BLOCK_N"])
    if of_weight:
        columns *= triton.cdiv(count // outputs, blocks["BLOCK_J"])
    share = max(triton.cdiv(values, max(PROGRAMS // (columns * samples), 1)), min(values, LEAST_PIXELS))
    whole, chunk = triton.cdiv(share, size), triton.cdiv(share, blocks["BLOCK_P"]) * blocks["BLOCK_P"]
    parts = triton.cdiv(size, chunk) if whole == 1 else 1
    splits = triton.cdiv(images, whole) * parts
    width = (count if of_weight else 0) + (outputs if of_bias else 0)
    partials = x.new_empty((samples, splits, width), dtype=compute_dtype(x))
    of_kind = {"WEIGHT": of_weight, "BIAS": of_bias}
    weight_kernel[(columns, samples * splits)](
        x_ptr=x, grad_ptr=grad, partials_ptr=partials, images=images, splits=splits, whole=whole, parts=parts,
        chunk=min(chunk, size), **lies(x, grad), **constants, **of_kind, **blocks, **options,
    )  # fmt: skip
    programs = (triton.cdiv(count, BLOCK) if of_weight else 0) + (triton.cdiv(outputs, BLOCK) if of_bias else 0)
    finish_kernel[(programs,)](
        partials_ptr=partials, weight_ptr=weight.contiguous(), logits_ptr=logits.contiguous(), bias_ptr=dense(bias),
        bias_logits_ptr=dense(bias_logits), dweight_ptr=dweight, dlogits_ptr=dlogits, dbias_ptr=dbias,
        dbias_logits_ptr=dbias_logits, first=first, samples=samples, splits=splits, tau=tau, P=count, OUT=outputs,
        AT_ONE=tau == 1.0, QUADS=count % 4 == 0, BLOCK=BLOCK, CT=constants["CT"], **of_kind, **seed_args(seed),
        **EXACT_OPTIONS,
    )  # fmt: skip


# ---- What `fastmod compile` builds of this file, and the tests check


#: Name -> channels in and out, filter, stride, dilation, channels innermost.
COMPILED: dict[str, Any] = {
    "3x3": (32, 64, (3, 3), (1, 1), (1, 1), False),
    "7x7": (3, 16, (7, 7), (2, 2), (1, 1), True),
    "dilated": (64, 64, (3, 2), (2, 3), (2, 1), False),
}


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """fp64 goes sample by sample."""
    if dtype.name == "fp64":
        return []
    p, w = dtype.pointer, dtype.wide_pointer
    on_amd = {"PRECISION": IEEE, "num_warps": OPTIONS["num_warps"], "maxnreg": None}
    found = []
    for case, (inputs, outputs, kernel, stride, dilation, last) in COMPILED.items():
        plain = case == "3x3"
        weight = torch.empty(outputs, inputs, *kernel, device="meta")
        constants = {
            **geometry(weight, weight, stride, (1, 1), dilation), "DT": dtype.element, "CT": dtype.compute,
            "PRECISION": TF32_THRICE if dtype.name == "fp32" else IEEE,
        }  # fmt: skip
        shared = {"SOURCE_LAST": last, "OUT_LAST": last, "source_ptr": p, "weight_ptr": p, "masks_ptr": "*u8"}
        sizes, options = product_tile(outputs, dtype.element, True)
        forward = {
            **forward_geometry(constants), **shared, **sizes, "out_ptr": p, "biases_ptr": w if plain else p,
            "BIAS_STEP": outputs if plain else 0,
        }  # fmt: skip
        found.append(Specialisation(product_kernel, forward, options, case, on_amd))
        sizes, options = product_tile(inputs, dtype.element, plain)
        backward = {**forward, **backward_geometry(constants), **sizes, "biases_ptr": None}
        found.append(Specialisation(product_kernel, backward, options, f"{case}-back", on_amd))
        sizes, options = weight_tile(outputs, weight[0].numel(), dtype.element)
        weights = {
            **constants, **sizes, "x_ptr": p, "grad_ptr": p, "partials_ptr": w, "WEIGHT": True, "BIAS": plain,
            "SOURCE_LAST": last, "OUT_LAST": last,
        }  # fmt: skip
        found.append(Specialisation(weight_kernel, weights, options, case, on_amd))
    for quads in (True, False):
        name = "quads" if quads else "words"
        shared = {
            "logits_ptr": p, "bias_ptr": p if quads else None, "bias_logits_ptr": p if quads else None,
            "seed_ptr": "*i64", "QUADS": quads, "BLOCK": BLOCK, "CT": dtype.compute,
        }  # fmt: skip
        drawn = {**shared, "masks_ptr": "*u8", "biases_ptr": w if quads else None}
        found.append(Specialisation(draw_kernel, drawn, EXACT_OPTIONS, name))
        for at_one in (True, False):
            finished = {
                **shared, "partials_ptr": w, "weight_ptr": p, "dweight_ptr": p if at_one else None, "dlogits_ptr": p,
                "dbias_ptr": p if quads else None, "dbias_logits_ptr": p if quads else None, "WEIGHT": True,
                "BIAS": quads, "AT_ONE": at_one,
            }  # fmt: skip
            named = f"{name}-{'one' if at_one else 'any'}"
            found.append(Specialisation(finish_kernel, finished, EXACT_OPTIONS, named))
    return found
