"""Shared by the kernels of images: pixels, normalisation while loading, sums of partial results in a fixed order.

Images are ``[B, E, H, W, C]`` in memory (``[B, H, W, C]`` if all experts share them). A *row* is a pixel of a batch,
``r = (b * H + y) * W + x``, and its channels are the columns. Sums over pixels are written tile by tile and added up
in a fixed order, by the program that is the last to write, so that every call gives the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmod.ops._checks import compute_dtype

IEEE, TF32, TF32_THRICE = 0, 1, 2
_TF32 = tl.constexpr(TF32)
_TF32_THRICE = tl.constexpr(TF32_THRICE)
#: Parts of a sum that are added up at once.
PARTS = tl.constexpr(32)
#: The interpreter truncates fp32 to bf16 where a GPU rounds.
_CUTS_OFF = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def innermost(images: Tensor) -> Tensor:
    """``[..., C, H, W]`` as contiguous ``[..., H, W, C]``, without a copy if it has this layout already."""
    return images.movedim(-3, -1).contiguous()


def precision(x: Tensor, convolution: bool = False) -> int:
    """How fp32 products are computed: by three tf32 products, which lose nothing, or by one if torch is allowed to do
    so as well. Other dtypes, and fp32 on AMD, whose tensor cores support it, are multiplied directly."""
    if x.dtype != torch.float32 or torch.version.hip is not None:
        return IEEE
    return TF32 if _tf32_allowed(convolution) else TF32_THRICE


def _tf32_allowed(convolution: bool) -> bool:
    """Follows the settings of torch's own convolutions (tf32 unless disabled) or matrix products."""
    settings: Any = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    newer: Any = getattr(settings, "conv", None) if convolution else settings
    # If the newer setting was used, torch refuses to read the older one.
    return newer.fp32_precision == "tf32" if hasattr(newer, "fp32_precision") else bool(settings.allow_tf32)


def refuse(x: Tensor, **others: tuple[Tensor | None, Sequence[tuple[int, ...]]]) -> None:
    """Refuses tensors that would be read beyond their end or as another dtype; ``others``: tensors and the shapes they
    may have. Scales and statistics have the dtype of the sums."""
    for name, (tensor, shapes) in others.items():
        if tensor is None:
            continue
        wide = any(part in name for part in ("scale", "shift", "mean", "var"))
        dtype = compute_dtype(x) if wide else x.dtype
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) not in shapes:
            raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}")


def power(size: int, least: int, most: int) -> int:
    """The power of two that covers ``size``, between ``least`` and ``most``."""
    return min(max(triton.next_power_of_2(size), least), most)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``"""
    if PRECISION == _TF32_THRICE:
        return tl.dot(a, b, total, input_precision="tf32x3", out_dtype=total.dtype)
    if PRECISION == _TF32:
        return tl.dot(a, b, total, input_precision="tf32", out_dtype=total.dtype)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """``value`` in ``dtype``, rounded to nearest, in the interpreter as on a GPU."""
    if _CUTS_OFF:
        if dtype == tl.bfloat16 and value.dtype != tl.bfloat16:
            bits = value.to(tl.int32, bitcast=True)
            # Clears the bits to truncate: in a subnormal number the interpreter would keep them.
            near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
            return tl.where(value == value, near, value).to(dtype)
    return value.to(dtype)


@triton.jit
def read(value, dtype: tl.constexpr, CT: tl.constexpr):
    """The loaded value, rounded to ``dtype`` as a cast would unless it has that dtype, and then widened."""
    return rounded(value, dtype).to(CT)


@triton.jit
def pixels(start, local, H, W):
    """Image (64 bits), y and x (32 bits) of the rows ``start + local``."""
    size = H * W
    first = start // size
    inner = (start % size).to(tl.int32) + local
    inside = inner % size
    return first + inner // size, inside // W, inside % W


@triton.jit
def rectified(u):
    """relu; NaN stays NaN."""
    return tl.where(u < 0, 0.0, u)


@triton.jit
def through(u, grad):
    """The gradient of relu at u."""
    return tl.where(u <= 0, 0.0, grad)


@triton.jit
def per_column(ptr, first, columns, mask, CT: tl.constexpr):
    """``[1, columns]`` of a per-channel tensor."""
    return tl.load(ptr + first + columns, mask=mask, other=0.0).to(CT)[None, :]


@triton.jit
def column_sums(ptr, rows, columns, N, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr):
    """The sums ``[columns]`` of partial results ``[rows, N]``."""
    return sums_of_rows(ptr, rows, N, columns, columns < N, BLOCK_R, BLOCK_C, CT)


@triton.jit
def sums_of_rows(ptr, rows, step, columns, known, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CT: tl.constexpr):
    """The sums ``[columns]`` of so many rows, which lie ``step`` numbers apart; of columns that are ``known``."""
    local = tl.arange(0, BLOCK_R).to(tl.int64)
    total = tl.zeros([BLOCK_R, BLOCK_C], CT)
    for first in range(0, rows, BLOCK_R):
        row = first + local
        mask = (row < rows)[:, None] & known[None, :]
        total += tl.load(ptr + row[:, None] * step + columns[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def store_sums(ptr, places, parts_ptr, rows, step, columns, known, BLOCK: tl.constexpr, CT: tl.constexpr):
    """Adds up the parts of a result, if that is wanted."""
    if ptr is not None:
        found = sums_of_rows(parts_ptr, rows, step, columns, known, PARTS, BLOCK, CT)
        tl.store(ptr + places, rounded(found, ptr.dtype.element_ty), mask=known)


@triton.jit
def is_last(ticket_ptr, programs):
    """Whether this is the last of so many programs to have stored its part, so that it may read those of the others.
    It clears the ticket, for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
