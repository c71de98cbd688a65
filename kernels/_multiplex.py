"""Triton kernels of ``multiplex``.

The tiled kernels take whole batch elements: scores ``[b, m, n]`` are computed and normalised once, and a product is a
sum over an axis within each thread. What is too large for a tile is computed by rows ``r = b * N + n`` (the outputs),
with any number of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import (
    GUMBEL,
    SOFTMAX,
    STREAM,
    column_stats,
    divide,
    excess,
    hard_weight,
    key,
    philox,
    scaled_logit,
    soft_weight,
    split_rows,
    temperature,
    uniform,
    uniform_of,
)
from fastmod.kernels._images import is_last, read, rounded
from fastmod.kernels._stack import store_sum, sum_of


@triton.jit
def route_rows(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, start, local, mask, tau, seed, threshold, M, N, D,
    MODE: tl.constexpr, PENALTY: tl.constexpr, BLOCK_D: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Write the outputs of rows ``start + local``; returns each row's share of the penalty over the logits."""
    rows = start + local
    b, n = split_rows(start, local, N)
    base = b * M * N + n
    best, total, index, squares = column_stats(
        logits_ptr, copy_ptr, base, mask, tau, seed, threshold, M, N, MODE, PENALTY, LT, CT
    )
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        acc = tl.zeros([rows.shape[0], BLOCK_D], CT)
        for m in range(M):
            if MODE == SOFTMAX:
                _, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, LT, CT)
                w = soft_weight(z, best, total)
            else:
                w = hard_weight(m, index, total)
            x = tl.load(blocks_ptr + (b * M + m)[:, None] * D + d[None, :], mask=tile, other=0.0)
            acc += w[:, None] * read(x, DT, CT)
        tl.store(out_ptr + rows[:, None] * D + d[None, :], rounded(acc, out_ptr.dtype.element_ty), mask=tile)
    return squares


@triton.jit
def copy_and_program(programs):
    """The index of this program's copy, of so many programs each, and its index within the copy. Both are on grid axis
    0, as the others end at 65535; a grid has fewer than 2**31 programs: 32 bits are enough for the division."""
    pid = tl.program_id(0)
    return (pid // programs).to(tl.int64), (pid % programs).to(tl.int64)


@triton.jit
def routing_of_copy(copy, tau_ptr, seed_ptr, tau_step, seed_step):
    if tau_ptr is not None:
        tau_ptr += copy * tau_step
    if seed_ptr is not None:
        seed_ptr += copy * seed_step
    return tau_ptr, seed_ptr


@triton.jit
def of_copy(copy, blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D):
    """Moves the pointers to this program's copy. Each copy has B batch elements, and its noise is counted from its own
    beginning. ``out_ptr``: the routed blocks or their gradient."""
    tau_ptr, seed_ptr = routing_of_copy(copy, tau_ptr, seed_ptr, tau_step, seed_step)
    batch = copy * B
    return blocks_ptr + batch * M * D, logits_ptr + batch * M * N, out_ptr + batch * N * D, tau_ptr, seed_ptr


@triton.jit
def store_tau(dtau_ptr, parts_ptr, copy, parts, BLOCK: tl.constexpr, CT: tl.constexpr):
    """The gradient of the temperature of a copy: the sum of its parts, 0 if there are none."""
    total = tl.zeros([], CT)
    if parts_ptr is not None:
        total = sum_of(parts_ptr + copy * parts, parts, 1, BLOCK, CT)
    store_sum(dtau_ptr + copy, total)


@triton.jit(do_not_specialize=["programs"])
def forward_kernel(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, programs: tl.int32, tau_step: tl.int64, seed_step: tl.int64, threshold: tl.float64,
    B: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64, MODE: tl.constexpr, PENALTY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_R rows of a copy, and with PENALTY one partial sum per program. DT and LT: what blocks and
    logits are rounded to when they are loaded."""
    copy, pid = copy_and_program(programs)
    blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr = of_copy(
        copy, blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D
    )
    R = B * N
    local = tl.arange(0, BLOCK_R)
    squares = route_rows(
        blocks_ptr, logits_ptr, out_ptr, copy_ptr, pid * BLOCK_R, local, pid * BLOCK_R + local < R,
        temperature(tau_ptr, tau_value, CT), key(seed_ptr, seed_value), tl.full([], threshold, CT), M, N, D,
        MODE, PENALTY, BLOCK_D, LT, DT, CT,
    )  # fmt: skip
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(squares, axis=0))


@triton.jit
def row_dot(
    grad_ptr, blocks_ptr, grad_base, block_base, mask, D, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr
):  # fmt: skip
    """``sum_d grad[row, d] * blocks[row, d]``."""
    acc = tl.zeros(grad_base.shape, CT)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        g = tl.load(grad_ptr + grad_base[:, None] + d[None, :], mask=tile, other=0.0).to(CT)
        x = tl.load(blocks_ptr + block_base[:, None] + d[None, :], mask=tile, other=0.0)
        acc += tl.sum(g * read(x, DT, CT), axis=1)
    return acc


@triton.jit(do_not_specialize=["programs"])
def backward_logits_kernel(
    grad_ptr, blocks_ptr, logits_ptr, dlogits_ptr, weights_ptr, parts_ptr, grad_penalty_ptr, tau_ptr,
    tau_value: tl.float64, seed_ptr, seed_value: tl.int64, programs: tl.int32, tau_step: tl.int64,
    seed_step: tl.int64, threshold: tl.float64, B: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64,
    MODE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits (with that of the penalty, if ``grad_penalty_ptr`` is given), one part of that of tau
    per program, and the weights of the forward ``[B, M, N]`` for the gradient of the blocks.

    dw is computed twice, in the sum over M and after it: that is cheaper than storing it for any M.
    """
    copy, pid = copy_and_program(programs)
    blocks_ptr, logits_ptr, grad_ptr, tau_ptr, seed_ptr = of_copy(
        copy, blocks_ptr, logits_ptr, grad_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D
    )
    R = B * N
    of_logits = copy * B * M * N
    dlogits_ptr += of_logits
    if weights_ptr is not None:
        weights_ptr += of_logits
    rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < R
    tau = temperature(tau_ptr, tau_value, CT)
    seed = key(seed_ptr, seed_value)
    limit = tl.full([], threshold, CT)
    b, n = split_rows(pid * BLOCK_R, tl.arange(0, BLOCK_R), N)
    base = b * M * N + n
    best, total, index, _ = column_stats(logits_ptr, None, base, mask, tau, seed, limit, M, N, MODE, False, LT, CT)
    mean = tl.zeros(rows.shape, CT)
    centre = tl.zeros(rows.shape, CT)
    for m in range(M):
        _, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, LT, CT)
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, DT, CT)
        w = soft_weight(z, best, total)
        mean += w * dw
        centre += w * z
    dtau = tl.zeros(rows.shape, CT)
    for m in range(M):
        t, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, LT, CT)
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, DT, CT)
        w = soft_weight(z, best, total)
        dz = divide(w * (dw - mean), tau)
        # dz sum to 0 over m, so any offset may be subtracted from z: its mean keeps rounding errors of `mean` out
        dtau -= dz * (z - centre)
        if grad_penalty_ptr is not None:
            dz += 2 * tl.load(grad_penalty_ptr).to(CT) * excess(t, limit)
        tl.store(dlogits_ptr + base + m * N, rounded(dz, dlogits_ptr.dtype.element_ty), mask=mask)
        if weights_ptr is not None:
            if MODE != SOFTMAX:
                w = hard_weight(m, index, total)
            tl.store(weights_ptr + base + m * N, w, mask=mask)
    if parts_ptr is not None:
        tl.store(parts_ptr + copy * programs + pid, tl.sum(tl.where(mask, dtau, 0.0), axis=0))


@triton.jit(do_not_specialize=["parts", "copies"])
def backward_blocks_kernel(
    weights_ptr, grad_ptr, add_ptr, dblocks_ptr, dtau_ptr, parts_ptr, parts: tl.int32, copies: tl.int64, R: tl.int64,
    M: tl.int64, N: tl.int64, D: tl.int64, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """``dblocks[b, m] = sum_n weights[b, m, n] * grad[b, n] (+ add[b, m])``; rows ``r = b * M + m``. The gradients of
    the copies' temperatures, if asked for, are made on the way, from parts of the launch before this."""
    if dtau_ptr is not None:
        for copy in range(tl.program_id(0).to(tl.int64), copies, tl.num_programs(0)):
            store_tau(dtau_ptr, parts_ptr, copy, parts, BLOCK_T, CT)
    pid = tl.program_id(0).to(tl.int64)
    rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < R
    b, _ = split_rows(pid * BLOCK_R, tl.arange(0, BLOCK_R), M)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        out = rows[:, None] * D + d[None, :]
        acc = tl.zeros([BLOCK_R, BLOCK_D], CT)
        for n in range(N):
            w = tl.load(weights_ptr + rows * N + n, mask=mask, other=0.0).to(CT)
            g = tl.load(grad_ptr + (b * N + n)[:, None] * D + d[None, :], mask=tile, other=0.0).to(CT)
            acc += w[:, None] * g
        if add_ptr is not None:
            acc += tl.load(add_ptr + out, mask=tile, other=0.0).to(CT)
        tl.store(dblocks_ptr + out, rounded(acc, dblocks_ptr.dtype.element_ty), mask=tile)


@triton.jit
def tile_scores(
    logits_ptr, begin, first, lines, n, inside, tau, seed, N,
    MODE: tl.constexpr, QUADS: tl.constexpr, BLOCK_N: tl.constexpr, LT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Raw logits t and z = (t + noise) / tau, ``[b, m, n]``: rows ``lines [b, m, 1]`` from element ``begin`` on, with a
    copy's noise from ``first`` on."""
    offsets = lines * N + n
    t = read(tl.load(logits_ptr + begin + offsets, mask=inside, other=0.0), LT, CT)
    z = t
    if MODE == GUMBEL:
        if QUADS:  # rows begin at multiples of four: one call draws four numbers
            quad = tl.arange(0, BLOCK_N // 4)[None, None, :]
            c0, c1, c2, c3 = philox(seed, (first >> 2) + (lines * (N // 4) + quad), STREAM)
            u = uniform_of(tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3)), CT)
        else:
            u = uniform(seed, first + offsets, CT)
        z = t - tl.log(-tl.log(u))
    return t, divide(z, tau)


@triton.jit
def tile(
    logits_ptr, tau_ptr, tau_value, seed_ptr, seed_value, programs, tau_step, seed_step, B, M, N, MODE: tl.constexpr,
    COPIES: tl.constexpr, QUADS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """For this program: its copy and index, its first batch element, the indices ``b``, ``m`` and ``n`` in its tile,
    masks of the elements, blocks and logits that exist, the temperature, raw logits and scores."""
    copy, pid = tl.full([], 0, tl.int64), tl.program_id(0).to(tl.int64)
    if COPIES:
        copy, pid = copy_and_program(programs)
        tau_ptr, seed_ptr = routing_of_copy(copy, tau_ptr, seed_ptr, tau_step, seed_step)
    first = pid * BLOCK_B
    begin = first
    if COPIES:
        begin += copy * B
    b = tl.arange(0, BLOCK_B)[:, None, None]
    m = tl.arange(0, BLOCK_M)[None, :, None]
    n = tl.arange(0, BLOCK_N)[None, None, :]
    there = first + b < B
    exists = m < M
    tau = temperature(tau_ptr, tau_value, CT)
    inside = there & exists & (n < N)
    t, z = tile_scores(
        logits_ptr, begin * M * N, first * M * N, b * M + m, n, inside, tau, key(seed_ptr, seed_value), N, MODE, QUADS,
        BLOCK_N, LT, CT,
    )  # fmt: skip
    return copy, pid, begin, b, m, n, there, exists, inside, tau, t, z


@triton.jit
def tile_softmax(z, exists):
    """Soft weights over axis 1 and their sums, which are NaN where torch.softmax is; ``exists``: which m exist."""
    z = tl.where(exists, z, float("-inf"))
    e = tl.exp(z - tl.max(z, axis=1, keep_dims=True))
    total = tl.sum(e, axis=1, keep_dims=True)
    return divide(e, total), total


@triton.jit
def tile_forward_weights(z, w, total, m, exists, MODE: tl.constexpr):
    """The weights of the forward from the soft ones."""
    if MODE != SOFTMAX:
        chosen = tl.argmax(tl.where(exists, z, float("-inf")), axis=1, keep_dims=True)
        w = hard_weight(m, chosen, total)
    return w


@triton.jit(do_not_specialize=["programs"])
def tiled_forward_kernel(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, programs: tl.int32, tau_step: tl.int64, seed_step: tl.int64, threshold: tl.float64,
    B: tl.int64, M: tl.int32, N: tl.int32, D: tl.int32, MODE: tl.constexpr, PENALTY: tl.constexpr,
    COPIES: tl.constexpr, QUADS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_B batch elements of a copy, and with PENALTY one partial sum per program."""
    _, pid, begin, b, m, n, there, exists, inside, tau, t, z = tile(
        logits_ptr, tau_ptr, tau_value, seed_ptr, seed_value, programs, tau_step, seed_step, B, M, N, MODE, COPIES,
        QUADS, BLOCK_B, BLOCK_M, BLOCK_N, LT, CT,
    )  # fmt: skip
    if copy_ptr is not None:
        tl.store(copy_ptr + begin * M * N + ((b * M + m) * N + n), t, mask=inside)
    if PENALTY:
        over = tl.where(inside, excess(t, tl.full([], threshold, CT)), 0.0)
        squares = tl.sum(tl.sum(tl.sum(over * over, axis=2), axis=1), axis=0)
        tl.store(partials_ptr + pid, squares)
    w, total = tile_softmax(z, exists)
    w = tile_forward_weights(z, w, total, m, exists, MODE)
    outputs = tl.arange(0, BLOCK_N)[None, :, None]
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, None, :]
        x = tl.load(
            blocks_ptr + begin * M * D + ((b * M + m) * D + d), mask=there & exists & (d < D), other=0.0
        )  # fmt: skip
        mixed = tl.sum(w[:, :, :, None] * read(x, DT, CT)[:, :, None, :], axis=1)  # [b, n, d]
        tl.store(
            out_ptr + begin * N * D + ((b * N + outputs) * D + d), rounded(mixed, out_ptr.dtype.element_ty),
            mask=there & (outputs < N) & (d < D),
        )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def tiled_backward_kernel(
    grad_ptr, blocks_ptr, logits_ptr, dblocks_ptr, dlogits_ptr, dtau_ptr, parts_ptr, tickets_ptr, tau_ptr,
    tau_value: tl.float64, seed_ptr, seed_value: tl.int64, programs: tl.int32, tau_step: tl.int64,
    seed_step: tl.int64, B: tl.int64, M: tl.int32, N: tl.int32, D: tl.int32, MODE: tl.constexpr,
    COPIES: tl.constexpr, QUADS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, LT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradients of blocks and logits of BLOCK_B batch elements of a copy, and, by the last program of a copy, of
    its temperature."""
    copy, pid, begin, b, m, n, there, exists, inside, tau, _, z = tile(
        logits_ptr, tau_ptr, tau_value, seed_ptr, seed_value, programs, tau_step, seed_step, B, M, N, MODE, COPIES,
        QUADS, BLOCK_B, BLOCK_M, BLOCK_N, LT, CT,
    )  # fmt: skip
    w, total = tile_softmax(z, exists)

    last_m = tl.arange(0, BLOCK_M)[None, None, :]
    dw = tl.zeros([BLOCK_B, BLOCK_M, BLOCK_N], CT)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :, None]
        x = tl.load(
            blocks_ptr + begin * M * D + ((b * M + last_m) * D + d), mask=there & (last_m < M) & (d < D), other=0.0
        )  # fmt: skip
        g = tl.load(
            grad_ptr + begin * N * D + ((b * N + n) * D + d), mask=there & (n < N) & (d < D), other=0.0
        ).to(CT)  # fmt: skip
        dw += tl.sum(read(x, DT, CT)[:, :, :, None] * g[:, :, None, :], axis=1)  # [b, m, n]
    dw = tl.where(exists, dw, 0.0)  # 0 * inf is not

    dz = divide(w * (dw - tl.sum(w * dw, axis=1, keep_dims=True)), tau)
    of_logits = rounded(dz, dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + begin * M * N + ((b * M + m) * N + n), of_logits, mask=inside)
    if parts_ptr is not None:
        # dz sum to 0 over m, so any offset may be subtracted from z: its mean keeps rounding errors of dz out
        z_known = tl.where(exists, z, 0.0)
        terms = dz * (z_known - tl.sum(w * z_known, axis=1, keep_dims=True))
        terms = tl.sum(tl.sum(tl.sum(tl.where(inside, terms, 0.0), axis=2), axis=1), axis=0)
        tl.store(parts_ptr + copy * programs + pid, -terms)

    w = tl.permute(tile_forward_weights(z, w, total, m, exists, MODE), (0, 2, 1))  # [b, n, m]
    outputs = tl.arange(0, BLOCK_N)[None, :, None]
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, None, :]
        g = tl.load(
            grad_ptr + begin * N * D + ((b * N + outputs) * D + d), mask=there & (outputs < N) & (d < D), other=0.0
        ).to(CT)  # fmt: skip
        spread = tl.sum(w[:, :, :, None] * g[:, :, None, :], axis=1)  # [b, m, d]
        tl.store(
            dblocks_ptr + begin * M * D + ((b * M + m) * D + d), rounded(spread, dblocks_ptr.dtype.element_ty),
            mask=there & exists & (d < D),
        )  # fmt: skip
    # At the end, where few registers are in use.
    last = pid == 0
    if parts_ptr is not None:
        last = is_last(tickets_ptr + copy, programs)
    if last:
        store_tau(dtau_ptr, parts_ptr, copy, programs, BLOCK_T, CT)
