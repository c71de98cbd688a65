"""Triton kernels and launchers of ``mfnnr``: a stack of one layer, see smfr.py, or one with wider hidden layers.

Wider layers and fp64 take a launch per linear layer: the forward ends with bias and LeakyReLU, the backward with its
slope or with an addition. One more launch computes the gradients of all weights and biases and of the temperature;
routing and gate are the kernels of other ops. Parameters and x are widened when they are loaded, and under autocast
rounded first; activations are fp32.

`saved`: sections, each ``[B, width]``, in the order route hidden 0.., logits, routed, update hidden 0.., new and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels import gated_residual, multiplex, smfr
from fastmod.kernels._common import OPTIONS, TRITON_TYPES, compute_type, guard
from fastmod.kernels._images import IEEE, TF32_THRICE, rounded
from fastmod.kernels._stack import SLOPE, accumulate, finish, store_sum, sum_of, weight_gradient
from fastmod.kernels._stack_plan import kind
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._autograd import one_by_one
from fastmod.ops._checks import compute_dtype, tau_dtype
from fastmod.ops.mfnnr import BATCH_TILE, NO_PENALTY, saved_rows
from fastmod.ops.multiplex import MODES

#: Programs that a large GPU needs: if large tiles make fewer, small ones are used.
ENOUGH = 128
LARGE = {"BLOCK_B": 64, "BLOCK_O": 64, "BLOCK_K": 16}
SMALL = {"BLOCK_B": 16, "BLOCK_O": 32, "BLOCK_K": 32}
WEIGHT_TILE = {"BLOCK_O": 32, "BLOCK_I": 64, "BLOCK_B": 32, "BLOCK_T": 128}
WEIGHT_TILE_FP64 = {"BLOCK_O": 16, "BLOCK_I": 32, "BLOCK_B": 16, "BLOCK_T": 128}
#: Linear layers per launch of their gradients: each takes five pointer arguments.
MOST_LINEARS = 64


@triton.jit(do_not_specialize=["B"])
def linear_kernel(
    in_ptr, context_ptr, weight_ptr, bias_ptr, out_ptr, B: tl.int64, inputs: tl.int32, context: tl.int32,
    outputs: tl.int32, HIDDEN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, XT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``out = [in ; context] @ weight.T + bias``, and LeakyReLU of a HIDDEN layer. XT: what ``in`` is rounded to when
    it is loaded; DT: the same for all else."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = accumulate(
        tl.zeros([BLOCK_B, BLOCK_O], CT), in_ptr, weight_ptr, rows, rows < B, o, inputs, outputs, inputs + context,
        False, BLOCK_K, PRECISION, XT, DT, CT,
    )  # fmt: skip
    if context_ptr is not None:
        acc = accumulate(
            acc, context_ptr, weight_ptr + inputs, rows, rows < B, o, context, outputs, inputs + context, False,
            BLOCK_K, PRECISION, DT, DT, CT,
        )  # fmt: skip
    finish(acc, bias_ptr, out_ptr, rows, rows < B, o, outputs, HIDDEN, DT, CT)


@triton.jit(do_not_specialize=["B"])
def linear_backward_kernel(
    grad_ptr, weight_ptr, base_ptr, hidden_ptr, to_ptr, rest_ptr, B: tl.int64, outputs: tl.int32, columns: tl.int32,
    rest: tl.int32, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``grad @ weight``. The first ``columns`` of it, plus ``base`` and through the LeakyReLU that made ``hidden`` if
    these are given, are stored at one place, the ``rest`` at ``rest_ptr`` if that is given."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    c = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = accumulate(
        tl.zeros([BLOCK_B, BLOCK_O], CT), grad_ptr, weight_ptr, rows, rows < B, c, outputs, columns + rest,
        columns + rest, True, BLOCK_K, PRECISION, CT, DT, CT,
    )  # fmt: skip
    at = rows[:, None] * columns + c[None, :]
    there = (rows < B)[:, None] & (c < columns)[None, :]
    if rest_ptr is not None:
        beyond = (rows < B)[:, None] & ((c >= columns) & (c < columns + rest))[None, :]
        tl.store(rest_ptr + rows[:, None] * rest + (c - columns)[None, :], acc, mask=beyond)
    if base_ptr is not None:
        acc += tl.load(base_ptr + at, mask=there, other=0.0).to(CT)
    if hidden_ptr is not None:
        acc = tl.where(tl.load(hidden_ptr + at, mask=there, other=0.0) > 0, acc, acc * SLOPE)
    tl.store(to_ptr + at, rounded(acc, to_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["B", "parts"])
def weights_kernel(
    grads, below, beside_ptr, dweights, dbiases, dtaus_ptr, dtau_ptr, B: tl.int64, parts: tl.int32,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, KEPT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Grid axis 1: linear layers, each with one entry in the tuples, then the temperature; axis 0: tiles of a weight,
    each summed over the batch by one program. Inputs: the first KEPT at ``below``, the others from x."""
    linear = tl.program_id(1)
    if len(OUTPUTS) > 0:
        if linear < len(OUTPUTS):
            # Triton cannot index a tuple by a computed number, but it can choose among the entries.
            grad_at = grads[0].to(tl.int64)
            below_at = below[0].to(tl.int64)
            dweight_at = dweights[0].to(tl.int64)
            dbias_at = dbiases[0].to(tl.int64)
            outputs = tl.full([], OUTPUTS[0], tl.int32)
            inputs = tl.full([], INPUTS[0], tl.int32)
            kept = tl.full([], KEPT[0], tl.int32)
            for i in tl.static_range(1, len(OUTPUTS)):
                own = linear == i
                grad_at = tl.where(own, grads[i].to(tl.int64), grad_at)
                below_at = tl.where(own, below[i].to(tl.int64), below_at)
                dweight_at = tl.where(own, dweights[i].to(tl.int64), dweight_at)
                dbias_at = tl.where(own, dbiases[i].to(tl.int64), dbias_at)
                outputs = tl.where(own, OUTPUTS[i], outputs)
                inputs = tl.where(own, INPUTS[i], inputs)
                kept = tl.where(own, KEPT[i], kept)
            weight_gradient(
                grad_at.to(tl.pointer_type(CT)), below_at.to(tl.pointer_type(CT)), beside_ptr,
                dweight_at.to(tl.pointer_type(PT)), dbias_at.to(tl.pointer_type(PT)), tl.program_id(0), B, outputs,
                inputs, kept, BLOCK_O, BLOCK_I, BLOCK_B, PRECISION, DT, CT,
            )  # fmt: skip
    if dtau_ptr is not None:
        if (linear == len(OUTPUTS)) & (tl.program_id(0) == 0):
            total = tl.zeros([], CT)
            if dtaus_ptr is not None:
                total = sum_of(dtaus_ptr, parts, 1, BLOCK_T, CT)
            store_sum(dtau_ptr, total)


# ---- Launchers


class Sections(NamedTuple):
    """Views into `saved`; each ``[B, width]``."""

    route: list[Tensor]  # hidden layers, then the logits
    routed: Tensor
    update: list[Tensor]  # hidden layers, then new and gate side by side


def sections(saved: Tensor, x: Tensor, route: Sequence[Tensor], update: Sequence[Tensor]) -> Sections:
    """Splits ``saved`` for ``x [B, M, D]``."""
    batch, m, d = x.shape
    widths = [bias.shape[0] for bias in route[1::2]]
    widths += [widths[-1] // m * d] + [bias.shape[0] for bias in update[1::2]]
    views = [view.view(batch, -1) for view in saved[: batch * sum(widths)].split([batch * w for w in widths])]
    layers = len(route) // 2
    return Sections(views[:layers], views[layers], views[layers + 1 :])


def tile(batch: int, columns: int, wide: tl.dtype) -> dict[str, int]:
    """The tile of a linear layer's launch."""
    few = triton.cdiv(batch, LARGE["BLOCK_B"]) * triton.cdiv(columns, LARGE["BLOCK_O"]) < ENOUGH
    return SMALL if few or wide == tl.float64 else LARGE


def _launch(kernel: Any, batch: int, width: int, x: Tensor, **arguments: Any) -> None:
    """Launches for ``width`` columns of all rows; ``x`` tells device and precision."""
    sizes = tile(batch, width, compute_type(x))
    with guard(x):
        kernel[(triton.cdiv(batch, sizes["BLOCK_B"]), triton.cdiv(width, sizes["BLOCK_O"]))](
            B=batch, PRECISION=precision_of(x), CT=compute_type(x), **arguments, **sizes, **OPTIONS
        )


def precision_of(x: Tensor) -> int:
    return IEEE if x.dtype == torch.float64 else kind(x)


def _fnn(
    inputs: Tensor, context: Tensor | None, params: Sequence[Tensor], outs: Sequence[Tensor], x: Tensor,
    of_input: tl.dtype, dtype: tl.dtype,
) -> None:  # fmt: skip
    """An FNN whose first layer reads ``[inputs ; context]``. Inputs are rounded to ``of_input``, context and parameters
    to ``dtype``."""
    for i, out in enumerate(outs):
        _launch(
            linear_kernel, out.shape[0], out.shape[1], x, in_ptr=inputs, context_ptr=context, weight_ptr=params[2 * i],
            bias_ptr=params[2 * i + 1], out_ptr=out, inputs=inputs.shape[1],
            context=0 if context is None else context.shape[1], outputs=out.shape[1], HIDDEN=i < len(outs) - 1,
            XT=of_input, DT=dtype,
        )  # fmt: skip
        inputs, context, of_input = out, None, compute_type(x)


def _forward_by_layers(
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
    dtype: tl.dtype,
) -> Tensor | None:
    """Returns the partial sums of the penalty."""
    batch, m, d = x.shape
    n = out.shape[1]
    flat = x.view(batch, m * d)
    _fnn(flat, None, route, cut.route, x, dtype, dtype)
    of_gates = gated_residual.programs(batch * n, d, compute_type(x))
    partials = multiplex.launch_forward(
        x, cut.route[-1].view(batch, m, n), cut.routed, tau, tau_value, seed, mode,
        copy=logits, threshold=threshold, penalty=threshold != NO_PENALTY, more=of_gates, dtype=dtype,
    )  # fmt: skip
    _fnn(cut.routed, flat if context else None, update, cut.update, x, compute_type(x), dtype)
    new, raw_gate = cut.update[-1].split([n * d, n], dim=1)
    gated_residual.launch_forward(
        cut.routed.view(batch, n, d), new, raw_gate, out, copy=gate, threshold=threshold,
        partials=None if partials is None else partials[-of_gates:],
    )  # fmt: skip
    return partials


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
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x ``[..., M, D]`` -> out ``[..., N, D]``, penalty (0-d), logits ``[..., M, N]``, gate ``[..., N]``, saved."""
    layers = [smfr.Layer(route, update, tau, seed if mode == MODES["gumbel"] else None)]
    if smfr.fits(x, layers):
        found = smfr.stack_forward(x, layers, tau_value, mode, context, threshold, save, low)
        return found.outs[0], found.penalty, found.logits[0], found.gates[0], found.saved[0]
    if route[0].dim() > 2:  # many nets: copy by copy
        arguments = x, route, update, tau, tau_value, seed, mode, context, threshold, save, low
        return one_by_one(mfnnr_forward, route[0].shape[0], *arguments)
    *lead, m, d = x.shape
    n = route[-1].shape[0] // m
    batch = x.shape[:-2].numel()
    wide, dtype = compute_dtype(x), low or x.dtype
    out, logits, gate = (torch.empty((*lead, *size), dtype=dtype, device=x.device) for size in ((n, d), (m, n), (n,)))
    if batch == 0:
        return out, torch.zeros((), dtype=wide, device=x.device), logits, gate, x.new_empty(0, dtype=wide)
    padded = triton.cdiv(batch, BATCH_TILE) * BATCH_TILE
    # Activations pass through this; without `save` it is just the workspace of this call.
    saved = x.new_empty(padded * saved_rows(x, route, update), dtype=wide)
    blocks = x.contiguous().view(batch, m, d)
    route, update = [p.contiguous() for p in route], [p.contiguous() for p in update]
    partials = _forward_by_layers(
        blocks, route, update, tau, tau_value, seed, mode, context, threshold,
        sections(saved, blocks, route, update), out.view(batch, n, d), logits.view(batch, m, n), gate.view(batch, n),
        TRITON_TYPES[dtype],
    )  # fmt: skip
    penalty = torch.zeros((), dtype=wide, device=x.device) if partials is None else partials.sum()
    return out, penalty, logits, gate, saved if save else x.new_empty(0, dtype=wide)


def _fnn_backward(
    grad: Tensor, params: Sequence[Tensor], outs: Sequence[Tensor], x: Tensor, dtype: tl.dtype
) -> list[Tensor]:
    """grad ``[B, out]`` of an FNN -> the gradients of its layers' results, in the order of the layers."""
    grads = [grad]
    for i in reversed(range(1, len(outs))):
        grads.insert(0, torch.empty_like(outs[i - 1]))
        _through(grads[1], params[2 * i], grads[0], x, dtype, hidden=outs[i - 1])
    return grads


def _through(
    grad: Tensor,
    weight: Tensor,
    to: Tensor,
    x: Tensor,
    dtype: tl.dtype,
    *,
    base: Tensor | None = None,
    hidden: Tensor | None = None,
    rest: Tensor | None = None,
) -> None:
    """``to [B, columns]`` and, for the weight's other inputs, ``rest``: see :func:`linear_backward_kernel`."""
    batch, columns = to.shape
    _launch(
        linear_backward_kernel, batch, weight.shape[1] if rest is not None else columns, x, grad_ptr=grad,
        weight_ptr=weight, base_ptr=base, hidden_ptr=hidden, to_ptr=to, rest_ptr=rest, outputs=weight.shape[0],
        columns=columns, rest=weight.shape[1] - columns, DT=dtype,
    )  # fmt: skip


def _weights(
    grads: Sequence[Tensor],
    below: Sequence[Tensor | None],
    x: Tensor,
    params: Sequence[Tensor],
    dtaus: Tensor | None,
    dtau: Tensor,
    dtype: tl.dtype,
) -> list[Tensor]:
    """Gradients of weights and biases, if any are given, and of tau, which is written. ``below``: what a layer reads
    besides x."""
    results = [torch.empty_like(p) for p in params]
    sizes = WEIGHT_TILE_FP64 if x.dtype == torch.float64 else WEIGHT_TILE
    read = [x.new_empty(0, dtype=compute_dtype(x)) if t is None else t for t in below]
    kept = [0 if t is None else t.shape[1] for t in below]
    for first in range(0, max(len(params) // 2, 1), MOST_LINEARS):
        own = slice(first, first + MOST_LINEARS)
        shapes = [weight.shape for weight in params[::2][own]]
        tiles = [triton.cdiv(o, sizes["BLOCK_O"]) * triton.cdiv(i, sizes["BLOCK_I"]) for o, i in shapes]
        with guard(x):
            weights_kernel[(max(tiles, default=1), len(shapes) + (first == 0))](
                grads=tuple(grads[own]), below=tuple(read[own]), beside_ptr=x,
                dweights=tuple(results[::2][own]) or (dtau,), dbiases=tuple(results[1::2][own]) or (dtau,),
                dtaus_ptr=dtaus, dtau_ptr=dtau if first == 0 else None,
                B=x.shape[0], parts=0 if dtaus is None else dtaus.numel(), OUTPUTS=tuple(o for o, _ in shapes),
                INPUTS=tuple(i for _, i in shapes), KEPT=tuple(kept[own]), PRECISION=precision_of(x),
                PT=TRITON_TYPES[(results or [dtau])[0].dtype], DT=dtype, CT=compute_type(x), **sizes, **OPTIONS,
            )  # fmt: skip
    return results


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
    low: torch.dtype | None = None,
) -> list[Tensor]:
    """``[dx or empty(0), dtau, *droute, *dupdate]``, the parameters' only with ``need_params``."""
    layers = [smfr.Layer(route, update, tau, seed if mode == MODES["gumbel"] else None)]
    if smfr.fits(x, layers):
        found = smfr.stack_backward(
            grad_out, grad_penalty, x, layers, tau_value, mode, context, threshold, [], [saved], need_x, need_params,
            low,
        )  # fmt: skip
        return [found.x, *(found.taus or [multiplex.zero_tau(tau, x, layers[0].nets)]), *found.params]
    if route[0].dim() > 2:
        own = grad_out, grad_penalty, x, route, update, tau, tau_value, seed, mode, context, threshold, saved
        return one_by_one(mfnnr_backward, route[0].shape[0], *own, need_x, need_params, low)
    batch = x.shape[:-2].numel()
    m, d = x.shape[-2:]
    n = route[-1].shape[0] // m
    if threshold == NO_PENALTY:
        grad_penalty = None
    if batch == 0 or (grad_out is None and grad_penalty is None):
        grads = [torch.zeros(x.shape if need_x else (0,), dtype=x.dtype, device=x.device), multiplex.zero_tau(tau, x)]
        return grads + ([p.new_zeros(p.shape) for p in [*route, *update]] if need_params else [])
    params = [p.contiguous() for p in [*route, *update]]
    route, update = params[: len(route)], params[len(route) :]
    blocks = x.contiguous().view(batch, m, d)
    flat = blocks.view(batch, m * d)
    cut, dtype = sections(saved, blocks, route, update), TRITON_TYPES[low or x.dtype]
    # The gate: gradients of [new ; gate], side by side, and of the routed blocks.
    du, drouted = torch.empty_like(cut.update[-1]), torch.empty_like(cut.routed)
    gated_residual.launch_backward(
        None if grad_out is None else grad_out.contiguous(),
        cut.routed.view(batch, n, d), *cut.update[-1].split([n * d, n], dim=1),
        drouted, *du.split([n * d, n], dim=1), grad_penalty=grad_penalty, threshold=threshold,
    )  # fmt: skip
    of_update = _fnn_backward(du, update, cut.update, blocks, dtype)
    dcontext = flat.new_empty(flat.shape, dtype=du.dtype) if context and need_x else None
    _through(of_update[0], update[0], drouted, blocks, dtype, base=drouted, rest=dcontext)
    # The routing.
    g = drouted.view(batch, n, d)
    dlogits, weights, dtaus = multiplex.launch_backward_logits(
        g, blocks, cut.route[-1].view(batch, m, n), tau, tau_value, seed, mode,
        grad_penalty=grad_penalty, threshold=threshold, need_weights=need_x, dtype=dtype,
    )  # fmt: skip
    of_route, dx = [dlogits.view(batch, m * n)], x.new_empty(x.shape if need_x else 0)
    if need_x or need_params:
        of_route = _fnn_backward(of_route[0], route, cut.route, blocks, dtype)
    if weights is not None:
        mixed = torch.empty_like(flat, dtype=du.dtype)
        launch_add = None if dcontext is None else dcontext.view(batch, m, d)
        multiplex.launch_backward_blocks(weights, g, launch_add, mixed.view(batch, m, d))
        _through(of_route[0], route[0], dx.view(batch, m * d), blocks, dtype, base=mixed)
    dtau = x.new_empty((), dtype=tau_dtype(tau, x))
    below = [None, *cut.route[:-1], cut.routed, *cut.update[:-1]]
    results = _weights([*of_route, *of_update], below, blocks, params if need_params else [], dtaus, dtau, dtype)
    return [dx, dtau, *results]


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Tiles of both sizes, with and without everything optional; four linear layers. With 16 bits the large tiles and
    the gradients of the weights read fp32, as under autocast."""
    p, w = dtype.pointer, dtype.wide_pointer
    exact = {"PRECISION": IEEE}
    double = dtype.name == "fp64"
    shared = {"PRECISION": IEEE if double else TF32_THRICE, "DT": dtype.element, "CT": dtype.compute}
    found = []
    for case, sizes in (("small", SMALL), ("large", LARGE)):
        if double and case == "large":
            continue
        whole = case == "small"
        q = p if whole else w  # of parameters and x
        linear = {
            **shared, **sizes, "in_ptr": w, "context_ptr": q if whole else None, "weight_ptr": q, "bias_ptr": q,
            "out_ptr": w, "HIDDEN": whole, "XT": dtype.compute if whole else dtype.element,
        }  # fmt: skip
        backward = {
            **shared, **sizes, "grad_ptr": w, "weight_ptr": q, "base_ptr": w if whole else None,
            "hidden_ptr": None if whole else w, "to_ptr": p if whole else w, "rest_ptr": w if whole else None,
        }  # fmt: skip
        found.append(Specialisation(linear_kernel, linear, OPTIONS, case, exact))
        found.append(Specialisation(linear_backward_kernel, backward, OPTIONS, case, exact))
    weights = {
        **shared, **(WEIGHT_TILE_FP64 if double else WEIGHT_TILE), "grads": (w,) * 4, "below": (w,) * 4,
        "beside_ptr": w, "dweights": (w,) * 4, "dbiases": (w,) * 4, "dtaus_ptr": w, "dtau_ptr": w,
        "OUTPUTS": (400, 20, 400, 788), "INPUTS": (980, 400, 1764, 400), "KEPT": (0, 400, 784, 400),
        "PT": dtype.compute,
    }  # fmt: skip
    return [*found, Specialisation(weights_kernel, weights, OPTIONS, "", exact)]
