"""Triton kernels of ``masked_conv2d``: implicit products of pixels and masked filters, all samples at once.

Masks take a byte per weight: a bit for each of seven samples, and one for a NaN logit. They are drawn in the launch
before the one that reads them: within the products, each weight's mask would be drawn again for every tile of pixels,
with registers that the products need.

The products have result channels as rows and pixels as columns. The forward sums over the source's channels and taps.
The gradient of x is the same with the filters' channels exchanged; with a stride, pixels with the same remainder modulo
the stride form an image of their own, as they all use the same taps, and no product is wasted. The gradient of the
weights sums over pixels, in several parts, which a last launch adds up, applying masks and slopes.

Images are read and written in place: lanes run along the pixels, or along the channels if those are innermost.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import key, noise_word, uniform_of
from fastmod.kernels._images import pixels, product, read, rounded
from fastmod.kernels.sample_mask import noise_words, slope_at, slope_at_one, words_off

from fastmod.noise import STREAM_MASK, STREAM_MASK_BIAS

OF_WEIGHTS = tl.constexpr(STREAM_MASK)
OF_BIASES = tl.constexpr(STREAM_MASK_BIAS)
#: Samples per byte of masks. Its last bit says that the logit is NaN.
SAMPLES = 7
BYTE = tl.constexpr(SAMPLES)
NAN_BIT = tl.constexpr(1 << SAMPLES)
#: Arguments that a kernel is not specialised for.
PLACES = [f"{of}_{step}" for of in ("from", "to") for step in ("image", "channel", "row", "column")]
PLACES += ["images", "SOURCE_HIGH", "SOURCE_WIDE", "HIGH", "WIDE"]


# ---- Masks


@triton.jit
def draw(
    logits_ptr, masks_ptr, seed, block, group, first, samples, P, QUADS: tl.constexpr, BLOCK: tl.constexpr,
    LT: tl.constexpr,
):  # fmt: skip
    """Draws the masks of block ``block`` of the P weights for the samples of byte ``group``."""
    begin = block * BLOCK
    start = group * BYTE
    i = begin + tl.arange(0, BLOCK)
    logit = read(tl.load(logits_ptr + i, mask=i < P, other=0.0), LT, tl.float32)
    off = words_off(logit)
    byte = tl.where(logit == logit, 0, NAN_BIT)
    for s in range(tl.minimum(samples - start, BYTE).to(tl.int32)):
        words = noise_words(seed, (first + start + s) * P + begin, OF_WEIGHTS, QUADS, BLOCK)
        byte |= tl.where((words >> 9).to(tl.int32) >= off, 1, 0) << s
    tl.store(masks_ptr + group * P + i, byte.to(tl.uint8), mask=i < P)


@triton.jit(do_not_specialize=["first", "samples"])
def draw_kernel(
    logits_ptr, masks_ptr, bias_ptr, bias_logits_ptr, biases_ptr, seed_ptr, seed_value: tl.int64, first: tl.int64,
    samples: tl.int64, P: tl.int64, OUT: tl.int64, QUADS: tl.constexpr, BLOCK: tl.constexpr, LT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Draws masks for BLOCK of the P weights, or masked biases ``[samples, OUT]``, for BYTE samples."""
    blocks = tl.cdiv(P, BLOCK)
    seed = key(seed_ptr, seed_value)
    group = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) < blocks:
        draw(logits_ptr, masks_ptr, seed, tl.program_id(0).to(tl.int64), group, first, samples, P, QUADS, BLOCK, LT)
    elif biases_ptr is not None:
        start = group * BYTE
        count = tl.minimum(samples - start, BYTE).to(tl.int32)
        o = (tl.program_id(0) - blocks) * BLOCK + tl.arange(0, BLOCK)
        logit = read(tl.load(bias_logits_ptr + o, mask=o < OUT, other=0.0), LT, tl.float32)
        bias = read(tl.load(bias_ptr + o, mask=o < OUT, other=0.0), LT, CT)
        bias = tl.where(logit == logit, bias, float("nan"))
        off = words_off(logit)
        for s in range(count):
            words = noise_word(seed, (first + start + s) * OUT + o, OF_BIASES)
            keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(CT)
            tl.store(biases_ptr + (start + s) * OUT + o, keep * bias, mask=o < OUT)


@triton.jit
def masked_weight(
    weight_ptr, byte_ptr, row, column, known_rows, known_columns, bit, LT: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """``[rows, columns]`` of the masked weights at ``row + column``; 0 beyond the edges."""
    at = row[:, None] + column[None, :]
    inside = known_rows[:, None] & known_columns[None, :]
    byte = tl.load(byte_ptr + at, mask=inside, other=0).to(tl.int32)
    weight = read(tl.load(weight_ptr + at, mask=inside, other=0.0), LT, DT)
    weight = tl.where(byte < NAN_BIT, weight, float("nan")).to(DT)
    return ((byte >> bit) & 1).to(DT) * weight  # a product, not a choice: 0 * inf is NaN as in torch


# ---- Products


@triton.jit
def axis(
    residue, BACK: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """For one dimension: the first tap that is used, how many are, and where it reads for result 0. BACK: for pixels
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
            # Exact if a tap is used; a class that uses none sums over nothing.
            origin = (residue + PADDING - first * DILATION) // STRIDE
    return first, taps, origin


@triton.jit
def inside_bits(begin, PACE: tl.constexpr, SIZE, KERNEL: tl.constexpr):
    """A bit for each tap: whether ``begin + tap * PACE`` is between 0 and SIZE, which holds from ``first`` to before
    ``end``."""
    if PACE > 0:
        first = (tl.maximum(-begin, 0) + (PACE - 1)) // PACE
        end = (tl.maximum(SIZE - begin, 0) + (PACE - 1)) // PACE
    else:
        first = tl.maximum(begin - SIZE - PACE, 0) // -PACE
        end = tl.maximum(begin - PACE, 0) // -PACE
    first, end = tl.minimum(first, KERNEL), tl.minimum(end, KERNEL)
    return tl.where(end > first, (1 << end) - (1 << first), 0)


@triton.jit
def pixel_tile(ptr, base, bits, offset, needed, LAST: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr):
    """``[depth, pixels]`` at ``base`` of each pixel plus ``offset`` of each pair of a channel and a tap; 0 unless the
    pixel has the bits that the pair needs. LAST: lanes run along the depth, else along the pixels."""
    if LAST:
        inside = (bits[:, None] & needed[None, :]) == needed[None, :]
        return tl.trans(read(tl.load(ptr + base[:, None] + offset[None, :], mask=inside, other=0.0), LT, DT))
    inside = (bits[None, :] & needed[:, None]) == needed[:, None]
    return read(tl.load(ptr + base[None, :] + offset[:, None], mask=inside, other=0.0), LT, DT)


@triton.jit
def added(total, a, b, PRECISION: tl.constexpr, DT: tl.constexpr):
    """``total + a @ b``. Tensor cores truncate sums, so fp32 sums start at zero for every step; for 16-bit results the
    final rounding is much larger."""
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
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of BLOCK_M pixels of a sample's results; ``images``: per sample, HIGH x WIDE.

    BACK: the gradient of x, from that of the result. TAP_STEP: distance between taps that a pixel uses; PACE: between
    the pixels they read. LT: dtype that loaded values are rounded to, DT: dtype of the factors, CT: of the sums."""
    across = tl.minimum(WIDE, STRIDE_W) if BACK else 1
    classes = tl.minimum(HIGH, STRIDE_H) * across if BACK else 1
    group = tl.program_id(0) // tiles
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    sample = (group // classes).to(tl.int64)
    down, right = group % classes // across, group % classes % across  # the pixel modulo the stride
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
            if CHANNELS % BLOCK_K == 0:  # one tap per step
                tap = start // CHANNELS + tl.zeros([BLOCK_K], tl.int32)
                channel = start % CHANNELS + tl.arange(0, BLOCK_K)
            else:
                channel = k % CHANNELS if SOURCE_LAST else k // taps
                tap = k // CHANNELS if SOURCE_LAST else k % taps
            tap_y, tap_x = tap // taps_x, tap % taps_x
            known = k < CHANNELS * taps
            offset = channel * from_channel + tap_y * PACE_H * from_row + tap_x * PACE_W * from_column
            needed = tl.where(known, (1 << tap_y) | (256 << tap_x), 1 << 30)
            pixel = pixel_tile(source_ptr, base, bits, offset, needed, SOURCE_LAST, LT, DT)
            of_k = (first_y + tap_y * TAP_STEP_H) * KERNEL_W + (first_x + tap_x * TAP_STEP_W)
            of_k += channel * (RESULTS * KERNEL_H * KERNEL_W if BACK else KERNEL_H * KERNEL_W)
            if BACK:  # lanes run along the channels that are closer together
                weight = tl.trans(masked_weight(weight_ptr, byte_ptr, of_k, of_n, known, n < RESULTS, bit, LT, DT))
            else:
                weight = masked_weight(weight_ptr, byte_ptr, of_n, of_k, n < RESULTS, known, bit, LT, DT)
            total = added(total, weight, pixel, PRECISION, DT)
        if biases_ptr is not None:
            bias = tl.load(biases_ptr + sample * BIAS_STEP + n, mask=n < RESULTS, other=0.0)
            total += read(bias, LT, CT)[:, None]
        row = image * to_image + (down + y * STRIDE_H if BACK else y) * to_row
        place = row + (right + x * STRIDE_W if BACK else x) * to_column
        total = rounded(total, out_ptr.dtype.element_ty)
        if OUT_LAST:
            inside = there[:, None] & (n < RESULTS)[None, :]
            tl.store(out_ptr + place[:, None] + (n * to_channel)[None, :], tl.trans(total), mask=inside)
        else:
            inside = there[None, :] & (n < RESULTS)[:, None]
            tl.store(out_ptr + place[None, :] + (n * to_channel)[:, None], total, mask=inside)


@triton.jit(do_not_specialize=[*PLACES, "splits", "whole", "parts", "chunk", "first", "samples"])
def weight_kernel(
    x_ptr, grad_ptr, partials_ptr, logits_ptr, masks_ptr, seed_ptr, seed_value: tl.int64, first: tl.int64,
    samples: tl.int32, images: tl.int64, splits: tl.int32, whole: tl.int32, parts: tl.int32, chunk: tl.int32,
    from_image: tl.int64, from_channel: tl.int64, from_row: tl.int64, from_column: tl.int64, to_image: tl.int64,
    to_channel: tl.int64, to_row: tl.int64, to_column: tl.int64, SOURCE_HIGH: tl.int32, SOURCE_WIDE: tl.int32,
    HIGH: tl.int32, WIDE: tl.int32, CHANNELS: tl.constexpr, RESULTS: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, SOURCE_LAST: tl.constexpr,
    OUT_LAST: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Partial gradients of weights and biases, which a later launch adds up; further programs draw the masks that the
    next launch reads, if ``masks_ptr`` is given."""
    if tl.program_id(1) < samples * splits:
        weight_part(
            x_ptr, grad_ptr, partials_ptr, images, splits, whole, parts, chunk, from_image, from_channel, from_row,
            from_column, to_image, to_channel, to_row, to_column, SOURCE_HIGH, SOURCE_WIDE, HIGH, WIDE, CHANNELS,
            RESULTS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W, SOURCE_LAST,
            OUT_LAST, WEIGHT, BIAS, PRECISION, BLOCK_N, BLOCK_J, BLOCK_P, LT, DT, CT,
        )  # fmt: skip
    elif masks_ptr is not None:
        WEIGHTS: tl.constexpr = RESULTS * CHANNELS * KERNEL_H * KERNEL_W
        BLOCKS: tl.constexpr = (WEIGHTS + BLOCK - 1) // BLOCK
        own = (tl.program_id(1) - samples * splits) * tl.num_programs(0) + tl.program_id(0)
        group = (own // BLOCKS).to(tl.int64)
        if group * BYTE < samples:
            draw(
                logits_ptr, masks_ptr, key(seed_ptr, seed_value), (own % BLOCKS).to(tl.int64), group, first, samples,
                tl.full([], WEIGHTS, tl.int64), QUADS, BLOCK, LT,
            )  # fmt: skip


@triton.jit
def weight_part(
    x_ptr, grad_ptr, partials_ptr, images, splits, whole, parts, chunk, from_image, from_channel, from_row,
    from_column, to_image, to_channel, to_row, to_column, SOURCE_HIGH, SOURCE_WIDE, HIGH, WIDE, CHANNELS: tl.constexpr,
    RESULTS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, SOURCE_LAST: tl.constexpr, OUT_LAST: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """What ``whole`` images of a sample, or ``chunk`` pixels of an image that is split into ``parts``, add to the
    gradient of BLOCK_N x BLOCK_J masked weights, and to that of the biases: ``[samples, splits, weights + biases]``.
    from: x, to: the gradient of the result."""
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
    begin = split % parts * chunk  # within the first image of a step, which avoids a 64-bit division
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
            pixel = pixel_tile(x_ptr, base, tl.where(there, bits, 0), offset, needed, SOURCE_LAST, LT, DT)
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
    COUNT, STREAM: tl.constexpr, AT_ONE: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr, LT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Finishes values ``begin .. begin + BLOCK - 1`` of COUNT, which are masked by logits if there are any."""
    inside = i < COUNT
    logit = tl.zeros([BLOCK], CT)
    if logits_ptr is not None:
        logit = read(tl.load(logits_ptr + i, mask=inside, other=0.0), LT, CT)
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
        of_logits *= read(tl.load(value_ptr + i, mask=inside, other=0.0), LT, CT)
        tl.store(dlogits_ptr + i, rounded(of_logits, dlogits_ptr.dtype.element_ty), mask=inside)
    if dvalue_ptr is not None:
        tl.store(dvalue_ptr + i, rounded(of_value, dvalue_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "samples", "splits"])
def finish_kernel(
    partials_ptr, weight_ptr, logits_ptr, bias_ptr, bias_logits_ptr, dweight_ptr, dlogits_ptr, dbias_ptr,
    dbias_logits_ptr, seed_ptr, seed_value: tl.int64, first: tl.int64, samples: tl.int64, splits: tl.int64,
    tau: tl.float64, P: tl.int64, OUT: tl.int64, WEIGHT: tl.constexpr, BIAS: tl.constexpr, AT_ONE: tl.constexpr,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, LT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of BLOCK weights or biases, sample by sample, in a fixed order."""
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
                LT, CT,
            )  # fmt: skip
    elif BIAS:
        begin = (tl.program_id(0) - blocks).to(tl.int64) * BLOCK
        finish(
            partials_ptr + weights, bias_ptr, bias_logits_ptr, dbias_ptr, dbias_logits_ptr, seed, begin,
            begin + tl.arange(0, BLOCK), first, samples, splits, width, tau, OUT, OF_BIASES, AT_ONE, False, BLOCK, LT,
            CT,
        )  # fmt: skip
