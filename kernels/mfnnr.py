"""Triton kernels and launchers of ``mfnnr``.

Forward, hidden widths up to 128: two launches, each with a program per tile of the batch that runs a whole FNN and what
follows it. Activations pass from layer to layer through the `saved` tensor, where the backward wants them anyway: a
program reads back only what it wrote, so a barrier between layers is enough. Wider: torch's GEMMs, and the pointwise
kernels of the other ops around them. Backward: torch's GEMMs and the same pointwise kernels.

`saved`: sections, each ``[B, width]``, in the order route hidden 0.., logits, routed, update hidden 0.., new and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels import gated_residual, multiplex
from fastmod.kernels._common import OPTIONS, compute_type, guard, key, routing_args, row_tile, temperature
from fastmod.kernels.gated_residual import gate_rows
from fastmod.kernels.multiplex import route_rows
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.mfnnr import BATCH_TILE, LEAKY_SLOPE, NO_PENALTY, saved_rows
from fastmod.ops.multiplex import MODES

SLOPE = tl.constexpr(LEAKY_SLOPE)
#: Hidden layers up to this width stay inside the two fused launches.
FUSED_HIDDEN = 128
#: Batch elements, output features and input features per step of a layer. 16 is the least that tl.dot takes; few
#: batch elements per program put a batch of 128 on eight multiprocessors.
LAYER_TILE = {"BLOCK_B": 16, "BLOCK_O": 32, "BLOCK_K": 32}
LAYER_TILE_FP64 = {"BLOCK_B": 16, "BLOCK_O": 32, "BLOCK_K": 16}
LEAKY_BLOCK = 1024


@triton.jit
def leaky(t):
    return tl.where(t > 0, t, t * SLOPE)


@triton.jit
def accumulate(
    acc, in_ptr, weight_ptr, rows, mask, outputs,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``acc [BLOCK_B, BLOCK_O] += in[rows, :IN] @ weight[outputs, :IN].T``; rows of the weight are STRIDE apart."""
    for start in range(0, IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < IN
        x = tl.load(
            in_ptr + rows[:, None] * IN + k[None, :], mask=mask[:, None] & inside[None, :], other=0.0
        ).to(CT)  # fmt: skip
        w = tl.load(
            weight_ptr + outputs[None, :].to(tl.int64) * STRIDE + k[:, None],
            mask=inside[:, None] & (outputs < OUT)[None, :],
            other=0.0,
        ).to(CT)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=CT)  # TF32 would break the error bound
    return acc


@triton.jit
def fnn(
    x_ptr, context_ptr, params, outs, rows, mask, IN: tl.constexpr, CONTEXT: tl.constexpr, WIDTHS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Run ``[x ; context]`` through the layers of ``params``; layer i writes ``outs[i] [B, WIDTHS[i]]``."""
    for i in tl.static_range(len(WIDTHS)):
        for start in range(0, WIDTHS[i], BLOCK_O):
            o = start + tl.arange(0, BLOCK_O)
            acc = tl.zeros([rows.shape[0], BLOCK_O], CT)
            if i == 0:
                acc = accumulate(
                    acc, x_ptr, params[0], rows, mask, o, IN, WIDTHS[0], IN + CONTEXT, BLOCK_K, CT
                )  # fmt: skip
                if CONTEXT > 0:
                    acc = accumulate(
                        acc, context_ptr, params[0] + IN, rows, mask, o, CONTEXT, WIDTHS[0], IN + CONTEXT, BLOCK_K, CT
                    )  # fmt: skip
            else:
                acc = accumulate(
                    acc, outs[i - 1], params[2 * i], rows, mask, o, WIDTHS[i - 1], WIDTHS[i], WIDTHS[i - 1], BLOCK_K,
                    CT,
                )  # fmt: skip
            acc += tl.load(params[2 * i + 1] + o, mask=o < WIDTHS[i], other=0.0).to(CT)[None, :]
            if i < len(WIDTHS) - 1:
                acc = leaky(acc)
            tl.store(
                outs[i] + rows[:, None] * WIDTHS[i] + o[None, :], acc, mask=mask[:, None] & (o < WIDTHS[i])[None, :]
            )
        tl.debug_barrier()  # the next reader of outs[i] is another thread of this program


@triton.jit
def route_kernel(
    x_ptr, params, outs, routed_ptr, logits_ptr, partials_ptr, tau_ptr, tau_value: tl.float64, seed_ptr,
    seed_value: tl.int64, threshold: tl.float64, B: tl.int64,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTHS: tl.constexpr, MODE: tl.constexpr,
    PENALTY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_B batch elements: the route FNN, then softmax or Gumbel, the routed blocks and the penalty's partial."""
    pid = tl.program_id(0).to(tl.int64)
    batch = pid * BLOCK_B + tl.arange(0, BLOCK_B)
    fnn(x_ptr, None, params, outs, batch, batch < B, M * D, 0, WIDTHS, BLOCK_O, BLOCK_K, CT)
    tau = temperature(tau_ptr, tau_value, CT)
    seed = key(seed_ptr, seed_value)
    limit = tl.full([], threshold, CT)
    squares = tl.zeros([BLOCK_R], CT)
    first = pid * BLOCK_B * N
    for start in range(0, BLOCK_B * N, BLOCK_R):
        local = start + tl.arange(0, BLOCK_R)
        squares += route_rows(
            x_ptr, outs[len(WIDTHS) - 1], routed_ptr, logits_ptr, first, local,
            (local < BLOCK_B * N) & (first + local < B * N), tau, seed, limit, M, N, D, MODE, PENALTY, BLOCK_D, CT,
        )  # fmt: skip
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(squares, axis=0))


@triton.jit
def update_kernel(
    x_ptr, routed_ptr, params, outs, out_ptr, gate_ptr, partials_ptr, threshold: tl.float64, B: tl.int64,
    N: tl.constexpr, D: tl.constexpr, CONTEXT: tl.constexpr, WIDTHS: tl.constexpr, PENALTY: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_B batch elements: the update FNN on ``[routed ; x]``, then the gate and the penalty's partial."""
    pid = tl.program_id(0).to(tl.int64)
    batch = pid * BLOCK_B + tl.arange(0, BLOCK_B)
    fnn(routed_ptr, x_ptr, params, outs, batch, batch < B, N * D, CONTEXT, WIDTHS, BLOCK_O, BLOCK_K, CT)
    limit = tl.full([], threshold, CT)
    squares = tl.zeros([BLOCK_R], CT)
    first = pid * BLOCK_B * N
    new_ptr = outs[len(WIDTHS) - 1]
    for start in range(0, BLOCK_B * N, BLOCK_R):
        local = start + tl.arange(0, BLOCK_R)
        squares += gate_rows(
            routed_ptr, new_ptr, new_ptr + N * D, out_ptr, gate_ptr, first, local,
            (local < BLOCK_B * N) & (first + local < B * N), N * D + N, N * D + N, limit, N, D, PENALTY, BLOCK_D, CT,
        )  # fmt: skip
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(squares, axis=0))


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


def fused_tile(n: int, d: int, wide: tl.dtype) -> dict[str, int]:
    """Tile sizes of the fused kernels for N = ``n`` outputs of D = ``d``."""
    layer = LAYER_TILE_FP64 if wide == tl.float64 else LAYER_TILE
    return {**layer, **row_tile(d, wide, rows=triton.next_power_of_2(n * layer["BLOCK_B"]))}


def _forward_fused(
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
    """Two launches; returns the penalty's partials."""
    batch, m, d = x.shape
    n = out.shape[1]
    wide = compute_type(x)
    tile = fused_tile(n, d, wide)
    programs = triton.cdiv(batch, tile["BLOCK_B"])
    penalty = threshold != NO_PENALTY
    partials = x.new_empty((2, programs), dtype=compute_dtype(x)) if penalty else None
    with guard(x):
        route_kernel[(programs,)](
            x_ptr=x, params=tuple(route), outs=tuple(cut.route), routed_ptr=cut.routed, logits_ptr=logits,
            partials_ptr=partials, threshold=threshold, B=batch, M=m, N=n, D=d,
            WIDTHS=tuple(t.shape[1] for t in cut.route), PENALTY=penalty, CT=wide,
            **routing_args(tau, tau_value, seed, mode), **tile, **OPTIONS,
        )  # fmt: skip
        update_kernel[(programs,)](
            x_ptr=x, routed_ptr=cut.routed, params=tuple(update), outs=tuple(cut.update), out_ptr=out, gate_ptr=gate,
            partials_ptr=None if partials is None else partials[1], threshold=threshold, B=batch, N=n, D=d,
            CONTEXT=m * d if context else 0, WIDTHS=tuple(t.shape[1] for t in cut.update), PENALTY=penalty, CT=wide,
            **tile, **OPTIONS,
        )  # fmt: skip
    return partials


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
    *lead, m, d = x.shape
    n = route[-1].shape[0] // m
    batch = x.shape[:-2].numel()
    wide = compute_dtype(x)
    out, logits, gate = (torch.empty((*lead, *size), dtype=x.dtype, device=x.device) for size in ((n, d), (m, n), (n,)))
    if batch == 0:
        return out, torch.zeros((), dtype=wide, device=x.device), logits, gate, x.new_empty(0, dtype=wide)
    padded = triton.cdiv(batch, BATCH_TILE) * BATCH_TILE
    # Without `save` it is the workspace of this call: the layers still pass their activations through it.
    saved = x.new_empty(padded * saved_rows(x, route, update), dtype=wide)
    blocks = x.contiguous().view(batch, m, d)
    route, update = [p.contiguous() for p in route], [p.contiguous() for p in update]
    hidden = [bias.shape[0] for bias in [*route[1:-1:2], *update[1:-1:2]]]
    forward = _forward_fused if max(hidden, default=0) <= FUSED_HIDDEN else _forward_wide
    partials = forward(
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


#: Name -> (M, N, D), hidden widths, mode: models of the studies and of the benchmarks, by dtype.
_REDUCED = {"D196": ((5, 4, 196), (128,), "gumbel")}
COMPILED_SIZES: dict[str, dict[str, Any]] = {
    "fp32": {
        "hidden100": ((6, 8, 10), (100,), "softmax"),
        "layers3": ((8, 8, 10), (100, 100, 100), "gumbel"),
        "hidden128": ((16, 16, 32), (128,), "softmax"),
    },
    "bf16": _REDUCED,
    "fp16": _REDUCED,
    "fp64": {"hidden100": ((6, 8, 10), (100,), "softmax")},
}


def specialisations(dtype: Dtype) -> list[Specialisation]:
    p, w = dtype.pointer, dtype.wide_pointer
    found = []
    for case, ((m, n, d), hidden, mode) in COMPILED_SIZES[dtype.name].items():
        by_pointer = mode == "gumbel"
        layers = len(hidden) + 1
        shared = {
            "params": (p,) * (2 * layers), "outs": (w,) * layers, "x_ptr": p, "routed_ptr": w, "partials_ptr": w,
            "N": n, "D": d, "PENALTY": True, "CT": dtype.compute, **fused_tile(n, d, dtype.compute),
        }  # fmt: skip
        route = {
            **shared, "logits_ptr": p, "M": m, "WIDTHS": (*hidden, m * n), "MODE": MODES[mode],
            "tau_ptr": "*fp32" if by_pointer else None, "seed_ptr": "*i64" if by_pointer else None,
        }  # fmt: skip
        update = {**shared, "out_ptr": p, "gate_ptr": p, "CONTEXT": m * d, "WIDTHS": (*hidden, n * d + n)}
        found.append(Specialisation(route_kernel, route, OPTIONS, case))
        found.append(Specialisation(update_kernel, update, OPTIONS, case))
    if dtype.is_wide:  # the wide MFNNR computes in the compute dtype
        found.append(Specialisation(leaky_kernel, {"t_ptr": w, "BLOCK": LEAKY_BLOCK}, OPTIONS))
        backward = {"grad_ptr": w, "hidden_ptr": w, "BLOCK": LEAKY_BLOCK}
        found.append(Specialisation(leaky_backward_kernel, backward, OPTIONS))
    return found
