"""Tiles of the kernels of ``masked_linear``: loading and masking them, multiplying and storing them."""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import noise_word, philox, philox_near
from fastmod.kernels._images import TF32_THRICE, product, read, rounded
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
def of_layer(layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step):
    if seed_ptr is not None:
        seed_ptr += layer * seed_step
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
    BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``weight * mask [BLOCK_O, BLOCK_I]`` of sample s and, if BLOCK_S is 2, of the next one (else of s again); 0
    beyond the weight's edges."""
    i = begin + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None] * IN + i[None, :]
    logit = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, tl.float32)
    weight = read(tl.load(weight_ptr + at, mask=inside, other=0.0), LT, DT)
    weight = tl.where(logit == logit, weight, float("nan")).to(DT)  # a NaN must not become a confident mask
    off = weight * 0.0  # 0 * inf is NaN as in torch
    # The bounds, beyond which nothing changes, keep AMD's compiler from fusing a conversion from fp16 with a product.
    low = low_words(tl.maximum(tl.minimum(logit, 200.0), -200.0) if tl.float16 == LT else logit)
    words = tile_words(seed, s, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
    others = words
    near = words - low
    if BLOCK_S == 2:
        others = tile_words(seed, s + 1, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        near = tl.minimum(near, others - low)
    if tl.min(tl.ravel(near)) < UNCERTAIN_WORDS:
        exact = words_off(logit)
        weight = tl.where(exact == ALL_WORDS, off, weight)  # even with the largest word
        low = tl.minimum(exact, ALL_WORDS - 1).to(tl.uint32) << 9
    return tl.where(words >= low, weight, off), tl.where(others >= low, weight, off)


@triton.jit
def rows_tile(
    ptr, s, r, begin, samples, rows, SIZE, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
    LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``[PARTS, rows, DEPTH]`` from rows of SIZE numbers of sample s; 0 beyond the edges."""
    columns = begin + tl.arange(0, PARTS * DEPTH)
    inside = (r < tl.where(s < samples, rows, 0))[:, None] & (columns < SIZE)[None, :]
    at = ((s * rows + r) * SIZE)[:, None] + columns[None, :]
    found = read(tl.load(ptr + at, mask=inside, other=0.0), LT, DT)
    return tl.permute(tl.reshape(found, [BLOCK_R, PARTS, DEPTH]), (1, 0, 2))


@triton.jit
def split(t, NVIDIA: tl.constexpr):
    """t as two tf32 numbers; the product truncates the second one."""
    if NVIDIA:
        big = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [t], tl.float32, True, 1)
    else:
        big = ((t.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return big, t - big


@triton.jit
def multiplied(a, b, zeros, PRECISION: tl.constexpr, NVIDIA: tl.constexpr):
    """``a @ b``"""
    if PRECISION == _TF32_THRICE:
        a_big, a_small = split(a, NVIDIA)
        b_big, b_small = split(b, NVIDIA)
        part = tl.dot(a_small, b_big, zeros, input_precision="tf32")
        part = tl.dot(a_big, b_small, part, input_precision="tf32")
        part = tl.where(part == part, part, 0.0)  # inf - inf
        return tl.dot(a_big, b_big, part, input_precision="tf32")
    return product(a, b, zeros, PRECISION)


@triton.jit
def store_rows(ptr, parts, s, r, columns, samples, rows, SIZE, biases_ptr, bias_step, LT: tl.constexpr):
    value = tl.sum(parts, axis=0)
    if biases_ptr is not None:
        there = columns < tl.where(s < samples, SIZE, 0)
        biases = read(tl.load(biases_ptr + s * bias_step + columns, mask=there, other=0.0), LT, value.dtype)
        # A choice after widening, as AMD's compiler would fuse the widening with the sum.
        value += tl.where(there, biases, 0.0)[None, :]
    inside = (r < tl.where(s < samples, rows, 0))[:, None] & (columns < SIZE)[None, :]
    at = ((s * rows + r) * SIZE)[:, None] + columns[None, :]
    tl.store(ptr + at, rounded(value, ptr.dtype.element_ty), mask=inside)


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
    return multiplied(tl.trans(grad), x, zeros, PRECISION, NVIDIA)


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
