"""What the kernels that take rows through a stack of MFNNRs are made of: see smfr.py.

Pointers into activations and gradients are those of the whole batch; ``rows`` or ``first`` say which part is this
program's. Sizes of layers are numbers of 32 bits, rows of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    GUMBEL,
    SOFTMAX,
    TRITON_TYPES,
    compute_type,
    divide,
    each_contiguous,
    excess,
    key,
    row_tile,
    temperature,
    uniform,
)
from fastmod.kernels._images import power, precision, product, read, rounded
from torch import Tensor

from fastmod.ops._checks import compute_dtype
from fastmod.ops.mfnnr import BATCH_TILE, LEAKY_SLOPE

SLOPE = tl.constexpr(LEAKY_SLOPE)
#: Activations of a net are those of a multiple of so many rows.
PADDING = tl.constexpr(BATCH_TILE)
#: Hidden layers up to this width are served here, wider ones layer by layer, see mfnnr.py.
FUSED_HIDDEN = 128
#: Blocks that a layer may read: the scores of a column are one tile.
MOST_BLOCKS = 1024
#: Arguments of a kernel may take 32,764 bytes.
MOST_POINTERS = 2000


# ---- The table


@triton.jit
def write_table(table_ptr, pointers, net, B, NUMBERS: tl.constexpr, STEPS: tl.constexpr):
    """Pointers, then numbers; there for all threads of this program. STEPS, None for one net: bytes from one net's
    tensor to the next's, as so many for each net, for each of its rows, and for each of these padded."""
    for i in tl.static_range(len(pointers)):
        at = pointers[i].to(tl.int64)
        if STEPS is not None:
            at += net * (STEPS[i][0] + B * STEPS[i][1] + tl.cdiv(B, PADDING) * PADDING * STEPS[i][2])
        tl.store(table_ptr + i, at)
    for i in tl.static_range(len(NUMBERS)):
        tl.store(table_ptr + len(pointers) + i, NUMBERS[i])
    tl.debug_barrier()


@triton.jit
def net_and_rows(B, BLOCK_B: tl.constexpr, STEPS: tl.constexpr):
    """Which net's rows this program takes, and from which of them on: the programs of a net are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    if STEPS is not None:
        programs = tl.cdiv(B, BLOCK_B)
        return pid // programs, pid % programs * BLOCK_B
    return tl.full([], 0, tl.int64), pid * BLOCK_B


@triton.jit
def pointer_at(table_ptr, index, dtype: tl.constexpr):
    return tl.load(table_ptr + index).to(tl.pointer_type(dtype))


@triton.jit
def number_at(table_ptr, index):
    return tl.load(table_ptr + index).to(tl.int32)


@triton.jit
def offset_at(table_ptr, index, B):
    """Of a part that begins after so many numbers a row."""
    return tl.load(table_ptr + index) * B


# ---- Linear layers


@triton.jit
def accumulate(
    acc, in_ptr, weight_ptr, rows, mask, columns, inputs, outputs, stride, TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, XT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``acc += in[rows, :inputs] @ weight.T`` for the result's ``columns``, of which there are ``outputs``, or
    ``@ weight`` if TRANSPOSED; rows of the weight are ``stride`` apart. XT and DT: what input and weight are rounded to
    as they are loaded."""
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < inputs
        x = tl.load(in_ptr + rows[:, None] * inputs + k[None, :], mask=mask[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & (columns < outputs)[None, :]
        if TRANSPOSED:
            at = k.to(tl.int64)[:, None] * stride + columns[None, :]
        else:
            at = columns.to(tl.int64)[None, :] * stride + k[:, None]
        w = tl.load(weight_ptr + at, mask=there, other=0.0)
        # sums by chunks round less
        acc += product(read(x, XT, CT), read(w, DT, CT), tl.zeros(acc.shape, CT), PRECISION)
    return acc


@triton.jit
def fnn(
    params_ptr, widths_ptr, in_ptr, context_ptr, inputs, context, out_ptr, rows, mask, B, LINEARS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """``[in ; context]`` through an FNN; what its layers make lies one after the other from ``out_ptr`` on. Returns
    where its last layer's is, and what comes after that. Parameters lie as PT and count as DT."""
    width = number_at(widths_ptr, 0)
    weight_ptr = pointer_at(params_ptr, 0, PT)
    for start in range(0, width, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        acc = tl.zeros([rows.shape[0], BLOCK_O], CT)
        acc = accumulate(
            acc, in_ptr, weight_ptr, rows, mask, o, inputs, width, inputs + context, False, BLOCK_K, PRECISION, CT, DT,
            CT,
        )  # fmt: skip
        if context_ptr is not None:
            acc = accumulate(
                acc, context_ptr, weight_ptr + inputs, rows, mask, o, context, width, inputs + context, False, BLOCK_K,
                PRECISION, CT, DT, CT,
            )  # fmt: skip
        finish(acc, pointer_at(params_ptr, 1, PT), out_ptr, rows, mask, o, width, LINEARS > 1, DT, CT)
    tl.debug_barrier()
    last_ptr = out_ptr
    out_ptr += B * width
    if LINEARS > 1:
        for i in range(1, LINEARS):
            before = width
            width = number_at(widths_ptr, i)
            for start in range(0, width, BLOCK_O):
                o = start + tl.arange(0, BLOCK_O)
                acc = accumulate(
                    tl.zeros([rows.shape[0], BLOCK_O], CT), last_ptr, pointer_at(params_ptr, 2 * i, PT), rows, mask, o,
                    before, width, before, False, BLOCK_K, PRECISION, CT, DT, CT,
                )  # fmt: skip
                bias_ptr = pointer_at(params_ptr, 2 * i + 1, PT)
                finish(acc, bias_ptr, out_ptr, rows, mask, o, width, i < LINEARS - 1, DT, CT)
            tl.debug_barrier()
            last_ptr = out_ptr
            out_ptr += B * width
    return last_ptr, out_ptr


@triton.jit
def finish(acc, bias_ptr, out_ptr, rows, mask, o, width, hidden, DT: tl.constexpr, CT: tl.constexpr):
    """Bias, LeakyReLU if it is a hidden layer's, and out."""
    acc += read(tl.load(bias_ptr + o, mask=o < width, other=0.0), DT, CT)[None, :]
    acc = tl.where((acc > 0) | (not hidden), acc, acc * SLOPE)
    tl.store(out_ptr + rows[:, None] * width + o[None, :], acc, mask=mask[:, None] & (o < width)[None, :])


@triton.jit
def through(
    grad_ptr, weight_ptr, to_ptr, hidden_ptr, rows, mask, outputs, columns, stride, ADD: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``to[rows, :columns] = grad[rows, :outputs] @ weight``, added to what is there if ADD; through the LeakyReLU that
    made ``hidden``, if given. ``stride``: inputs of the layer."""
    for start in range(0, columns, BLOCK_O):
        c = start + tl.arange(0, BLOCK_O)
        acc = accumulate(
            tl.zeros([rows.shape[0], BLOCK_O], CT), grad_ptr, weight_ptr, rows, mask, c, outputs, columns, stride,
            True, BLOCK_K, PRECISION, CT, DT, CT,
        )  # fmt: skip
        at = rows[:, None] * columns + c[None, :]
        there = mask[:, None] & (c < columns)[None, :]
        if ADD:
            acc += tl.load(to_ptr + at, mask=there, other=0.0)
        if hidden_ptr is not None:
            acc = tl.where(tl.load(hidden_ptr + at, mask=there, other=0.0) > 0, acc, acc * SLOPE)
        tl.store(to_ptr + at, acc, mask=there)


@triton.jit
def fnn_backward(
    params_ptr, widths_ptr, grads_ptr, saved_ptr, rows, mask, B, LINEARS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """From the gradient of an FNN's last layer, which begins at ``grads_ptr``, to that of its first: each lies before
    the other, as the activations at ``saved_ptr`` do. Returns where the first one's is."""
    if LINEARS > 1:
        for j in range(1, LINEARS):
            i = LINEARS - j
            width = number_at(widths_ptr, i)
            before = number_at(widths_ptr, i - 1)
            to_ptr = grads_ptr - B * before
            saved_ptr -= B * before
            through(
                grads_ptr, pointer_at(params_ptr, 2 * i, PT), to_ptr, saved_ptr, rows, mask, width, before, before,
                False, BLOCK_O, BLOCK_K, PRECISION, DT, CT,
            )  # fmt: skip
            tl.debug_barrier()
            grads_ptr = to_ptr
    return grads_ptr


@triton.jit
def weight_gradient(
    grad_ptr, below_ptr, beside_ptr, dweight_ptr, dbias_ptr, tile, B, outputs, inputs, kept, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Tile ``tile`` of the gradient of a weight ``[outputs, inputs]``, from that of its layer's results; the first
    ``kept`` inputs lie at ``below_ptr``, the others, rounded to DT as they are loaded, at ``beside_ptr``. Programs of
    the first columns have the bias as well. Tiles beyond the last do nothing."""
    across = tl.cdiv(inputs, BLOCK_I)
    if tile < across * tl.cdiv(outputs, BLOCK_O):
        o = tile // across * BLOCK_O + tl.arange(0, BLOCK_O)
        i = tile % across * BLOCK_I + tl.arange(0, BLOCK_I)
        total = tl.zeros([BLOCK_O, BLOCK_I], CT)
        of_bias = tl.zeros([BLOCK_O], CT)
        for start in range(0, B, BLOCK_B):
            row = start + tl.arange(0, BLOCK_B).to(tl.int64)
            there = (row < B)[:, None]
            grad = tl.load(
                grad_ptr + (row * outputs)[:, None] + o[None, :], mask=there & (o < outputs)[None, :], other=0.0
            )
            below = tl.load(below_ptr + (row * kept)[:, None] + i[None, :], mask=there & (i < kept)[None, :], other=0.0)
            beside = tl.load(
                beside_ptr + (row * (inputs - kept))[:, None] + (i - kept)[None, :],
                mask=there & ((i >= kept) & (i < inputs))[None, :], other=0.0,
            )  # fmt: skip
            source = tl.where((i < kept)[None, :], below, read(beside, DT, CT))
            total += product(tl.trans(grad), source, tl.zeros([BLOCK_O, BLOCK_I], CT), PRECISION)
            of_bias += tl.sum(grad, axis=0)
        at = tl.cast(o, tl.int64)[:, None] * inputs + i[None, :]
        total = rounded(total, dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + at, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])
        if tile % across == 0:
            tl.store(dbias_ptr + o, rounded(of_bias, dbias_ptr.dtype.element_ty), mask=o < outputs)


@triton.jit
def sum_of(ptr, count, step, BLOCK: tl.constexpr, CT: tl.constexpr):
    """Of ``count`` numbers that are ``step`` apart, in a fixed order."""
    found = tl.zeros([BLOCK], CT)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += tl.load(ptr + i.to(tl.int64) * step, mask=i < count, other=0.0)
    return tl.sum(found, axis=0)


@triton.jit
def store_sum(to_ptr, total):
    """In the dtype of its place, rounded to nearest."""
    T: tl.constexpr = to_ptr.dtype.element_ty
    if T.primitive_bitwidth == 16:
        total = total.to(tl.float32)
    tl.store(to_ptr, rounded(total, T))


# ---- Routing. Rows are (b, n), the columns of their tiles the M blocks.


@triton.jit
def scores(
    logits_ptr, base, mask, tau, seed, m, n, MODE: tl.constexpr, BLOCK_M: tl.constexpr, CT: tl.constexpr
):  # fmt: skip
    """Raw logits, scores, soft weights and those of the forward ``[rows, BLOCK_M]``, and which of them are there.
    Weights of a row are NaN where torch's softmax is: a NaN or +inf in it, or nothing but -inf."""
    i = tl.arange(0, BLOCK_M)
    offset = base[:, None] + i.to(tl.int64)[None, :] * n
    inside = mask[:, None] & (i < m)[None, :]
    t = tl.load(logits_ptr + offset, mask=inside, other=0.0)
    z = t
    if MODE == GUMBEL:
        z = t - tl.log(-tl.log(uniform(seed, offset, CT)))
    z = tl.where((i < m)[None, :], divide(z, tau), float("-inf"))
    terms = tl.exp(z - tl.max(z, axis=1)[:, None])
    total = tl.sum(terms, axis=1)[:, None]
    soft = divide(terms, total)
    weights = soft
    if MODE != SOFTMAX:
        weights = tl.where(i[None, :] == tl.argmax(z, axis=1)[:, None], 1.0, 0.0).to(CT) + (total - total)
    return t, z, soft, weights, offset, inside


@triton.jit
def split(local, first, count):
    """Row ``first + local // count`` and place in it. Of a program, 32 bits are enough for the division."""
    return first + local // count, local % count


@triton.jit
def mix(
    weights_ptr, values_ptr, add_ptr, out_ptr, first, B, outer, inner, outer_step, inner_step, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``out[b, o] = sum_i weights[b, o, i] values[b, i] (+ add[b, o])`` of BLOCK_B rows b; weights of a row are
    ``outer * inner`` numbers, ``outer_step`` and ``inner_step`` apart."""
    for start in range(0, BLOCK_B * outer, BLOCK_R):
        local = start + tl.arange(0, BLOCK_R)
        b, o = split(local, first, outer)
        mask = (local < BLOCK_B * outer) & (b < B)
        base = b * (outer * inner) + o * outer_step
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            tile = mask[:, None] & (d < D)[None, :]
            acc = tl.zeros([BLOCK_R, BLOCK_D], CT)
            for i in range(inner):
                w = tl.load(weights_ptr + base + i * inner_step, mask=mask, other=0.0)
                v = tl.load(values_ptr + ((b * inner + i) * D)[:, None] + d[None, :], mask=tile, other=0.0).to(CT)
                acc += w[:, None] * v
            at = ((b * outer + o) * D)[:, None] + d[None, :]
            if add_ptr is not None:
                acc += tl.load(add_ptr + at, mask=tile, other=0.0)
            tl.store(out_ptr + at, acc, mask=tile)


@triton.jit
def route(
    logits_ptr, weights_ptr, copy_ptr, first, tau, seed, limit, B, m, n, squares, MODE: tl.constexpr,
    PENALTY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Weights ``[b, m, n]`` from logits, which ``copy_ptr`` receives in its own dtype; adds to the penalty."""
    for start in range(0, BLOCK_B * n, BLOCK_S):
        local = start + tl.arange(0, BLOCK_S)
        b, o = split(local, first, n)
        mask = (local < BLOCK_B * n) & (b < B)
        t, _, _, weights, offset, inside = scores(logits_ptr, b * (m * n) + o, mask, tau, seed, m, n, MODE, BLOCK_M, CT)
        tl.store(copy_ptr + offset, t, mask=inside)
        tl.store(weights_ptr + offset, weights, mask=inside)
        if PENALTY:
            e = excess(t, limit)
            squares += tl.sum(tl.where(inside, e * e, 0.0), axis=1)
    return squares


@triton.jit
def route_backward(
    grad_ptr, x_ptr, logits_ptr, dlogits_ptr, weights_ptr, grad_penalty_ptr, first, tau, seed, limit, B, m, n, dtau,
    D: tl.constexpr, MODE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits, the forward's weights once more, and of tau what this program adds to it."""
    for start in range(0, BLOCK_B * n, BLOCK_R):  # the gradient of the weights, where that of the logits will be
        local = start + tl.arange(0, BLOCK_R)
        b, o = split(local, first, n)
        mask = (local < BLOCK_B * n) & (b < B)
        for i in range(m):
            dw = tl.zeros([BLOCK_R], CT)
            for d0 in range(0, D, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                tile = mask[:, None] & (d < D)[None, :]
                g = tl.load(grad_ptr + ((b * n + o) * D)[:, None] + d[None, :], mask=tile, other=0.0)
                x = tl.load(x_ptr + ((b * m + i) * D)[:, None] + d[None, :], mask=tile, other=0.0).to(CT)
                dw += tl.sum(g * x, axis=1)
            tl.store(dlogits_ptr + b * (m * n) + i * n + o, dw, mask=mask)
    tl.debug_barrier()
    for start in range(0, BLOCK_B * n, BLOCK_S):
        local = start + tl.arange(0, BLOCK_S)
        b, o = split(local, first, n)
        mask = (local < BLOCK_B * n) & (b < B)
        t, z, soft, weights, offset, inside = scores(
            logits_ptr, b * (m * n) + o, mask, tau, seed, m, n, MODE, BLOCK_M, CT
        )
        tl.store(weights_ptr + offset, weights, mask=inside)
        dw = tl.load(dlogits_ptr + offset, mask=inside, other=0.0)
        there = tl.where(inside, z, 0.0)  # -inf beyond the last block
        dz = divide(soft * (dw - tl.sum(soft * dw, axis=1)[:, None]), tau)
        # dz sum to 0 over m, so z may be measured from anywhere; from its own mean a rounding of theirs does not count
        off = dz * (there - tl.sum(soft * there, axis=1)[:, None])
        dtau -= tl.sum(tl.where(inside, off, 0.0), axis=1)
        if grad_penalty_ptr is not None:
            dz += 2 * tl.load(grad_penalty_ptr).to(CT) * excess(t, limit)
        tl.store(dlogits_ptr + offset, dz, mask=inside)
    return dtau


@triton.jit
def routing(extra_ptr, tau_value, MODE: tl.constexpr, TAU: tl.constexpr, CT: tl.constexpr):
    """Temperature and seed of a layer, whose addresses are at ``extra_ptr``: the seed's, if there is noise, first."""
    seed = tl.full([], 0, tl.int64)
    if MODE == GUMBEL:
        seed = key(pointer_at(extra_ptr, 0, tl.int64), 0)
    if TAU is None:
        tau = temperature(None, tau_value, CT)
    else:
        tau = temperature(pointer_at(extra_ptr, MODE == GUMBEL, TAU), tau_value, CT)
    return tau, seed


# ---- Rows


@triton.jit
def copy_rows(from_ptr, to_ptr, rows, mask, size, BLOCK: tl.constexpr, CT: tl.constexpr):
    """Zeros, unless there is something to copy."""
    for start in range(0, size, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = rows[:, None] * size + c[None, :]
        tile = mask[:, None] & (c < size)[None, :]
        values = tl.zeros([rows.shape[0], BLOCK], CT)
        if from_ptr is not None:
            values = tl.load(from_ptr + at, mask=tile, other=0.0).to(CT)
        tl.store(to_ptr + at, rounded(values, to_ptr.dtype.element_ty), mask=tile)


# ---- What a launch is given


class Layer(NamedTuple):
    route: Sequence[Tensor]
    update: Sequence[Tensor]
    tau: Tensor | None
    seed: Tensor | None

    @property
    def params(self) -> list[Tensor]:
        return [*self.route, *self.update]

    @property
    def widths(self) -> list[int]:
        """Of the linear layers."""
        return [bias.shape[-1] for bias in self.params[1::2]]

    @property
    def hidden(self) -> list[int]:
        return [bias.shape[-1] for bias in [*self.route[1:-1:2], *self.update[1:-1:2]]]

    @property
    def nets(self) -> torch.Size:
        """``[copies]`` of the parameters of many nets, else nothing."""
        return self.route[0].shape[:-2]


def layers_of(
    params: Sequence[Tensor], fnn_tensors: int, taus: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Layer]:
    found = []
    for i, at in enumerate(range(0, len(params), 2 * fnn_tensors)):
        cut = at + fnn_tensors
        tau, seed = taus[i] if taus else None, seeds[i] if seeds else None
        found.append(Layer(params[at:cut], params[cut : cut + fnn_tensors], tau, seed))
    return found


def counts_of(x: Tensor, layers: Sequence[Layer]) -> list[int]:
    """Blocks that come in and that come out of every layer: one more than there are layers."""
    counts = [x.shape[-2]]
    for layer in layers:
        counts.append(layer.route[-1].shape[-1] // counts[-1])
    return counts


def fits(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Whether a stack is served by the kernels of smfr.py: the only place that says so. fp64, in which exponentials
    alone take all scalar registers of an AMD GPU, goes by layers."""
    pointers = sum(2 * len(layer.params) + 5 for layer in layers)
    hidden = max((width for layer in layers for width in layer.hidden), default=0)
    small = hidden <= FUSED_HIDDEN and max(counts_of(x, layers)) <= MOST_BLOCKS and pointers <= MOST_POINTERS
    return small and x.dtype != torch.float64


def numbers_of(x: Tensor, layers: Sequence[Layer], context: bool) -> tuple[int, ...]:
    """What the kernels read of sizes: of layers, then of linear ones."""
    d, counts = x.shape[-1], counts_of(x, layers)
    sizes: list[int] = []
    linears: list[int] = []
    before = 0
    for layer, (m, n) in zip(layers, pairwise(counts), strict=True):
        routes = len(layer.route) // 2
        logits = sum(layer.widths[: routes - 1])
        new = sum(layer.widths[:-1]) + n * d
        sizes += [m, n, before, logits, logits + m * n, new, *layer.widths]
        at = 0  # of this linear layer's results among the layer's activations
        for i, width in enumerate(layer.widths):
            if i == routes:
                at += n * d  # the routed blocks
                source, kept = at - n * d, n * d
                inputs = (n + m if context else n) * d
            elif i == 0:
                source, kept, inputs = 0, 0, m * d
            else:
                kept = inputs = layer.widths[i - 1]
                source = at - kept
            linears += [width, inputs, source, kept, before + at]
            at += width
        before += at
    return (*sizes, *linears)


def tile(counts: Sequence[int], d: int) -> dict[str, int]:
    """BLOCK_B: few rows put a batch of 128 on eight multiprocessors; 16 is the least that tl.dot takes."""
    block_m = power(max(counts[:-1]), 2, MOST_BLOCKS)
    rows = triton.next_power_of_2(16 * max(counts))
    return {
        "BLOCK_B": 16, "BLOCK_O": 64, "BLOCK_K": 32, **row_tile(d, tl.float32, rows=rows),
        "BLOCK_M": block_m, "BLOCK_S": min(rows, 1024 // block_m),
    }  # fmt: skip


def kind(x: Tensor) -> int:
    """As other products of fp32; reduced precision is widened to that, as activations are fp32."""
    return precision(x if x.dtype == torch.float32 else x.new_empty(0, dtype=torch.float32))


class Place(NamedTuple):
    """Where a tensor begins, and how many bytes further the next net's does: so many, and so many for each row and
    each of the padded rows. 0: one for all nets."""

    tensor: Tensor
    step: int = 0
    of_row: int = 0
    of_padded_row: int = 0


class Plan(NamedTuple):
    """What forward and backward of a stack have in common."""

    x: Tensor  # [B, M, D] of every net, or one for all of them; contiguous
    shared: bool  # one for all of them
    rounded: Tensor | None  # where the kernel puts each net's x if it is to be read in another dtype
    seeds: list[Place]  # of layers that have one
    taus: list[Place]
    params: list[list[Place]]  # of every layer, contiguous for every net
    counts: list[int]
    copies: int
    batch: int  # rows of a net
    constants: dict[str, Any]

    @property
    def first(self) -> Place:
        """What the first layer reads."""
        if self.rounded is not None:
            return self.of_rows(self.rounded)
        return Place(self.x) if self.shared else self.of_rows(self.x)

    @property
    def programs(self) -> int:
        """Of a net."""
        return triton.cdiv(self.batch, self.constants["BLOCK_B"])

    @property
    def room(self) -> int:
        return max(m * n for m, n in pairwise(self.counts))

    def scratch(self, columns: int) -> Tensor:
        """Numbers of the compute dtype for every row that a program has, there or not."""
        rows = self.copies * self.programs * self.constants["BLOCK_B"]
        return self.x.new_empty(rows * columns, dtype=compute_dtype(self.x))

    def of_rows(self, tensor: Tensor) -> Place:
        """A contiguous tensor of every row of every net."""
        return Place(tensor, of_row=tensor.nbytes // (self.copies * self.batch))

    def of_padded_rows(self, tensor: Tensor) -> Place:
        padded = triton.cdiv(self.batch, BATCH_TILE) * BATCH_TILE
        return Place(tensor, of_padded_row=tensor.nbytes // (self.copies * padded))

    def of_nets(self, tensor: Tensor) -> Place:
        """A contiguous tensor with a part for every net."""
        return Place(tensor, tensor.nbytes // self.copies)

    def arguments(self, places: Sequence[Place]) -> dict[str, Any]:
        """Of a kernel that writes its table from the places of all layers."""
        size = len(places) + len(self.constants["NUMBERS"])
        return {
            "pointers": tuple(place.tensor for place in places),
            "table_ptr": self.x.new_empty(self.copies * self.programs * size, dtype=torch.int64),
            "x_ptr": self.x, "rounded_ptr": self.rounded, "B": self.batch, "DEPTH": len(self.params),
            "ROOM": self.room, "SHARED": self.shared,
            "STEPS": tuple(place[1:] for place in places) if self.copies > 1 else None, **self.constants,
        }  # fmt: skip


def plan(x: Tensor, layers: Sequence[Layer], mode: int, context: bool, low: torch.dtype | None) -> Plan:
    """``low``: what x and parameters count as, None for their own dtype."""
    nets, d, wide = layers[0].nets, x.shape[-1], compute_type(x)
    copies, batch = nets.numel(), x.shape[len(nets) : -2].numel()
    taus = [layer.tau for layer in layers if layer.tau is not None]
    one = taus[0].dtype if taus else None  # of all temperatures: the kernel reads them by one type

    def dense(tensor: Tensor) -> Place:
        found, step = each_contiguous(tensor, copies)
        return Place(found, step * tensor.element_size())

    def number(tensor: Tensor) -> Place:
        return Place(tensor, tensor.stride(0) * tensor.element_size() if tensor.dim() else 0)

    counts = counts_of(x, layers)
    constants = {
        "NUMBERS": numbers_of(x, layers, context), "D": d, "ROUTE": len(layers[0].route) // 2,
        "UPDATE": len(layers[0].update) // 2, "CONTEXT": context, "MODE": mode,
        "TAU": None if one is None else TRITON_TYPES[one], **tile(counts, d), "PRECISION": kind(x),
        "PT": TRITON_TYPES[layers[0].route[0].dtype], "DT": TRITON_TYPES[low or x.dtype], "CT": wide,
    }  # fmt: skip
    blocks, step = each_contiguous(x, copies)
    size = copies * batch, *x.shape[-2:]
    return Plan(
        blocks, copies > 1 and step == 0,
        None if low in (None, x.dtype) else x.new_empty(size, dtype=low),
        [number(layer.seed) for layer in layers if layer.seed is not None], [number(tau.to(one)) for tau in taus],
        [[dense(p) for p in layer.params] for layer in layers], counts, copies, batch, constants,
    )  # fmt: skip
