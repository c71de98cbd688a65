"""Triton kernels and launchers of ``multiplex``.

The tiled kernels take whole batch elements: scores ``[b, m, n]`` are computed and normalised once, and a product is a
sum over an axis that no thread shares. What is too large for a tile goes by rows ``r = b * N + n``, the outputs, with
any number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    GUMBEL,
    OPTIONS,
    SOFTMAX,
    STREAM,
    TRITON_TYPES,
    column_stats,
    compute_type,
    divide,
    excess,
    guard,
    hard_weight,
    key,
    philox,
    routing_args,
    row_tile,
    scaled_logit,
    soft_weight,
    split_rows,
    temperature,
    uniform,
    uniform_of,
)
from fastmod.kernels._images import read
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.multiplex import MODES, copies_of


@triton.jit
def route_rows(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, start, local, mask, tau, seed, threshold, M, N, D,
    MODE: tl.constexpr, PENALTY: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Write the outputs of rows ``start + local``; returns each row's share of the penalty over the logits."""
    rows = start + local
    b, n = split_rows(start, local, N)
    base = b * M * N + n
    best, total, index, squares = column_stats(
        logits_ptr, copy_ptr, base, mask, tau, seed, threshold, M, N, MODE, PENALTY, CT
    )
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        acc = tl.zeros([rows.shape[0], BLOCK_D], CT)
        for m in range(M):
            if MODE == SOFTMAX:
                _, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, CT)
                w = soft_weight(z, best, total)
            else:
                w = hard_weight(m, index, total)
            x = tl.load(blocks_ptr + (b * M + m)[:, None] * D + d[None, :], mask=tile, other=0.0)
            acc += w[:, None] * read(x, DT, CT)
        tl.store(out_ptr + rows[:, None] * D + d[None, :], acc, mask=tile)
    return squares


@triton.jit
def routing_of_copy(tau_ptr, seed_ptr, tau_step, seed_step):
    copy = tl.program_id(1).to(tl.int64)
    if tau_ptr is not None:
        tau_ptr += copy * tau_step
    if seed_ptr is not None:
        seed_ptr += copy * seed_step
    return tau_ptr, seed_ptr


@triton.jit
def of_copy(blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D):
    """Where the tensors of this program's copy begin, which is grid axis 1: each has B batch elements, and noise that
    is counted from its own beginning. ``out_ptr``: the routed blocks or their gradient."""
    tau_ptr, seed_ptr = routing_of_copy(tau_ptr, seed_ptr, tau_step, seed_step)
    batch = tl.program_id(1).to(tl.int64) * B
    return blocks_ptr + batch * M * D, logits_ptr + batch * M * N, out_ptr + batch * N * D, tau_ptr, seed_ptr


@triton.jit
def forward_kernel(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, tau_step: tl.int64, seed_step: tl.int64, threshold: tl.float64, B: tl.int64, M: tl.int64,
    N: tl.int64, D: tl.int64, MODE: tl.constexpr, PENALTY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_R rows of a copy, and with PENALTY one partial sum per program. DT: what blocks are rounded to
    as they are loaded."""
    blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr = of_copy(
        blocks_ptr, logits_ptr, out_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D
    )
    R = B * N
    pid = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_R)
    squares = route_rows(
        blocks_ptr, logits_ptr, out_ptr, copy_ptr, pid * BLOCK_R, local, pid * BLOCK_R + local < R,
        temperature(tau_ptr, tau_value, CT), key(seed_ptr, seed_value), tl.full([], threshold, CT), M, N, D,
        MODE, PENALTY, BLOCK_D, DT, CT,
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


@triton.jit
def backward_logits_kernel(
    grad_ptr, blocks_ptr, logits_ptr, dlogits_ptr, weights_ptr, dtau_ptr, grad_penalty_ptr, tau_ptr,
    tau_value: tl.float64, seed_ptr, seed_value: tl.int64, tau_step: tl.int64, seed_step: tl.int64,
    threshold: tl.float64, B: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64,
    MODE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits (with that of the penalty, if ``grad_penalty_ptr`` is given), one partial of d_tau per
    program, and the weights of the forward ``[B, M, N]`` for the gradient of the blocks.

    dw is computed twice, in the sum over M and after it: cheaper than keeping it for any M.
    """
    blocks_ptr, logits_ptr, grad_ptr, tau_ptr, seed_ptr = of_copy(
        blocks_ptr, logits_ptr, grad_ptr, tau_ptr, seed_ptr, tau_step, seed_step, B, M, N, D
    )
    R = B * N
    of_logits = tl.program_id(1).to(tl.int64) * B * M * N
    dlogits_ptr += of_logits
    if weights_ptr is not None:
        weights_ptr += of_logits
    pid = tl.program_id(0).to(tl.int64)
    rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < R
    tau = temperature(tau_ptr, tau_value, CT)
    seed = key(seed_ptr, seed_value)
    limit = tl.full([], threshold, CT)
    b, n = split_rows(pid * BLOCK_R, tl.arange(0, BLOCK_R), N)
    base = b * M * N + n
    best, total, index, _ = column_stats(logits_ptr, None, base, mask, tau, seed, limit, M, N, MODE, False, CT)
    mean = tl.zeros(rows.shape, CT)
    centre = tl.zeros(rows.shape, CT)
    for m in range(M):
        _, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, CT)
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, DT, CT)
        w = soft_weight(z, best, total)
        mean += w * dw
        centre += w * z
    dtau = tl.zeros(rows.shape, CT)
    for m in range(M):
        t, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, CT)
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, DT, CT)
        w = soft_weight(z, best, total)
        dz = divide(w * (dw - mean), tau)
        # dz sum to 0 over m, so z may be measured from anywhere; from its own mean a rounding of `mean` does not count
        dtau -= dz * (z - centre)
        if grad_penalty_ptr is not None:
            dz += 2 * tl.load(grad_penalty_ptr).to(CT) * excess(t, limit)
        tl.store(dlogits_ptr + base + m * N, dz, mask=mask)
        if weights_ptr is not None:
            if MODE != SOFTMAX:
                w = hard_weight(m, index, total)
            tl.store(weights_ptr + base + m * N, w, mask=mask)
    if dtau_ptr is not None:
        tl.store(dtau_ptr + tl.program_id(1) * tl.num_programs(0) + pid, tl.sum(tl.where(mask, dtau, 0.0), axis=0))


@triton.jit
def backward_blocks_kernel(
    weights_ptr, grad_ptr, add_ptr, dblocks_ptr, R: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``dblocks[b, m] = sum_n weights[b, m, n] * grad[b, n] (+ add[b, m])``; rows ``r = b * M + m``."""
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
        tl.store(dblocks_ptr + out, acc, mask=tile)


@triton.jit
def tile_scores(
    logits_ptr, begin, first, lines, n, inside, tau, seed, N,
    MODE: tl.constexpr, QUADS: tl.constexpr, BLOCK_N: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Raw logits t and z = (t + noise) / tau, ``[b, m, n]``: rows ``lines [b, m, 1]`` from element ``begin`` on, of a
    copy's noise from ``first`` on."""
    offsets = lines * N + n
    t = tl.load(logits_ptr + begin + offsets, mask=inside, other=0.0).to(CT)
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
def tile_softmax(z, exists):
    """Soft weights over axis 1 and their sums, which are NaN where torch.softmax is; ``exists``: which m there are."""
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


@triton.jit
def tiled_forward_kernel(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, tau_step: tl.int64, seed_step: tl.int64, threshold: tl.float64, B: tl.int64, M: tl.int32,
    N: tl.int32, D: tl.int32, MODE: tl.constexpr, PENALTY: tl.constexpr, COPIES: tl.constexpr, QUADS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_B batch elements of a copy, and with PENALTY one partial sum per program."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_B
    begin = first
    if COPIES:
        tau_ptr, seed_ptr = routing_of_copy(tau_ptr, seed_ptr, tau_step, seed_step)
        begin += tl.program_id(1).to(tl.int64) * B
    b = tl.arange(0, BLOCK_B)[:, None, None]
    m = tl.arange(0, BLOCK_M)[None, :, None]
    n = tl.arange(0, BLOCK_N)[None, None, :]
    there = first + b < B
    exists = m < M
    tau = temperature(tau_ptr, tau_value, CT)
    inside = there & exists & (n < N)
    t, z = tile_scores(
        logits_ptr, begin * M * N, first * M * N, b * M + m, n, inside, tau, key(seed_ptr, seed_value), N, MODE, QUADS,
        BLOCK_N, CT,
    )  # fmt: skip
    if copy_ptr is not None:
        tl.store(copy_ptr + begin * M * N + ((b * M + m) * N + n), t, mask=inside)
    if PENALTY:
        over = tl.where(inside, excess(t, tl.full([], threshold, CT)), 0.0)
        squares = tl.sum(tl.sum(tl.sum(over * over, axis=2), axis=1), axis=0)
        tl.store(partials_ptr + tl.program_id(0), squares)
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
            out_ptr + begin * N * D + ((b * N + outputs) * D + d), mixed, mask=there & (outputs < N) & (d < D)
        )  # fmt: skip


@triton.jit
def tiled_backward_kernel(
    grad_ptr, blocks_ptr, logits_ptr, dblocks_ptr, dlogits_ptr, dtau_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, tau_step: tl.int64, seed_step: tl.int64, B: tl.int64, M: tl.int32, N: tl.int32,
    D: tl.int32, MODE: tl.constexpr, COPIES: tl.constexpr, QUADS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Gradients of blocks and logits of BLOCK_B batch elements of a copy, and of tau one partial per program."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_B
    begin = first
    if COPIES:
        tau_ptr, seed_ptr = routing_of_copy(tau_ptr, seed_ptr, tau_step, seed_step)
        begin += tl.program_id(1).to(tl.int64) * B
    b = tl.arange(0, BLOCK_B)[:, None, None]
    m = tl.arange(0, BLOCK_M)[None, :, None]
    n = tl.arange(0, BLOCK_N)[None, None, :]
    there = first + b < B
    exists = m < M
    tau = temperature(tau_ptr, tau_value, CT)
    inside = there & exists & (n < N)
    _, z = tile_scores(
        logits_ptr, begin * M * N, first * M * N, b * M + m, n, inside, tau, key(seed_ptr, seed_value), N, MODE, QUADS,
        BLOCK_N, CT,
    )  # fmt: skip
    w, total = tile_softmax(z, exists)

    last_m = tl.arange(0, BLOCK_M)[None, None, :]
    dw = tl.zeros([BLOCK_B, BLOCK_M, BLOCK_N], CT)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :, None]
        x = tl.load(
            blocks_ptr + begin * M * D + ((b * M + last_m) * D + d), mask=there & (last_m < M) & (d < D), other=0.0
        ).to(CT)  # fmt: skip
        g = tl.load(
            grad_ptr + begin * N * D + ((b * N + n) * D + d), mask=there & (n < N) & (d < D), other=0.0
        ).to(CT)  # fmt: skip
        dw += tl.sum(x[:, :, :, None] * g[:, :, None, :], axis=1)  # [b, m, n]
    dw = tl.where(exists, dw, 0.0)  # 0 * inf is not

    dz = divide(w * (dw - tl.sum(w * dw, axis=1, keep_dims=True)), tau)
    tl.store(dlogits_ptr + begin * M * N + ((b * M + m) * N + n), dz, mask=inside)
    if dtau_ptr is not None:
        # dz sum to 0 over m, so z may be measured from anywhere: from its own mean a rounding of theirs does not count
        z_known = tl.where(exists, z, 0.0)
        terms = dz * (z_known - tl.sum(w * z_known, axis=1, keep_dims=True))
        terms = tl.sum(tl.sum(tl.sum(tl.where(inside, terms, 0.0), axis=2), axis=1), axis=0)
        if COPIES:
            dtau_ptr += tl.program_id(1) * tl.num_programs(0)
        tl.store(dtau_ptr + tl.program_id(0), -terms)

    w = tl.permute(tile_forward_weights(z, w, total, m, exists, MODE), (0, 2, 1))  # [b, n, m]
    outputs = tl.arange(0, BLOCK_N)[None, :, None]
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, None, :]
        g = tl.load(
            grad_ptr + begin * N * D + ((b * N + outputs) * D + d), mask=there & (outputs < N) & (d < D), other=0.0
        ).to(CT)  # fmt: skip
        spread = tl.sum(w[:, :, :, None] * g[:, :, None, :], axis=1)  # [b, m, d]
        tl.store(
            dblocks_ptr + begin * M * D + ((b * M + m) * D + d), spread, mask=there & exists & (d < D)
        )  # fmt: skip


#: Numbers of a product ``[b, m, n, d]`` for each warp, by the compute dtype: more spill registers.
WARP_TILE = {tl.float32: 4096, tl.float64: 2048}
#: Of a batch element, in a tile, where there are several copies.
COPIED_WEIGHTS = 256


def tile_of(batch: int, m: int, n: int, d: int, wide: tl.dtype, copies: int = 1) -> dict[str, Any] | None:
    """Sizes and warps of a tile, or None where the weights of one batch element are too many for one; of several copies
    fewer, as where they begin takes registers as well."""
    block_m, block_n = triton.next_power_of_2(m), triton.next_power_of_2(max(n, 4))
    block_d = min(triton.next_power_of_2(d), 32)  # a line
    room = WARP_TILE[wide]
    while block_m * block_n * block_d > 4 * room and block_d > 8:
        block_d //= 2
    size = block_m * block_n * block_d
    if size > 4 * room or max(m, n) * d >= 2**20:  # offsets in a tile have 32 bits
        return None
    if copies > 1 and block_m * block_n > COPIED_WEIGHTS:
        return None
    block_b = max(1, min(room // (2 * size), triton.next_power_of_2(max(batch // 64, 1))))
    return {
        "COPIES": copies > 1, "QUADS": n % 4 == 0, "BLOCK_B": block_b, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_D": block_d, **OPTIONS, "num_warps": max(1, size // room),
    }  # fmt: skip


def steps(tau: Tensor | None, seed: Tensor | None) -> dict[str, int]:
    """From copy to copy; 0 where they share one."""
    return {"tau_step": _step(tau), "seed_step": _step(seed)}


def _step(tensor: Tensor | None) -> int:
    return tensor.stride(0) if tensor is not None and tensor.dim() else 0


def launch_forward(
    blocks: Tensor,
    logits: Tensor,
    out: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    *,
    copy: Tensor | None = None,
    threshold: float = 0.0,
    penalty: bool = False,
    more: int = 0,
    copies: int = 1,
    dtype: tl.dtype | None = None,
) -> Tensor | None:
    """``out [B, N, D]`` from contiguous ``blocks [B, M, D]``, ``logits [B, M, N]``; returns the penalty's partials,
    with room for ``more`` of them. ``dtype``: what the blocks count as, if not their own."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile, rows = tile_of(batch, m, n, d, wide, copies), row_tile(d, wide)
    programs = triton.cdiv(batch * n, rows["BLOCK_R"]) if tile is None else triton.cdiv(batch, tile["BLOCK_B"])
    partials = blocks.new_empty(programs + more, dtype=compute_dtype(blocks)) if penalty else None
    arguments = {
        "blocks_ptr": blocks, "logits_ptr": logits, "out_ptr": out, "copy_ptr": copy, "partials_ptr": partials,
        "threshold": threshold, "B": batch, "M": m, "N": n, "D": d, "PENALTY": penalty,
        "DT": dtype or TRITON_TYPES[blocks.dtype], "CT": wide,
        **routing_args(tau, tau_value, seed, mode), **steps(tau, seed),
    }  # fmt: skip
    with guard(blocks):
        if tile is None:
            forward_kernel[(programs, copies)](**rows, **arguments, **OPTIONS)
        else:
            tiled_forward_kernel[(programs, copies)](**tile, **arguments)
    return partials


def launch_backward_logits(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    *,
    grad_penalty: Tensor | None = None,
    threshold: float = 0.0,
    need_weights: bool = True,
    copies: int = 1,
    dtype: tl.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of the logits ``[B, M, N]``, the weights ``[B, M, N]`` in the compute dtype, parts of the gradient of
    tau."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile = row_tile(d, wide)
    programs = triton.cdiv(batch * n, tile["BLOCK_R"])
    dlogits = torch.empty_like(logits)
    weights = torch.empty_like(logits, dtype=compute_dtype(blocks)) if need_weights else None
    partials = blocks.new_empty((copies, programs), dtype=compute_dtype(blocks)) if tau is not None else None
    with guard(blocks):
        backward_logits_kernel[(programs, copies)](
            grad_ptr=grad, blocks_ptr=blocks, logits_ptr=logits, dlogits_ptr=dlogits, weights_ptr=weights,
            dtau_ptr=partials, grad_penalty_ptr=grad_penalty, threshold=threshold, B=batch, M=m, N=n, D=d,
            DT=dtype or TRITON_TYPES[blocks.dtype], CT=wide, **routing_args(tau, tau_value, seed, mode),
            **steps(tau, seed), **tile, **OPTIONS,
        )  # fmt: skip
    return dlogits, weights, partials


def launch_backward_blocks(weights: Tensor, grad: Tensor, add: Tensor | None, dblocks: Tensor) -> None:
    """Write ``dblocks [B, M, D]`` from ``weights [B, M, N]``, ``grad [B, N, D]`` and ``add [B, M, D]`` or None."""
    batch, m, n = weights.shape
    d = grad.shape[-1]
    wide = compute_type(weights)
    tile = row_tile(d, wide)
    rows = batch * m
    with guard(grad):
        backward_blocks_kernel[(triton.cdiv(rows, tile["BLOCK_R"]),)](
            weights_ptr=weights, grad_ptr=grad, add_ptr=add, dblocks_ptr=dblocks, R=rows, M=m, N=n, D=d, CT=wide,
            **tile, **OPTIONS,
        )  # fmt: skip


def launch_tiled_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    dblocks: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    tile: dict[str, Any],
    copies: int,
) -> tuple[Tensor, Tensor | None]:
    """Write ``dblocks [B, M, D]``; the gradient of the logits ``[B, M, N]`` and parts ``[copies, programs]`` of that of
    tau, which take a launch more to be added up: in Triton no program knows that it is the last."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    programs = triton.cdiv(batch, tile["BLOCK_B"])
    wide = compute_dtype(blocks)
    dlogits = torch.empty_like(logits)
    partials = blocks.new_empty((copies, programs), dtype=wide) if tau is not None else None
    with guard(blocks):
        tiled_backward_kernel[(programs, copies)](
            grad_ptr=grad, blocks_ptr=blocks, logits_ptr=logits, dblocks_ptr=dblocks, dlogits_ptr=dlogits,
            dtau_ptr=partials, B=batch, M=m, N=logits.shape[-1], D=d, CT=compute_type(blocks),
            **routing_args(tau, tau_value, seed, mode), **steps(tau, seed), **tile,
        )  # fmt: skip
    return dlogits, partials


def zero_tau(like: Tensor, copies: Sequence[int] = ()) -> Tensor:
    """The gradient of a tau that got none: 0-d or one a copy, compute dtype."""
    return torch.zeros(tuple(copies), dtype=compute_dtype(like), device=like.device)


def multiplex_forward(
    blocks: Tensor, logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int
) -> Tensor:
    """blocks ``[..., M, D]``, logits ``[..., M, N]`` -> ``[..., N, D]``; of many copies one launch."""
    out = torch.empty(
        (*blocks.shape[:-2], logits.shape[-1], blocks.shape[-1]), dtype=blocks.dtype, device=blocks.device
    )
    if out.numel() == 0:
        return out
    many = copies_of(tau, seed).numel()
    launch_forward(flat(blocks), flat(logits), out, tau, tau_value, seed, mode, copies=many)
    return out


def multiplex_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad ``[..., N, D]`` -> gradients of blocks, logits and tau (0-d or one a copy, compute dtype; zero without a tau
    tensor)."""
    copies = copies_of(tau, seed)
    if grad.numel() == 0 or blocks.shape[-2] == 0:
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (blocks, logits)]
        return zeros[0], zeros[1], zero_tau(blocks, copies)
    g, x, own = flat(grad), flat(blocks), flat(logits)
    dblocks = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    batch, m, d = x.shape
    many = copies.numel()
    routing = tau, tau_value, seed, mode
    tile = tile_of(batch // many, m, own.shape[-1], d, compute_type(x), many)
    if tile is not None:
        dlogits, partials = launch_tiled_backward(g, x, own, dblocks, *routing, tile, many)
    else:
        dlogits, weights, partials = launch_backward_logits(g, x, own, *routing, copies=many)
        assert weights is not None
        launch_backward_blocks(weights, g, None, dblocks)
    dtau = zero_tau(blocks, copies) if partials is None else partials.sum(1).view(copies)
    return dblocks, dlogits.view(logits.shape), dtau


def flat(tensor: Tensor) -> Tensor:
    """``[..., K, D]`` -> contiguous ``[B, K, D]``."""
    return tensor.contiguous().view(tensor.shape[:-2].numel(), *tensor.shape[-2:])


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Tiles of the papers' shapes, of which one copies logits and adds the penalty as an MFNNR does and one is of many
    copies, and rows of the largest."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    tiled = [(8, 8, 10, "gumbel"), (16, 16, 32, "softmax"), (5, 4, 196, "argmax"), (30, 30, 7, "gumbel")]
    for m, n, d, mode in tiled:
        inside = mode == "gumbel"
        routing = {
            "tau_ptr": w if inside else None, "seed_ptr": "*i64" if inside else None, "MODE": MODES[mode],
            "CT": dtype.compute,
        }  # fmt: skip
        tile = tile_of(4096, m, n, d, dtype.compute, 8 if m == 16 else 1)
        assert tile is not None
        options = {name: tile.pop(name) for name in OPTIONS}
        forward = {
            "blocks_ptr": p, "logits_ptr": p, "out_ptr": p, "copy_ptr": p if inside else None,
            "partials_ptr": w if inside else None, "PENALTY": inside, "DT": dtype.element, **routing, **tile,
        }  # fmt: skip
        backward = {
            "grad_ptr": p, "blocks_ptr": p, "logits_ptr": p, "dblocks_ptr": p, "dlogits_ptr": p,
            "dtau_ptr": w if inside else None, **routing, **tile,
        }  # fmt: skip
        found.append(Specialisation(tiled_forward_kernel, forward, options, f"M{m}-N{n}-D{d}"))
        found.append(Specialisation(tiled_backward_kernel, backward, options, f"M{m}-N{n}-D{d}"))
    for d in (32, 1000):
        inside = d == 1000
        routing = {
            "tau_ptr": "*fp32" if inside else None, "seed_ptr": "*i64" if inside else None,
            "MODE": MODES["gumbel" if inside else "softmax"],
        }  # fmt: skip
        shared = {**row_tile(d, dtype.compute), "DT": dtype.element, "CT": dtype.compute, **routing}
        forward = {
            "blocks_ptr": p, "logits_ptr": p, "out_ptr": p, "copy_ptr": p if inside else None,
            "partials_ptr": w if inside else None, "PENALTY": inside, **shared,
        }  # fmt: skip
        backward = {
            "grad_ptr": p, "blocks_ptr": p, "logits_ptr": p, "dlogits_ptr": p, "weights_ptr": w,
            "dtau_ptr": w if inside else None, "grad_penalty_ptr": w if inside else None, **shared,
        }  # fmt: skip
        found.append(Specialisation(forward_kernel, forward, OPTIONS, f"D{d}"))
        found.append(Specialisation(backward_logits_kernel, backward, OPTIONS, f"D{d}"))
    for d in (10, 196):
        blocks = {
            "weights_ptr": w, "grad_ptr": p, "add_ptr": w if d == 196 else None, "dblocks_ptr": p,
            **row_tile(d, dtype.compute), "CT": dtype.compute,
        }  # fmt: skip
        found.append(Specialisation(backward_blocks_kernel, blocks, OPTIONS, f"D{d}"))
    return found
