"""Tiles of the kernels of ``masked_linear``: loading and masking them, multiplying and storing them."""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import noise_word, philox, philox_near
from fastmod.kernels._images import TF32_THRICE, is_last, product, read, rounded
from fastmod.kernels.sample_mask import ALL_WORDS, words_off

from fastmod.noise import STREAM_MASK

STREAM = tl.constexpr(STREAM_MASK)
_TF32_THRICE = tl.constexpr(TF32_THRICE)
UNCERTAIN_WORDS = tl.constexpr(1 << 13)  # see low_words


@triton.jit
def layer_and_program(programs, LAYERS: tl.constexpr):
    """The index of this program's layer, if there are several LAYERS of so many programs each, and its index within the
    layer. A grid has fewer than 2**31 programs: 32 bits are enough for the division."""
    pid = tl.program_id(0)
    if LAYERS:
        return (pid // programs).to(tl.int64), pid % programs
    return tl.full([], 0, tl.int64), pid


@triton.jit
def of_layer(layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step, QUADS: tl.constexpr):
    if seed_ptr is not None:
        seed_ptr += layer * seed_step
    if QUADS:  # as of IN
        weight_step, logits_step = weight_step // 4 * 4, logits_step // 4 * 4
    return weight_ptr + layer * weight_step, logits_ptr + layer * logits_step, seed_ptr


@triton.jit
def place(pid, SIZE, BLOCK: tl.constexpr):
    """``divmod`` of a program's index by the number of blocks in SIZE."""
    blocks = tl.cdiv(SIZE, BLOCK).to(tl.int32)
    return pid // blocks, (pid % blocks).to(tl.int64)


@triton.jit
def low_words(logit):
    """Rough thresholds: a noise word below this drops a weight, one at least UNCERTAIN_WORDS above keeps it, as the
    share of words that switch a weight off has an error below 2**-21. For words in between ``words_off`` decides."""
    share = 4294967296.0 / (tl.exp2(logit * 1.44269504088896341) + 1.0)
    return tl.maximum(share - 4096.0, 0.0).to(tl.uint32)


@triton.jit
def tile_words(
    seed, s, o, begin, OUT, IN, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Noise words ``[BLOCK_O, BLOCK_I]`` of sample s and the inputs from begin on. QUADS: IN and begin are multiples of
    4, so that one Philox call gives the words of four weights; NEAR: groups of the noise are below 2**32."""
    if not QUADS:
        start = (s * (OUT * IN) + o * IN + begin)[:, None]
        return noise_word(seed, start + tl.arange(0, BLOCK_I)[None, :], STREAM)
    local = tl.arange(0, BLOCK_I // 4)[None, :, None]
    start = ((s * (OUT * IN) + o * IN + begin) // 4)[:, None, None]
    if NEAR:
        c0, c1, c2, c3 = philox_near(seed, start.to(tl.uint32) + local.to(tl.uint32), STREAM, NVIDIA)
    else:
        c0, c1, c2, c3 = philox(seed, start + local, STREAM)
    # The compiler resolves these choices, as it knows the position; tl.join would take two layout conversions.
    word = tl.arange(0, 4)[None, None, :]
    words = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    return tl.reshape(words, [BLOCK_O, BLOCK_I])


@triton.jit
def masked_tiles(
    weight_ptr, logits_ptr, seed, s, o, begin, OUT, IN, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    INSIDE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LT: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """``weight * mask [BLOCK_S, BLOCK_O, BLOCK_I]`` of samples from s on; 0 beyond the weight's edges. INSIDE: all is
    inside."""
    i = begin + tl.arange(0, BLOCK_I)
    at = o[:, None] * IN + i[None, :]
    if INSIDE:
        loaded_logit, loaded_weight = tl.load(logits_ptr + at), tl.load(weight_ptr + at)
    else:
        inside = (o < OUT)[:, None] & (i < IN)[None, :]
        loaded_logit = tl.load(logits_ptr + at, mask=inside, other=0.0)
        loaded_weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    logit = read(loaded_logit, LT, tl.float32)
    weight = read(loaded_weight, LT, DT)
    weight = tl.where(logit == logit, weight, float("nan")).to(DT)  # a NaN must not become a confident mask
    off = weight * 0.0  # 0 * inf is NaN as in torch
    # The bounds, beyond which nothing changes, keep AMD's compiler from fusing a conversion from fp16 with a product.
    low = low_words(tl.maximum(tl.minimum(logit, 200.0), -200.0) if tl.float16 == LT else logit)
    words = tile_words(seed, s, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
    near = words - low
    if BLOCK_S > 1:
        words_1 = tile_words(seed, s + 1, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        near = tl.minimum(near, words_1 - low)
    if BLOCK_S > 2:
        words_2 = tile_words(seed, s + 2, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        words_3 = tile_words(seed, s + 3, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        near = tl.minimum(near, tl.minimum(words_2 - low, words_3 - low))
    if tl.min(tl.ravel(near)) < UNCERTAIN_WORDS:
        exact = words_off(logit)
        weight = tl.where(exact == ALL_WORDS, off, weight)  # even with the largest word
        low = tl.minimum(exact, ALL_WORDS - 1).to(tl.uint32) << 9
    masked = tl.where(words >= low, weight, off)
    if BLOCK_S == 1:
        found = masked[None, :, :]
    elif BLOCK_S == 2:
        found = pair_of_tiles(masked, tl.where(words_1 >= low, weight, off), BLOCK_O, BLOCK_I)
    else:
        found = four_tiles(
            masked, tl.where(words_1 >= low, weight, off), tl.where(words_2 >= low, weight, off),
            tl.where(words_3 >= low, weight, off), BLOCK_O, BLOCK_I,
        )  # fmt: skip
    return found


@triton.jit
def in_fours(masked, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """The first, second, third and fourth of every four columns."""
    even, odd = tl.split(tl.reshape(masked, [BLOCK_O, BLOCK_I // 2, 2]))
    first, third = tl.split(tl.reshape(even, [BLOCK_O, BLOCK_I // 4, 2]))
    second, fourth = tl.split(tl.reshape(odd, [BLOCK_O, BLOCK_I // 4, 2]))
    return first, second, third, fourth


@triton.jit
def pair_of_tiles(a, b, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """Two tiles as ``[2, BLOCK_O, BLOCK_I]``. Columns are joined after the samples: what is joined last are neighbours
    in registers, so that four columns go to shared memory as one vector."""
    a0, a1, a2, a3 = in_fours(a, BLOCK_O, BLOCK_I)
    b0, b1, b2, b3 = in_fours(b, BLOCK_O, BLOCK_I)
    even, odd = tl.join(tl.join(a0, b0), tl.join(a2, b2)), tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.permute(tl.join(even, odd), (2, 0, 1, 3, 4)), [2, BLOCK_O, BLOCK_I])


@triton.jit
def four_tiles(a, b, c, d, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """Likewise."""
    a0, a1, a2, a3 = in_fours(a, BLOCK_O, BLOCK_I)
    b0, b1, b2, b3 = in_fours(b, BLOCK_O, BLOCK_I)
    c0, c1, c2, c3 = in_fours(c, BLOCK_O, BLOCK_I)
    d0, d1, d2, d3 = in_fours(d, BLOCK_O, BLOCK_I)
    first, second = tl.join(tl.join(a0, c0), tl.join(b0, d0)), tl.join(tl.join(a1, c1), tl.join(b1, d1))
    third, fourth = tl.join(tl.join(a2, c2), tl.join(b2, d2)), tl.join(tl.join(a3, c3), tl.join(b3, d3))
    joined = tl.join(tl.join(first, third), tl.join(second, fourth))  # [outputs, fours, 2, 2, 2, 2]
    return tl.reshape(tl.permute(joined, (2, 3, 0, 1, 4, 5)), [4, BLOCK_O, BLOCK_I])


@triton.jit
def rows_tile(
    ptr, row, known, begin, SIZE, INSIDE: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr, DEPTH: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_S * PARTS, BLOCK_R, DEPTH]`` from rows of SIZE numbers, ``row [BLOCK_S * BLOCK_R]`` of several samples;
    0 beyond the edges. INSIDE: all is inside."""
    columns = begin + tl.arange(0, PARTS * DEPTH)
    at = (row * SIZE)[:, None] + columns[None, :]
    if INSIDE:
        loaded = tl.load(ptr + at)
    else:
        loaded = tl.load(ptr + at, mask=known[:, None] & (columns < SIZE)[None, :], other=0.0)
    found = tl.reshape(read(loaded, LT, DT), [BLOCK_S, BLOCK_R, PARTS, DEPTH])
    return tl.reshape(tl.permute(found, (0, 2, 1, 3)), [BLOCK_S * PARTS, BLOCK_R, DEPTH])


@triton.jit
def split(t, NVIDIA: tl.constexpr):
    """t as two tf32 numbers; the product truncates the second one."""
    if NVIDIA:
        big = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [t], tl.float32, True, 1)
    else:
        big = ((t.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return big, t - big


@triton.jit
def multiplied(a, b, zeros, PRECISION: tl.constexpr, NVIDIA: tl.constexpr, GUARDED: tl.constexpr):
    """``a @ b``; not GUARDED: what an infinite factor makes of it may be NaN."""
    if PRECISION == _TF32_THRICE:
        a_big, a_small = split(a, NVIDIA)
        b_big, b_small = split(b, NVIDIA)
        part = tl.dot(a_small, b_big, zeros, input_precision="tf32")
        part = tl.dot(a_big, b_small, part, input_precision="tf32")
        if GUARDED:
            part = tl.where(part == part, part, 0.0)  # inf - inf
        return tl.dot(a_big, b_big, part, input_precision="tf32")
    return product(a, b, zeros, PRECISION)


@triton.jit
def added(
    total, zeros, first, ptr, row, known, s, fixed, weight_ptr, logits_ptr, seed, sample, OUT, IN, INSIDE: tl.constexpr,
    FORWARD: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``total`` plus one step of the sum. FORWARD: of inputs from ``first`` on, for outputs from ``fixed`` on; else of
    outputs, for inputs."""
    if FORWARD:
        w = masked_tiles(
            weight_ptr, logits_ptr, seed, sample, fixed + tl.arange(0, BLOCK_O), first, OUT, IN, QUADS, NEAR, NVIDIA,
            INSIDE, BLOCK_S, BLOCK_O, PARTS * BLOCK_I, LT, DT,
        )  # fmt: skip
        w = tl.permute(tl.reshape(w, [BLOCK_S, BLOCK_O, PARTS, BLOCK_I]), (0, 2, 3, 1))
        w = tl.reshape(w, [BLOCK_S * PARTS, BLOCK_I, BLOCK_O])
        rows = rows_tile(ptr, row, known, first, IN, INSIDE, PARTS, BLOCK_S, BLOCK_R, BLOCK_I, LT, DT)
    else:
        w = masked_tiles(
            weight_ptr, logits_ptr, seed, sample, first + tl.arange(0, PARTS * BLOCK_O), fixed, OUT, IN, QUADS, NEAR,
            NVIDIA, INSIDE, BLOCK_S, PARTS * BLOCK_O, BLOCK_I, LT, DT,
        )  # fmt: skip
        w = tl.reshape(w, [BLOCK_S * PARTS, BLOCK_O, BLOCK_I])
        rows = rows_tile(ptr, row, known, first, OUT, INSIDE, PARTS, BLOCK_S, BLOCK_R, BLOCK_O, LT, DT)
    return total + multiplied(rows, w, zeros, PRECISION, NVIDIA, not INSIDE)


@triton.jit
def product_with_masks(
    ptr, s, r, fixed, begin, end, weight_ptr, logits_ptr, seed, first_sample, samples, rows, OUT, IN,
    FORWARD: tl.constexpr, WHOLE: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_S, BLOCK_R, columns]``: the sum over the inputs, or outputs, from begin to end. WHOLE: whole steps come
    first, with neither masks at edges nor guards. An infinite factor leaves a NaN there; then all is computed again,
    with guards."""
    COLUMNS: tl.constexpr = BLOCK_O if FORWARD else BLOCK_I
    STEP: tl.constexpr = PARTS * (BLOCK_I if FORWARD else BLOCK_O)
    sample = s + tl.arange(0, BLOCK_S)
    known = tl.reshape((sample < samples)[:, None] & (r < rows)[None, :], [BLOCK_S * BLOCK_R])
    row = tl.where(known, tl.reshape((sample * rows)[:, None] + r[None, :], [BLOCK_S * BLOCK_R]), 0)
    total = tl.zeros([BLOCK_S * PARTS, BLOCK_R, COLUMNS], CT)
    # Not known to be 0, or a product would be added to the total within it, term by term, which rounds more.
    zeros = total + (rows < 0).to(CT)
    start = begin
    if WHOLE:
        edge = fixed + COLUMNS > (OUT if FORWARD else IN)
        start = tl.where(edge, begin, begin + (end - begin) // STEP * STEP)
        for first in range(begin, start, STEP):
            total = added(
                total, zeros, first, ptr, row, known, s, fixed, weight_ptr, logits_ptr, seed, first_sample + s, OUT, IN,
                True, FORWARD, QUADS, NEAR, NVIDIA, PARTS, BLOCK_S, BLOCK_R, BLOCK_O, BLOCK_I, PRECISION, LT, DT,
            )  # fmt: skip
        if PRECISION == _TF32_THRICE:
            if tl.max(tl.ravel((total != total).to(tl.int32))) > 0:
                start = begin
                total = zeros
    for first in range(start, end, STEP):
        total = added(
            total, zeros, first, ptr, row, known, s, fixed, weight_ptr, logits_ptr, seed, first_sample + s, OUT, IN,
            False, FORWARD, QUADS, NEAR, NVIDIA, PARTS, BLOCK_S, BLOCK_R, BLOCK_O, BLOCK_I, PRECISION, LT, DT,
        )  # fmt: skip
    return tl.sum(tl.reshape(total, [BLOCK_S, PARTS, BLOCK_R, COLUMNS]), axis=1)


@triton.jit
def share_of(pid, SIZE, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """This program's tile, its share of the sum over SIZE, of SPLITS in whole steps, and where that begins and ends."""
    if SPLITS == 1:
        return pid, 0, SIZE * 0, SIZE
    share = pid % SPLITS
    each = tl.cdiv(tl.cdiv(SIZE, STEP), SPLITS) * STEP
    return pid // SPLITS, share, share * each, tl.minimum((share + 1) * each, SIZE)


@triton.jit
def store_rows(
    ptr, value, sums_ptr, tickets_ptr, share, s, r, fixed, samples, rows, SIZE, biases_ptr, bias_step,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr, LT: tl.constexpr,
):  # fmt: skip
    """Stores ``value [BLOCK_S, BLOCK_R, COLUMNS]``. If it is one of SPLITS shares, the last program of the tile adds
    them up, in order."""
    whole = True
    if SPLITS > 1:
        NUMBERS: tl.constexpr = BLOCK_S * BLOCK_R * COLUMNS
        tile = (tl.program_id(0) // SPLITS).to(tl.int64)
        local = tl.reshape(tl.arange(0, NUMBERS), [BLOCK_S, BLOCK_R, COLUMNS])
        sums_ptr += tile * (SPLITS * NUMBERS)
        tl.store(sums_ptr + share * NUMBERS + local, value)
        whole = is_last(tickets_ptr + tile, SPLITS)
        if whole:
            value = tl.load(sums_ptr + local)
            for i in tl.static_range(1, SPLITS):
                value += tl.load(sums_ptr + i * NUMBERS + local)
    if whole:
        sample = (s + tl.arange(0, BLOCK_S))[:, None, None]
        column = (fixed + tl.arange(0, COLUMNS))[None, None, :]
        if biases_ptr is not None:
            there = (sample < samples) & (column < SIZE)
            biases = read(tl.load(biases_ptr + sample * bias_step + column, mask=there, other=0.0), LT, value.dtype)
            # A choice after widening, as AMD's compiler would fuse the widening with the sum.
            value += tl.where(there, biases, 0.0)
        row = r[None, :, None]
        inside = (sample < samples) & (row < rows) & (column < SIZE)
        tl.store(ptr + (sample * rows + row) * SIZE + column, rounded(value, ptr.dtype.element_ty), mask=inside)


@triton.jit
def part_of_rows(
    sample, start, grad_ptr, x_ptr, o, i, rows, OUT, IN, zeros, PRECISION: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_R: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Products of the rows from ``start`` on ``[outputs, inputs]``."""
    r = start + tl.arange(0, BLOCK_R)
    here = (r < rows)[:, None]
    row = (sample * rows + r)[:, None]
    grad = tl.load(grad_ptr + row * OUT + o[None, :], mask=here & (o < OUT)[None, :], other=0.0).to(DT)
    x = read(tl.load(x_ptr + row * IN + i[None, :], mask=here & (i < IN)[None, :], other=0.0), LT, DT)
    return multiplied(tl.trans(grad), x, zeros, PRECISION, NVIDIA, True)


@triton.jit
def quick_slope(words, flip, decay, NVIDIA: tl.constexpr):
    """:func:`slope_at_one` of noise words, without the factor decay; flip: all bits of the noise if the logit is
    negative, as inverted bits give 1 - u."""
    if NVIDIA:  # (a ^ b) | c
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x3f800000, 0xbe;", "=r,r,r", [words >> 9, flip], tl.int32, True, 1
        )
    else:
        bits = ((words >> 9).to(tl.int32) ^ flip) | 0x3F800000
    u = bits.to(tl.float32, bitcast=True) - 0.999999940395355224609375  # 1 - 2**-24
    v = 1.0 - u
    total = tl.fma(decay, v, u)
    return u * v / (total * total)
