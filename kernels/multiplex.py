"""Triton kernels and launchers of ``multiplex``: rows ``r = b * N + n`` are the outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    OPTIONS,
    SOFTMAX,
    column_stats,
    compute_type,
    divide,
    excess,
    guard,
    hard_weight,
    key,
    routing_args,
    row_tile,
    scaled_logit,
    soft_weight,
    split_rows,
    temperature,
)
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.multiplex import MODES


@triton.jit
def route_rows(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, start, local, mask, tau, seed, threshold, M, N, D,
    MODE: tl.constexpr, PENALTY: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
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
            x = tl.load(blocks_ptr + (b * M + m)[:, None] * D + d[None, :], mask=tile, other=0.0).to(CT)
            acc += w[:, None] * x
        tl.store(out_ptr + rows[:, None] * D + d[None, :], acc, mask=tile)
    return squares


@triton.jit
def forward_kernel(
    blocks_ptr, logits_ptr, out_ptr, copy_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, threshold: tl.float64, R: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64,
    MODE: tl.constexpr, PENALTY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_R rows, and with PENALTY one partial sum per program."""
    pid = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_R)
    squares = route_rows(
        blocks_ptr, logits_ptr, out_ptr, copy_ptr, pid * BLOCK_R, local, pid * BLOCK_R + local < R,
        temperature(tau_ptr, tau_value, CT), key(seed_ptr, seed_value), tl.full([], threshold, CT), M, N, D,
        MODE, PENALTY, BLOCK_D, CT,
    )  # fmt: skip
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(squares, axis=0))


@triton.jit
def row_dot(grad_ptr, blocks_ptr, grad_base, block_base, mask, D, BLOCK_D: tl.constexpr, CT: tl.constexpr):
    """``sum_d grad[row, d] * blocks[row, d]``."""
    acc = tl.zeros(grad_base.shape, CT)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        g = tl.load(grad_ptr + grad_base[:, None] + d[None, :], mask=tile, other=0.0).to(CT)
        x = tl.load(blocks_ptr + block_base[:, None] + d[None, :], mask=tile, other=0.0).to(CT)
        acc += tl.sum(g * x, axis=1)
    return acc


@triton.jit
def backward_logits_kernel(
    grad_ptr, blocks_ptr, logits_ptr, dlogits_ptr, weights_ptr, dtau_ptr, grad_penalty_ptr, tau_ptr,
    tau_value: tl.float64, seed_ptr, seed_value: tl.int64, threshold: tl.float64,
    R: tl.int64, M: tl.int64, N: tl.int64, D: tl.int64,
    MODE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits (with that of the penalty, if ``grad_penalty_ptr`` is given), one partial of d_tau per
    program, and the weights of the forward ``[B, M, N]`` for the gradient of the blocks.

    dw is computed twice, in the sum over M and after it: cheaper than keeping it for any M.
    """
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
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, CT)
        w = soft_weight(z, best, total)
        mean += w * dw
        centre += w * z
    dtau = tl.zeros(rows.shape, CT)
    for m in range(M):
        t, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, CT)
        dw = row_dot(grad_ptr, blocks_ptr, rows * D, (b * M + m) * D, mask, D, BLOCK_D, CT)
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
        tl.store(dtau_ptr + pid, tl.sum(tl.where(mask, dtau, 0.0), axis=0))


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
) -> Tensor | None:
    """``out [B, N, D]`` from contiguous ``blocks [B, M, D]``, ``logits [B, M, N]``; returns the penalty's partials."""
    batch, m, d = blocks.shape
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile = row_tile(d, wide)
    rows = batch * n
    programs = triton.cdiv(rows, tile["BLOCK_R"])
    partials = blocks.new_empty(programs, dtype=compute_dtype(blocks)) if penalty else None
    with guard(blocks):
        forward_kernel[(programs,)](
            blocks_ptr=blocks, logits_ptr=logits, out_ptr=out, copy_ptr=copy, partials_ptr=partials,
            threshold=threshold, R=rows, M=m, N=n, D=d, PENALTY=penalty, CT=wide,
            **routing_args(tau, tau_value, seed, mode), **tile, **OPTIONS,
        )  # fmt: skip
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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradient of the logits ``[B, M, N]``, the weights ``[B, M, N]`` in the compute dtype, gradient of tau."""
    batch, m, d = blocks.shape
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile = row_tile(d, wide)
    rows = batch * n
    programs = triton.cdiv(rows, tile["BLOCK_R"])
    dlogits = torch.empty_like(logits)
    weights = torch.empty_like(logits, dtype=compute_dtype(blocks)) if need_weights else None
    partials = blocks.new_empty(programs, dtype=compute_dtype(blocks)) if tau is not None else None
    with guard(blocks):
        backward_logits_kernel[(programs,)](
            grad_ptr=grad, blocks_ptr=blocks, logits_ptr=logits, dlogits_ptr=dlogits, weights_ptr=weights,
            dtau_ptr=partials, grad_penalty_ptr=grad_penalty, threshold=threshold, R=rows, M=m, N=n, D=d, CT=wide,
            **routing_args(tau, tau_value, seed, mode), **tile, **OPTIONS,
        )  # fmt: skip
    return dlogits, weights, zero_tau(blocks) if partials is None else partials.sum()


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


def zero_tau(like: Tensor) -> Tensor:
    """The gradient of a tau that got none: 0-d, compute dtype."""
    return torch.zeros((), dtype=compute_dtype(like), device=like.device)


def multiplex_forward(
    blocks: Tensor, logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int
) -> Tensor:
    """blocks ``[..., M, D]``, logits ``[..., M, N]`` -> ``[..., N, D]``."""
    out = torch.empty(
        (*blocks.shape[:-2], logits.shape[-1], blocks.shape[-1]), dtype=blocks.dtype, device=blocks.device
    )
    if out.numel() == 0:
        return out
    launch_forward(flat(blocks), flat(logits), out, tau, tau_value, seed, mode)
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
    """grad ``[..., N, D]`` -> gradients of blocks, logits and tau (0-d, compute dtype; zero without a tau tensor)."""
    if grad.numel() == 0 or blocks.shape[-2] == 0:
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (blocks, logits)]
        return zeros[0], zeros[1], zero_tau(blocks)
    g = flat(grad)
    dlogits, weights, dtau = launch_backward_logits(g, flat(blocks), flat(logits), tau, tau_value, seed, mode)
    assert weights is not None
    dblocks = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    launch_backward_blocks(weights, g, None, dblocks)
    return dblocks, dlogits.view(logits.shape), dtau


def flat(tensor: Tensor) -> Tensor:
    """``[..., K, D]`` -> contiguous ``[B, K, D]``."""
    return tensor.contiguous().view(tensor.shape[:-2].numel(), *tensor.shape[-2:])


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Softmax alone; with the largest D Gumbel inside an MFNNR, which copies the logits and adds the penalty."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    for d in (10, 32, 1000):
        inside = d == 1000
        routing = {
            "tau_ptr": "*fp32" if inside else None, "seed_ptr": "*i64" if inside else None,
            "MODE": MODES["gumbel" if inside else "softmax"],
        }  # fmt: skip
        shared = {**row_tile(d, dtype.compute), "CT": dtype.compute, **routing}
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
