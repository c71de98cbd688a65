"""Triton kernels and launchers of ``masked_linear``: weights are masked tile by tile, on their way into the products.

They serve samples of few rows, so that one program holds them all and every mask is drawn once a product. No masked
copy of the weight is ever in memory. The thresholds are: 4 bytes a weight, computed once, where the products would need
them once a sample.

Element (o, i) of sample s has the noise of index ``s * P + o * IN + i``, with ``P = OUT * IN``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard, key, noise_word, philox, seed_args, uniform_of
from fastmod.kernels.sample_mask import EXACT_OPTIONS, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.noise import STREAM_MASK

STREAM = tl.constexpr(STREAM_MASK)
#: In place of a threshold: the logit is NaN, and so is the masked weight.
NOT_A_THRESHOLD = tl.constexpr(-1)
THRESHOLDS_BLOCK = 1024
#: Rows of a sample, outputs and inputs of one step. 16 is the least that tl.dot takes.
TILE = {"BLOCK_R": 64, "BLOCK_O": 16, "BLOCK_I": 32}
TILE_FP64 = {"BLOCK_R": 64, "BLOCK_O": 16, "BLOCK_I": 16}
#: Of the gradients of weight and logits, whose sums and slopes take many registers; with more of them ptxas spills.
WEIGHT_TILE = {"BLOCK_O": 16, "BLOCK_I": 16}
#: Numbers of eight bytes take twice the registers, which twice the warps have.
WEIGHT_OPTIONS_FP64 = {**OPTIONS, "num_warps": 8}


@triton.jit
def thresholds_kernel(logits_ptr, off_ptr, P: tl.int64, BLOCK: tl.constexpr):
    """How many noise values switch each weight off, int32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + i, mask=i < P, other=0.0).to(tl.float32)
    tl.store(off_ptr + i, tl.where(logit == logit, words_off(logit), NOT_A_THRESHOLD), mask=i < P)


@triton.jit
def program(SIZE, BLOCK: tl.constexpr):
    """This program's place: ``divmod`` by the number of blocks of SIZE. A grid has less than 2**31 programs: 32 bits
    are enough for the division."""
    blocks = tl.cdiv(SIZE, BLOCK).to(tl.int32)
    return (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)


@triton.jit
def tile_words(seed, sample, o, first, OUT, IN, QUADS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Noise words ``[outputs, BLOCK_I]`` of the inputs from ``first`` on. QUADS: IN and first are multiples of 4, one
    Philox call serves four weights."""
    start = (sample * OUT + o)[:, None] * IN + first
    if QUADS:
        c0, c1, c2, c3 = philox(seed, start // 4 + tl.arange(0, BLOCK_I // 4)[None, :], STREAM)
        return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return noise_word(seed, start + tl.arange(0, BLOCK_I)[None, :], STREAM)


@triton.jit
def kept(words, off, value):
    """``value`` where the mask keeps it, else 0; NaN where there is no mask."""
    # A product, not a choice: 0 * inf is NaN here as in torch.
    keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(value.dtype)
    return keep * tl.where(off == NOT_A_THRESHOLD, float("nan"), value).to(value.dtype)


@triton.jit
def masked_tile(
    weight_ptr, off_ptr, seed, sample, o, first, OUT, IN, QUADS: tl.constexpr, BLOCK_I: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """``weight * mask [outputs, BLOCK_I]`` of one sample; 0 beyond the weight's edges."""
    i = first + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    place = o[:, None] * IN + i[None, :]
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(DT)
    off = tl.load(off_ptr + place, mask=inside, other=0)
    return kept(tile_words(seed, sample, o, first, OUT, IN, QUADS, BLOCK_I), off, weight)


@triton.jit
def rows_tile(ptr, sample, r, columns, rows, SIZE, DT: tl.constexpr):
    """``[r, columns]`` of the rows of one sample, of SIZE numbers each; 0 beyond the edges."""
    inside = (r < rows)[:, None] & (columns < SIZE)[None, :]
    return tl.load(ptr + (sample * rows + r)[:, None] * SIZE + columns[None, :], mask=inside, other=0.0).to(DT)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, off_ptr, biases_ptr, out_ptr, seed_ptr, seed_value: tl.int64, rows: tl.int64, OUT: tl.int64,
    IN: tl.int64, QUADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of all rows of one sample. DT: dtype of the factors, CT: of the sums."""
    sample, block = program(OUT, BLOCK_O)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([BLOCK_R, BLOCK_O], CT)
    for first in range(0, IN, BLOCK_I):
        x = rows_tile(x_ptr, sample, r, first + tl.arange(0, BLOCK_I), rows, IN, DT)
        w = masked_tile(weight_ptr, off_ptr, seed, sample, o, first, OUT, IN, QUADS, BLOCK_I, DT)
        total += tl.dot(x, tl.trans(w), input_precision="ieee", out_dtype=CT)  # sums by chunks round less
    if biases_ptr is not None:
        total += tl.load(biases_ptr + sample * OUT + o, mask=o < OUT, other=0.0).to(CT)[None, :]
    place = (sample * rows + r)[:, None] * OUT + o[None, :]
    tl.store(out_ptr + place, total, mask=(r < rows)[:, None] & (o < OUT)[None, :])


@triton.jit
def backward_x_kernel(
    grad_ptr, weight_ptr, off_ptr, dx_ptr, seed_ptr, seed_value: tl.int64, rows: tl.int64, OUT: tl.int64, IN: tl.int64,
    QUADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_I inputs of all rows of one sample."""
    sample, block = program(IN, BLOCK_I)
    first = block * BLOCK_I
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([BLOCK_R, BLOCK_I], CT)
    for start in range(0, OUT, BLOCK_O):
        o = (start + tl.arange(0, BLOCK_O)).to(tl.int64)
        grad = rows_tile(grad_ptr, sample, r, o, rows, OUT, DT)
        w = masked_tile(weight_ptr, off_ptr, seed, sample, o, first, OUT, IN, QUADS, BLOCK_I, DT)
        total += tl.dot(grad, w, input_precision="ieee", out_dtype=CT)
    i = first + tl.arange(0, BLOCK_I)
    place = (sample * rows + r)[:, None] * IN + i[None, :]
    tl.store(dx_ptr + place, total, mask=(r < rows)[:, None] & (i < IN)[None, :])


@triton.jit
def backward_weight_kernel(
    grad_ptr, x_ptr, weight_ptr, logits_ptr, off_ptr, dweight_ptr, dlogits_ptr, seed_ptr, seed_value: tl.int64,
    samples: tl.int64, rows: tl.int64, tau: tl.float64, OUT: tl.int64, IN: tl.int64,
    AT_ONE: tl.constexpr, QUADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of logits and weight, each if asked for, summed over the samples; AT_ONE: tau is 1."""
    outer, block = program(IN, BLOCK_I)
    o = outer * BLOCK_O + tl.arange(0, BLOCK_O)
    first = block * BLOCK_I
    i = first + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    place = o[:, None] * IN + i[None, :]
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    seed = key(seed_ptr, seed_value)
    logit = tl.load(logits_ptr + place, mask=inside, other=0.0).to(CT)
    decay = tl.exp(-tl.abs(logit))
    of_logits = tl.zeros([BLOCK_O, BLOCK_I], CT)
    of_weight = tl.zeros([BLOCK_O, BLOCK_I], CT)
    for sample in range(samples):
        grad = rows_tile(grad_ptr, sample, r, o, rows, OUT, DT)
        x = rows_tile(x_ptr, sample, r, i, rows, IN, DT)
        product = tl.dot(tl.trans(grad), x, input_precision="ieee", out_dtype=CT)
        words = tile_words(seed, sample, o, first, OUT, IN, QUADS, BLOCK_I)
        if dlogits_ptr is not None:
            u = uniform_of(words, CT)
            of_logits += product * (
                slope_at_one(u, logit, decay) if AT_ONE else slope_at(u, logit, tl.full([], tau, CT))
            )
        if dweight_ptr is not None:
            of_weight += kept(words, tl.load(off_ptr + place, mask=inside, other=0), product)
    if dlogits_ptr is not None:
        weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(CT)
        tl.store(dlogits_ptr + place, of_logits * weight, mask=inside)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + place, of_weight, mask=inside)


def factor_type(x: Tensor) -> tl.dtype:
    """Reduced precision goes into the products as it is, for its products are exact in fp32. Not so bf16 in the
    interpreter, which would multiply its bits."""
    if x.dtype == torch.bfloat16 and x.is_cuda:
        return tl.bfloat16
    return tl.float16 if x.dtype == torch.float16 else compute_type(x)


def tile(rows: int, inputs: int, factors: tl.dtype, wide: tl.dtype) -> dict[str, Any]:
    """Constants of a launch."""
    sizes = TILE_FP64 if wide == tl.float64 else TILE
    if rows > sizes["BLOCK_R"]:
        raise ValueError(f"x: expected at most {sizes['BLOCK_R']} rows a sample, got {rows}")
    block_r = max(16, triton.next_power_of_2(rows))
    return {**sizes, "BLOCK_R": block_r, "QUADS": inputs % 4 == 0, "DT": factors, "CT": wide}


def thresholds(logits: Tensor) -> Tensor:
    """int32, of the shape of ``logits``, which are contiguous."""
    off = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    grid = (triton.cdiv(logits.numel(), THRESHOLDS_BLOCK),)
    thresholds_kernel[grid](
        logits_ptr=logits, off_ptr=off, P=logits.numel(), BLOCK=THRESHOLDS_BLOCK, **EXACT_OPTIONS
    )  # fmt: skip
    return off


def masked_linear_forward(
    x: Tensor, weight: Tensor, logits: Tensor, biases: Tensor | None, seed: Tensor, samples: int, first: int = 0
) -> Tensor:
    """x ``[B, ..., in]``, weight and logits ``[out, in]``, biases ``[S, out]`` -> ``[B, ..., out]``."""
    assert first == 0, f"first: expected 0, got {first}"
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, weight, logits = x.contiguous(), weight.contiguous(), logits.contiguous()
    rows = out.numel() // (outputs * samples)
    constants = tile(rows, inputs, factor_type(x), compute_type(x))
    with guard(x):
        forward_kernel[(triton.cdiv(outputs, constants["BLOCK_O"]) * samples,)](
            x_ptr=x, weight_ptr=weight, off_ptr=thresholds(logits),
            biases_ptr=None if biases is None else biases.contiguous(), out_ptr=out, rows=rows, OUT=outputs, IN=inputs,
            **seed_args(seed), **constants, **OPTIONS,
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
) -> list[Tensor]:
    """grad ``[B, ..., out]`` -> gradients of x, weight and logits; empty where not needed."""
    assert first == 0, f"first: expected 0, got {first}"
    outputs, inputs = weight.shape
    like = (x, weight, logits)
    rows = x.shape[:-1].numel() // samples
    if rows * outputs * inputs == 0:
        return [torch.zeros_like(t) if needed else t.new_empty(0) for t, needed in zip(like, needs, strict=True)]
    found = [
        torch.empty(t.shape if needed else (0,), dtype=t.dtype, device=t.device)
        for t, needed in zip(like, needs, strict=True)
    ]
    need_x, need_weight, need_logits = needs
    grad, x, weight, logits = grad.contiguous(), x.contiguous(), weight.contiguous(), logits.contiguous()
    constants = tile(rows, inputs, factor_type(x), compute_type(x))
    shared = {
        "grad_ptr": grad, "weight_ptr": weight, "rows": rows, "OUT": outputs, "IN": inputs, **seed_args(seed),
        **constants, **OPTIONS,
    }  # fmt: skip
    with guard(x):
        off = thresholds(logits) if need_x or need_weight else None
        if need_x:
            backward_x_kernel[(triton.cdiv(inputs, constants["BLOCK_I"]) * samples,)](
                off_ptr=off, dx_ptr=found[0], **shared
            )
        if need_weight or need_logits:
            small = {**shared, **WEIGHT_TILE, **(WEIGHT_OPTIONS_FP64 if x.dtype == torch.float64 else {})}
            grid = (triton.cdiv(outputs, small["BLOCK_O"]) * triton.cdiv(inputs, small["BLOCK_I"]),)
            backward_weight_kernel[grid](
                x_ptr=x, logits_ptr=logits, off_ptr=off, dweight_ptr=found[1] if need_weight else None,
                dlogits_ptr=found[2] if need_logits else None, samples=samples, tau=tau, AT_ONE=tau == 1.0, **small,
            )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """With few rows and a word a weight, and with many rows in quads."""
    p = dtype.pointer
    thresholds_values = {"logits_ptr": p, "off_ptr": "*i32", "BLOCK": THRESHOLDS_BLOCK}
    found = [Specialisation(thresholds_kernel, thresholds_values, EXACT_OPTIONS)]
    for rows, inputs in ((5, 33), (64, 64)):
        quads = inputs % 4 == 0
        shared = {
            "weight_ptr": p, "off_ptr": "*i32", "seed_ptr": "*i64" if quads else None,
            **tile(rows, inputs, dtype.element, dtype.compute),
        }  # fmt: skip
        forward = {**shared, "x_ptr": p, "biases_ptr": p if quads else None, "out_ptr": p}
        backward_x = {**shared, "grad_ptr": p, "dx_ptr": p}
        found.append(Specialisation(forward_kernel, forward, OPTIONS, f"rows{rows}"))
        found.append(Specialisation(backward_x_kernel, backward_x, OPTIONS, f"rows{rows}"))
        for at_one in (True, False):
            values = {
                **shared, "grad_ptr": p, "x_ptr": p, "logits_ptr": p, "dlogits_ptr": p,
                "dweight_ptr": p if quads == at_one else None, "AT_ONE": at_one, **WEIGHT_TILE,
            }  # fmt: skip
            case = f"rows{rows}-{'one' if at_one else 'any'}"
            options = WEIGHT_OPTIONS_FP64 if dtype.compute == tl.float64 else OPTIONS
            found.append(Specialisation(backward_weight_kernel, values, options, case))
    return found
