"""Triton kernels and launchers of ``masked_linear``: weights are masked tile by tile, just before they are multiplied.

A program takes two samples one after the other, which share one tile of the weight, its logits and thresholds. The
products have parts of the sum as their batch axis, which are added up at the end. There is never a masked copy of the
weight in memory. Many layers share a launch: the programs of each follow those of the previous one, with equal tiles.

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
    seed_args,
    uniform_of,
)
from fastmod.kernels._images import IEEE, TF32_THRICE, power, precision, read, rounded
from fastmod.kernels._masked_linear import (
    UNCERTAIN_WORDS,
    layer_and_program,
    low_words,
    masked_tiles,
    multiplied,
    of_layer,
    part_of_rows,
    place,
    quick_slope,
    rows_tile,
    store_rows,
    tile_words,
)
from fastmod.kernels.sample_mask import ALL_WORDS, EXACT_OPTIONS, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation

LAST_WORD = tl.constexpr(0xFFFFFFFF)
#: Whether inline assembly for NVIDIA GPUs is allowed: not on AMD, and not in the interpreter.
NVIDIA = torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
#: Columns of a program's result, and how much of the sum each of its PARTS takes per step. Parts are the batch axis of
#: the products, with two warps each, so that few warps load and split the same numbers. tl.dot needs at least 16. AMD's
#: compiler spills scalars with larger values.
COLUMNS, DEPTH, PARTS = (32, 16, 4) if torch.version.hip is None else (16, 16, 2)
#: The most samples per program, which share weights and thresholds. More samples would need too many registers.
SAMPLES = 2 if torch.version.hip is None else 1
#: Programs that a large GPU needs. If there are fewer, each takes one sample and half as many columns: weights and
#: thresholds are then read for every sample, but such a small weight fits a cache.
ENOUGH = 100
#: Nothing is loaded ahead: registers and shared memory are for tiles.
STEP_OPTIONS = {**EXACT_OPTIONS, "num_stages": 1, "num_warps": 8}
WEIGHT_OPTIONS = {**STEP_OPTIONS, "num_warps": 4}
#: Tiles for the gradients of weight and logits; in quads and at tau = 1 eight times as large, on AMD twice.
WEIGHT_TILE = {"BLOCK_O": 16, "BLOCK_I": 16}
WEIGHT_TILE_QUADS = {"BLOCK_O": 32, "BLOCK_I": 64, "BLOCK_R": 16}
WEIGHT_TILE_AMD = {"BLOCK_O": 16, "BLOCK_I": 32, "BLOCK_R": 16}


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs", "bias_step"])
def forward_kernel(
    x_ptr, weight_ptr, logits_ptr, biases_ptr, out_ptr, seed_ptr, seed_value: tl.int64, first_sample: tl.int64,
    samples: tl.int64, rows: tl.int64, programs: tl.int32, bias_step: tl.int64, x_step: tl.int64,
    weight_step: tl.int64, logits_step: tl.int64, biases_step: tl.int64, seed_step: tl.int64, OUT: tl.int64,
    IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of BLOCK_R rows of BLOCK_S samples. LT: dtype that loaded values are rounded to, DT: dtype of the
    factors, CT: of the sums. Steps: distances between the tensors of two layers, 0 if layers share one."""
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
            if tl.min(tl.ravel(words - low)) < UNCERTAIN_WORDS:
                # Loaded again: exact thresholds of `logit` would be computed before the loop, for all weights.
                again = tl.load(logits_ptr + at, mask=inside, other=0.0)
                exact = words_off(read(again, LT, tl.float32))
                low = tl.where(exact == ALL_WORDS, LAST_WORD, exact.to(tl.uint32) << 9)
                words = tl.minimum(words, LAST_WORD - 1)
            of_weight = tl.fma(tl.where(words >= low, 1.0, 0.0).to(CT), found, of_weight)
    if dweight_ptr is not None:
        again = read(tl.load(logits_ptr + at, mask=inside, other=0.0), LT, CT)
        of_weight = tl.where(again == again, of_weight, float("nan"))  # a NaN must not become a confident mask
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
    """The dtype of factors, for x treated as ``dtype`` if that is given. Reduced precision is multiplied directly, as
    its products are exact in fp32; not bf16 in the interpreter, which would multiply its bits."""
    dtype = dtype or x.dtype
    if dtype == torch.bfloat16 and x.is_cuda:
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else compute_type(x)


def kinds(x: Tensor, low: torch.dtype | None) -> tuple[tl.dtype, tl.dtype, tl.dtype, int]:
    """Dtypes of loaded values, factors and sums, and how fp32 is multiplied."""
    dtype = low or x.dtype
    return TRITON_TYPES[dtype], factor_type(x, dtype), compute_type(x), precision(x) if dtype == x.dtype else IEEE


def tile(
    samples: int, rows: int, inputs: int, columns: int, block: str, loaded: tl.dtype, factors: tl.dtype, wide: tl.dtype,
    kind: int, near: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Constants of a product with ``columns`` columns, of which a program takes as many as its ``block``. near: groups
    of the noise are below 2**32."""
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
    """For sm_120 ptxas spills if eight warps take one sample of 16 bits."""
    small = constants["QUADS"] and constants["BLOCK_S"] == 1 and constants["DT"] in (tl.bfloat16, tl.float16)
    return WEIGHT_OPTIONS if small and torch.version.hip is None else STEP_OPTIONS


def weight_tile(constants: dict[str, Any], at_one: bool, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of the gradients of weight and logits, from those of a product."""
    double = constants["CT"] == tl.float64
    quads = constants["QUADS"] and at_one and not double
    on_amd = torch.version.hip is not None
    found = {**constants, **((WEIGHT_TILE_AMD if on_amd else WEIGHT_TILE_QUADS) if quads else WEIGHT_TILE)}
    del found["BLOCK_S"], found["PARTS"]
    # Logarithms, 64-bit numbers, offsets of layers and conversions to 16 bits need more registers, so twice the warps.
    few = on_amd or (constants["DT"] == tl.float32 and (layers == 1 or not quads))
    return found, WEIGHT_OPTIONS if at_one and not double and few else STEP_OPTIONS


def programs(samples: int, rows: int, columns: int, constants: dict[str, Any], block: str) -> int:
    """How many programs a layer's product with ``columns`` columns has."""
    groups = triton.cdiv(samples, constants["BLOCK_S"]) * triton.cdiv(rows, constants["BLOCK_R"])
    return groups * triton.cdiv(columns, constants[block])


def near(weight: Tensor, first: int, samples: int) -> bool:
    """Whether all groups of four noise words are below 2**32. False on AMD: philox_near takes too many scalars."""
    return torch.version.hip is None and (first + samples) * weight.shape[-2:].numel() <= 1 << 34


def weight_args(weight: Tensor, logits: Tensor, seed: Tensor) -> dict[str, Any]:
    """Arguments of all kernels for weights ``[out, in]`` or ``[layers, out, in]``."""
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
    """x ``[B, ..., in]``, weight and logits ``[out, in]``, biases ``[S, out]`` -> ``[B, ..., out]``. With weights
    ``[layers, out, in]`` all tensors have the layers in front, except a seed that they share."""
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
    """Few rows with a noise word per weight; many rows in quads, for one layer and for several; and few programs. With
    16 bits the cases of 64 rows read fp32, as under autocast."""
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
