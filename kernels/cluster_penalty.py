"""Triton kernels and launchers of ``cluster_penalty``: squared distances between templates, summed over differences."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, guard
from fastmod.kernels._images import column_sums
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops import _checks
from fastmod.ops._checks import compute_dtype

SIZES = ["SIZE"]
#: How many parts and distances the sum of parts takes at once.
TABLE_TILE = {"BLOCK_R": 32, "BLOCK_C": 32}


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    bank_ptr, partials_ptr, SIZE: tl.int64, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """``partials[part, j, k]``: the share of BLOCK_P columns in the distances of BLOCK_K templates k to all j."""
    part = tl.program_id(0).to(tl.int64)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (k < K)[:, None] & (p < SIZE)[None, :]
    own = tl.load(bank_ptr + k.to(tl.int64)[:, None] * SIZE + p[None, :], mask=mask, other=0.0).to(CT)
    for j in range(K):
        other = tl.load(bank_ptr + j * SIZE + p, mask=p < SIZE, other=0.0).to(CT)
        apart = own - other[None, :]
        found = tl.sum(apart * apart, axis=1)
        tl.store(partials_ptr + (part * K + j) * K + k, found, mask=k < K)


@triton.jit(do_not_specialize=["parts"])
def table_kernel(
    partials_ptr, table_ptr, parts: tl.int64, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Adds up the parts in a fixed order, in fp64."""
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = column_sums(partials_ptr, parts, c, K * K, BLOCK_R, BLOCK_C, tl.float64)
    tl.store(table_ptr + c, found, mask=c < K * K)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    grad_ptr, bank_ptr, dbank_ptr, SIZE: tl.int64, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """``sum_j w[k, j] * (bank[k] - bank[j])``, w = 2 (grad + grad^T), as the table holds each pair twice."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (k < K)[:, None] & (p < SIZE)[None, :]
    place = k.to(tl.int64)[:, None] * SIZE + p[None, :]
    own = tl.load(bank_ptr + place, mask=mask, other=0.0).to(CT)
    total = tl.zeros([BLOCK_K, BLOCK_P], CT)
    for j in range(K):
        other = tl.load(bank_ptr + j * SIZE + p, mask=p < SIZE, other=0.0).to(CT)
        both = tl.load(grad_ptr + k * K + j, mask=k < K, other=0.0) + tl.load(
            grad_ptr + j * K + k, mask=k < K, other=0.0
        )
        total += (2 * both).to(CT)[:, None] * (own - other[None, :])
    tl.store(dbank_ptr + place, total, mask=mask)


def tile(wide: tl.dtype, backward: bool) -> dict[str, int]:
    """Larger tiles spill registers."""
    return {"BLOCK_K": 16, "BLOCK_P": 128 if backward or wide == tl.float64 else 256}


def _arguments(bank: Tensor, backward: bool) -> dict[str, Any]:
    """For both kernels; refuses tensors that would be read beyond their end."""
    _checks.float_tensor("bank", bank, 2, "[K, P]")
    if bank.dim() != 2 or bank.shape[0] == 0:
        raise ValueError(f"bank: expected [K, P] with K >= 1, got shape {list(bank.shape)}")
    wide = compute_type(bank)
    return {
        "bank_ptr": bank.contiguous(), "SIZE": bank.shape[1], "K": bank.shape[0], "CT": wide, **tile(wide, backward),
        **OPTIONS,
    }  # fmt: skip


def _grid(shared: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(shared["SIZE"], shared["BLOCK_P"]), triton.cdiv(shared["K"], shared["BLOCK_K"])


def cluster_penalty_forward(bank: Tensor) -> Tensor:
    """bank ``[K, P]`` -> squared distances ``[K, K]``, fp64"""
    shared = _arguments(bank, backward=False)
    count = bank.shape[0]
    if bank.shape[1] == 0:
        return bank.new_zeros((count, count), dtype=torch.float64)
    table = bank.new_empty((count, count), dtype=torch.float64)
    parts, blocks = _grid(shared)
    partials = bank.new_empty((parts, count, count), dtype=compute_dtype(bank))
    with guard(bank):
        forward_kernel[(parts, blocks)](partials_ptr=partials, **shared)
        table_kernel[(triton.cdiv(count * count, TABLE_TILE["BLOCK_C"]),)](
            partials_ptr=partials, table_ptr=table, parts=parts, K=count, **TABLE_TILE, **OPTIONS
        )
    return table


def cluster_penalty_backward(grad: Tensor, bank: Tensor) -> Tensor:
    """grad ``[K, K]``, fp64 -> ``[K, P]``"""
    shared = _arguments(bank, backward=True)
    if grad.dtype != torch.float64:
        raise TypeError(f"grad: expected float64, got {grad.dtype}")
    if grad.shape != (bank.shape[0], bank.shape[0]):
        raise ValueError(f"grad: expected [K, K] with K = {bank.shape[0]}, got shape {list(grad.shape)}")
    out = bank.new_empty(bank.shape)
    if out.numel() > 0:
        with guard(bank):
            backward_kernel[_grid(shared)](grad_ptr=grad.contiguous(), dbank_ptr=out, **shared)
    return out


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    p, w = dtype.pointer, dtype.wide_pointer
    shared = {"bank_ptr": p, "K": 32, "CT": dtype.compute}
    forward = {**shared, "partials_ptr": w, **tile(dtype.compute, backward=False)}
    backward = {**shared, "grad_ptr": "*fp64", "dbank_ptr": p, **tile(dtype.compute, backward=True)}
    table = {"partials_ptr": w, "table_ptr": "*fp64", "K": 32, **TABLE_TILE}
    found = [Specialisation(forward_kernel, forward, OPTIONS), Specialisation(backward_kernel, backward, OPTIONS)]
    # Parts have the dtype of sums: reduced precision has no table kernel of its own.
    return [*found, Specialisation(table_kernel, table, OPTIONS)] if dtype.is_wide else found
