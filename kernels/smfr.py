"""Triton kernels and launchers of ``smfr``: a stack of MFNNRs in four launches per step for any depth, and for any
number of nets.

A program takes BLOCK_B rows through all layers. Data passes between steps through memory that only this program reads
and writes, so that a barrier is enough; the backward needs most of it anyway. The layers are a loop, not unrolled.
Triton cannot index kernel arguments, so every program first writes them, pointers and sizes of all layers, into a
table.

Forward: the stack, and the sum of the penalty's parts. Backward: gradients through the activations, from the last layer
to the first, then those of all weights, biases and temperatures, each summed over the batch by one program. Products
are fp32 for any dtype: three tf32 products, which lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import GUMBEL, OPTIONS, TRITON_TYPES, guard
from fastmod.kernels._images import IEEE, TF32_THRICE
from fastmod.kernels._stack import (
    copy_rows,
    fnn,
    fnn_backward,
    mix,
    net_and_rows,
    number_at,
    offset_at,
    pointer_at,
    route,
    route_backward,
    routing,
    store_sum,
    sum_of,
    through,
    weight_gradient,
    write_table,
)
from fastmod.kernels._stack_plan import Layer, Place, counts_of, fits, layers_of, numbers_of, plan, tile
from fastmod.kernels.gated_residual import gate_gradients, gate_rows
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype, tau_dtype
from fastmod.ops.mfnnr import BACKWARD as MFNNR_BACKWARD
from fastmod.ops.mfnnr import BATCH_TILE, NO_PENALTY
from fastmod.ops.mfnnr import FORWARD as MFNNR_FORWARD
from fastmod.ops.multiplex import MODES

#: Pointers of a layer before those of its seed, temperature and parameters: input, activations; in the forward also
#: logits, gates and output.
FORWARD_POINTERS = tl.constexpr(5)
BACKWARD_POINTERS = tl.constexpr(2)
#: Numbers of a layer before the widths of its linear layers: M, N; activations per row of all layers before it, and of
#: this layer before its logits, its routed blocks and its new values.
SIZES = tl.constexpr(6)
#: Numbers of a linear layer: see `weight_kernel`.
LINEAR_NUMBERS = tl.constexpr(5)
#: Options of the two launches with a program per tile of rows. Left to itself ptxas spills registers to run more
#: programs at once; loading ahead in loops takes more registers than there are.
NVIDIA_OPTIONS = {**OPTIONS, "num_warps": 8, "num_stages": 1, "maxnreg": 224}
AMD_OPTIONS = {**OPTIONS, "num_stages": 1}  # warps are twice as large there
WEIGHT_TILE = {"BLOCK_O": 32, "BLOCK_I": 64, "BLOCK_B": 32, "BLOCK_T": 128}
STACK_OPTIONS = NVIDIA_OPTIONS if torch.version.hip is None else AMD_OPTIONS


@triton.jit(do_not_specialize=["B"])
def forward_kernel(
    pointers, table_ptr, x_ptr, rounded_ptr, weights_ptr, partials_ptr, tau_value: tl.float64, threshold: tl.float64,
    B: tl.int64, NUMBERS: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, DEPTH: tl.constexpr,
    MOST_WEIGHTS: tl.constexpr, D: tl.constexpr, ROUTE: tl.constexpr, UPDATE: tl.constexpr, CONTEXT: tl.constexpr,
    MODE: tl.constexpr, PENALTY: tl.constexpr, TAU: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """BLOCK_B rows through DEPTH layers. TAU: dtype of the temperatures, or None. MOST_WEIGHTS: numbers per row at
    ``weights_ptr``, enough for the layer with the most. Parameters are stored as PT; they and blocks are treated as DT,
    to which x is first rounded if ``rounded_ptr`` is given. STEPS: see `write_table`; SHARED: all nets have one x."""
    net, first = net_and_rows(B, BLOCK_B, STEPS)
    rows = first + tl.arange(0, BLOCK_B)
    mask = rows < B
    pid = tl.program_id(0).to(tl.int64)
    table_ptr += pid * (len(pointers) + len(NUMBERS))
    write_table(table_ptr, pointers, net, B, NUMBERS, STEPS)
    if STEPS is not None:
        weights_ptr += (pid * BLOCK_B - first) * MOST_WEIGHTS
    if rounded_ptr is not None:
        size = number_at(table_ptr + len(pointers), 0) * D
        copy_rows(
            x_ptr if SHARED else x_ptr + net * B * size, rounded_ptr + net * B * size, rows, mask, size, BLOCK_O, CT
        )
        tl.debug_barrier()
    limit = tl.full([], threshold, CT)
    of_logits = tl.zeros([BLOCK_S], CT)
    of_gates = tl.zeros([BLOCK_R], CT)
    EXTRA: tl.constexpr = FORWARD_POINTERS + (MODE == GUMBEL) + (TAU is not None)
    for layer in range(DEPTH):
        own_ptr = table_ptr + layer * (EXTRA + 2 * (ROUTE + UPDATE))
        sizes_ptr = table_ptr + len(pointers) + layer * (SIZES + ROUTE + UPDATE)
        m = number_at(sizes_ptr, 0)
        n = number_at(sizes_ptr, 1)
        in_ptr = pointer_at(own_ptr, 0, DT)
        logits_ptr, routed_ptr = fnn(
            own_ptr + EXTRA, sizes_ptr + SIZES, in_ptr, None, m * D, 0, pointer_at(own_ptr, 1, CT), rows, mask, B,
            ROUTE, BLOCK_O, BLOCK_K, PRECISION, PT, DT, CT,
        )  # fmt: skip
        tau, seed = routing(own_ptr + FORWARD_POINTERS, tau_value, MODE, TAU, CT)
        # The same part of the memory for this program in every layer.
        own_weights_ptr = weights_ptr + first * (MOST_WEIGHTS - m * n)
        of_logits = route(
            logits_ptr, own_weights_ptr, pointer_at(own_ptr, 2, DT), first, tau, seed, limit, B, m, n, of_logits, MODE,
            PENALTY, BLOCK_B, BLOCK_S, BLOCK_M, CT,
        )  # fmt: skip
        tl.debug_barrier()
        mix(
            own_weights_ptr, in_ptr, None, routed_ptr, first, B, n, m, 1, n, D, BLOCK_B, BLOCK_R, BLOCK_D, CT
        )  # fmt: skip
        tl.debug_barrier()
        update_ptr = routed_ptr + B * n * D
        new_ptr, _ = fnn(
            own_ptr + EXTRA + 2 * ROUTE, sizes_ptr + SIZES + ROUTE, routed_ptr, in_ptr if CONTEXT else None, n * D,
            m * D if CONTEXT else 0, update_ptr, rows, mask, B, UPDATE, BLOCK_O, BLOCK_K, PRECISION, PT, DT, CT,
        )  # fmt: skip
        for start in range(0, BLOCK_B * n, BLOCK_R):
            local = start + tl.arange(0, BLOCK_R)
            of_gates += gate_rows(
                routed_ptr, new_ptr, new_ptr + n * D, pointer_at(own_ptr, 4, DT), pointer_at(own_ptr, 3, DT), first * n,
                local, (local < BLOCK_B * n) & (first * n + local < B * n), n * D + n, n * D + n, limit, n, D, PENALTY,
                BLOCK_D, CT, CT,
            )  # fmt: skip
        tl.debug_barrier()
    if PENALTY:
        tl.store(partials_ptr + pid, tl.sum(of_logits, axis=0) + tl.sum(of_gates, axis=0))


@triton.jit(do_not_specialize=["B", "penalty_step"])
def backward_kernel(
    pointers, table_ptr, x_ptr, rounded_ptr, grad_out_ptr, grad_penalty_ptr, dx_ptr, grads_ptr, flow_ptr, weights_ptr,
    dtaus_ptr,
    tau_value: tl.float64, threshold: tl.float64, B: tl.int64, penalty_step: tl.int64, NUMBERS: tl.constexpr,
    STEPS: tl.constexpr, SHARED: tl.constexpr, DEPTH: tl.constexpr, MOST_WEIGHTS: tl.constexpr, FLOW: tl.constexpr,
    KEPT: tl.constexpr, D: tl.constexpr, ROUTE: tl.constexpr, UPDATE: tl.constexpr,
    CONTEXT: tl.constexpr, MODE: tl.constexpr, TAU: tl.constexpr, PARAMS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Gradients through the activations of BLOCK_B rows, for all layers. Those of each linear layer's results are
    stored at ``grads_ptr`` in the same layout as the results, KEPT numbers per row. ``flow_ptr``: gradients between
    layers, FLOW numbers per row. PARAMS: pointers to a layer's parameters, and to their gradients if those are
    wanted."""
    net, first = net_and_rows(B, BLOCK_B, STEPS)
    rows = first + tl.arange(0, BLOCK_B)
    mask = rows < B
    pid = tl.program_id(0).to(tl.int64)
    table_ptr += pid * (len(pointers) + len(NUMBERS))
    EXTRA: tl.constexpr = BACKWARD_POINTERS + (MODE == GUMBEL) + 2 * (TAU is not None)
    write_table(table_ptr, pointers, net, B, NUMBERS, STEPS)
    of_input = number_at(table_ptr + len(pointers), 0) * D
    size = number_at(table_ptr + len(pointers) + (DEPTH - 1) * (SIZES + ROUTE + UPDATE), 1) * D
    if STEPS is not None:
        before = pid * BLOCK_B - first  # rows of the previous nets, including those that do not exist
        weights_ptr += before * MOST_WEIGHTS
        flow_ptr += before * FLOW
        grads_ptr += before * KEPT
        if grad_out_ptr is not None:
            grad_out_ptr += net * B * size
        if grad_penalty_ptr is not None:
            grad_penalty_ptr += net * penalty_step
        if dx_ptr is not None:
            dx_ptr += net * B * of_input
    if rounded_ptr is not None:
        copy_rows(
            x_ptr if SHARED else x_ptr + net * B * of_input, rounded_ptr + net * B * of_input, rows, mask, of_input,
            BLOCK_O, CT,
        )  # fmt: skip
    copy_rows(grad_out_ptr, flow_ptr + first * (FLOW - size), rows, mask, size, BLOCK_O, CT)
    tl.debug_barrier()
    for back in range(DEPTH):
        layer = DEPTH - 1 - back
        own_ptr = table_ptr + layer * (EXTRA + PARAMS)
        sizes_ptr = table_ptr + len(pointers) + layer * (SIZES + ROUTE + UPDATE)
        m = number_at(sizes_ptr, 0)
        n = number_at(sizes_ptr, 1)
        own_grads_ptr = grads_ptr + offset_at(sizes_ptr, 2, B)
        # The gate: gradients of new and gate, side by side, and of the routed blocks.
        saved_ptr = pointer_at(own_ptr, 1, CT)
        new_ptr = saved_ptr + offset_at(sizes_ptr, 5, B)
        dnew_ptr = own_grads_ptr + offset_at(sizes_ptr, 5, B)
        for start in range(0, BLOCK_B * n, BLOCK_R):
            local = start + tl.arange(0, BLOCK_R)
            gate_gradients(
                flow_ptr + first * (FLOW - n * D), saved_ptr + offset_at(sizes_ptr, 4, B), new_ptr, new_ptr + n * D,
                own_grads_ptr + offset_at(sizes_ptr, 4, B), dnew_ptr, dnew_ptr + n * D, grad_penalty_ptr, first * n,
                local, (local < BLOCK_B * n) & (first * n + local < B * n), n * D + n, n * D + n,
                tl.full([], threshold, CT), n, D, BLOCK_D, CT, CT,
            )  # fmt: skip
        tl.debug_barrier()
        # The update FNN, back to the routed blocks and to x.
        params_ptr = own_ptr + EXTRA + 2 * ROUTE
        from_ptr = fnn_backward(
            params_ptr, sizes_ptr + SIZES + ROUTE, dnew_ptr, new_ptr, rows, mask, B, UPDATE, BLOCK_O, BLOCK_K,
            PRECISION, PT, DT, CT,
        )  # fmt: skip
        width = number_at(sizes_ptr, SIZES + ROUTE)
        inputs = (n + m) * D if CONTEXT else n * D
        drouted_ptr = own_grads_ptr + offset_at(sizes_ptr, 4, B)
        through(
            from_ptr, pointer_at(params_ptr, 0, PT), drouted_ptr, None, rows, mask, width, n * D, inputs, True,
            BLOCK_O, BLOCK_K, PRECISION, DT, CT,
        )  # fmt: skip
        own_flow_ptr = flow_ptr + first * (FLOW - m * D)
        if CONTEXT:
            through(
                from_ptr, pointer_at(params_ptr, 0, PT) + n * D, own_flow_ptr, None, rows, mask, width, m * D, inputs,
                False, BLOCK_O, BLOCK_K, PRECISION, DT, CT,
            )  # fmt: skip
        tl.debug_barrier()
        # The routing, and its FNN.
        tau, seed = routing(own_ptr + BACKWARD_POINTERS, tau_value, MODE, TAU, CT)
        logits_ptr = pointer_at(own_ptr, 1, CT) + offset_at(sizes_ptr, 3, B)
        dlogits_ptr = own_grads_ptr + offset_at(sizes_ptr, 3, B)
        own_weights_ptr = weights_ptr + first * (MOST_WEIGHTS - m * n)
        dtau = route_backward(
            drouted_ptr, pointer_at(own_ptr, 0, DT), logits_ptr, dlogits_ptr, own_weights_ptr, grad_penalty_ptr, first,
            tau, seed, tl.full([], threshold, CT), B, m, n, tl.zeros([BLOCK_S], CT), D, MODE, BLOCK_B, BLOCK_R, BLOCK_D,
            BLOCK_S, BLOCK_M, CT,
        )  # fmt: skip
        if dtaus_ptr is not None:
            tl.store(dtaus_ptr + pid * DEPTH + layer, tl.sum(dtau, axis=0))
        tl.debug_barrier()
        params_ptr = own_ptr + EXTRA
        from_ptr = fnn_backward(
            params_ptr, sizes_ptr + SIZES, dlogits_ptr, logits_ptr, rows, mask, B, ROUTE, BLOCK_O, BLOCK_K, PRECISION,
            PT, DT, CT,
        )  # fmt: skip
        if dx_ptr is not None or layer > 0:
            through(
                from_ptr, pointer_at(params_ptr, 0, PT), own_flow_ptr, None, rows, mask, number_at(sizes_ptr, SIZES),
                m * D, m * D, CONTEXT, BLOCK_O, BLOCK_K, PRECISION, DT, CT,
            )  # fmt: skip
            tl.debug_barrier()
            mix(
                own_weights_ptr, own_grads_ptr + offset_at(sizes_ptr, 4, B), own_flow_ptr, own_flow_ptr, first, B, m,
                n, n, 1, D, BLOCK_B, BLOCK_R, BLOCK_D, CT,
            )  # fmt: skip
            tl.debug_barrier()
    if dx_ptr is not None:
        copy_rows(flow_ptr + first * (FLOW - of_input), dx_ptr, rows, mask, of_input, BLOCK_O, CT)


@triton.jit(do_not_specialize=["B", "depth", "linears", "programs", "tiles", "grads_step"])
def weight_kernel(
    table_ptr, grads_ptr, dtaus_ptr, B: tl.int64, depth: tl.int32, linears: tl.int32, programs: tl.int32,
    tiles: tl.int32, grads_step: tl.int64, COPIES: tl.constexpr, POINTERS: tl.constexpr, ROUTE: tl.constexpr,
    UPDATE: tl.constexpr, EXTRA: tl.constexpr, PARAMS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr, PT: tl.constexpr,
    TT: tl.constexpr, DT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Grid axis 1: linear layers, and the temperatures, if there are any, as one more; axis 0: tiles of a weight, one
    net after the other, each with the table of its first program.

    Numbers of a linear layer: outputs, inputs; then, per row, where its inputs begin in the activations of its layer,
    how many of them are there (the others are x's), and where its results are in the gradients of all layers.
    """
    linear = tl.program_id(1)
    tile = tl.program_id(0)
    PER: tl.constexpr = ROUTE + UPDATE
    if COPIES:
        net = (tile // tiles).to(tl.int64)
        tile = tile % tiles
        table_ptr += net * programs * (POINTERS + depth * (SIZES + PER + PER * LINEAR_NUMBERS))
        grads_ptr += net * grads_step
        if dtaus_ptr is not None:
            dtaus_ptr += net * programs * depth
    if linear < linears:
        layer = linear // PER
        place = linear % PER
        own_ptr = table_ptr + layer * (EXTRA + PARAMS)
        numbers_ptr = table_ptr + POINTERS + depth * (SIZES + PER) + linear * LINEAR_NUMBERS
        outputs = number_at(numbers_ptr, 0)
        inputs = number_at(numbers_ptr, 1)
        of_input = B * tl.load(numbers_ptr + 2)
        kept = number_at(numbers_ptr, 3)
        of_grad = B * tl.load(numbers_ptr + 4)
        params_ptr = own_ptr + EXTRA + 2 * PER + 2 * place
        weight_gradient(
            grads_ptr + of_grad, pointer_at(own_ptr, 1, CT) + of_input, pointer_at(own_ptr, 0, DT),
            pointer_at(params_ptr, 0, PT), pointer_at(params_ptr, 1, PT), tile, B, outputs, inputs, kept, BLOCK_O,
            BLOCK_I, BLOCK_B, PRECISION, DT, CT,
        )  # fmt: skip
    elif dtaus_ptr is not None:
        if tile == 0:
            for layer in range(depth):
                own_ptr = table_ptr + layer * (EXTRA + PARAMS)
                store_sum(pointer_at(own_ptr, EXTRA - 1, TT), sum_of(dtaus_ptr + layer, programs, depth, BLOCK_T, CT))


@triton.jit(do_not_specialize=["programs"])
def penalty_kernel(partials_ptr, penalty_ptr, programs: tl.int32, BLOCK_T: tl.constexpr, CT: tl.constexpr):
    """One program per net, so that a net's sum has the same bits for any number of nets."""
    net = tl.program_id(0).to(tl.int64)
    tl.store(penalty_ptr + net, sum_of(partials_ptr + net * programs, programs, 1, BLOCK_T, CT))


# ---- Launchers


class StackOutput(NamedTuple):
    """Lists have one entry per layer; ``saved``: activations, empty unless they are wanted."""

    outs: list[Tensor]
    penalty: Tensor
    logits: list[Tensor]
    gates: list[Tensor]
    saved: list[Tensor]


def stack_forward(
    x: Tensor, layers: Sequence[Layer], tau_value: float, mode: int, context: bool, threshold: float, save: bool,
    low: torch.dtype | None,
) -> StackOutput:  # fmt: skip
    """For a stack that :func:`fits`; many nets take the same two launches."""
    nets = layers[0].nets
    d, lead = x.shape[-1], x.shape[:-2]
    wide, dtype = compute_dtype(x), low or x.dtype
    pairs = list(pairwise(counts_of(x, layers)))
    outs = [x.new_empty((*lead, n, d), dtype=dtype) for _, n in pairs]
    logits = [x.new_empty((*lead, m, n), dtype=dtype) for m, n in pairs]
    gates = [x.new_empty((*lead, n), dtype=dtype) for _, n in pairs]
    nothing = [x.new_empty((*nets, 0), dtype=wide) for _ in layers]
    if lead.numel() == 0:
        return StackOutput(outs, x.new_zeros(nets, dtype=wide), logits, gates, nothing)
    found = plan(x, layers, mode, context, low)
    padded = triton.cdiv(found.batch, BATCH_TILE) * BATCH_TILE
    # Without `save` this is just the workspace of the call.
    saved = [
        x.new_empty((*nets, padded * (sum(layer.widths) + n * d)), dtype=wide)
        for layer, (_, n) in zip(layers, pairs, strict=True)
    ]
    places: list[Place] = []
    for i, params in enumerate(found.params):
        shown = [found.of_rows(t) for t in (logits[i], gates[i], outs[i])]
        places += [found.of_rows(outs[i - 1]) if i else found.first, found.of_padded_rows(saved[i]), *shown]
        places += [*found.seeds[i : i + 1], *found.taus[i : i + 1], *params]
    penalised = threshold != NO_PENALTY
    programs = found.copies * found.programs
    partials = x.new_empty(programs, dtype=wide) if penalised else None
    penalty = x.new_empty(nets, dtype=wide) if penalised else x.new_zeros(nets, dtype=wide)
    with guard(x):
        forward_kernel[(programs,)](
            weights_ptr=found.scratch(found.most_weights), partials_ptr=partials, tau_value=tau_value,
            threshold=threshold, PENALTY=penalised, **found.arguments(places), **STACK_OPTIONS,
        )  # fmt: skip
        if penalised:
            penalty_kernel[(found.copies,)](
                partials_ptr=partials, penalty_ptr=penalty, programs=found.programs, CT=found.constants["CT"],
                BLOCK_T=WEIGHT_TILE["BLOCK_T"], **OPTIONS,
            )  # fmt: skip
    return StackOutput(outs, penalty, logits, gates, saved if save else nothing)


class StackGrads(NamedTuple):
    x: Tensor  # empty unless wanted
    taus: list[Tensor]  # of layers that have one
    params: list[Tensor]  # none unless wanted


def stack_backward(
    grad_out: Tensor | None,
    grad_penalty: Tensor | None,
    x: Tensor,
    layers: Sequence[Layer],
    tau_value: float,
    mode: int,
    context: bool,
    threshold: float,
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor],
    need_x: bool,
    need_params: bool,
    low: torch.dtype | None,
) -> StackGrads:
    """``inputs``: those of every layer but the first."""
    nets, wide = layers[0].nets, compute_dtype(x)
    grad_penalty = None if threshold == NO_PENALTY else grad_penalty
    nothing = x.shape[:-2].numel() == 0 or (grad_out is None and grad_penalty is None)
    made = torch.zeros if nothing else torch.empty
    of_taus = [tau_dtype(layer.tau, x) for layer in layers if layer.tau is not None]
    one = of_taus[0] if len(set(of_taus)) == 1 else wide  # one for all, as the kernel writes them as one type
    result = StackGrads(
        made(x.shape if need_x else (*nets, 0), dtype=x.dtype, device=x.device),
        [made(nets, dtype=one, device=x.device) for _ in of_taus],
        [made(p.shape, dtype=p.dtype, device=p.device) for layer in layers for p in layer.params if need_params],
    )
    if nothing:
        result.taus[:] = [tau.to(dtype) for tau, dtype in zip(result.taus, of_taus, strict=True)]
        return result
    found = plan(x, layers, mode, context, low)
    below = [found.first, *[found.of_rows(t.to(low or x.dtype).contiguous()) for t in inputs]]
    places: list[Place] = []
    grads_of_params = iter(result.params)
    for i, params in enumerate(found.params):
        places += [below[i], found.of_padded_rows(saved[i].contiguous()), *found.seeds[i : i + 1]]
        places += [*found.taus[i : i + 1], *[found.of_nets(t) for t in result.taus[i : i + 1]], *params]
        places += [found.of_nets(next(grads_of_params)) for _ in params if need_params]
    d, programs, linears = x.shape[-1], found.programs, sum(len(layer.widths) for layer in layers)
    flow = max(found.counts) * d
    kept = sum(sum(layer.widths) + n * d for layer, n in zip(layers, found.counts[1:], strict=True))
    grads = found.scratch(kept)
    dtaus = x.new_empty(found.copies * programs * len(layers), dtype=wide) if result.taus else None
    of_params = (2 if need_params else 1) * len(layers[0].params)
    arguments = found.arguments(places)
    with guard(x):
        backward_kernel[(found.copies * programs,)](
            grad_out_ptr=None if grad_out is None else grad_out.contiguous(),
            grad_penalty_ptr=grad_penalty, penalty_step=0 if grad_penalty is None else sum(grad_penalty.stride()),
            dx_ptr=result.x if need_x else None, grads_ptr=grads, flow_ptr=found.scratch(flow),
            weights_ptr=found.scratch(found.most_weights), dtaus_ptr=dtaus, tau_value=tau_value, threshold=threshold,
            FLOW=flow, KEPT=kept, PARAMS=of_params, **arguments, **STACK_OPTIONS,
        )  # fmt: skip
        if need_params or dtaus is not None:
            tiles = [
                triton.cdiv(p.shape[-2], WEIGHT_TILE["BLOCK_O"]) * triton.cdiv(p.shape[-1], WEIGHT_TILE["BLOCK_I"])
                for layer in layers
                for p in layer.params[::2]
            ]
            most, rows = (max(tiles), linears) if need_params else (1, 0)
            same = {name: found.constants[name] for name in ("ROUTE", "UPDATE", "PRECISION", "PT", "DT", "CT")}
            weight_kernel[(found.copies * most, rows + (dtaus is not None))](
                table_ptr=arguments["table_ptr"], grads_ptr=grads, dtaus_ptr=dtaus, B=found.batch, depth=len(layers),
                linears=rows, programs=programs, tiles=most, grads_step=grads.numel() // found.copies,
                COPIES=found.copies > 1, POINTERS=len(places), EXTRA=len(places) // len(layers) - of_params,
                PARAMS=of_params, TT=TRITON_TYPES[one], **same, **WEIGHT_TILE, **OPTIONS,
            )  # fmt: skip
    result.taus[:] = [tau.to(dtype) for tau, dtype in zip(result.taus, of_taus, strict=True)]
    return result


@torch.no_grad()
def smfr_forward(
    x: Tensor,
    params: Sequence[Tensor],
    fnn_tensors: int,
    taus: Sequence[Tensor],
    seeds: Sequence[Tensor],
    mode: int,
    context: bool,
    threshold: float,
    save: bool,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """x ``[..., M, D]`` -> out, penalty (0-d), logits, gates, saved: activations of layer 0, its output, ..."""
    layers = layers_of(params, fnn_tensors, taus, seeds)
    if fits(x, layers):
        found = stack_forward(x, layers, 1.0, mode, context, threshold, save, low)
        outs, total, logits, gates, kept = found
    else:
        outs, logits, gates, kept = [], [], [], []
        total = x.new_zeros((), dtype=compute_dtype(x))
        for layer in layers:
            out, penalty, *shown, activations = MFNNR_FORWARD[True](
                outs[-1] if outs else x, layer.route, layer.update, layer.tau, 1.0, layer.seed, mode, context,
                threshold, save, low,
            )  # fmt: skip
            total = total + penalty
            for some, one in zip((outs, logits, gates, kept), (out, *shown, activations), strict=True):
                some.append(one)
    saved = [t for pair in zip(kept, outs, strict=True) for t in pair][:-1] if save else []
    return outs[-1], total, logits, gates, saved


@torch.no_grad()
def smfr_backward(
    grad_out: Tensor | None,
    grad_penalty: Tensor | None,
    x: Tensor,
    params: Sequence[Tensor],
    fnn_tensors: int,
    taus: Sequence[Tensor],
    seeds: Sequence[Tensor],
    mode: int,
    context: bool,
    threshold: float,
    saved: Sequence[Tensor],
    need_x: bool,
    need_params: bool,
    low: torch.dtype | None = None,
) -> list[Tensor]:
    """``[dx or empty(0), *dtaus, *dparams]``, the parameters' only with ``need_params``."""
    layers = layers_of(params, fnn_tensors, taus, seeds)
    if fits(x, layers):
        found = stack_backward(
            grad_out, grad_penalty, x, layers, 1.0, mode, context, threshold, saved[1::2], saved[::2], need_x,
            need_params, low,
        )  # fmt: skip
        return [found.x, *found.taus, *found.params]
    grad = grad_out
    grad_taus: list[Tensor] = []
    grad_params: list[Tensor] = []
    for i in reversed(range(len(layers))):
        layer = layers[i]
        grad, grad_tau, *own = MFNNR_BACKWARD[True](
            grad, grad_penalty, saved[2 * i - 1] if i else x, layer.route, layer.update, layer.tau, 1.0, layer.seed,
            mode, context, threshold, saved[2 * i], i > 0 or need_x, need_params, low,
        )  # fmt: skip
        grad_taus[:0] = [grad_tau] if taus else []
        grad_params[:0] = own
    assert grad is not None
    return [grad, *grad_taus, *grad_params]


# ---- What `fastmod compile` builds of this file, and the tests check


#: Name -> blocks in and out of the layers, D, hidden widths, mode, context, nets.
COMPILED: dict[str, Any] = {
    "D10": ((6, 8, 8, 8, 5), 10, (100,), "softmax", True, 1),
    "D32": ((16, 16), 32, (128, 128, 128), "gumbel", False, 1),
    "copies": ((6, 8, 5), 10, (100,), "gumbel", True, 8),
}


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """With 16 bits those with noise read fp32, as under autocast."""
    if dtype.name == "fp64":  # see `fits`
        return []
    p, w = dtype.pointer, dtype.wide_pointer
    stack_on_amd = {"PRECISION": IEEE, "num_warps": AMD_OPTIONS["num_warps"], "maxnreg": None}
    found = []
    for case, (counts, d, hidden, mode, context, nets) in COMPILED.items():
        x = torch.empty(1, counts[0], d, device="meta")

        def fnn(inputs: int, outputs: int, hidden: Sequence[int] = hidden) -> list[Tensor]:
            sizes = [inputs, *hidden, outputs]
            shapes = [shape for i, o in pairwise(sizes) for shape in ((o, i), (o,))]
            return [torch.empty(shape, device="meta") for shape in shapes]

        layers = [
            Layer(fnn(m * d, m * n), fnn((n + m if context else n) * d, n * d + n), None, None)
            for m, n in pairwise(counts)
        ]
        gumbel = mode == "gumbel"
        q = w if gumbel else p  # of the parameters
        params, extra = len(layers[0].params), ["*i64", "*fp32"] if gumbel else []
        shared = {
            "table_ptr": "*i64", "weights_ptr": w, "NUMBERS": numbers_of(x, layers, context), "SHARED": nets > 1,
            "D": d, "DEPTH": len(layers), "MOST_WEIGHTS": max(m * n for m, n in pairwise(counts)),
            "ROUTE": len(hidden) + 1, "UPDATE": len(hidden) + 1, "CONTEXT": context, "MODE": MODES[mode],
            "TAU": tl.float32 if gumbel else None, **tile(counts, d),
            "PRECISION": TF32_THRICE, "PT": dtype.compute if gumbel else dtype.element, "DT": dtype.element,
            "CT": dtype.compute, "x_ptr": q, "rounded_ptr": p if q != p else None,
        }  # fmt: skip
        pointers = (p, w, p, p, p, *extra, *[q] * params) * len(layers)
        forward = {
            **shared, "pointers": pointers, "STEPS": some_steps(len(pointers), nets), "partials_ptr": w,
            "PENALTY": True,
        }  # fmt: skip
        pointers = (p, w, *extra, *([w] if gumbel else []), *[q] * (2 * params)) * len(layers)
        backward = {
            **shared, "pointers": pointers, "STEPS": some_steps(len(pointers), nets), "grad_out_ptr": p,
            "grad_penalty_ptr": w, "dx_ptr": q, "grads_ptr": w, "flow_ptr": w, "dtaus_ptr": w if gumbel else None,
            "FLOW": max(counts) * d, "KEPT": sum(sum(layer.widths) for layer in layers), "PARAMS": 2 * params,
        }  # fmt: skip
        kept = {name: shared[name] for name in ("table_ptr", "ROUTE", "UPDATE", "PRECISION", "PT", "DT", "CT")}
        weight = {
            **kept, "grads_ptr": w, "dtaus_ptr": w if gumbel else None, "COPIES": nets > 1, "POINTERS": len(pointers),
            "EXTRA": len(pointers) // len(layers) - 2 * params, "PARAMS": 2 * params, "TT": dtype.compute,
            **WEIGHT_TILE,
        }  # fmt: skip
        found += [
            Specialisation(forward_kernel, forward, NVIDIA_OPTIONS, case, stack_on_amd),
            Specialisation(backward_kernel, backward, NVIDIA_OPTIONS, case, stack_on_amd),
            Specialisation(weight_kernel, weight, OPTIONS, case, {"PRECISION": IEEE}),
        ]
    if dtype.name == "fp32":  # the dtype of penalties for any dtype of the layers
        sums = {"partials_ptr": w, "penalty_ptr": w, "BLOCK_T": WEIGHT_TILE["BLOCK_T"], "CT": dtype.compute}
        found.append(Specialisation(penalty_kernel, sums, OPTIONS))
    return found


def some_steps(pointers: int, nets: int) -> tuple[tuple[int, ...], ...] | None:
    """Example steps: the code is the same for all that are not 0."""
    return tuple((4 * i, 4, 4) for i in range(1, 1 + pointers)) if nets > 1 else None
