"""Triton kernels and launchers of ``gated_residual``: rows ``r = b * N + n``, one gate each.

``new`` and ``gate`` have their own batch strides, so that they may be side by side in the output of an FNN. Each tensor
has its own dtype and is rounded to DT, the autocast dtype, when it is loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    OPTIONS,
    TRITON_TYPES,
    compute_type,
    excess,
    guard,
    row_tile,
    sigmoid,
    split_rows,
)
from fastmod.kernels._images import read, rounded
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation


@triton.jit
def gate_rows(
    x_ptr, new_ptr, gate_ptr, out_ptr, copy_ptr, start, local, mask, new_stride, gate_stride, threshold, N, D,
    PENALTY: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of rows ``start + local``; returns each row's share of the penalty.

    ``copy_ptr``, if given, receives the raw gates in its own dtype.
    """
    rows = start + local
    b, n = split_rows(start, local, N)
    t = read(tl.load(gate_ptr + b * gate_stride + n, mask=mask, other=0.0), DT, CT)
    if copy_ptr is not None:
        tl.store(copy_ptr + rows, t, mask=mask)
    s, shut = sigmoid(t), sigmoid(-t)  # 1 - sigmoid(t) would cancel
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        x = read(tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=tile, other=0.0), DT, CT)
        new = tl.load(new_ptr + (b * new_stride + n * D)[:, None] + d[None, :], mask=tile, other=0.0)
        new = read(new, DT, CT)
        out = s[:, None] * new + shut[:, None] * x
        at = out_ptr + rows[:, None] * D + d[None, :]
        tl.store(at, rounded(out, out_ptr.dtype.element_ty), mask=tile)
    squares = tl.zeros(rows.shape, CT)
    if PENALTY:
        e = excess(t, threshold)
        squares = tl.where(mask, e * e, 0.0)
    return squares


@triton.jit
def forward_kernel(
    x_ptr, new_ptr, gate_ptr, out_ptr, copy_ptr, partials_ptr, new_stride: tl.int64, gate_stride: tl.int64,
    threshold: tl.float64, R: tl.int64, N: tl.int64, D: tl.int64,
    PENALTY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_R)
    squares = gate_rows(
        x_ptr, new_ptr, gate_ptr, out_ptr, copy_ptr, pid * BLOCK_R, local, pid * BLOCK_R + local < R, new_stride,
        gate_stride, tl.full([], threshold, CT), N, D, PENALTY, BLOCK_D, DT, CT,
    )  # fmt: skip
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(squares, axis=0))


@triton.jit
def gate_gradients(
    grad_ptr, x_ptr, new_ptr, gate_ptr, dx_ptr, dnew_ptr, dgate_ptr, grad_penalty_ptr, start, local, mask, new_stride,
    gate_stride, threshold, N, D, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradients of x, new and gate of rows ``start + local``, the last with that of the penalty if
    ``grad_penalty_ptr`` is given. Without ``grad_ptr`` the gradient of the output is zero."""
    rows = start + local
    b, n = split_rows(start, local, N)
    t = read(tl.load(gate_ptr + b * gate_stride + n, mask=mask, other=0.0), DT, CT)
    s, shut = sigmoid(t), sigmoid(-t)  # 1 - sigmoid(t) would cancel
    # Like autograd, the difference of two sums and not the sum of differences: this gives the same infinities.
    taken = tl.zeros(rows.shape, CT)
    kept = tl.zeros(rows.shape, CT)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = mask[:, None] & (d < D)[None, :]
        at = rows[:, None] * D + d[None, :]
        at_new = (b * new_stride + n * D)[:, None] + d[None, :]
        g = tl.zeros([rows.shape[0], BLOCK_D], CT)
        if grad_ptr is not None:
            g = tl.load(grad_ptr + at, mask=tile, other=0.0).to(CT)
            x = read(tl.load(x_ptr + at, mask=tile, other=0.0), DT, CT)
            new = read(tl.load(new_ptr + at_new, mask=tile, other=0.0), DT, CT)
            taken += tl.sum(g * new, axis=1)
            kept += tl.sum(g * x, axis=1)
        tl.store(dx_ptr + at, rounded(shut[:, None] * g, dx_ptr.dtype.element_ty), mask=tile)
        tl.store(dnew_ptr + at_new, rounded(s[:, None] * g, dnew_ptr.dtype.element_ty), mask=tile)
    dgate = (taken - kept) * shut * s
    if grad_penalty_ptr is not None:
        dgate += 2 * tl.load(grad_penalty_ptr).to(CT) * excess(t, threshold)
    tl.store(dgate_ptr + b * gate_stride + n, rounded(dgate, dgate_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, new_ptr, gate_ptr, dx_ptr, dnew_ptr, dgate_ptr, grad_penalty_ptr,
    new_stride: tl.int64, gate_stride: tl.int64, threshold: tl.float64, R: tl.int64, N: tl.int64, D: tl.int64,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    local = tl.arange(0, BLOCK_R)
    gate_gradients(
        grad_ptr, x_ptr, new_ptr, gate_ptr, dx_ptr, dnew_ptr, dgate_ptr, grad_penalty_ptr, pid * BLOCK_R, local,
        pid * BLOCK_R + local < R, new_stride, gate_stride, tl.full([], threshold, CT), N, D, BLOCK_D, DT, CT,
    )  # fmt: skip


def programs(rows: int, d: int, wide: tl.dtype) -> int:
    return triton.cdiv(rows, row_tile(d, wide)["BLOCK_R"])


def launch_forward(
    x: Tensor,
    new: Tensor,
    gate: Tensor,
    out: Tensor,
    *,
    copy: Tensor | None = None,
    threshold: float = 0.0,
    partials: Tensor | None = None,
    low: torch.dtype | None = None,
) -> None:
    """``out [B, N, D]`` from contiguous ``x [B, N, D]``; ``new [B, N*D]`` and ``gate [B, N]`` are dense except for the
    batch stride. ``partials``, one per program (:func:`programs`), receives those of the penalty. ``low``: the dtype
    that all are treated as, if not their own."""
    batch, n, d = x.shape
    wide = compute_type(x)
    tile = row_tile(d, wide)
    with guard(x):
        forward_kernel[(programs(batch * n, d, wide),)](
            x_ptr=x, new_ptr=new, gate_ptr=gate, out_ptr=out, copy_ptr=copy, partials_ptr=partials,
            new_stride=new.stride(0), gate_stride=gate.stride(0), threshold=threshold, R=batch * n, N=n, D=d,
            PENALTY=partials is not None, DT=TRITON_TYPES[low or x.dtype], CT=wide, **tile, **OPTIONS,
        )  # fmt: skip


def launch_backward(
    grad: Tensor | None,
    x: Tensor,
    new: Tensor,
    gate: Tensor,
    dx: Tensor,
    dnew: Tensor,
    dgate: Tensor,
    *,
    grad_penalty: Tensor | None = None,
    threshold: float = 0.0,
    low: torch.dtype | None = None,
) -> None:
    """Writes ``dx``, ``dnew`` and ``dgate``, with the layouts of x, new and gate (see :func:`launch_forward`)."""
    batch, n, d = x.shape
    wide = compute_type(x)
    tile = row_tile(d, wide)
    with guard(x):
        backward_kernel[(triton.cdiv(batch * n, tile["BLOCK_R"]),)](
            grad_ptr=grad, x_ptr=x, new_ptr=new, gate_ptr=gate, dx_ptr=dx, dnew_ptr=dnew, dgate_ptr=dgate,
            grad_penalty_ptr=grad_penalty, new_stride=new.stride(0), gate_stride=gate.stride(0),
            threshold=threshold, R=batch * n, N=n, D=d, DT=TRITON_TYPES[low or x.dtype], CT=wide, **tile, **OPTIONS,
        )  # fmt: skip


def gated_residual_forward(x: Tensor, new: Tensor, gate: Tensor, low: torch.dtype | None = None) -> Tensor:
    """x, new ``[..., N, D]``, gate ``[..., N]`` -> ``[..., N, D]``."""
    out = torch.empty(x.shape, dtype=low or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    batch, n, d = x.shape[:-2].numel(), *x.shape[-2:]
    launch_forward(
        x.contiguous().view(batch, n, d),
        new.contiguous().view(batch, n * d),
        gate.contiguous().view(batch, n),
        out,
        low=low,
    )
    return out


def gated_residual_backward(
    grad: Tensor, x: Tensor, new: Tensor, gate: Tensor, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """grad ``[..., N, D]`` -> gradients of x, new and gate."""
    batch, n, d = x.shape[:-2].numel(), *x.shape[-2:]
    dx, dnew, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, new, gate))
    if x.numel() == 0:
        return dx, dnew, dgate.zero_()
    launch_backward(
        grad.contiguous(),
        x.contiguous().view(batch, n, d),
        new.contiguous().view(batch, n * d),
        gate.contiguous().view(batch, n),
        dx,
        dnew,
        dgate,
        low=low,
    )
    return dx, dnew, dgate


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """By itself, where 16 bits read fp32 as under autocast; and with the larger D inside an MFNNR, which copies the
    gates and adds the penalty."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    for d in (10, 196):
        inside = d == 196
        tile = {**row_tile(d, dtype.compute), "DT": dtype.element, "CT": dtype.compute}
        x = p if inside else w
        forward = {
            "x_ptr": x, "new_ptr": p, "gate_ptr": p, "out_ptr": p, "copy_ptr": p if inside else None,
            "partials_ptr": w if inside else None, "PENALTY": inside, **tile,
        }  # fmt: skip
        backward = {
            "grad_ptr": p, "x_ptr": x, "new_ptr": p, "gate_ptr": p, "dx_ptr": x, "dnew_ptr": p, "dgate_ptr": p,
            "grad_penalty_ptr": w if inside else None, **tile,
        }  # fmt: skip
        found.append(Specialisation(forward_kernel, forward, OPTIONS, f"D{d}"))
        found.append(Specialisation(backward_kernel, backward, OPTIONS, f"D{d}"))
    return found
