"""Launchers of ``multiplex``, whose kernels are in _multiplex.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, TRITON_TYPES, compute_type, guard, routing_args, row_tile, tickets_for
from fastmod.kernels._multiplex import (
    backward_blocks_kernel,
    backward_logits_kernel,
    forward_kernel,
    tiled_backward_kernel,
    tiled_forward_kernel,
)
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype, tau_dtype
from fastmod.ops.multiplex import MODES, copies_of

#: Numbers of a product ``[b, m, n, d]`` per warp, by the compute dtype: more would spill registers.
WARP_TILE = {tl.float32: 4096, tl.float64: 2048}
#: The most weights of a batch element in a tile, if there are several copies.
COPIED_WEIGHTS = 256
#: Parts of the gradient of tau that are added up at a time.
TAU_BLOCK = 256


def tile_of(batch: int, m: int, n: int, d: int, wide: tl.dtype, copies: int = 1) -> dict[str, Any] | None:
    """Sizes and warps of a tile, or None if the weights of one batch element are too many for a tile. With several
    copies fewer fit, as their offsets take registers as well."""
    block_m, block_n = triton.next_power_of_2(m), triton.next_power_of_2(max(n, 4))
    block_d = min(triton.next_power_of_2(d), 32)  # a cache line
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
    """Distances between copies; 0 if they share one."""
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
    of_logits: tl.dtype | None = None,
) -> Tensor | None:
    """``out [B, N, D]`` from contiguous ``blocks [B, M, D]``, ``logits [B, M, N]``; returns the partial sums of the
    penalty, with room for ``more``. ``dtype``, ``of_logits``: what blocks and logits are treated as, if not their
    own."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile, rows = tile_of(batch, m, n, d, wide, copies), row_tile(d, wide)
    programs = triton.cdiv(batch * n, rows["BLOCK_R"]) if tile is None else triton.cdiv(batch, tile["BLOCK_B"])
    partials = blocks.new_empty(programs + more, dtype=compute_dtype(blocks)) if penalty else None
    arguments = {
        "blocks_ptr": blocks, "logits_ptr": logits, "out_ptr": out, "copy_ptr": copy, "partials_ptr": partials,
        "threshold": threshold, "programs": programs, "B": batch, "M": m, "N": n, "D": d, "PENALTY": penalty,
        "LT": of_logits or TRITON_TYPES[logits.dtype], "DT": dtype or TRITON_TYPES[blocks.dtype], "CT": wide,
        **routing_args(tau, tau_value, seed, mode), **steps(tau, seed),
    }  # fmt: skip
    with guard(blocks):
        if tile is None:
            forward_kernel[(copies * programs,)](**rows, **arguments, **OPTIONS)
        else:
            tiled_forward_kernel[(copies * programs,)](**tile, **arguments)
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
    of_logits: tl.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of the logits ``[B, M, N]``, the weights ``[B, M, N]`` in the compute dtype, and partial gradients
    of tau."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    n = logits.shape[-1]
    wide = compute_type(blocks)
    tile = row_tile(d, wide)
    programs = triton.cdiv(batch * n, tile["BLOCK_R"])
    dlogits = torch.empty_like(logits)
    weights = torch.empty_like(logits, dtype=compute_dtype(blocks)) if need_weights else None
    partials = blocks.new_empty((copies, programs), dtype=compute_dtype(blocks)) if tau is not None else None
    with guard(blocks):
        backward_logits_kernel[(copies * programs,)](
            grad_ptr=grad, blocks_ptr=blocks, logits_ptr=logits, dlogits_ptr=dlogits, weights_ptr=weights,
            parts_ptr=partials, grad_penalty_ptr=grad_penalty, threshold=threshold, programs=programs, B=batch, M=m,
            N=n, D=d, LT=of_logits or TRITON_TYPES[logits.dtype], DT=dtype or TRITON_TYPES[blocks.dtype], CT=wide,
            **routing_args(tau, tau_value, seed, mode), **steps(tau, seed), **tile, **OPTIONS,
        )  # fmt: skip
    return dlogits, weights, partials


def launch_backward_blocks(
    weights: Tensor,
    grad: Tensor,
    add: Tensor | None,
    dblocks: Tensor,
    dtau: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Writes ``dblocks [B, M, D]`` from ``weights [B, M, N]``, ``grad [B, N, D]`` and ``add [B, M, D]`` or None; and
    ``dtau``, if given, from parts ``[copies, programs]``, or as 0."""
    batch, m, n = weights.shape
    d = grad.shape[-1]
    wide = compute_type(weights)
    tile = row_tile(d, wide)
    rows = batch * m
    with guard(grad):
        backward_blocks_kernel[(triton.cdiv(rows, tile["BLOCK_R"]),)](
            weights_ptr=weights, grad_ptr=grad, add_ptr=add, dblocks_ptr=dblocks, dtau_ptr=dtau, parts_ptr=partials,
            parts=0 if partials is None else partials.shape[1], copies=0 if dtau is None else dtau.numel(), R=rows,
            M=m, N=n, D=d, CT=wide, BLOCK_T=TAU_BLOCK, **tile, **OPTIONS,
        )  # fmt: skip


def launch_tiled_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    dblocks: Tensor,
    dtau: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    tile: dict[str, Any],
    copies: int,
    low: torch.dtype | None,
) -> Tensor:
    """Writes ``dblocks [B, M, D]`` and ``dtau``; returns the gradient of the logits ``[B, M, N]``."""
    batch, m, d = blocks.shape[0] // copies, *blocks.shape[1:]
    programs = triton.cdiv(batch, tile["BLOCK_B"])
    wide = compute_dtype(blocks)
    dlogits = torch.empty_like(logits)
    partials = blocks.new_empty((copies, programs), dtype=wide) if tau is not None else None
    with guard(blocks):
        tiled_backward_kernel[(copies * programs,)](
            grad_ptr=grad, blocks_ptr=blocks, logits_ptr=logits, dblocks_ptr=dblocks, dlogits_ptr=dlogits,
            dtau_ptr=dtau, parts_ptr=partials, tickets_ptr=None if partials is None else tickets_for(blocks, copies),
            programs=programs, B=batch, M=m, N=logits.shape[-1], D=d, LT=TRITON_TYPES[low or logits.dtype],
            DT=TRITON_TYPES[low or blocks.dtype], CT=compute_type(blocks), BLOCK_T=TAU_BLOCK,
            **routing_args(tau, tau_value, seed, mode), **steps(tau, seed), **tile,
        )  # fmt: skip
    return dlogits


def zero_tau(tau: Tensor | None, like: Tensor, copies: Sequence[int] = ()) -> Tensor:
    """The gradient of a tau that got none: 0-d or one per copy."""
    return torch.zeros(tuple(copies), dtype=tau_dtype(tau, like), device=like.device)


def multiplex_forward(
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    low: torch.dtype | None = None,
) -> Tensor:
    """blocks ``[..., M, D]``, logits ``[..., M, N]`` -> ``[..., N, D]``, in one launch for all copies."""
    out = torch.empty(
        (*blocks.shape[:-2], logits.shape[-1], blocks.shape[-1]), dtype=low or blocks.dtype, device=blocks.device
    )
    if out.numel() == 0:
        return out
    many, counts_as = copies_of(tau, seed).numel(), TRITON_TYPES[low] if low else None
    launch_forward(
        flat(blocks), flat(logits), out, tau, tau_value, seed, mode, copies=many, dtype=counts_as, of_logits=counts_as
    )  # fmt: skip
    return out


def multiplex_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad ``[..., N, D]`` -> gradients of blocks, logits and tau (0-d or one per copy; zero without a tau tensor)."""
    copies = copies_of(tau, seed)
    if grad.numel() == 0 or blocks.shape[-2] == 0:
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (blocks, logits)]
        return zeros[0], zeros[1], zero_tau(tau, blocks, copies)
    g, x, own = flat(grad), flat(blocks), flat(logits)
    dblocks = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    batch, m, d = x.shape
    many = copies.numel()
    routing = tau, tau_value, seed, mode
    tile = tile_of(batch // many, m, own.shape[-1], d, compute_type(x), many)
    dtau = torch.empty(copies, dtype=tau_dtype(tau, blocks), device=blocks.device)
    if tile is not None:
        dlogits = launch_tiled_backward(g, x, own, dblocks, dtau, *routing, tile, many, low)
    else:
        counts_as = TRITON_TYPES[low] if low else None
        dlogits, weights, partials = launch_backward_logits(
            g, x, own, *routing, copies=many, dtype=counts_as, of_logits=counts_as
        )
        assert weights is not None
        launch_backward_blocks(weights, g, None, dblocks, dtau, partials)
    return dblocks, dlogits.view(logits.shape), dtau


def flat(tensor: Tensor) -> Tensor:
    """``[..., K, D]`` -> contiguous ``[B, K, D]``."""
    return tensor.contiguous().view(tensor.shape[:-2].numel(), *tensor.shape[-2:])


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Tiles of the papers' shapes, one of which copies logits and adds the penalty as an MFNNR does, and one has many
    copies with learned temperatures; and rows of the largest shape. With 16 bits some read fp32, as under autocast."""
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    tiled = [(8, 8, 10, "gumbel"), (16, 16, 32, "softmax"), (5, 4, 196, "argmax"), (30, 30, 7, "gumbel")]
    for m, n, d, mode in tiled:
        inside, learned = mode == "gumbel", mode == "gumbel" or m == 16
        routing = {
            "tau_ptr": w if learned else None, "seed_ptr": "*i64" if inside else None, "MODE": MODES[mode],
            "CT": dtype.compute,
        }  # fmt: skip
        tile = tile_of(4096, m, n, d, dtype.compute, 8 if m == 16 else 1)
        assert tile is not None
        options = {name: tile.pop(name) for name in OPTIONS}
        routing |= {"LT": dtype.element, "DT": dtype.element}
        q = p if mode == "argmax" else w
        forward = {
            "blocks_ptr": q, "logits_ptr": q, "out_ptr": p, "copy_ptr": p if inside else None,
            "partials_ptr": w if inside else None, "PENALTY": inside, **routing, **tile,
        }  # fmt: skip
        backward = {
            "grad_ptr": p, "blocks_ptr": q, "logits_ptr": q, "dblocks_ptr": q, "dlogits_ptr": q, "dtau_ptr": w,
            "parts_ptr": w if learned else None, "tickets_ptr": "*i32" if learned else None, "BLOCK_T": TAU_BLOCK,
            **routing, **tile,
        }  # fmt: skip
        found.append(Specialisation(tiled_forward_kernel, forward, options, f"M{m}-N{n}-D{d}"))
        found.append(Specialisation(tiled_backward_kernel, backward, options, f"M{m}-N{n}-D{d}"))
    for d in (32, 1000):
        inside = d == 1000
        routing = {
            "tau_ptr": "*fp32" if inside else None, "seed_ptr": "*i64" if inside else None,
            "MODE": MODES["gumbel" if inside else "softmax"],
        }  # fmt: skip
        shared = {
            **row_tile(d, dtype.compute), "LT": dtype.element, "DT": dtype.element, "CT": dtype.compute, **routing,
        }  # fmt: skip
        forward = {
            "blocks_ptr": p, "logits_ptr": p, "out_ptr": p, "copy_ptr": p if inside else None,
            "partials_ptr": w if inside else None, "PENALTY": inside, **shared,
        }  # fmt: skip
        backward = {
            "grad_ptr": p, "blocks_ptr": p, "logits_ptr": p, "dlogits_ptr": p, "weights_ptr": w,
            "parts_ptr": w if inside else None, "grad_penalty_ptr": w if inside else None, **shared,
        }  # fmt: skip
        found.append(Specialisation(forward_kernel, forward, OPTIONS, f"D{d}"))
        found.append(Specialisation(backward_logits_kernel, backward, OPTIONS, f"D{d}"))
    for d in (10, 196):
        blocks = {
            "weights_ptr": w, "grad_ptr": p, "add_ptr": w if d == 196 else None, "dblocks_ptr": p,
            "dtau_ptr": w if d == 10 else None, "parts_ptr": w if d == 10 else None, "BLOCK_T": TAU_BLOCK,
            **row_tile(d, dtype.compute), "CT": dtype.compute,
        }  # fmt: skip
        found.append(Specialisation(backward_blocks_kernel, blocks, OPTIONS, f"D{d}"))
    return found
