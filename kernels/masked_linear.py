"""Triton kernels and launchers of ``masked_linear``: weights are masked tile by tile, on their way into the products.

A program takes two samples one after the other, which share one tile of the weight, its logits and thresholds. The
products have parts of the sum as their batch axis, which are added up at the end. No masked copy of the weight is ever
in memory. Many layers are one launch: the programs of each come after those of the one before, with the same tiles.

Element (o, i) of sample s has the noise of index ``s * P + o * IN + i``, with ``P = OUT * IN``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    TRITON_TYPES,
    compute_type,
    each_contiguous,
    guard,
    key,
    noise_word,
    philox,
    philox_near,
    seed_args,
    uniform_of,
)
from fastmod.kernels._images import IEEE, TF32_THRICE, power, precision, product, read, rounded
from fastmod.kernels.sample_mask import ALL_WORDS, EXACT_OPTIONS, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.noise import STREAM_MASK

STREAM = tl.constexpr(STREAM_MASK)
_TF32_THRICE = tl.constexpr(TF32_THRICE)
UNSURE = tl.constexpr(1 << 13)  # see low_words
LAST_WORD = tl.constexpr(0xFFFFFFFF)
#: Whether instructions of NVIDIA's GPUs may be named: not on AMD, and not in the interpreter.
NVIDIA = torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
#: Columns of a program's result, and how much of the sum each of its PARTS takes in a step: parts are the batch axis of
#: the products, two warps each, so that few warps load and split what others do as well. tl.dot takes 16 at least.
#: AMD's compiler spills scalars with more of them.
COLUMNS, DEPTH, PARTS = (32, 16, 4) if torch.version.hip is None else (16, 16, 2)
#: Samples of a program at most, which share weights and thresholds. With more of them registers do not suffice.
SAMPLES = 2 if torch.version.hip is None else 1
#: Programs that a large GPU needs. Where there are fewer, each takes one sample and half as many columns: weights and
#: thresholds are then read for every sample, of a weight so small that a cache holds it.
ENOUGH = 100
#: Nothing is loaded ahead: registers and shared memory are for tiles.
STEP_OPTIONS = {**EXACT_OPTIONS, "num_stages": 1, "num_warps": 8}
WEIGHT_OPTIONS = {**STEP_OPTIONS, "num_warps": 4}
#: Of the gradients of weight and logits; in quads and at tau = 1 four times the weights.
WEIGHT_TILE = {"BLOCK_O": 16, "BLOCK_I": 16}
WEIGHT_TILE_QUADS = {"BLOCK_O": 32, "BLOCK_I": 64, "BLOCK_R": 16}
WEIGHT_TILE_AMD = {"BLOCK_O": 16, "BLOCK_I": 32, "BLOCK_R": 16}


@triton.jit
def layer_and_program(programs, LAYERS: tl.constexpr):
    """Which of several LAYERS, of so many programs each, this is one of, and which of them. A grid has less than 2**31
    programs: 32 bits are enough for the division."""
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
    """``divmod`` of a program by the number of blocks of SIZE."""
    blocks = tl.cdiv(SIZE, BLOCK).to(tl.int32)
    return pid // blocks, (pid % blocks).to(tl.int64)


@triton.jit
def low_words(logit):
    """Rough thresholds: a noise word below does not keep a weight, one that is UNSURE above it does, as the share of
    words that switch a weight off has an error below 2**-21. Between them ``words_off`` decides."""
    share = 4294967296.0 / (tl.exp2(logit * 1.44269504088896341) + 1.0)
    return tl.maximum(share - 4096.0, 0.0).to(tl.uint32)


@triton.jit
def tile_words(
    seed, s, o, begin, OUT, IN, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Noise words ``[BLOCK_O, BLOCK_I]`` of sample s and the inputs from begin on. QUADS: IN and begin are multiples of
    4, one Philox call serves four weights; NEAR: groups of the noise are below 2**32."""
    if not QUADS:
        start = (s * (OUT * IN) + o * IN + begin)[:, None]
        return noise_word(seed, start + tl.arange(0, BLOCK_I)[None, :], STREAM)
    local = tl.arange(0, BLOCK_I // 4)[None, :, None]
    start = ((s * (OUT * IN) + o * IN + begin) // 4)[:, None, None]
    if NEAR:
        c0, c1, c2, c3 = philox_near(seed, start.to(tl.uint32) + local.to(tl.uint32), STREAM, NVIDIA)
    else:
        c0, c1, c2, c3 = philox(seed, start + local, STREAM)
    # By choices that the compiler makes, as it knows the place: tl.join would be two conversions of layouts.
    word = tl.arange(0, 4)[None, None, :]
    words = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    return tl.reshape(words, [BLOCK_O, BLOCK_I])


@triton.jit
def masked_tiles(
    weight_ptr, logits_ptr, seed, s, o, begin, OUT, IN, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``weight * mask [BLOCK_O, BLOCK_I]`` of sample s and, if BLOCK_S is 2, of the next (else once more of s); 0
    beyond the weight's edges."""
    i = begin + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None] * IN + i[None, :]
    logit = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, tl.float32)
    weight = read(tl.load(weight_ptr + at, mask=inside, other=0.0), LT, DT)
    weight = tl.where(logit == logit, weight, float("nan")).to(DT)  # no NaN turns into a confident mask
    off = weight * 0.0  # 0 * inf is NaN here as in torch
    # Bounds, beyond which nothing changes, keep AMD's compiler from joining a conversion from fp16 and a product.
    low = low_words(tl.maximum(tl.minimum(logit, 200.0), -200.0) if tl.float16 == LT else logit)
    words = tile_words(seed, s, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
    others = words
    near = words - low
    if BLOCK_S == 2:
        others = tile_words(seed, s + 1, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        near = tl.minimum(near, others - low)
    if tl.min(tl.ravel(near)) < UNSURE:
        exact = words_off(logit)
        weight = tl.where(exact == ALL_WORDS, off, weight)  # also by the largest word
        low = tl.minimum(exact, ALL_WORDS - 1).to(tl.uint32) << 9
    return tl.where(words >= low, weight, off), tl.where(others >= low, weight, off)


@triton.jit
def rows_tile(
    ptr, s, r, begin, samples, rows, SIZE, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
    LT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``[PARTS, rows, DEPTH]`` of rows of SIZE numbers of sample s; 0 beyond the edges."""
    columns = begin + tl.arange(0, PARTS * DEPTH)
    inside = (r < tl.where(s < samples, rows, 0))[:, None] & (columns < SIZE)[None, :]
    at = ((s * rows + r) * SIZE)[:, None] + columns[None, :]
    found = read(tl.load(ptr + at, mask=inside, other=0.0), LT, DT)
    return tl.permute(tl.reshape(found, [BLOCK_R, PARTS, DEPTH]), (1, 0, 2))


@triton.jit
def split(t, NVIDIA: tl.constexpr):
    """t as two numbers of tf32; the product cuts off what the second has too much."""
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
        # A choice after widening, as AMD's compiler makes one fused instruction of a widened number and a sum.
        value += tl.where(there, biases, 0.0)[None, :]
    inside = (r < tl.where(s < samples, rows, 0))[:, None] & (columns < SIZE)[None, :]
    at = ((s * rows + r) * SIZE)[:, None] + columns[None, :]
    tl.store(ptr + at, rounded(value, ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs", "bias_step"])
def forward_kernel(
    x_ptr, weight_ptr, logits_ptr, biases_ptr, out_ptr, seed_ptr, seed_value: tl.int64, first_sample: tl.int64,
    samples: tl.int64, rows: tl.int64, programs: tl.int32, bias_step: tl.int64, x_step: tl.int64,
    weight_step: tl.int64, logits_step: tl.int64, biases_step: tl.int64, seed_step: tl.int64, OUT: tl.int64,
    IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of BLOCK_R rows of BLOCK_S samples. LT: what is loaded is rounded to that dtype, DT: dtype of the
    factors, CT: of the sums. Steps: numbers from one layer's tensor to the next's, 0 where they share one."""
    layer, pid = layer_and_program(programs, LAYERS)
    if QUADS:
        IN = IN // 4 * 4  # which the compiler is to know, for vectors of four
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        x_ptr += layer * x_step
        out_ptr += layer * samples * rows * OUT
        if biases_ptr is not None:
            biases_ptr += layer * biases_step
    outer, block = place(pid, OUT, BLOCK_O)
    tile_of_rows, r = place(outer, rows, BLOCK_R)
    s = tile_of_rows.to(tl.int64) * BLOCK_S
    r = r * BLOCK_R + tl.arange(0, BLOCK_R)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([PARTS, BLOCK_R, BLOCK_O], CT)
    second = total
    zeros = total + (pid < 0).to(CT)
    for first in range(0, IN, PARTS * BLOCK_I):
        w, w_second = masked_tiles(
            weight_ptr, logits_ptr, seed, first_sample + s, o, first, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_S, BLOCK_O,
            PARTS * BLOCK_I, LT, DT,
        )  # fmt: skip
        x = rows_tile(x_ptr, s, r, first, samples, rows, IN, PARTS, BLOCK_R, BLOCK_I, LT, DT)
        w = tl.permute(tl.reshape(w, [BLOCK_O, PARTS, BLOCK_I]), (1, 2, 0))
        total += multiplied(x, w, zeros, PRECISION, NVIDIA)
        if BLOCK_S == 2:
            x = rows_tile(x_ptr, s + 1, r, first, samples, rows, IN, PARTS, BLOCK_R, BLOCK_I, LT, DT)
            w = tl.permute(tl.reshape(w_second, [BLOCK_O, PARTS, BLOCK_I]), (1, 2, 0))
            second += multiplied(x, w, zeros, PRECISION, NVIDIA)
    store_rows(out_ptr, total, s, r, o, samples, rows, OUT, biases_ptr, bias_step, LT)
    if BLOCK_S == 2:
        store_rows(out_ptr, second, s + 1, r, o, samples, rows, OUT, biases_ptr, bias_step, LT)


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs"])
def backward_x_kernel(
    grad_ptr, weight_ptr, logits_ptr, dx_ptr, seed_ptr, seed_value: tl.int64, first_sample: tl.int64,
    samples: tl.int64, rows: tl.int64, programs: tl.int32, weight_step: tl.int64, logits_step: tl.int64,
    seed_step: tl.int64, OUT: tl.int64, IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr,
    NVIDIA: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_I inputs of BLOCK_R rows of BLOCK_S samples."""
    layer, pid = layer_and_program(programs, LAYERS)
    if QUADS:
        IN = IN // 4 * 4  # which the compiler is to know, for vectors of four
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        grad_ptr += layer * samples * rows * OUT
        dx_ptr += layer * samples * rows * IN
    outer, block = place(pid, IN, BLOCK_I)
    tile_of_rows, r = place(outer, rows, BLOCK_R)
    s = tile_of_rows.to(tl.int64) * BLOCK_S
    r = r * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = block * BLOCK_I
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([PARTS, BLOCK_R, BLOCK_I], CT)
    second = total
    zeros = total + (pid < 0).to(CT)
    for start in range(0, OUT, PARTS * BLOCK_O):
        o = start + tl.arange(0, PARTS * BLOCK_O).to(tl.int64)
        w, w_second = masked_tiles(
            weight_ptr, logits_ptr, seed, first_sample + s, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_S,
            PARTS * BLOCK_O, BLOCK_I, LT, DT,
        )  # fmt: skip
        grad = rows_tile(grad_ptr, s, r, start, samples, rows, OUT, PARTS, BLOCK_R, BLOCK_O, LT, DT)
        total += multiplied(grad, tl.reshape(w, [PARTS, BLOCK_O, BLOCK_I]), zeros, PRECISION, NVIDIA)
        if BLOCK_S == 2:
            grad = rows_tile(grad_ptr, s + 1, r, start, samples, rows, OUT, PARTS, BLOCK_R, BLOCK_O, LT, DT)
            second += multiplied(grad, tl.reshape(w_second, [PARTS, BLOCK_O, BLOCK_I]), zeros, PRECISION, NVIDIA)
    i = begin + tl.arange(0, BLOCK_I)
    store_rows(dx_ptr, total, s, r, i, samples, rows, IN, None, 0, LT)
    if BLOCK_S == 2:
        store_rows(dx_ptr, second, s + 1, r, i, samples, rows, IN, None, 0, LT)


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
    """:func:`slope_at_one` of noise words, without the factor decay; flip: all bits of the noise where the logit is
    negative, for those make 1 - u of u."""
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


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs"])
def backward_weight_kernel(
    grad_ptr, x_ptr, weight_ptr, logits_ptr, dweight_ptr, dlogits_ptr, seed_ptr, seed_value: tl.int64,
    first_sample: tl.int64, samples: tl.int64, rows: tl.int64, programs: tl.int32, tau: tl.float64, x_step: tl.int64,
    weight_step: tl.int64, logits_step: tl.int64, seed_step: tl.int64, OUT: tl.int64, IN: tl.int64,
    LAYERS: tl.constexpr, AT_ONE: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr, LT: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of logits and weight, each if asked for, summed over the samples; AT_ONE: tau is 1."""
    layer, pid = layer_and_program(programs, LAYERS)
    if QUADS:
        IN = IN // 4 * 4  # which the compiler is to know, for vectors of four
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        grad_ptr += layer * samples * rows * OUT
        x_ptr += layer * x_step
    down, block = place(pid, IN, BLOCK_I)
    o = down.to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = block * BLOCK_I
    i = begin + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None] * IN + i[None, :]
    seed = key(seed_ptr, seed_value)
    logit = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, CT)
    low = low_words(logit.to(tl.float32))
    decay = tl.exp(-tl.abs(logit))
    flip = tl.where(logit < 0, 0x7FFFFF, 0)
    of_logits = tl.zeros([BLOCK_O, BLOCK_I], CT)
    of_weight = tl.zeros([BLOCK_O, BLOCK_I], CT)
    zeros = tl.zeros([BLOCK_O, BLOCK_I], CT) + (pid < 0).to(CT)
    for sample in range(samples):
        found = part_of_rows(sample, 0, grad_ptr, x_ptr, o, i, rows, OUT, IN, zeros, PRECISION, NVIDIA, BLOCK_R, LT, DT)
        for start in range(BLOCK_R, rows, BLOCK_R):
            found += part_of_rows(
                sample, start, grad_ptr, x_ptr, o, i, rows, OUT, IN, zeros, PRECISION, NVIDIA, BLOCK_R, LT, DT
            )
        words = tile_words(seed, first_sample + sample, o, begin, OUT, IN, QUADS, NEAR, NVIDIA, BLOCK_O, BLOCK_I)
        if dlogits_ptr is not None:
            if AT_ONE and tl.float32 == CT:
                of_logits = tl.fma(found, quick_slope(words, flip, decay, NVIDIA), of_logits)
            elif AT_ONE:
                of_logits += found * slope_at_one(uniform_of(words, CT), logit, decay)
            else:
                of_logits += found * slope_at(uniform_of(words, CT), logit, tl.full([], tau, CT))
        if dweight_ptr is not None:
            if tl.min(tl.ravel(words - low)) < UNSURE:
                # Loaded anew: thresholds of what is there already would be computed before the loop, for all.
                again = tl.load(logits_ptr + at, mask=inside, other=0.0)
                exact = words_off(read(again, LT, tl.float32))
                low = tl.where(exact == ALL_WORDS, LAST_WORD, exact.to(tl.uint32) << 9)
                words = tl.minimum(words, LAST_WORD - 1)
            of_weight = tl.fma(tl.where(words >= low, 1.0, 0.0).to(CT), found, of_weight)
    if dweight_ptr is not None:
        again = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, CT)
        of_weight = tl.where(again == again, of_weight, float("nan"))  # no NaN turns into a confident mask
    if dlogits_ptr is not None and AT_ONE and tl.float32 == CT:
        of_logits *= decay
    if dlogits_ptr is not None:
        of_logits *= read(tl.load(weight_ptr + at, mask=inside, other=0.0), LT, CT)
    at += layer * OUT * IN
    if dlogits_ptr is not None:
        tl.store(dlogits_ptr + at, rounded(of_logits, dlogits_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at, rounded(of_weight, dweight_ptr.dtype.element_ty), mask=inside)


def factor_type(x: Tensor, dtype: torch.dtype | None = None) -> tl.dtype:
    """Of ``dtype``, if x counts as another than its own. Reduced precision goes into the products as it is, for its
    products are exact in fp32. Not so bf16 in the interpreter, which would multiply its bits."""
    dtype = dtype or x.dtype
    if dtype == torch.bfloat16 and x.is_cuda:
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else compute_type(x)


def kinds(x: Tensor, low: torch.dtype | None) -> tuple[tl.dtype, tl.dtype, tl.dtype, int]:
    """What is loaded counts as, factors, sums, and how fp32 is multiplied."""
    dtype = low or x.dtype
    return TRITON_TYPES[dtype], factor_type(x, dtype), compute_type(x), precision(x) if dtype == x.dtype else IEEE


def tile(
    samples: int, rows: int, inputs: int, columns: int, block: str, loaded: tl.dtype, factors: tl.dtype, wide: tl.dtype,
    kind: int, near: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Constants of a product with ``columns`` columns, of which a program has as many as its ``block``. near: groups of
    the noise are below 2**32."""
    double = wide == tl.float64
    constants = {
        "BLOCK_O": DEPTH, "BLOCK_I": DEPTH, block: DEPTH if double else COLUMNS, "BLOCK_R": power(rows, 16, 32),
        "BLOCK_S": 1 if double or inputs % 4 else power(samples, 1, SAMPLES), "QUADS": inputs % 4 == 0, "NEAR": near,
        "NVIDIA": NVIDIA, "PARTS": PARTS, "PRECISION": kind, "LT": loaded, "DT": factors, "CT": wide,
    }  # fmt: skip
    for fewer in ({"BLOCK_S": 1}, {block: DEPTH}):
        if programs(samples, rows, columns, constants, block) < ENOUGH:
            constants.update(fewer)
    return constants


def forward_options(constants: dict[str, Any]) -> dict[str, Any]:
    """ptxas spills for sm_120 where eight warps take one sample of 16 bits."""
    small = constants["QUADS"] and constants["BLOCK_S"] == 1 and constants["DT"] in (tl.bfloat16, tl.float16)
    return WEIGHT_OPTIONS if small and torch.version.hip is None else STEP_OPTIONS


def weight_tile(constants: dict[str, Any], at_one: bool, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of the gradients of weight and logits, from those of a product."""
    double = constants["CT"] == tl.float64
    quads = constants["QUADS"] and at_one and not double
    on_amd = torch.version.hip is not None
    found = {**constants, **((WEIGHT_TILE_AMD if on_amd else WEIGHT_TILE_QUADS) if quads else WEIGHT_TILE)}
    del found["BLOCK_S"], found["PARTS"]
    # Logarithms, numbers of eight bytes, what tells layers apart and conversions to 16 bits take more registers, which
    # twice the warps have.
    few = on_amd or (constants["DT"] == tl.float32 and (layers == 1 or not quads))
    return found, WEIGHT_OPTIONS if at_one and not double and few else STEP_OPTIONS


def programs(samples: int, rows: int, columns: int, constants: dict[str, Any], block: str) -> int:
    """Of a layer's product with ``columns`` columns."""
    groups = triton.cdiv(samples, constants["BLOCK_S"]) * triton.cdiv(rows, constants["BLOCK_R"])
    return groups * triton.cdiv(columns, constants[block])


def near(weight: Tensor, first: int, samples: int) -> bool:
    """Whether no group of the noise, of four words, is 2**32 or beyond. Not on AMD, for the sake of its scalars."""
    return torch.version.hip is None and (first + samples) * weight.shape[-2:].numel() <= 1 << 34


def weight_args(weight: Tensor, logits: Tensor, seed: Tensor) -> dict[str, Any]:
    """Of ``[out, in]`` or ``[layers, out, in]``, in all kernels."""
    layers = weight.shape[:-2].numel()
    (dense, step), (dense_logits, logits_step) = each_contiguous(weight, layers), each_contiguous(logits, layers)
    return {
        "weight_ptr": dense, "weight_step": step, "logits_ptr": dense_logits, "logits_step": logits_step,
        **seed_args(seed), "seed_step": sum(seed.stride()), "OUT": weight.shape[-2], "IN": weight.shape[-1],
        "LAYERS": layers > 1,
    }  # fmt: skip


def masked_linear_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    biases: Tensor | None,
    seed: Tensor,
    samples: int,
    first: int = 0,
    low: torch.dtype | None = None,
) -> Tensor:
    """x ``[B, ..., in]``, weight and logits ``[out, in]``, biases ``[S, out]`` -> ``[B, ..., out]``; of weights
    ``[layers, out, in]`` all with the layers in front, but for a seed that they share."""
    *many, outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=low or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    layers = weight.shape[:-2].numel()
    rows = out.numel() // (layers * outputs * samples)
    dense, x_step = each_contiguous(x, layers)
    if biases is not None and biases.stride(-1) != 1:
        biases = biases.contiguous()
    constants = tile(samples, rows, inputs, outputs, "BLOCK_O", *kinds(x, low), near(weight, first, samples))
    each = programs(samples, rows, outputs, constants, "BLOCK_O")
    with guard(x):
        forward_kernel[(layers * each,)](
            x_ptr=dense, x_step=x_step, biases_ptr=biases, bias_step=0 if biases is None else biases.stride(-2),
            biases_step=biases.stride(0) if many and biases is not None else 0, out_ptr=out, first_sample=first,
            samples=samples, rows=rows, programs=each, **weight_args(weight, logits, seed), **constants,
            **forward_options(constants),
        )  # fmt: skip
    return out


def masked_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    seed: Tensor,
    samples: int,
    tau: float,
    needs: Sequence[bool],
    first: int = 0,
    low: torch.dtype | None = None,
) -> list[Tensor]:
    """grad ``[B, ..., out]`` -> gradients of x, weight and logits; empty where not needed."""
    *many, outputs, inputs = weight.shape
    layers, rows = weight.shape[:-2].numel(), x.shape[len(many) : -1].numel() // samples
    nothing = layers * rows * outputs * inputs == 0
    found = [
        (torch.zeros if nothing else torch.empty)(t.shape if needed else (*many, 0), dtype=t.dtype, device=t.device)
        for t, needed in zip((x, weight, logits), needs, strict=True)
    ]
    if nothing:
        return found
    need_x, need_weight, need_logits = needs
    constants = tile(samples, rows, inputs, inputs, "BLOCK_I", *kinds(x, low), near(weight, first, samples))
    shared = {
        "grad_ptr": grad.contiguous(), "first_sample": first, "samples": samples, "rows": rows,
        **weight_args(weight, logits, seed),
    }  # fmt: skip
    with guard(x):
        if need_x:
            each = programs(samples, rows, inputs, constants, "BLOCK_I")
            backward_x_kernel[(layers * each,)](
                dx_ptr=found[0], programs=each, **shared, **constants, **STEP_OPTIONS
            )  # fmt: skip
        if need_weight or need_logits:
            small, launch_options = weight_tile(constants, tau == 1.0, layers)
            each = triton.cdiv(outputs, small["BLOCK_O"]) * triton.cdiv(inputs, small["BLOCK_I"])
            dense, x_step = each_contiguous(x, layers)
            backward_weight_kernel[(layers * each,)](
                x_ptr=dense, x_step=x_step, dweight_ptr=found[1] if need_weight else None,
                dlogits_ptr=found[2] if need_logits else None, tau=tau, AT_ONE=tau == 1.0, programs=each, **shared,
                **small, **launch_options,
            )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """With few rows and a word a weight, with many rows in quads, of one layer and of several, and where programs are
    few; of 16 bits the second reads fp32, as under autocast."""
    on_amd = {"PRECISION": IEEE, "NEAR": False, "NVIDIA": False}
    on_amd_step = {**on_amd, "BLOCK_S": 1, "BLOCK_O": DEPTH, "BLOCK_I": DEPTH, "PARTS": 2}
    found = []
    for samples, rows, inputs, columns, layers in (
        (3, 5, 33, 10_000, 1), (4, 64, 64, 10_000, 1), (4, 64, 64, 10_000, 8), (4, 32, 400, 400, 1),
    ):  # fmt: skip
        quads = inputs % 4 == 0
        case = f"rows{rows}" if layers == 1 else f"layers{layers}"
        p, low = dtype.wide_pointer if rows == 64 else dtype.pointer, dtype.pointer
        own = dtype.element, dtype.element, dtype.compute, TF32_THRICE if dtype.name == "fp32" else IEEE
        sizes = {block: tile(samples, rows, inputs, columns, block, *own) for block in ("BLOCK_O", "BLOCK_I")}
        shared = {
            "weight_ptr": p,
            "logits_ptr": p,
            "seed_ptr": "*i64" if quads and columns > 400 else None,
            "LAYERS": layers > 1,
        }
        forward = {**shared, **sizes["BLOCK_O"], "x_ptr": p, "biases_ptr": p if quads else None, "out_ptr": low}
        backward_x = {**shared, **sizes["BLOCK_I"], "grad_ptr": low, "dx_ptr": p}
        found.append(
            Specialisation(forward_kernel, forward, forward_options(forward), case, {**on_amd_step, "num_warps": 8})
        )
        found.append(Specialisation(backward_x_kernel, backward_x, STEP_OPTIONS, case, on_amd_step))
        for at_one in (True, False) if columns > 400 else ():
            sizes_of_weight, of_weight = weight_tile(sizes["BLOCK_I"], at_one, layers)
            values = {
                **shared, **sizes_of_weight, "grad_ptr": low, "x_ptr": p, "dlogits_ptr": p,
                "dweight_ptr": p if quads == at_one else None, "AT_ONE": at_one,
            }  # fmt: skip
            on_amd_weight = dict(on_amd)
            if at_one and dtype.compute != tl.float64:
                on_amd_weight |= {**(WEIGHT_TILE_AMD if quads else {}), "num_warps": 4}
            named = f"{case}-{'one' if at_one else 'any'}"
            found.append(Specialisation(backward_weight_kernel, values, of_weight, named, on_amd_weight))
    return found
