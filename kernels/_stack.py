"""Device functions of the kernels that take rows through a stack of MFNNRs: see smfr.py.

Pointers into activations and gradients are those of the whole batch; ``rows`` or ``first`` say which part belongs to
this program. Sizes of layers have 32 bits, rows have 64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import GUMBEL, SOFTMAX, divide, excess, key, temperature, uniform
from fastmod.kernels._images import product, read, rounded

from fastmod.ops.mfnnr import BATCH_TILE, LEAKY_SLOPE

SLOPE = tl.constexpr(LEAKY_SLOPE)
#: Activations of a net are padded to a multiple of this many rows.
PADDING = tl.constexpr(BATCH_TILE)


# ---- The table


@triton.jit
def write_table(table_ptr, pointers, net, B, NUMBERS: tl.constexpr, STEPS: tl.constexpr):
    """Pointers, then numbers; visible to all threads of this program. STEPS, None for one net: bytes from one net's
    tensor to the next's, as bytes per net, per row, and per padded row."""
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
    """The net whose rows this program takes, and the first of them; the programs of a net are neighbours."""
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
    """The offset of a part; the table holds it per row."""
    return tl.load(table_ptr + index) * B


# ---- Linear layers


@triton.jit
def accumulate(
    acc, in_ptr, weight_ptr, rows, mask, columns, inputs, outputs, stride, TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, XT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``acc += in[rows, :inputs] @ weight.T``, or ``@ weight`` if TRANSPOSED, for ``columns`` of the result, which has
    ``outputs`` columns; rows of the weight are ``stride`` apart. XT and DT: what input and weight are rounded to when
    they are loaded."""
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
        # summing by chunks rounds less
        acc += product(read(x, XT, CT), read(w, DT, CT), tl.zeros(acc.shape, CT), PRECISION)
    return acc


@triton.jit
def fnn(
    params_ptr, widths_ptr, in_ptr, context_ptr, inputs, context, out_ptr, rows, mask, B, LINEARS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """``[in ; context]`` through an FNN. Stores the results of its layers one after the other from ``out_ptr`` on, and
    returns pointers to the last layer's result and behind it. Parameters are stored as PT and treated as DT."""
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
    """Adds the bias, applies LeakyReLU in a hidden layer, and stores."""
    acc += read(tl.load(bias_ptr + o, mask=o < width, other=0.0), DT, CT)[None, :]
    acc = tl.where((acc > 0) | (not hidden), acc, acc * SLOPE)
    tl.store(out_ptr + rows[:, None] * width + o[None, :], acc, mask=mask[:, None] & (o < width)[None, :])


@triton.jit
def through(
    grad_ptr, weight_ptr, to_ptr, hidden_ptr, rows, mask, outputs, columns, stride, ADD: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``to[rows, :columns] = grad[rows, :outputs] @ weight``, or ``+=`` if ADD; then through the LeakyReLU that made
    ``hidden``, if given. ``stride``: inputs of the layer."""
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
    """From the gradient of an FNN's last layer, at ``grads_ptr``, to that of its first. Gradients are stored in the
    order of the layers, like the activations at ``saved_ptr``. Returns a pointer to that of the first layer."""
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
    """Tile ``tile`` of the gradient of a weight ``[outputs, inputs]``, from that of its layer's results. The first
    ``kept`` inputs are at ``below_ptr``, the others at ``beside_ptr``, rounded to DT when they are loaded. Programs of
    the first columns also compute the bias. Tiles beyond the last do nothing."""
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
    """The sum of ``count`` numbers that are ``step`` apart, in a fixed order."""
    found = tl.zeros([BLOCK], CT)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += tl.load(ptr + i.to(tl.int64) * step, mask=i < count, other=0.0)
    return tl.sum(found, axis=0)


@triton.jit
def store_sum(to_ptr, total):
    """Stores in the dtype of the destination, rounded to nearest."""
    T: tl.constexpr = to_ptr.dtype.element_ty
    if T.primitive_bitwidth == 16:
        total = total.to(tl.float32)
    tl.store(to_ptr, rounded(total, T))


# ---- Routing. Rows are (b, n), the columns of their tiles the M blocks.


@triton.jit
def scores(
    logits_ptr, base, mask, tau, seed, m, n, MODE: tl.constexpr, BLOCK_M: tl.constexpr, CT: tl.constexpr
):  # fmt: skip
    """Raw logits, scores, soft weights and those of the forward ``[rows, BLOCK_M]``, and the mask of those that exist.
    Weights of a row are NaN where torch's softmax is: with a NaN or +inf in it, or with only -inf."""
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
    """Row ``first + local // count`` and the place in it. Within a program 32 bits are enough for the division."""
    return first + local // count, local % count


@triton.jit
def mix(
    weights_ptr, values_ptr, add_ptr, out_ptr, first, B, outer, inner, outer_step, inner_step, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``out[b, o] = sum_i weights[b, o, i] values[b, i] (+ add[b, o])`` for BLOCK_B rows b; a row has ``outer * inner``
    weights, ``outer_step`` and ``inner_step`` apart."""
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
    """The gradient of the logits, the forward's weights again, and this program's share in the gradient of tau."""
    for start in range(0, BLOCK_B * n, BLOCK_R):  # the weights' gradient, which that of the logits then overwrites
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
        # dz sum to 0 over m, so any offset may be subtracted from z: its mean keeps rounding errors of dz out
        off = dz * (there - tl.sum(soft * there, axis=1)[:, None])
        dtau -= tl.sum(tl.where(inside, off, 0.0), axis=1)
        if grad_penalty_ptr is not None:
            dz += 2 * tl.load(grad_penalty_ptr).to(CT) * excess(t, limit)
        tl.store(dlogits_ptr + offset, dz, mask=inside)
    return dtau


@triton.jit
def routing(extra_ptr, tau_value, MODE: tl.constexpr, TAU: tl.constexpr, CT: tl.constexpr):
    """Temperature and seed of a layer, whose addresses are at ``extra_ptr``, the seed's first if there is noise."""
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
    """Writes zeros if there is nothing to copy."""
    for start in range(0, size, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = rows[:, None] * size + c[None, :]
        tile = mask[:, None] & (c < size)[None, :]
        values = tl.zeros([rows.shape[0], BLOCK], CT)
        if from_ptr is not None:
            values = tl.load(from_ptr + at, mask=tile, other=0.0).to(CT)
        tl.store(to_ptr + at, rounded(values, to_ptr.dtype.element_ty), mask=tile)
