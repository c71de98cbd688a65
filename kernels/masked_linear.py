"""Triton kernels and launchers of ``masked_linear``: weights are masked tile by tile, just before they are multiplied.

A program takes four samples at once, which share one tile of the weight, its logits and thresholds. The products have
samples and parts of the sum as their batch axis; parts are added up at the end. There is never a masked copy of the
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
    tickets_for,
    uniform_of,
)
from fastmod.kernels._images import IEEE, TF32_THRICE, power, precision, read, rounded
from fastmod.kernels._masked_linear import (
    UNCERTAIN_WORDS,
    layer_and_program,
    low_words,
    of_layer,
    part_of_rows,
    place,
    product_with_masks,
    quick_slope,
    share_of,
    store_rows,
    tile_words,
)
from fastmod.kernels.sample_mask import ALL_WORDS, EXACT_OPTIONS, slope_at, slope_at_one, words_off
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype

LAST_WORD = tl.constexpr(0xFFFFFFFF)
#: Whether inline assembly for NVIDIA GPUs is allowed: not on AMD, and not in the interpreter.
NVIDIA = torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
#: Columns of a program's result, and how much of the sum each of its parts takes per step. tl.dot needs at least 16.
#: AMD's compiler spills scalars with larger values.
COLUMNS, DEPTH = (32, 16) if torch.version.hip is None else (16, 16)
#: Parts of the sum by the samples per program, which share weights and thresholds. Samples and parts are the batch axis
#: of the products: with one for each of eight warps, no number is loaded from shared memory or split twice. More of
#: them would need too many registers.
PARTS = {4: 2, 2: 4, 1: 4} if torch.version.hip is None else {1: 2}
#: Programs that a large GPU needs. If there are fewer, several share a sum of so many steps each; where it is too short
#: for that, a program takes fewer samples and half as many columns: weights and thresholds are then read for every
#: sample, but such a small weight fits a cache.
ENOUGH, STEPS = 100, 8
#: Nothing is loaded ahead: registers and shared memory are for tiles.
STEP_OPTIONS = {**EXACT_OPTIONS, "num_stages": 1, "num_warps": 8}
WEIGHT_OPTIONS = {**STEP_OPTIONS, "num_warps": 4}
#: Tiles for the gradients of weight and logits; in quads and at tau = 1 eight times as large, four times where there
#: would be too few, on AMD twice.
WEIGHT_TILE = {"BLOCK_O": 16, "BLOCK_I": 16}
WEIGHT_TILE_QUADS = {"BLOCK_O": 32, "BLOCK_I": 64, "BLOCK_R": 16}
WEIGHT_TILE_FEW = {"BLOCK_O": 32, "BLOCK_I": 32, "BLOCK_R": 16}
WEIGHT_TILE_AMD = {"BLOCK_O": 16, "BLOCK_I": 32, "BLOCK_R": 16}


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs", "bias_step"])
def forward_kernel(
    x_ptr, weight_ptr, logits_ptr, biases_ptr, out_ptr, sums_ptr, tickets_ptr, seed_ptr, seed_value: tl.int64,
    first_sample: tl.int64, samples: tl.int64, rows: tl.int64, programs: tl.int32, bias_step: tl.int64,
    x_step: tl.int64, weight_step: tl.int64, logits_step: tl.int64, biases_step: tl.int64, seed_step: tl.int64,
    OUT: tl.int64, IN: tl.int64, LAYERS: tl.constexpr, QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of BLOCK_R rows of BLOCK_S samples. LT: dtype that loaded values are rounded to, DT: dtype of the
    factors, CT: of the sums. Steps: distances between the tensors of two layers, 0 if layers share one."""
    layer, pid = layer_and_program(programs, LAYERS)
    if QUADS:
        IN = IN // 4 * 4  # which the compiler is to know, for vectors of four
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step, QUADS
        )
        x_ptr += layer * (x_step // 4 * 4 if QUADS else x_step)
        out_ptr += layer * samples * rows * OUT
        if biases_ptr is not None:
            biases_ptr += layer * biases_step
    pid, share, begin, end = share_of(pid, IN, PARTS * BLOCK_I, SPLITS)
    outer, block = place(pid, OUT, BLOCK_O)
    tile_of_rows, r = place(outer, rows, BLOCK_R)
    s = tile_of_rows.to(tl.int64) * BLOCK_S
    r = r * BLOCK_R + tl.arange(0, BLOCK_R)
    value = product_with_masks(
        x_ptr, s, r, block * BLOCK_O, begin, end, weight_ptr, logits_ptr, key(seed_ptr, seed_value), first_sample,
        samples, rows, OUT, IN, True, WHOLE, QUADS, NEAR, NVIDIA, PARTS, BLOCK_S, BLOCK_R, BLOCK_O, BLOCK_I, PRECISION,
        LT, DT, CT,
    )  # fmt: skip
    store_rows(
        out_ptr, value, sums_ptr, tickets_ptr, share, s, r, block * BLOCK_O, samples, rows, OUT, biases_ptr, bias_step,
        SPLITS, BLOCK_S, BLOCK_R, BLOCK_O, LT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_sample", "samples", "rows", "programs"])
def backward_x_kernel(
    grad_ptr, weight_ptr, logits_ptr, dx_ptr, sums_ptr, tickets_ptr, seed_ptr, seed_value: tl.int64,
    first_sample: tl.int64, samples: tl.int64, rows: tl.int64, programs: tl.int32, weight_step: tl.int64,
    logits_step: tl.int64, seed_step: tl.int64, OUT: tl.int64, IN: tl.int64, LAYERS: tl.constexpr,
    QUADS: tl.constexpr, NEAR: tl.constexpr, NVIDIA: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_I inputs of BLOCK_R rows of BLOCK_S samples."""
    layer, pid = layer_and_program(programs, LAYERS)
    if QUADS:
        IN = IN // 4 * 4  # which the compiler is to know, for vectors of four
    if LAYERS:
        weight_ptr, logits_ptr, seed_ptr = of_layer(
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step, QUADS
        )
        grad_ptr += layer * samples * rows * OUT
        dx_ptr += layer * samples * rows * IN
    pid, share, begin, end = share_of(pid, OUT, PARTS * BLOCK_O, SPLITS)
    outer, block = place(pid, IN, BLOCK_I)
    tile_of_rows, r = place(outer, rows, BLOCK_R)
    s = tile_of_rows.to(tl.int64) * BLOCK_S
    r = r * BLOCK_R + tl.arange(0, BLOCK_R)
    value = product_with_masks(
        grad_ptr, s, r, block * BLOCK_I, begin, end, weight_ptr, logits_ptr, key(seed_ptr, seed_value), first_sample,
        samples, rows, OUT, IN, False, WHOLE, QUADS, NEAR, NVIDIA, PARTS, BLOCK_S, BLOCK_R, BLOCK_O, BLOCK_I, PRECISION,
        LT, DT, CT,
    )  # fmt: skip
    store_rows(
        dx_ptr, value, sums_ptr, tickets_ptr, share, s, r, block * BLOCK_I, samples, rows, IN, None, 0, SPLITS, BLOCK_S,
        BLOCK_R, BLOCK_I, LT,
    )  # fmt: skip


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
            layer, weight_ptr, logits_ptr, seed_ptr, weight_step, logits_step, seed_step, QUADS
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
    samples: int, rows: int, outputs: int, inputs: int, block: str, loaded: tl.dtype, factors: tl.dtype, wide: tl.dtype,
    kind: int, near: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Constants of a product, of whose columns a program takes as many as its ``block``. near: groups of the noise are
    below 2**32. 16 bits need no guards, and with steps of two kinds they, and one sample, would spill registers."""
    double, quads, nvidia = wide == tl.float64, inputs % 4 == 0, torch.version.hip is None
    depth, columns = (inputs, outputs) if block == "BLOCK_O" else (outputs, inputs)
    constants = {
        "BLOCK_O": DEPTH, "BLOCK_I": DEPTH, block: DEPTH if double else COLUMNS, "BLOCK_R": power(rows, 16, 32),
        "BLOCK_S": together(samples) if nvidia and quads and not double else 1, "QUADS": quads, "NEAR": near,
        "NVIDIA": NVIDIA, "SPLITS": 1, "PRECISION": kind, "LT": loaded, "DT": factors, "CT": wide,
    }  # fmt: skip
    while True:
        constants["PARTS"] = PARTS[constants["BLOCK_S"]]
        constants["WHOLE"] = constants["BLOCK_S"] > 1 and factors == tl.float32
        step = DEPTH * constants["PARTS"]
        found = programs(samples, rows, columns, constants, block)
        for splits in (1, 2, 4) if constants["BLOCK_S"] == 4 else (1,):
            if splits * found >= ENOUGH and (splits == 1 or depth >= splits * STEPS * step):
                return {**constants, "SPLITS": splits}
        if constants["BLOCK_S"] > 1:
            constants["BLOCK_S"] //= 2
        elif constants[block] > DEPTH:
            constants[block] = DEPTH
        else:
            return constants


def together(samples: int) -> int:
    """How many samples a program takes."""
    return 1 if samples == 1 else 4 if samples % 4 in (0, 3) else 2


def forward_options(constants: dict[str, Any]) -> dict[str, Any]:
    """For sm_120 ptxas spills if eight warps take one sample of 16 bits."""
    small = constants["QUADS"] and constants["BLOCK_S"] == 1 and constants["DT"] in (tl.bfloat16, tl.float16)
    return WEIGHT_OPTIONS if small and torch.version.hip is None else STEP_OPTIONS


def weight_tile(
    constants: dict[str, Any], at_one: bool, layers: int, outputs: int, inputs: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of the gradients of weight and logits, from those of a product."""
    double = constants["CT"] == tl.float64
    quads = constants["QUADS"] and at_one and not double
    on_amd = torch.version.hip is not None
    large = WEIGHT_TILE_AMD if on_amd else WEIGHT_TILE_QUADS
    if not on_amd and tiles(outputs, inputs, large) < ENOUGH:
        large = WEIGHT_TILE_FEW
    found = {**constants, **(large if quads else WEIGHT_TILE)}
    for other in ("BLOCK_S", "PARTS", "SPLITS", "WHOLE"):
        del found[other]
    # Logarithms, 64-bit numbers, offsets of layers and conversions to 16 bits need more registers, so twice the warps.
    few = on_amd or (constants["DT"] == tl.float32 and (layers == 1 or not quads))
    return found, WEIGHT_OPTIONS if at_one and not double and few else STEP_OPTIONS


def tiles(outputs: int, inputs: int, constants: dict[str, Any]) -> int:
    """How many programs a layer's gradients of weight and logits have."""
    return triton.cdiv(outputs, constants["BLOCK_O"]) * triton.cdiv(inputs, constants["BLOCK_I"])


def programs(samples: int, rows: int, columns: int, constants: dict[str, Any], block: str) -> int:
    """How many programs a layer's product with ``columns`` columns has."""
    groups = triton.cdiv(samples, constants["BLOCK_S"]) * triton.cdiv(rows, constants["BLOCK_R"])
    return groups * triton.cdiv(columns, constants[block]) * constants["SPLITS"]


def sums(x: Tensor, each: int, constants: dict[str, Any], block: str) -> dict[str, Any]:
    """Memory for shares of the sums of ``each`` programs, and tickets, where programs share a sum."""
    if constants["SPLITS"] == 1:
        return {"sums_ptr": None, "tickets_ptr": None}
    numbers = constants["BLOCK_S"] * constants["BLOCK_R"] * constants[block]
    return {
        "sums_ptr": torch.empty(each * numbers, dtype=compute_dtype(x), device=x.device),
        "tickets_ptr": tickets_for(x, each // constants["SPLITS"]),
    }  # fmt: skip


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
    constants = tile(samples, rows, outputs, inputs, "BLOCK_O", *kinds(x, low), near(weight, first, samples))
    each = programs(samples, rows, outputs, constants, "BLOCK_O")
    with guard(x):
        forward_kernel[(layers * each,)](
            x_ptr=dense, x_step=x_step, biases_ptr=biases, bias_step=0 if biases is None else biases.stride(-2),
            biases_step=biases.stride(0) if many and biases is not None else 0, out_ptr=out, first_sample=first,
            samples=samples, rows=rows, programs=each, **weight_args(weight, logits, seed),
            **sums(x, layers * each, constants, "BLOCK_O"), **constants, **forward_options(constants),
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
    constants = tile(samples, rows, outputs, inputs, "BLOCK_I", *kinds(x, low), near(weight, first, samples))
    shared = {
        "grad_ptr": grad.contiguous(), "first_sample": first, "samples": samples, "rows": rows,
        **weight_args(weight, logits, seed),
    }  # fmt: skip
    with guard(x):
        if need_x:
            each = programs(samples, rows, inputs, constants, "BLOCK_I")
            backward_x_kernel[(layers * each,)](
                dx_ptr=found[0], programs=each, **shared, **sums(x, layers * each, constants, "BLOCK_I"), **constants,
                **STEP_OPTIONS,
            )  # fmt: skip
        if need_weight or need_logits:
            small, launch_options = weight_tile(constants, tau == 1.0, layers, outputs, inputs)
            each = tiles(outputs, inputs, small)
            dense, x_step = each_contiguous(x, layers)
            backward_weight_kernel[(layers * each,)](
                x_ptr=dense, x_step=x_step, dweight_ptr=found[1] if need_weight else None,
                dlogits_ptr=found[2] if need_logits else None, tau=tau, AT_ONE=tau == 1.0, programs=each, **shared,
                **small, **launch_options,
            )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Few rows with a noise word per weight; many rows in quads, for one layer, for several and of two samples; few
    programs; and sums that programs share. With 16 bits the cases of 64 rows read fp32, as under autocast."""
    on_amd = {"PRECISION": IEEE, "NEAR": False, "NVIDIA": False}
    on_amd_step = {
        **on_amd, "BLOCK_S": 1, "BLOCK_O": DEPTH, "BLOCK_I": DEPTH, "PARTS": 2, "SPLITS": 1, "WHOLE": False,
    }  # fmt: skip
    found = []
    for case, samples, rows, depth, columns in (
        ("rows5", 3, 5, 33, 9_999), ("rows64", 4, 64, 64, 10_000), ("layers8", 4, 64, 64, 10_000),
        ("pair", 2, 64, 64, 10_000), ("rows32", 4, 32, 400, 400), ("shared", 4, 32, 2_000, 2_000),
    ):  # fmt: skip
        if dtype.compute == tl.float64 and case in ("pair", "shared"):
            continue  # as with 64 rows
        quads, layers = depth % 4 == 0, 8 if case == "layers8" else 1
        p, low = dtype.wide_pointer if rows == 64 else dtype.pointer, dtype.pointer
        own = dtype.element, dtype.element, dtype.compute, TF32_THRICE if dtype.name == "fp32" else IEEE
        sizes = {
            "BLOCK_O": tile(samples, rows, columns, depth, "BLOCK_O", *own),
            "BLOCK_I": tile(samples, rows, depth, columns, "BLOCK_I", *own),
        }
        shared = {
            "weight_ptr": p,
            "logits_ptr": p,
            "seed_ptr": "*i64" if quads and columns > 400 else None,
            "LAYERS": layers > 1,
        }
        many = sizes["BLOCK_O"]["SPLITS"] > 1
        product = {
            **shared, "sums_ptr": dtype.wide_pointer if many else None, "tickets_ptr": "*i32" if many else None,
        }  # fmt: skip
        forward = {
            **product, **sizes["BLOCK_O"], "x_ptr": p, "biases_ptr": p if quads else None, "out_ptr": low,
        }  # fmt: skip
        backward_x = {**product, **sizes["BLOCK_I"], "grad_ptr": low, "dx_ptr": p}
        found.append(
            Specialisation(forward_kernel, forward, forward_options(forward), case, {**on_amd_step, "num_warps": 8})
        )
        found.append(Specialisation(backward_x_kernel, backward_x, STEP_OPTIONS, case, on_amd_step))
        for at_one in {"pair": (), "shared": (), "rows32": (True,)}.get(case, (True, False)):
            sizes_of_weight, of_weight = weight_tile(sizes["BLOCK_I"], at_one, layers, columns, max(depth, 400))
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
