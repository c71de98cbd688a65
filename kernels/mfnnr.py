"""Triton kernels and launchers of ``mfnnr``: a stack of one layer, see smfr.py, or one with wider hidden layers.

Wider: torch's GEMMs, and the pointwise kernels of the other ops around them.

`saved`: sections, each ``[B, width]``, in the order route hidden 0.., logits, routed, update hidden 0.., new and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels import gated_residual, multiplex, smfr
from fastmod.kernels._common import OPTIONS, guard
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.mfnnr import BATCH_TILE, LEAKY_SLOPE, NO_PENALTY, saved_rows
from fastmod.ops.multiplex import MODES

SLOPE = tl.constexpr(LEAKY_SLOPE)
LEAKY_BLOCK = 1024


@triton.jit
def leaky(t):
    return tl.where(t > 0, t, t * SLOPE)


@triton.jit
def leaky_kernel(t_ptr, SIZE: tl.int64, BLOCK: tl.constexpr):
    """LeakyReLU in place."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(t_ptr + i, leaky(tl.load(t_ptr + i, mask=i < SIZE)), mask=i < SIZE)


@triton.jit
def leaky_backward_kernel(grad_ptr, hidden_ptr, SIZE: tl.int64, BLOCK: tl.constexpr):
    """``grad`` in place, from the layer's output, which has the sign of its input."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + i, mask=i < SIZE)
    h = tl.load(hidden_ptr + i, mask=i < SIZE)
    tl.store(grad_ptr + i, tl.where(h > 0, g, g * SLOPE), mask=i < SIZE)


class Sections(NamedTuple):
    """Views into `saved`; each ``[B, width]``."""

    route: list[Tensor]  # hidden layers, then the logits
    routed: Tensor
    update: list[Tensor]  # hidden layers, then new and gate side by side


def sections(saved: Tensor, x: Tensor, route: Sequence[Tensor], update: Sequence[Tensor]) -> Sections:
    """Cut ``saved`` for ``x [B, M, D]``."""
    batch, m, d = x.shape
    widths = [bias.shape[0] for bias in route[1::2]]
    widths += [widths[-1] // m * d] + [bias.shape[0] for bias in update[1::2]]
    views = [view.view(batch, -1) for view in saved[: batch * sum(widths)].split([batch * w for w in widths])]
    layers = len(route) // 2
    return Sections(views[:layers], views[layers], views[layers + 1 :])


def _fnn_wide(inputs: Sequence[Tensor], params: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """The layers as GEMMs; the first reads ``inputs`` side by side, without joining them."""
    for i, out in enumerate(outs):
        weights = params[2 * i].split([t.shape[1] for t in inputs], dim=1)
        torch.addmm(params[2 * i + 1], inputs[0], weights[0].t(), out=out)
        for more, weight in zip(inputs[1:], weights[1:], strict=True):
            out.addmm_(more, weight.t())
        if i < len(outs) - 1:
            with guard(out):
                leaky_kernel[(triton.cdiv(out.numel(), LEAKY_BLOCK),)](
                    t_ptr=out, SIZE=out.numel(), BLOCK=LEAKY_BLOCK, **OPTIONS
                )
        inputs = [out]


def _forward_wide(
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    context: bool,
    threshold: float,
    cut: Sections,
    out: Tensor,
    logits: Tensor,
    gate: Tensor,
) -> Tensor | None:
    """GEMMs and pointwise kernels; returns the penalty's partials."""
    batch, m, d = x.shape
    n = out.shape[1]
    penalty = threshold != NO_PENALTY
    x, route, update = _widen(x, route, update)
    flat = x.view(batch, m * d)
    _fnn_wide([flat], route, cut.route)
    first = multiplex.launch_forward(
        x, cut.route[-1].view(batch, m, n), cut.routed, tau, tau_value, seed, mode,
        copy=logits, threshold=threshold, penalty=penalty,
    )  # fmt: skip
    _fnn_wide([cut.routed, flat] if context else [cut.routed], update, cut.update)
    new, raw_gate = cut.update[-1].split([n * d, n], dim=1)
    second = gated_residual.launch_forward(
        cut.routed.view(batch, n, d), new, raw_gate, out, copy=gate, threshold=threshold, penalty=penalty
    )
    return None if first is None or second is None else torch.cat([first, second])


def _widen(x: Tensor, route: Sequence[Tensor], update: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Everything in the compute dtype, for torch's GEMMs; the fused kernels widen as they load."""
    wide = compute_dtype(x)
    return x.to(wide), [p.to(wide) for p in route], [p.to(wide) for p in update]


@torch.no_grad()
def mfnnr_forward(
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    context: bool,
    threshold: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x ``[..., M, D]`` -> out ``[..., N, D]``, penalty (0-d), logits ``[..., M, N]``, gate ``[..., N]``, saved."""
    layers = [smfr.Layer(route, update, tau, seed if mode == MODES["gumbel"] else None)]
    if smfr.fits(x, layers):
        found = smfr.stack_forward(x, layers, tau_value, mode, context, threshold, save)
        return found.outs[0], found.penalty, found.logits[0], found.gates[0], found.saved[0]
    *lead, m, d = x.shape
    n = route[-1].shape[0] // m
    batch = x.shape[:-2].numel()
    wide = compute_dtype(x)
    out, logits, gate = (torch.empty((*lead, *size), dtype=x.dtype, device=x.device) for size in ((n, d), (m, n), (n,)))
    if batch == 0:
        return out, torch.zeros((), dtype=wide, device=x.device), logits, gate, x.new_empty(0, dtype=wide)
    padded = triton.cdiv(batch, BATCH_TILE) * BATCH_TILE
    # Without `save` it is the workspace of this call: activations pass through it all the same.
    saved = x.new_empty(padded * saved_rows(x, route, update), dtype=wide)
    blocks = x.contiguous().view(batch, m, d)
    route, update = [p.contiguous() for p in route], [p.contiguous() for p in update]
    partials = _forward_wide(
        blocks, route, update, tau, tau_value, seed, mode, context, threshold,
        sections(saved, blocks, route, update), out.view(batch, n, d), logits.view(batch, m, n), gate.view(batch, n),
    )  # fmt: skip
    penalty = torch.zeros((), dtype=wide, device=x.device) if partials is None else partials.sum()
    return out, penalty, logits, gate, saved if save else x.new_empty(0, dtype=wide)


def _fnn_backward(
    grad: Tensor, inputs: Sequence[Tensor], params: Sequence[Tensor], outs: Sequence[Tensor], need_params: bool
) -> tuple[Tensor, list[Tensor]]:
    """grad ``[B, out]`` of an FNN -> the gradient at the first layer's output, and of the parameters if needed."""
    grads: list[Tensor] = []
    for i in reversed(range(len(outs))):
        sources = [outs[i - 1]] if i else inputs
        if need_params:
            dweight = grad.new_empty(params[2 * i].shape)
            for source, part in zip(sources, dweight.split([t.shape[1] for t in sources], dim=1), strict=True):
                torch.mm(grad.t(), source, out=part)
            grads[:0] = [dweight, grad.sum(0)]
        if i:
            hidden = outs[i - 1]
            grad = grad @ params[2 * i]
            with guard(grad):
                leaky_backward_kernel[(triton.cdiv(grad.numel(), LEAKY_BLOCK),)](
                    grad_ptr=grad, hidden_ptr=hidden, SIZE=grad.numel(), BLOCK=LEAKY_BLOCK, **OPTIONS
                )
    return grad, grads


@torch.no_grad()
def mfnnr_backward(
    grad_out: Tensor | None,
    grad_penalty: Tensor | None,
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    context: bool,
    threshold: float,
    saved: Tensor,
    need_x: bool,
    need_params: bool,
) -> list[Tensor]:
    """``[dx or empty(0), dtau, *droute, *dupdate]``, the parameters' only with ``need_params``."""
    layers = [smfr.Layer(route, update, tau, seed if mode == MODES["gumbel"] else None)]
    if smfr.fits(x, layers):
        found = smfr.stack_backward(
            grad_out, grad_penalty, x, layers, tau_value, mode, context, threshold, [], [saved], need_x, need_params
        )
        return [found.x, *(found.taus or [multiplex.zero_tau(x)]), *found.params]
    batch = x.shape[:-2].numel()
    m, d = x.shape[-2:]
    n = route[-1].shape[0] // m
    if threshold == NO_PENALTY:
        grad_penalty = None
    if batch == 0 or (grad_out is None and grad_penalty is None):
        grads = [torch.zeros(x.shape if need_x else (0,), dtype=x.dtype, device=x.device), multiplex.zero_tau(x)]
        return grads + ([p.new_zeros(p.shape) for p in [*route, *update]] if need_params else [])
    params = [*route, *update]
    blocks, route, update = _widen(x.contiguous().view(batch, m, d), route, update)
    flat = blocks.view(batch, m * d)
    cut = sections(saved, blocks, route, update)
    # The gate, into [new ; gate] side by side and the gradient of the routed blocks.
    du, drouted = torch.empty_like(cut.update[-1]), torch.empty_like(cut.routed)
    gated_residual.launch_backward(
        None if grad_out is None else grad_out.contiguous(),
        cut.routed.view(batch, n, d), *cut.update[-1].split([n * d, n], dim=1),
        drouted, *du.split([n * d, n], dim=1), grad_penalty=grad_penalty, threshold=threshold,
    )  # fmt: skip
    dhidden, update_grads = _fnn_backward(
        du, [cut.routed, flat] if context else [cut.routed], update, cut.update, need_params
    )
    drouted.addmm_(dhidden, update[0][:, : n * d])
    dcontext = dhidden @ update[0][:, n * d :] if context and need_x else None
    # The routing.
    g = drouted.view(batch, n, d)
    dlogits, weights, dtau = multiplex.launch_backward_logits(
        g, blocks, cut.route[-1].view(batch, m, n), tau, tau_value, seed, mode,
        grad_penalty=grad_penalty, threshold=threshold, need_weights=need_x,
    )  # fmt: skip
    if not (need_x or need_params):
        return [x.new_empty(0), dtau]
    dhidden, route_grads = _fnn_backward(dlogits.view(batch, m * n), [flat], route, cut.route, need_params)
    dx = x.new_empty(0)
    if weights is not None:
        dflat = torch.empty_like(flat)
        launch_add = None if dcontext is None else dcontext.view(batch, m, d)
        multiplex.launch_backward_blocks(weights, g, launch_add, dflat.view(batch, m, d))
        dx = dflat.addmm_(dhidden, route[0]).view(x.shape).to(x.dtype)
    grads = [grad.to(p.dtype) for grad, p in zip([*route_grads, *update_grads], params, strict=need_params)]
    return [dx, dtau, *grads]


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Of the compute dtypes, which is all that wide layers know."""
    if not dtype.is_wide:
        return []
    p = dtype.pointer
    backward = {"grad_ptr": p, "hidden_ptr": p, "BLOCK": LEAKY_BLOCK}
    return [
        Specialisation(leaky_kernel, {"t_ptr": p, "BLOCK": LEAKY_BLOCK}, OPTIONS),
        Specialisation(leaky_backward_kernel, backward, OPTIONS),
    ]
