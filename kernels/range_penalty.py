"""Triton kernels and launchers of ``range_penalty``: one partial sum per program, then the sum of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, excess, guard
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype

BLOCK = 1024


@triton.jit
def forward_kernel(t_ptr, partials_ptr, threshold: tl.float64, SIZE: tl.int64, BLOCK: tl.constexpr, CT: tl.constexpr):
    """``partials[program] = sum of (t - clamp(t))**2`` over BLOCK elements."""
    pid = tl.program_id(0).to(tl.int64)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t_ptr + i, mask=i < SIZE, other=0.0).to(CT)
    e = excess(t, tl.full([], threshold, CT))
    tl.store(partials_ptr + pid, tl.sum(e * e, axis=0))


@triton.jit
def backward_kernel(
    grad_ptr, t_ptr, out_ptr, threshold: tl.float64, SIZE: tl.int64, BLOCK: tl.constexpr, CT: tl.constexpr
):
    """``2 * grad * (t - clamp(t))``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    t = tl.load(t_ptr + i, mask=mask, other=0.0).to(CT)
    out = 2 * tl.load(grad_ptr).to(CT) * excess(t, tl.full([], threshold, CT))
    tl.store(out_ptr + i, out, mask=mask)


def range_penalty_forward(logits: Sequence[Tensor], threshold: float) -> Tensor:
    """Tensors of any shape -> 0-d, in the compute dtype."""
    first = logits[0]
    programs = [triton.cdiv(t.numel(), BLOCK) for t in logits]
    partials = first.new_empty(sum(programs), dtype=compute_dtype(first))
    for t, part in zip(logits, partials.split(programs), strict=True):
        if t.numel() == 0:
            continue
        with guard(t):
            forward_kernel[(part.numel(),)](
                t_ptr=t.contiguous(), partials_ptr=part, threshold=threshold, SIZE=t.numel(), BLOCK=BLOCK,
                CT=compute_type(t), **OPTIONS,
            )  # fmt: skip
    return partials.sum()


def range_penalty_backward(grad: Tensor, logits: Sequence[Tensor], threshold: float) -> list[Tensor]:
    """grad 0-d -> a gradient for each tensor."""
    grads = []
    for t in logits:
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        grads.append(out)
        if t.numel() == 0:
            continue
        with guard(t):
            backward_kernel[(triton.cdiv(t.numel(), BLOCK),)](
                grad_ptr=grad, t_ptr=t.contiguous(), out_ptr=out, threshold=threshold, SIZE=t.numel(), BLOCK=BLOCK,
                CT=compute_type(t), **OPTIONS,
            )  # fmt: skip
    return grads


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    p, w = dtype.pointer, dtype.wide_pointer
    flat = {"BLOCK": BLOCK, "CT": dtype.compute}
    return [
        Specialisation(forward_kernel, {"t_ptr": p, "partials_ptr": w, **flat}, OPTIONS),
        Specialisation(backward_kernel, {"grad_ptr": w, "t_ptr": p, "out_ptr": p, **flat}, OPTIONS),
    ]
