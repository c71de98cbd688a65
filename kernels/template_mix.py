"""Triton kernels and launchers of ``template_mix``: a program has some columns of the bank, and all rows of logits.

Forward: a program computes the weights, then its columns of the product, tile by tile. Backward: the gradient is read
once, for the bank's gradient and for this program's share in that of the weights; a second kernel adds up the shares
and computes the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, divide, guard
from fastmod.kernels._images import IEEE, TF32_THRICE, column_sums, power, precision, product, rounded
from fastmod.kernels.masked_linear import factor_type
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _images
from fastmod.ops._checks import compute_dtype
from fastmod.ops.template_mix import MIXINGS, check_mixture

SOFTMAX = tl.constexpr(MIXINGS.index("softmax"))
TANH = tl.constexpr(MIXINGS.index("tanh"))
SIZES = ["ROWS", "SIZE"]


@triton.jit
def logits_at(logits_ptr, row, k, ROWS, K: tl.constexpr, CT: tl.constexpr):
    """``[rows, k]``; -inf beyond the last template, which makes the weight 0."""
    mask = (row < ROWS)[:, None] & (k < K)[None, :]
    t = tl.load(logits_ptr + (row * K)[:, None] + k[None, :], mask=mask, other=0.0).to(CT)
    return tl.where((k < K)[None, :], t, float("-inf"))


@triton.jit
def row_stats(logits_ptr, row, ROWS, K: tl.constexpr, MIXING: tl.constexpr, BLOCK_K: tl.constexpr, CT: tl.constexpr):
    """The largest logit and the sum of the exponentials; the sum is NaN where torch's softmax is."""
    largest = tl.full(row.shape, float("-inf"), CT)
    total = tl.full(row.shape, 1.0, CT)
    if MIXING == SOFTMAX:
        local = tl.arange(0, BLOCK_K)
        for first in range(0, K, BLOCK_K):
            t = logits_at(logits_ptr, row, first + local, ROWS, K, CT)
            largest = tl.maximum(largest, tl.max(t, axis=1))  # ignores NaNs, which reach the sum
        total = tl.zeros(row.shape, CT)
        for first in range(0, K, BLOCK_K):
            t = logits_at(logits_ptr, row, first + local, ROWS, K, CT)
            total += tl.sum(tl.exp(t - largest[:, None]), axis=1)
    return largest, total


@triton.jit
def weights_at(logits_ptr, row, k, largest, total, ROWS, K: tl.constexpr, MIXING: tl.constexpr, CT: tl.constexpr):
    """``[rows, k]``; 0 beyond the last row and template."""
    t = logits_at(logits_ptr, row, k, ROWS, K, CT)
    if MIXING == SOFTMAX:
        t = divide(tl.exp(t - largest[:, None]), total[:, None])
    elif MIXING == TANH:
        t = tanh(t)
    return tl.where((row < ROWS)[:, None] & (k < K)[None, :], t, 0.0)


@triton.jit
def all_weights(logits_ptr, row, k, ROWS, K: tl.constexpr, MIXING: tl.constexpr, CT: tl.constexpr):
    """The same if k covers all templates: every logit is read once."""
    t = logits_at(logits_ptr, row, k, ROWS, K, CT)
    if MIXING == SOFTMAX:
        t = tl.exp(t - tl.max(t, axis=1)[:, None])
        t = divide(t, tl.sum(t, axis=1)[:, None])
    elif MIXING == TANH:
        t = tanh(t)
    return tl.where((row < ROWS)[:, None] & (k < K)[None, :], t, 0.0)


@triton.jit
def some_weights(
    logits_ptr, row, k, ROWS, K: tl.constexpr, MIXING: tl.constexpr, BLOCK_K: tl.constexpr, CT: tl.constexpr
):
    """The weights of templates k, BLOCK_K of them."""
    if K <= BLOCK_K:
        weights = all_weights(logits_ptr, row, k, ROWS, K, MIXING, CT)
    else:
        largest, total = row_stats(logits_ptr, row, ROWS, K, MIXING, BLOCK_K, CT)
        weights = weights_at(logits_ptr, row, k, largest, total, ROWS, K, MIXING, CT)
    return weights


@triton.jit
def tanh(t):
    """-m / (2 + m) with m = exp(-2 |t|) - 1, but without the cancellation in a small m: in fp64 by the quotient of m
    and the logarithm of the exponential, which has the same error, in fp32 by the series of tanh."""
    x = -2 * tl.abs(t)
    u = tl.exp(x)
    if t.dtype == tl.float64:
        near = u > 0.5
        inner = tl.where(near & (u != 1), u, 0.75)
        m = tl.where(near, tl.where(u == 1, x, (inner - 1) * (x / tl.log(inner))), u - 1)
        small = -m / (2 + m)
    else:
        square = t * t
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        small = tl.where(x > -0.5, tl.abs(t) * series, divide(1 - u, 1 + u))
    return tl.where(t == t, tl.where(t < 0, -small, small), t)


@triton.jit
def split_product(weights, b, total, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """``total + weights @ b``, with b in the dtype of products. With reduced precision only b has that precision;
    weights are fp32 and split into two numbers, of which only the first is multiplied by values of b that are not
    finite."""
    high = rounded(weights, dtype)
    total = product(high, b, total, PRECISION)
    if dtype == tl.bfloat16 or dtype == tl.float16:
        low = weights - high.to(weights.dtype)
        low = tl.where(low == low, low, 0.0)
        finite = tl.where(b - b == 0, b, 0.0).to(dtype)
        total = product(rounded(low, dtype), finite, total, PRECISION)
    return total


@triton.jit
def tile_at(ptr, rows, columns, count, SIZE, DT: tl.constexpr):
    """``[rows, columns]`` of a matrix ``[count, SIZE]``."""
    mask = (rows < count)[:, None] & (columns < SIZE)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(DT)


@triton.jit
def store_tile(ptr, rows, columns, values, count, SIZE):
    mask = (rows < count)[:, None] & (columns < SIZE)[None, :]
    tl.store(ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], values, mask=mask)


@triton.jit
def held_weights(
    logits_ptr, k, ROWS, K: tl.constexpr, MIXING: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Weights of templates k for all rows: GROUPS of ``[BLOCK_L, BLOCK_K]``, which a program keeps."""
    weights = ()
    for i in tl.static_range(GROUPS):
        row = i * BLOCK_L + tl.arange(0, BLOCK_L).to(tl.int64)
        weights = weights + (some_weights(logits_ptr, row, k, ROWS, K, MIXING, BLOCK_K, CT),)  # type: ignore[assignment]
    return weights


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    logits_ptr, bank_ptr, out_ptr, ROWS: tl.int64, SIZE: tl.int64, K: tl.constexpr, MIXING: tl.constexpr,
    PRECISION: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_P columns, with all rows. GROUPS: groups of BLOCK_L rows, whose weights are computed once for all
    tiles of a program; 0: there are too many, and a program has one tile."""
    part = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    local = tl.arange(0, BLOCK_L).to(tl.int64)
    if GROUPS > 0:
        weights = held_weights(logits_ptr, k, ROWS, K, MIXING, GROUPS, BLOCK_L, BLOCK_K, CT)
        for tile in range(part, tl.cdiv(SIZE, BLOCK_P), tl.num_programs(0)):
            p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
            bank = tile_at(bank_ptr, k, p, K, SIZE, DT)
            for i in tl.static_range(GROUPS):
                found = split_product(weights[i], bank, tl.zeros([BLOCK_L, BLOCK_P], CT), DT, PRECISION)
                store_tile(out_ptr, i * BLOCK_L + local, p, found, ROWS, SIZE)
    else:
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        bank = tile_at(bank_ptr, k, p, K, SIZE, DT)
        for start in range(0, ROWS, BLOCK_L):
            row = start + local
            found = tl.zeros([BLOCK_L, BLOCK_P], CT)
            if K <= BLOCK_K:
                some = all_weights(logits_ptr, row, k, ROWS, K, MIXING, CT)
                found = split_product(some, bank, found, DT, PRECISION)
            else:
                largest, total = row_stats(logits_ptr, row, ROWS, K, MIXING, BLOCK_K, CT)
                for first in range(0, K, BLOCK_K):
                    some = weights_at(logits_ptr, row, first + k, largest, total, ROWS, K, MIXING, CT)
                    templates = tile_at(bank_ptr, first + k, p, K, SIZE, DT)
                    found = split_product(some, templates, found, DT, PRECISION)
            store_tile(out_ptr, row, p, found, ROWS, SIZE)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr, logits_ptr, bank_ptr, dbank_ptr, partials_ptr, ROWS: tl.int64, SIZE: tl.int64,
    K: tl.constexpr, MIXING: tl.constexpr, PRECISION: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_P columns: BLOCK_K templates (grid axis 1) of the bank's gradient, and
    ``partials[program, rows, K]``. GROUPS: groups of BLOCK_L rows, whose weights are computed, and partials written,
    once for all tiles of a program; 0: there are too many, and a program has one tile."""
    part = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    local = tl.arange(0, BLOCK_L).to(tl.int64)
    if GROUPS > 0:
        weights = held_weights(logits_ptr, k, ROWS, K, MIXING, GROUPS, BLOCK_L, BLOCK_K, CT)
        sums = (tl.zeros([BLOCK_L, BLOCK_K], CT),) * GROUPS
        for tile in range(part, tl.cdiv(SIZE, BLOCK_P), tl.num_programs(0)):
            p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
            bank = tile_at(bank_ptr, k, p, K, SIZE, DT)
            of_bank = tl.zeros([BLOCK_K, BLOCK_P], CT)
            before, sums = sums, ()
            for i in tl.static_range(GROUPS):
                grad = tile_at(grad_ptr, i * BLOCK_L + local, p, ROWS, SIZE, DT)
                if dbank_ptr is not None:
                    of_bank = split_product(tl.trans(weights[i]), grad, of_bank, DT, PRECISION)
                if partials_ptr is not None:
                    sums = sums + (product(grad, tl.trans(bank), before[i], PRECISION),)
                else:
                    sums = sums + (before[i],)
            if dbank_ptr is not None:
                store_tile(dbank_ptr, k, p, of_bank, K, SIZE)
        if partials_ptr is not None:
            for i in tl.static_range(GROUPS):
                store_weights(partials_ptr, part, i * BLOCK_L + local, k, sums[i], ROWS, K)
    else:
        p = part * BLOCK_P + tl.arange(0, BLOCK_P)
        bank = tile_at(bank_ptr, k, p, K, SIZE, DT)
        of_bank = tl.zeros([BLOCK_K, BLOCK_P], CT)
        for start in range(0, ROWS, BLOCK_L):
            row = start + local
            grad = tile_at(grad_ptr, row, p, ROWS, SIZE, DT)
            if dbank_ptr is not None:
                some = some_weights(logits_ptr, row, k, ROWS, K, MIXING, BLOCK_K, CT)
                of_bank = split_product(tl.trans(some), grad, of_bank, DT, PRECISION)
            if partials_ptr is not None:
                found = product(grad, tl.trans(bank), tl.zeros([BLOCK_L, BLOCK_K], CT), PRECISION)
                store_weights(partials_ptr, part, row, k, found, ROWS, K)
        if dbank_ptr is not None:
            store_tile(dbank_ptr, k, p, of_bank, K, SIZE)


@triton.jit
def store_weights(partials_ptr, part, row, k, values, ROWS, K: tl.constexpr):
    mask = (row < ROWS)[:, None] & (k < K)[None, :]
    tl.store(partials_ptr + ((part * ROWS + row) * K)[:, None] + k[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["parts", "ROWS"])
def finish_kernel(
    partials_ptr, logits_ptr, dlogits_ptr, parts: tl.int64, ROWS: tl.int64, K: tl.constexpr, MIXING: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """For one row: adds up the parts in a fixed order, then goes back through the mixing."""
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.zeros([1], tl.int64)
    local = tl.arange(0, BLOCK_C)
    largest, total = row_stats(logits_ptr, one, ROWS, K, MIXING, BLOCK_C, CT)
    if K <= BLOCK_C:  # every part is read once
        found = row_sums(partials_ptr, parts, row, local, ROWS, K, BLOCK_R, BLOCK_C, CT)[None, :]
        weights = weights_at(logits_ptr, one, local, largest, total, ROWS, K, MIXING, CT)
        mean = tl.sum(weights * found, axis=1)
        store_logits(dlogits_ptr, one, local, found, weights, mean, K, MIXING)
    else:
        mean = tl.zeros([1], CT)
        if MIXING == SOFTMAX:
            for first in range(0, K, BLOCK_C):
                k = first + local
                found = row_sums(partials_ptr, parts, row, k, ROWS, K, BLOCK_R, BLOCK_C, CT)[None, :]
                weights = weights_at(logits_ptr, one, k, largest, total, ROWS, K, MIXING, CT)
                mean += tl.sum(weights * found, axis=1)
        for first in range(0, K, BLOCK_C):
            k = first + local
            found = row_sums(partials_ptr, parts, row, k, ROWS, K, BLOCK_R, BLOCK_C, CT)[None, :]
            weights = weights_at(logits_ptr, one, k, largest, total, ROWS, K, MIXING, CT)
            store_logits(dlogits_ptr, one, k, found, weights, mean, K, MIXING)


@triton.jit
def store_logits(dlogits_ptr, row, k, found, weights, mean, K: tl.constexpr, MIXING: tl.constexpr):
    """Stores ``found``, the gradient of the weights ``[1, k]``, after the mixing's backward; mean: its weighted
    mean."""
    if MIXING == SOFTMAX:
        found = weights * (found - mean[:, None])
    elif MIXING == TANH:
        found = found * (1 - weights * weights)
    tl.store(dlogits_ptr + (row * K)[:, None] + k[None, :], found, mask=(k < K)[None, :])


@triton.jit
def row_sums(
    partials_ptr, parts, row, k, ROWS, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr
):
    """The sums of ``partials[:, row, k]``; 0 beyond the last template."""
    columns = tl.where(k < K, row * K + k, ROWS * K)
    return column_sums(partials_ptr, parts, columns, ROWS * K, BLOCK_R, BLOCK_C, CT)


# ---- Launchers


#: Programs per launch, if there are enough columns. What each reads and writes besides bank and gradients (logits, its
#: share of the weights' gradient) limits their number: at most OVERHEAD of all bytes, as in CUDA C++.
LEAST_PROGRAMS, MOST_PROGRAMS, OVERHEAD = 64, 1024, 0.045
#: Groups of 16 rows whose weights a program keeps; more would spill registers in the backward.
MOST_GROUPS = 9


def programs(numbers: int, of_each: int, tiles: int) -> int:
    """``numbers``: those of bank, result and gradients; ``of_each``: what a program adds to them."""
    return min(max(int(OVERHEAD * numbers / of_each), LEAST_PROGRAMS), MOST_PROGRAMS, tiles)


def forward_tile(rows: int, templates: int, element: tl.dtype) -> dict[str, Any]:
    """Larger tiles spill registers, on AMD those of 16 bits. On NVIDIA smaller fp32 tiles spill if weights are computed
    tile by tile."""
    few = element == tl.float64
    block_k, groups = 16 if few else power(templates, 16, 32), triton.cdiv(rows, 16)
    held = groups <= (1 if few else MOST_GROUPS) and templates <= block_k
    columns = 64 if few else 256 if element == tl.float32 and not held else 128
    return {"GROUPS": groups if held else 0, "BLOCK_L": 16, "BLOCK_K": block_k, "BLOCK_P": columns}


def backward_tile(rows: int, templates: int, element: tl.dtype) -> dict[str, Any]:
    """Larger tiles spill registers: the loop has two products, and weights and sums for each group of rows."""
    few, groups = element == tl.float64, triton.cdiv(rows, 16)
    held = groups <= (1 if few else MOST_GROUPS)
    columns = 32 if few or (held and groups > 1) else 64
    if held and groups > 6 and element == tl.float32:
        columns = 16
    return {
        "GROUPS": groups if held else 0, "BLOCK_L": 16, "BLOCK_K": 16 if few else power(templates, 16, 32),
        "BLOCK_P": columns,
    }  # fmt: skip


def backward_options(groups: int, element: tl.dtype) -> dict[str, Any]:
    """Nothing is loaded ahead, which would take shared memory and registers; several fp32 groups get twice the
    threads."""
    return {**OPTIONS, "num_stages": 1, "num_warps": 8 if groups > 1 and element == tl.float32 else 4}


#: How many parts and templates the sum of parts takes at once.
FINISH_TILE = {"BLOCK_R": 32, "BLOCK_C": 32}


def _arguments(logits: Tensor, bank: Tensor, mixing: int) -> dict[str, Any]:
    """For both kernels; refuses tensors that would be read beyond their end."""
    check_mixture(logits, bank)
    if not 0 <= mixing < len(MIXINGS):
        raise ValueError(f"mixing: expected 0 (softmax), 1 (tanh) or 2 (none), got {mixing}")
    return {
        "logits_ptr": logits.contiguous(), "bank_ptr": bank.contiguous(), "ROWS": logits.numel() // logits.shape[-1],
        "SIZE": bank.shape[1], "K": bank.shape[0], "MIXING": mixing, "PRECISION": precision(bank),
        "DT": factor_type(bank), "CT": compute_type(bank), **OPTIONS,
    }  # fmt: skip


def template_mix_forward(logits: Tensor, bank: Tensor, mixing: int) -> Tensor:
    """logits ``[..., K]``, bank ``[K, P]`` -> ``[..., P]``"""
    shared = _arguments(logits, bank, mixing)
    out = bank.new_empty((*logits.shape[:-1], bank.shape[1]))
    if out.numel() > 0:
        rows, templates, size = shared["ROWS"], shared["K"], shared["SIZE"]
        blocks = forward_tile(rows, templates, shared["DT"])
        parts = triton.cdiv(size, blocks["BLOCK_P"])
        if blocks["GROUPS"] > 0:
            parts = programs((rows + templates) * size, rows * templates, parts)
        with guard(bank):
            forward_kernel[(parts,)](out_ptr=out, **shared, **blocks)
    return out


def template_mix_backward(
    grad: Tensor, logits: Tensor, bank: Tensor, mixing: int, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of logits and bank, empty where not needed."""
    shared = _arguments(logits, bank, mixing)
    expected = (*logits.shape[:-1], bank.shape[1])
    if tuple(grad.shape) != expected or grad.dtype != bank.dtype:
        raise ValueError(f"grad: expected {list(expected)} of {bank.dtype}, got {list(grad.shape)} of {grad.dtype}")
    found = _images.blanks((logits, bank), needs, images=())
    if grad.numel() == 0:
        return [each.zero_() for each in found]
    rows, templates, size = shared["ROWS"], shared["K"], shared["SIZE"]
    blocks = backward_tile(rows, templates, shared["DT"])
    parts, wide = triton.cdiv(size, blocks["BLOCK_P"]), compute_dtype(bank)
    if blocks["GROUPS"] > 0:  # per program: the logits, and twice its share of the gradient of the weights
        of_each = (1 + 2 * wide.itemsize // bank.element_size()) * rows * templates
        parts = programs((rows + 2 * templates) * size, of_each, parts)
    partials = bank.new_empty((parts, rows, templates), dtype=wide) if needs[0] else None
    with guard(bank):
        backward_kernel[(parts, triton.cdiv(templates, blocks["BLOCK_K"]))](
            grad_ptr=grad.contiguous(), dbank_ptr=found[1] if needs[1] else None, partials_ptr=partials,
            **{**shared, **backward_options(blocks["GROUPS"], shared["DT"])}, **blocks,
        )  # fmt: skip
        if partials is not None:
            finish_kernel[(rows,)](
                partials_ptr=partials, logits_ptr=shared["logits_ptr"], dlogits_ptr=found[0], parts=parts, ROWS=rows,
                K=templates, MIXING=mixing, CT=shared["CT"], **FINISH_TILE, **OPTIONS,
            )  # fmt: skip
    return found


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Few layers, many, and more than a program can keep the weights of, which in fp64 is all beyond few."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    cases = [("l16-tanh", 16, 1), ("l96", 96, 0), ("l144", 144, 0), ("l160", 160, 0)]
    for case, rows, mixing in (cases[0], cases[-1]) if dtype.name == "fp64" else cases:
        shared = {
            "logits_ptr": p, "bank_ptr": p, "K": 32, "MIXING": mixing,
            "PRECISION": TF32_THRICE if dtype.name == "fp32" else IEEE, "DT": dtype.element, "CT": dtype.compute,
        }  # fmt: skip
        blocks = backward_tile(rows, 32, dtype.element)
        options = backward_options(blocks["GROUPS"], dtype.element)
        backward = {**shared, "grad_ptr": p, "dbank_ptr": p, "partials_ptr": w, **blocks}
        forward = {**shared, "out_ptr": p, **forward_tile(rows, 32, dtype.element)}
        found.append(Specialisation(forward_kernel, forward, OPTIONS, case, {"PRECISION": IEEE}))
        found.append(Specialisation(backward_kernel, backward, options, case, {"PRECISION": IEEE}))
    finish = {
        "partials_ptr": w, "logits_ptr": p, "dlogits_ptr": p, "K": 32, "MIXING": 0, "CT": dtype.compute, **FINISH_TILE
    }  # fmt: skip
    return [*found, Specialisation(finish_kernel, finish, OPTIONS)]
