"""Shared by the Triton kernels: noise, the softmax of a column, the penalty, launch options.

Kernels work on *rows*: row ``r = b * K + k`` of a ``[B, K, D]`` tensor, so that no size has to be a power of two and
the whole batch is on grid axis 0. Offsets are 64-bit from the program id on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._images import read
from torch import Tensor

from fastmod.noise import STREAM_MULTIPLEX
from fastmod.ops.multiplex import MODES

SOFTMAX = tl.constexpr(MODES["softmax"])
GUMBEL = tl.constexpr(MODES["gumbel"])
STREAM = tl.constexpr(STREAM_MULTIPLEX)
TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}

#: Options of every launch. The fusing of products into FMAs is set explicitly, as Triton's default is about to change.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


def compute_type(tensor: Tensor) -> tl.dtype:
    """The Triton dtype the kernels compute in: fp64 for fp64, else fp32."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def row_tile(d: int, wide: tl.dtype, rows: int = 64) -> dict[str, int]:
    """Tile sizes for rows of ``d`` elements: at most 1024 accumulators (512 in fp64), more spill registers."""
    block_d = min(triton.next_power_of_2(max(d, 1)), 256)
    room = (512 if wide == tl.float64 else 1024) // block_d
    return {"BLOCK_R": min(rows, room), "BLOCK_D": block_d}


def guard(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of ``tensor`` current: Triton launches on the current device, not on that of its arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def each_contiguous(tensor: Tensor, copies: int) -> tuple[Tensor, int]:
    """The tensor with every copy (its first dimension) contiguous, and the distance between copies in numbers. Copies
    that share memory, as in an expanded tensor, keep sharing it: distance 0."""
    if copies > 1 and tensor.stride(0) == 0:
        return tensor[0].contiguous(), 0
    return tensor.contiguous(), tensor.numel() // max(copies, 1)


#: By device and stream.
_tickets: dict[tuple[torch.device, int], Tensor] = {}


def tickets_for(like: Tensor, count: int) -> Tensor:
    """``count`` numbers that are zero before and after a launch: the last program to take one from a ticket clears it.
    Launches of one stream run one after the other, so they share them. A captured graph may run on any stream and gets
    its own, which one more launch clears."""
    stream = 0
    if like.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=like.device)
        stream = torch.cuda.current_stream(like.device).cuda_stream
    kept = _tickets.get((like.device, stream))
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 4096), dtype=torch.int32, device=like.device)
        _tickets[like.device, stream] = kept
    return kept


def routing_args(tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int) -> dict[str, Any]:
    """Kernel arguments for temperature and noise. Tensors are passed by pointer, which needs no synchronisation."""
    return {"tau_ptr": tau, "tau_value": tau_value, **seed_args(seed), "MODE": mode}


def seed_args(seed: Tensor | None) -> dict[str, Any]:
    """The arguments of :func:`key`. Always by pointer: a captured CUDA graph reads the seed again at every replay."""
    return {"seed_ptr": seed, "seed_value": 0}


@triton.jit
def split_rows(start, local, K):
    """``divmod(start + local, K)`` for a 64-bit ``start`` and small ``local``, with only one 64-bit division."""
    inner = (start % K).to(tl.int32) + local
    size = tl.full([], K, tl.int32)
    return start // K + inner // size, inner % size


@triton.jit
def divide(a, b):
    """``a / b`` rounded to nearest: Triton's fp32 ``/`` is off by up to 2 ulp, which matters for a logit of 1e4."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def sigmoid(t):
    one = tl.full([], 1.0, t.dtype)
    return divide(one, one + tl.exp(-t))


@triton.jit
def excess(t, threshold):
    """``t - clamp(t, -threshold, threshold)``; NaN stays NaN."""
    return tl.where(t > threshold, t - threshold, tl.where(t < -threshold, t + threshold, t - t))


@triton.jit
def temperature(tau_ptr, tau_value, CT: tl.constexpr):
    """tau by pointer if given (NaN unless > 0, as a GPU cannot raise), else by value."""
    if tau_ptr is not None:
        tau = tl.load(tau_ptr).to(CT)
        return tl.where(tau > 0, tau, float("nan"))
    return tl.full([], tau_value, CT)


@triton.jit
def key(seed_ptr, seed_value):
    if seed_ptr is not None:
        return tl.load(seed_ptr).to(tl.int64)
    return tl.full([], seed_value, tl.int64)


@triton.jit
def philox(seed, group, stream):
    """The four noise words (uint32) of each ``group`` (int64), by the contract of ``fastmod.noise``."""
    c0 = (group & 0xFFFFFFFF).to(tl.uint32)
    c1 = (group >> 32).to(tl.uint32)
    c2 = tl.full(group.shape, stream, tl.uint32)
    c3 = tl.zeros(group.shape, tl.uint32)
    k0 = tl.zeros(group.shape, tl.uint32) + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.zeros(group.shape, tl.uint32) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    # Tensors, not Python numbers: a literal above 2**31 would be an int64 and widen everything combined with it.
    multiplier0 = tl.full(group.shape, 0xD2511F53, tl.uint32)
    multiplier1 = tl.full(group.shape, 0xCD9E8D57, tl.uint32)
    step0 = tl.full(group.shape, 0x9E3779B9, tl.uint32)
    step1 = tl.full(group.shape, 0xBB67AE85, tl.uint32)
    for _ in range(10):
        high0 = tl.umulhi(c0, multiplier0)
        high1 = tl.umulhi(c2, multiplier1)
        low0 = c0 * multiplier0
        low1 = c2 * multiplier1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + step0
        k1 = k1 + step1
    return c0, c1, c2, c3


@triton.jit
def xor_of_three(a, b, c, NVIDIA: tl.constexpr):
    if NVIDIA:  # one instruction; otherwise Triton leaves it to ptxas to find it
        return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r", [a, b, c], tl.uint32, True, 1)
    return a ^ b ^ c


@triton.jit
def philox_near(seed, group, stream, NVIDIA: tl.constexpr):
    """Like :func:`philox`, for groups (uint32) below 2**32. What they have in common in the first three rounds are
    scalars, which are computed once. NVIDIA: inline assembly for NVIDIA GPUs is allowed."""
    multiplier0 = tl.full([], 0xD2511F53, tl.uint32)
    multiplier1 = tl.full([], 0xCD9E8D57, tl.uint32)
    step0 = tl.full([], 0x9E3779B9, tl.uint32)
    step1 = tl.full([], 0xBB67AE85, tl.uint32)
    c2 = tl.full([], stream, tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    fixed = tl.umulhi(c2, multiplier1) ^ k0
    of_stream = c2 * multiplier1
    c2 = tl.umulhi(group, multiplier0) ^ k1
    k0 += step0
    k1 += step1
    c0 = tl.umulhi(c2, multiplier1) ^ (of_stream ^ k0)
    c1 = c2 * multiplier1
    c2 = (group * multiplier0) ^ (tl.umulhi(fixed, multiplier0) ^ k1)
    k0 += step0
    k1 += step1
    of_fixed = (fixed * multiplier0) ^ k1
    high0, high1 = tl.umulhi(c0, multiplier0), tl.umulhi(c2, multiplier1)
    c3 = c0 * multiplier0
    c0 = xor_of_three(high1, c1, k0, NVIDIA)
    c1 = c2 * multiplier1
    c2 = high0 ^ of_fixed
    for _ in tl.static_range(7):
        k0 += step0
        k1 += step1
        high0, high1 = tl.umulhi(c0, multiplier0), tl.umulhi(c2, multiplier1)
        low0 = c0 * multiplier0
        c0 = xor_of_three(high1, c1, k0, NVIDIA)
        c1 = c2 * multiplier1
        c2 = xor_of_three(high0, c3, k1, NVIDIA)
        c3 = low0
    return c0, c1, c2, c3


@triton.jit
def noise_word(seed, index, stream):
    """The word of element ``index`` (int64)."""
    c0, c1, c2, c3 = philox(seed, index >> 2, stream)
    word = index & 3
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def uniform_of(word, CT: tl.constexpr):
    """u in (0, 1) of a noise word, exact."""
    return ((word >> 9).to(CT) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def uniform(seed, index, CT: tl.constexpr, stream=STREAM):
    """u in (0, 1) of element ``index`` (int64), by the contract of ``fastmod.noise``."""
    return uniform_of(noise_word(seed, index, stream), CT)


@triton.jit
def scaled_logit(logits_ptr, offset, mask, tau, seed, MODE: tl.constexpr, LT: tl.constexpr, CT: tl.constexpr):
    """The raw logit t, rounded to LT, and z = (t + noise) / tau at ``offset``, the element's index in contiguous
    ``[B, M, N]``."""
    t = read(tl.load(logits_ptr + offset, mask=mask, other=0.0), LT, CT)
    z = t
    if MODE == GUMBEL:
        z = t - tl.log(-tl.log(uniform(seed, offset, CT)))
    return t, divide(z, tau)


@triton.jit
def column_stats(
    logits_ptr, copy_ptr, base, mask, tau, seed, threshold, M, N,
    MODE: tl.constexpr, PENALTY: tl.constexpr, LT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """One pass over the M logits of each row's column: maximum, sum of exp, index of the maximum, penalty.

    The sum is NaN where torch.softmax gives a NaN column: with a NaN or +inf in it, or with only -inf. ``copy_ptr``, if
    given, receives the raw logits in its own dtype.
    """
    best = tl.full(base.shape, float("-inf"), CT)
    total = tl.zeros(base.shape, CT)
    index = tl.zeros(base.shape, tl.int64)
    squares = tl.zeros(base.shape, CT)
    for m in range(M):
        t, z = scaled_logit(logits_ptr, base + m * N, mask, tau, seed, MODE, LT, CT)
        if copy_ptr is not None:
            tl.store(copy_ptr + base + m * N, t, mask=mask)
        if PENALTY:
            e = excess(t, threshold)
            squares += e * e
        above = z > best
        # The comparisons replace exp(0) = 1, and avoid exp(-inf - -inf) before the first finite logit.
        shrink = tl.where(above, tl.exp(best - z), 1.0)
        term = tl.where(above | (z == best), 1.0, tl.exp(z - best))
        total = total * shrink + term
        index = tl.where(above, m, index)
        best = tl.where(above, z, best)
    return best, total + (best - best), index, tl.where(mask, squares, 0.0)


@triton.jit
def soft_weight(z, best, total):
    return divide(tl.exp(z - best), total)


@triton.jit
def hard_weight(m, index, total):
    """One-hot; NaN where the soft weights are NaN."""
    return tl.where(index == m, 1.0, 0.0) + (total - total)
