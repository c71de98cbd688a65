"""Triton kernels and launchers of ``masked_linear``: weights are masked tile by tile, on their way into the products.

A program takes a few samples at once, which share one tile of the weight, its logits and thresholds: the products have
the sample as their batch axis. No masked copy of the weight is ever in memory. Many layers are one launch: the programs
of each come after those of the one before, with the same tiles, so that its values are the same to the bit.

Element (o, i) of sample s has the noise of index ``s * P + o * IN + i``, with ``P = OUT * IN``.
"""

from __future__ import annotations

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
    seed_args,
    uniform_of,
)
from fastmod.kernels._images import IEEE, TF32_THRICE, power, precision, product, read, rounded
from fastmod.kernels.sample_mask import EXACT_OPTIONS, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.noise import STREAM_MASK

STREAM = tl.constexpr(STREAM_MASK)
#: Outputs and inputs of one step, and rows of all its samples. 16 is the least that tl.dot takes.
TILE = {"BLOCK_O": 16, "BLOCK_I": 32}
TILE_FP64 = {"BLOCK_O": 16, "BLOCK_I": 16}
ROWS = 64
#: Of the forward, in quads: samples of a program at most, which share weights and thresholds, whatever their rows. With
#: so many AMD's compiler spills.
SAMPLES = 4
#: Programs that a large GPU needs. Where there are fewer, each takes one sample, and of the gradient of x half as many
#: inputs: weights and thresholds are then read for every sample, of a weight so small that a cache holds it.
ENOUGH = 100
#: Of the gradients of weight and logits, whose sums and slopes take many registers: with more of them ptxas spills. In
#: quads and at tau = 1 twice the weights, and as few warps as have products of their own.
WEIGHT_TILE = {"BLOCK_O": 16, "BLOCK_I": 16}
WEIGHT_TILE_QUADS = {"BLOCK_O": 16, "BLOCK_I": 32, "BLOCK_R": 16}
FEWER_WARPS = {**EXACT_OPTIONS, "num_warps": 2}
#: Numbers of eight bytes, logarithms and a Philox call a weight take more registers, which twice the warps have.
MORE_WARPS = {**EXACT_OPTIONS, "num_warps": 8}


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
def rows_of_program(outer, rows, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr):
    """Samples ``[BLOCK_S]`` and rows of them ``[BLOCK_R]``."""
    tiles = tl.cdiv(rows, BLOCK_R).to(tl.int32)
    s = (outer // tiles).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    return s, (outer % tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)


@triton.jit
def tile_words(seed, s, o, first, OUT, IN, QUADS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Noise words ``[samples, outputs, BLOCK_I]`` of the inputs from ``first`` on. QUADS: IN and first are multiples of
    4, one Philox call serves four weights."""
    start = (s * (OUT * IN))[:, None, None] + (o * IN + first)[None, :, None]
    if QUADS:
        c0, c1, c2, c3 = philox(seed, start // 4 + tl.arange(0, BLOCK_I // 4)[None, None, :], STREAM)
        return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return noise_word(seed, start + tl.arange(0, BLOCK_I)[None, None, :], STREAM)


@triton.jit
def masked_tile(
    weight_ptr, logits_ptr, seed, s, o, first, OUT, IN, QUADS: tl.constexpr, BLOCK_I: tl.constexpr, LT: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """``weight * mask [samples, outputs, BLOCK_I]``; 0 beyond the weight's edges. s: samples of the noise."""
    i = first + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None] * IN + i[None, :]
    logit = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, tl.float32)
    weight = read(tl.load(weight_ptr + at, mask=inside, other=0.0), LT, DT)
    weight = tl.where(logit == logit, weight, float("nan")).to(DT)  # no NaN turns into a confident mask
    words = tile_words(seed, s, o, first, OUT, IN, QUADS, BLOCK_I)
    # A product, not a choice: 0 * inf is NaN here as in torch.
    return tl.where((words >> 9).to(tl.int32) >= words_off(logit)[None, :, :], 1.0, 0.0).to(DT) * weight[None, :, :]


@triton.jit
def rows_tile(ptr, s, r, columns, samples, rows, SIZE, LT: tl.constexpr, DT: tl.constexpr):
    """``[s, r, columns]`` of rows of SIZE numbers; 0 beyond the edges."""
    there = (s < samples)[:, None] & (r < rows)[None, :]
    inside = there[:, :, None] & (columns < SIZE)[None, None, :]
    at = (s[:, None] * rows + r[None, :])[:, :, None] * SIZE + columns[None, None, :]
    return read(tl.load(ptr + at, mask=inside, other=0.0), LT, DT)


@triton.jit
def store_rows(ptr, value, s, r, columns, samples, rows, SIZE):
    there = (s < samples)[:, None] & (r < rows)[None, :]
    inside = there[:, :, None] & (columns < SIZE)[None, None, :]
    at = (s[:, None] * rows + r[None, :])[:, :, None] * SIZE + columns[None, None, :]
    tl.store(ptr + at, rounded(value, ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs", "bias_step"])
def forward_kernel(
    x_ptr, weight_ptr, logits_ptr, biases_ptr, out_ptr, seed_ptr, seed_value: tl.int64, first_sample: tl.int64,
    samples: tl.int64, rows: tl.int64, programs: tl.int32, bias_step: tl.int64, x_step: tl.int64,
    weight_step: tl.int64, logits_step: tl.int64, biases_step: tl.int64, seed_step: tl.int64, OUT: tl.int64,
    IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of BLOCK_R rows of BLOCK_S samples. LT: what is loaded is rounded to that dtype, DT: dtype of the
    factors, CT: of the sums. Steps: numbers from one layer's tensor to the next's, 0 where they share one."""
    layer, pid = layer_and_program(programs, LAYERS)
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        x_ptr += layer * x_step
        out_ptr += layer * samples * rows * OUT
        if biases_ptr is not None:
            biases_ptr += layer * biases_step
    outer, block = place(pid, OUT, BLOCK_O)
    s, r = rows_of_program(outer, rows, BLOCK_S, BLOCK_R)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([BLOCK_S, BLOCK_R, BLOCK_O], CT)
    for first in range(0, IN, BLOCK_I):
        x = rows_tile(x_ptr, s, r, first + tl.arange(0, BLOCK_I), samples, rows, IN, LT, DT)
        w = masked_tile(weight_ptr, logits_ptr, seed, first_sample + s, o, first, OUT, IN, QUADS, BLOCK_I, LT, DT)
        # sums by chunks round less
        total += product(x, tl.permute(w, (0, 2, 1)), tl.zeros([BLOCK_S, BLOCK_R, BLOCK_O], CT), PRECISION)
    if biases_ptr is not None:
        inside = (s < samples)[:, None] & (o < OUT)[None, :]
        biases = tl.load(biases_ptr + s[:, None] * bias_step + o[None, :], mask=inside, other=0.0)
        total += read(biases, LT, CT)[:, None, :]
    store_rows(out_ptr, total, s, r, o, samples, rows, OUT)


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs"])
def backward_x_kernel(
    grad_ptr, weight_ptr, logits_ptr, dx_ptr, seed_ptr, seed_value: tl.int64, first_sample: tl.int64,
    samples: tl.int64, rows: tl.int64, programs: tl.int32, weight_step: tl.int64, logits_step: tl.int64,
    seed_step: tl.int64, OUT: tl.int64, IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_I inputs of BLOCK_R rows of BLOCK_S samples."""
    layer, pid = layer_and_program(programs, LAYERS)
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        grad_ptr += layer * samples * rows * OUT
        dx_ptr += layer * samples * rows * IN
    outer, block = place(pid, IN, BLOCK_I)
    s, r = rows_of_program(outer, rows, BLOCK_S, BLOCK_R)
    first = block * BLOCK_I
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([BLOCK_S, BLOCK_R, BLOCK_I], CT)
    for start in range(0, OUT, BLOCK_O):
        o = (start + tl.arange(0, BLOCK_O)).to(tl.int64)
        grad = rows_tile(grad_ptr, s, r, o, samples, rows, OUT, LT, DT)
        w = masked_tile(weight_ptr, logits_ptr, seed, first_sample + s, o, first, OUT, IN, QUADS, BLOCK_I, LT, DT)
        total += product(grad, w, tl.zeros([BLOCK_S, BLOCK_R, BLOCK_I], CT), PRECISION)
    store_rows(dx_ptr, total, s, r, first + tl.arange(0, BLOCK_I), samples, rows, IN)


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs"])
def backward_weight_kernel(
    grad_ptr, x_ptr, weight_ptr, logits_ptr, dweight_ptr, dlogits_ptr, seed_ptr, seed_value: tl.int64,
    first_sample: tl.int64, samples: tl.int64, rows: tl.int64, programs: tl.int32, tau: tl.float64, x_step: tl.int64,
    weight_step: tl.int64, logits_step: tl.int64, seed_step: tl.int64, OUT: tl.int64, IN: tl.int64,
    LAYERS: tl.constexpr, AT_ONE: tl.constexpr, QUADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of logits and weight, each if asked for, summed over the samples; AT_ONE: tau is 1."""
    layer, pid = layer_and_program(programs, LAYERS)
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step
        )
        grad_ptr += layer * samples * rows * OUT
        x_ptr += layer * x_step
    down, block = place(pid, IN, BLOCK_I)
    o = down.to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    first = block * BLOCK_I
    i = first + tl.arange(0, BLOCK_I)
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    at = o[:, None] * IN + i[None, :]
    seed = key(seed_ptr, seed_value)
    logit = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, CT)
    off = words_off(logit.to(tl.float32))
    decay = tl.exp(-tl.abs(logit))
    of_logits = tl.zeros([BLOCK_O, BLOCK_I], CT)
    of_weight = tl.zeros([BLOCK_O, BLOCK_I], CT)
    for sample in range(samples):
        found = tl.zeros([BLOCK_O, BLOCK_I], CT)
        for start in range(0, rows, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            row = ((sample * rows + r) * OUT)[:, None]
            here = (r < rows)[:, None]
            grad = tl.load(grad_ptr + row + o[None, :], mask=here & (o < OUT)[None, :], other=0.0).to(DT)
            row = ((sample * rows + r) * IN)[:, None]
            x = read(tl.load(x_ptr + row + i[None, :], mask=here & (i < IN)[None, :], other=0.0), LT, DT)
            found += product(tl.trans(grad), x, tl.zeros([BLOCK_O, BLOCK_I], CT), PRECISION)
        own = tl.full([1], first_sample + sample, tl.int64)
        words = tl.reshape(tile_words(seed, own, o, first, OUT, IN, QUADS, BLOCK_I), [BLOCK_O, BLOCK_I])
        if dlogits_ptr is not None:
            u = uniform_of(words, CT)
            of_logits += found * (slope_at_one(u, logit, decay) if AT_ONE else slope_at(u, logit, tl.full([], tau, CT)))
        if dweight_ptr is not None:
            keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(CT)
            of_weight += keep * tl.where(logit == logit, found, float("nan"))
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
    kind: int,
) -> dict[str, Any]:  # fmt: skip
    """Constants of a product with ``columns`` columns, of which a program has as many as its ``block``."""
    sizes = TILE_FP64 if wide == tl.float64 else TILE
    block_r = power(rows, 16, 32)
    many = block == "BLOCK_O" and inputs % 4 == 0 and wide != tl.float64 and torch.version.hip is None
    constants = {
        **sizes, "BLOCK_R": block_r, "BLOCK_S": power(samples, 1, SAMPLES if many else ROWS // block_r),
        "QUADS": inputs % 4 == 0, "PRECISION": kind, "LT": loaded, "DT": factors, "CT": wide,
    }  # fmt: skip
    for fewer in ({"BLOCK_S": 1}, {"BLOCK_I": 16} if block == "BLOCK_I" else {}):
        if programs(samples, rows, columns, constants, block) < ENOUGH:
            constants.update(fewer)
    return constants


def forward_options(constants: dict[str, Any]) -> dict[str, Any]:
    return EXACT_OPTIONS if constants["QUADS"] and constants["CT"] != tl.float64 else MORE_WARPS


def weight_tile(constants: dict[str, Any], at_one: bool, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of the gradients of weight and logits, from those of a product."""
    double = constants["CT"] == tl.float64
    quads = constants["QUADS"] and at_one and not double
    found = {**constants, **(WEIGHT_TILE_QUADS if quads else WEIGHT_TILE)}
    del found["BLOCK_S"]
    if quads and layers == 1:
        return found, FEWER_WARPS
    # With two warps what tells several layers apart spills registers on sm_120 and on AMD.
    return found, EXACT_OPTIONS if at_one and not double else MORE_WARPS


def programs(samples: int, rows: int, columns: int, constants: dict[str, Any], block: str) -> int:
    """Of a layer's product with ``columns`` columns."""
    groups = triton.cdiv(samples, constants["BLOCK_S"]) * triton.cdiv(rows, constants["BLOCK_R"])
    return groups * triton.cdiv(columns, constants[block])


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
    constants = tile(samples, rows, inputs, outputs, "BLOCK_O", *kinds(x, low))
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
    constants = tile(samples, rows, inputs, inputs, "BLOCK_I", *kinds(x, low))
    shared = {
        "grad_ptr": grad.contiguous(), "first_sample": first, "samples": samples, "rows": rows,
        **weight_args(weight, logits, seed),
    }  # fmt: skip
    with guard(x):
        if need_x:
            each = programs(samples, rows, inputs, constants, "BLOCK_I")
            backward_x_kernel[(layers * each,)](
                dx_ptr=found[0], programs=each, **shared, **constants, **EXACT_OPTIONS
            )  # fmt: skip
        if need_weight or need_logits:
            small, options = weight_tile(constants, tau == 1.0, layers)
            each = triton.cdiv(outputs, small["BLOCK_O"]) * triton.cdiv(inputs, small["BLOCK_I"])
            dense, x_step = each_contiguous(x, layers)
            backward_weight_kernel[(layers * each,)](
                x_ptr=dense, x_step=x_step, dweight_ptr=found[1] if need_weight else None,
                dlogits_ptr=found[2] if need_logits else None, tau=tau, AT_ONE=tau == 1.0, programs=each, **shared,
                **small, **options,
            )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """With few rows and a word a weight, with many rows in quads, of one layer and of several, and where programs are
    few; of 16 bits the second reads fp32, as under autocast."""
    on_amd = {"PRECISION": IEEE}
    found = []
    for samples, rows, inputs, columns, layers in (
        (3, 5, 33, 10_000, 1), (4, 64, 64, 10_000, 1), (4, 64, 64, 10_000, 8), (4, 32, 400, 400, 1),
    ):  # fmt: skip
        quads = inputs % 4 == 0
        case = f"rows{rows}" if layers == 1 else f"layers{layers}"
        p, low = dtype.wide_pointer if rows == 64 else dtype.pointer, dtype.pointer
        own = dtype.element, dtype.element, dtype.compute, TF32_THRICE if dtype.name == "fp32" else IEEE
        sizes = {block: tile(samples, rows, inputs, columns, block, *own) for block in ("BLOCK_O", "BLOCK_I")}
        shared = {"weight_ptr": p, "logits_ptr": p, "seed_ptr": "*i64" if quads else None, "LAYERS": layers > 1}
        forward = {**shared, **sizes["BLOCK_O"], "x_ptr": p, "biases_ptr": p if quads else None, "out_ptr": low}
        backward_x = {**shared, **sizes["BLOCK_I"], "grad_ptr": low, "dx_ptr": p}
        fewer = {**on_amd, "BLOCK_S": min(forward["BLOCK_S"], ROWS // forward["BLOCK_R"])}
        found.append(Specialisation(forward_kernel, forward, forward_options(forward), case, fewer))
        found.append(Specialisation(backward_x_kernel, backward_x, EXACT_OPTIONS, case, on_amd))
        for at_one in (True, False) if columns > 400 else ():
            sizes_of_weight, options = weight_tile(sizes["BLOCK_I"], at_one, layers)
            values = {
                **shared, **sizes_of_weight, "grad_ptr": low, "x_ptr": p, "dlogits_ptr": p,
                "dweight_ptr": p if quads == at_one else None, "AT_ONE": at_one,
            }  # fmt: skip
            named = f"{case}-{'one' if at_one else 'any'}"
            found.append(Specialisation(backward_weight_kernel, values, options, named, on_amd))
    return found
