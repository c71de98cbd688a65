"""Triton kernels and launchers of ``entropy_penalty``. There are only a few numbers, so all is in fp64."""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.template_mix import check_logits

#: Rows and logits that a program takes at once; with more of them, and exp in fp64, ptxas spills.
TILE = {"BLOCK_R": 32, "BLOCK_K": 16}


@triton.jit
def logits_at(logits_ptr, row, k, ROWS, K):
    """``[rows, k]``, and the mask of those that exist."""
    mask = (row < ROWS)[:, None] & (k < K)[None, :]
    return tl.load(logits_ptr + (row * K)[:, None] + k[None, :], mask=mask, other=float("-inf")).to(tl.float64), mask


@triton.jit
def log1p(t):
    """``log(1 + t)`` of t >= 0 in fp64; the quotient compensates for the rounding of 1 + t."""
    w = 1.0 + t
    return tl.where(w == 1.0, t, tl.log(w) * (t / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def row_stats(logits_ptr, row, ROWS, K, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """With u = largest logit - logit: the largest logit, the sum of exp(-u) without that of the largest, and the sum of
    exp(-u) * u. A NaN makes the sums NaN."""
    local = tl.arange(0, BLOCK_K)
    largest = tl.full([BLOCK_R], float("-inf"), tl.float64)
    for first in range(0, K, BLOCK_K):
        x, _ = logits_at(logits_ptr, row, first + local, ROWS, K)
        largest = tl.maximum(largest, tl.max(x, axis=1))  # ignores NaNs
    place = tl.zeros([BLOCK_R], tl.int64) + K  # index of the first largest
    for first in range(0, K, BLOCK_K):
        k = first + local
        x, mask = logits_at(logits_ptr, row, k, ROWS, K)
        candidates = tl.where(mask & (x == largest[:, None]), k[None, :] + tl.zeros([BLOCK_R, 1], tl.int64), K)
        place = tl.minimum(place, tl.min(candidates, axis=1))
    others = tl.zeros([BLOCK_R], tl.float64)
    apart = tl.zeros([BLOCK_R], tl.float64)
    for first in range(0, K, BLOCK_K):
        k = first + local
        x, mask = logits_at(logits_ptr, row, k, ROWS, K)
        counted = mask & (k[None, :] != place[:, None]) & ~gone(x, largest[:, None])
        u = tl.where(counted, largest[:, None] - x, 0.0)
        share = tl.where(counted, tl.exp(-u), 0.0)
        others += tl.sum(share, axis=1)
        apart += tl.sum(share * u, axis=1)
    return largest, others, apart


@triton.jit
def gone(x, largest):
    """A logit of -inf does not count, unless all are -inf."""
    return (x == float("-inf")) & (largest != float("-inf"))


@triton.jit(do_not_specialize=["ROWS"])
def forward_kernel(logits_ptr, partials_ptr, ROWS: tl.int64, K: tl.int64, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """``partials[program]``: the sum of the entropies of BLOCK_R rows."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid * BLOCK_R + tl.arange(0, BLOCK_R)
    _, others, apart = row_stats(logits_ptr, row, ROWS, K, BLOCK_R, BLOCK_K)
    entropy = tl.where(row < ROWS, log1p(others) + apart / (1.0 + others), 0.0)
    tl.store(partials_ptr + pid, tl.sum(entropy, axis=0))


@triton.jit(do_not_specialize=["ROWS"])
def backward_kernel(
    grad_ptr, logits_ptr, out_ptr, ROWS: tl.int64, K: tl.int64, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    largest, others, apart = row_stats(logits_ptr, row, ROWS, K, BLOCK_R, BLOCK_K)
    grad = tl.load(grad_ptr).to(tl.float64)
    total = (1.0 + others)[:, None]
    mean = apart[:, None] / total
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x, mask = logits_at(logits_ptr, row, k, ROWS, K)
        none = gone(x, largest[:, None])
        u = tl.where(none, 0.0, largest[:, None] - x)
        slope = tl.where(none, 0.0, tl.exp(-u) / total * (u - mean))
        tl.store(out_ptr + (row * K)[:, None] + k[None, :], (grad * slope).to(CT), mask=mask)


def entropy_penalty_forward(logits: Tensor) -> Tensor:
    """logits ``[..., K]`` -> 0-d, in the compute dtype."""
    check_logits(logits)
    rows, wide = logits.numel() // logits.shape[-1], compute_dtype(logits)
    if rows == 0:
        return logits.new_zeros((), dtype=wide)
    programs = triton.cdiv(rows, TILE["BLOCK_R"])
    partials = logits.new_empty(programs, dtype=wide)
    with guard(logits):
        forward_kernel[(programs,)](
            logits_ptr=logits.contiguous(), partials_ptr=partials, ROWS=rows, K=logits.shape[-1], **TILE, **OPTIONS
        )
    return partials.sum()


def entropy_penalty_backward(grad: Tensor, logits: Tensor) -> Tensor:
    """grad 0-d -> ``[..., K]``"""
    check_logits(logits)
    if grad.numel() != 1:
        raise ValueError(f"grad: expected a scalar, got shape {list(grad.shape)}")
    out = logits.new_empty(logits.shape)
    rows = logits.numel() // logits.shape[-1]
    if rows > 0:
        with guard(logits):
            backward_kernel[(triton.cdiv(rows, TILE["BLOCK_R"]),)](
                grad_ptr=grad, logits_ptr=logits.contiguous(), out_ptr=out, ROWS=rows, K=logits.shape[-1],
                CT=compute_type(logits), **TILE, **OPTIONS,
            )  # fmt: skip
    return out


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    p, w = dtype.pointer, dtype.wide_pointer
    return [
        Specialisation(forward_kernel, {"logits_ptr": p, "partials_ptr": w, **TILE}, OPTIONS),
        Specialisation(
            backward_kernel, {"grad_ptr": w, "logits_ptr": p, "out_ptr": p, **TILE, "CT": dtype.compute}, OPTIONS
        ),
    ]
