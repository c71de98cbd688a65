"""A whole MFNNR (Multiplexer, then FNN with gated residual) as one autograd node: ``mfnnr``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod._private import transformed, without_binding
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample, fnn_shapes
from fastmod.ops.gated_residual import reference as gated_residual_reference
from fastmod.ops.multiplex import MODES, mode_code, seed_for
from fastmod.ops.multiplex import reference as multiplex_reference
from fastmod.ops.range_penalty import each as each_penalty
from fastmod.ops.range_penalty import reference as range_penalty_reference

LEAKY_SLOPE = 0.01
#: The kernels keep activations of the batch in tiles of this many columns.
BATCH_TILE = 64
#: The `threshold` of a call of the kernels that wants no penalty.
NO_PENALTY = -1.0


class MFNNROutput(NamedTuple):
    """What ``mfnnr`` returns. ``logits`` and ``gate`` are for inspection and carry no gradient."""

    out: Tensor  # [..., N, D]
    penalty: Tensor  # scalar
    logits: Tensor  # [..., M, N] routing logits, before temperature and noise
    gate: Tensor  # [..., N] gate logits


def mfnnr(
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    *,
    context: bool = True,
    mode: str = "softmax",
    tau: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    threshold: float | None = 20.0,
) -> MFNNROutput:
    """Route M blocks to N with one FNN, then rewrite them with another behind gates.

    Both FNNs are given as ``[weight, bias, weight, bias, ...]`` with shapes as in ``nn.Linear`` and LeakyReLU(0.01)
    between the layers; N follows from the last layer of ``route``.

    Args:
        x: ``[..., M, D]``.
        route: M*D features -> M*N routing logits ``[M, N]``.
        update: (N+M)*D features ``[routed ; x]`` (N*D without context) -> N*D new values, then N gate logits.
        context: whether ``update`` reads ``x`` besides the routed blocks.
        mode, tau, seed: as in :func:`fastmod.ops.multiplex`.
        threshold: of the range penalty over the routing and gate logits; ``None`` for no penalty (a zero).
    """
    code = mode_code(mode)
    _checks.flag("context", context)
    chosen = backend.resolve("mfnnr", x)
    if backend.checks_first(chosen):
        _check(x, route, update, context)
    limit = NO_PENALTY if threshold is None else _checks.threshold(threshold, "a float or None")
    tau_tensor, tau_value = _checks.positive_tau(tau, x)
    seed_value = seed_for(mode, seed, x)
    if chosen == "reference":
        with backend.reference_autocast(x, *route, *update) as (x, *params):
            route, update = params[: len(route)], params[len(route) :]
            return reference(x, route, update, tau_tensor, tau_value, seed_value, code, context, limit)
    try:
        low = None
        if backend.autocasts(x):
            low = backend.rounded_by_kernel(x, *route, *update)
            if low is None:
                x, *params = backend.lowered(x, *route, *update)
                route, update = params[: len(route)], params[len(route) :]
        triton = chosen == "triton"
        found = _run(x, route, update, tau_tensor, tau_value, seed_value, code, context, limit, triton, low)
    except Exception:
        _check(x, route, update, context)
        raise
    return MFNNROutput(*found)


def _check(x: Tensor, route: Sequence[Tensor], update: Sequence[Tensor], context: bool) -> None:
    _checks.float_tensor("x", x, 2, "[..., M, D]")
    check_layer("", x, x.shape[-2], x.shape[-1], route, update, context)


def check_layer(
    prefix: str, x: Tensor, m: int, d: int, route: Sequence[Tensor], update: Sequence[Tensor], context: bool
) -> int:
    """Check both FNNs of a layer that reads M blocks of size D, of the kind of ``x``; returns N."""
    if m == 0 or d == 0:
        raise ValueError(f"x: expected [..., M, D] with M >= 1 and D >= 1, got shape {_checks.shape(x)}")
    outputs = _check_fnn(f"{prefix}route", x, route, m * d)
    n = outputs // m
    if outputs != m * n or n == 0:
        raise ValueError(
            f"{prefix}route[{len(route) - 2}]: expected a multiple of M = {m} output features, got shape "
            f"{_checks.shape(route[-2])}"
        )
    outputs = _check_fnn(f"{prefix}update", x, update, (n + m) * d if context else n * d)
    if outputs != n * d + n:
        raise ValueError(
            f"{prefix}update[{len(update) - 2}]: expected N*D + N = {n * d + n} output features (N = {n}, D = {d}), "
            f"got shape {_checks.shape(update[-2])}"
        )
    return n


def _check_fnn(name: str, x: Tensor, params: Sequence[Tensor], features: int) -> int:
    """Check a chain of linear layers that starts at ``features``; returns its number of outputs."""
    _checks.listed(name, params, "[weight, bias, ...]")
    if len(params) == 0 or len(params) % 2:
        raise ValueError(f"{name}: expected [weight, bias, ...] in pairs, got {len(params)} tensors")
    for i in range(0, len(params), 2):
        weight, bias = params[i], params[i + 1]
        _checks.float_tensor(f"{name}[{i}]", weight, 2, "[out, in]")
        _checks.float_tensor(f"{name}[{i + 1}]", bias, 1, "[out]")
        _checks.same_kind("x", x, f"{name}[{i}]", weight)
        _checks.same_kind("x", x, f"{name}[{i + 1}]", bias)
        if weight.dim() != 2 or weight.shape[1] != features or weight.shape[0] == 0:
            raise ValueError(
                f"{name}[{i}]: expected a weight [out, in] with in = {features} and out >= 1, got shape "
                f"{_checks.shape(weight)}"
            )
        features = weight.shape[0]
        _checks.exact_shape(f"{name}[{i + 1}]", bias, (features,), "a bias [out]")
    return features


def fnn(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """``[..., in] -> [..., out]`` in plain PyTorch."""
    for i in range(0, len(params) - 2, 2):
        x = F.leaky_relu(F.linear(x, params[i], params[i + 1]), LEAKY_SLOPE)
    return F.linear(x, params[-2], params[-1])


def reference(
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    context: bool,
    threshold: float,
) -> MFNNROutput:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    blocks = x.to(wide)
    route, update = [p.to(wide) for p in route], [p.to(wide) for p in update]
    *batch, m, d = x.shape
    n = route[-1].shape[0] // m
    flat = blocks.flatten(-2)  # [..., M*D]
    logits = fnn(flat, route).unflatten(-1, (m, n))
    routed = multiplex_reference(blocks, logits, tau, tau_value, seed, mode)  # [..., N, D]
    hidden = routed.flatten(-2)
    update_out = fnn(torch.cat([hidden, flat], dim=-1) if context else hidden, update)  # [..., N*D + N]
    new, gate = update_out[..., : n * d].unflatten(-1, (n, d)), update_out[..., n * d :]
    out = gated_residual_reference(routed, new, gate)
    penalty = (
        torch.zeros((), dtype=wide, device=x.device)
        if threshold == NO_PENALTY
        else range_penalty_reference([logits, gate], threshold)
    )
    return MFNNROutput(out.to(x.dtype), penalty, logits.detach().to(x.dtype), gate.detach().to(x.dtype))


def saved_rows(x: Tensor, route: Sequence[Tensor], update: Sequence[Tensor]) -> int:
    """Activations kept per batch element: hidden layers of both FNNs, their outputs, and the routed blocks."""
    m, d = x.shape[-2:]
    return sum(bias.shape[-1] for bias in [*route[1::2], *update[1::2]]) + route[-1].shape[-1] // m * d


# `low` of a kernel is the autocast dtype. Parameters and x, which have it or fp32, are rounded to it as they are read;
# results have it, gradients the dtypes of their tensors (in fp32 without rounding).
#
# Kernels and their fakes also take the parameters of many nets at once, with a leading dimension of copies, which x,
# temperatures, seeds and all results then have as well.


def fake_forward(
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
    _checks.one_device(x, *route, *update, tau)
    dtype = x.dtype if low is None else low
    *batch, m, d = x.shape
    n = route[-1].shape[-1] // m
    wide = _checks.compute_dtype(x)
    copies = route[0].shape[:-2]
    elements = 1
    for size in batch[len(copies) :]:
        elements = elements * size
    padded = (elements + BATCH_TILE - 1) // BATCH_TILE * BATCH_TILE
    return (
        x.new_empty(*batch, n, d, dtype=dtype),
        x.new_empty(copies, dtype=wide),
        x.new_empty(*batch, m, n, dtype=dtype),
        x.new_empty(*batch, n, dtype=dtype),
        x.new_empty(*copies, padded * saved_rows(x, route, update) if save else 0, dtype=wide),
    )


def fake_backward(
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
    """``[grad x, grad tau, grads of route..., grads of update...]``; what is not needed is empty or left out."""
    copies = route[0].shape[:-2]
    grads = [x.new_empty(x.shape if need_x else (*copies, 0)), x.new_empty(copies, dtype=_checks.tau_dtype(tau, x))]
    if need_params:
        grads += [p.new_empty(p.shape) for p in [*route, *update]]
    return grads


def penalties(logits: Tensor, gates: Tensor, threshold: float) -> Tensor:
    """The penalty of each element of the leading dimension, [V]."""
    if threshold == NO_PENALTY:
        return torch.zeros(logits.shape[0], dtype=_checks.compute_dtype(logits), device=logits.device)
    return each_penalty([logits, gates], threshold)


def _forward_rule(overload: Any) -> _autograd.Rule:
    """The elements of x as a larger batch in one call, unless they differ in parameters or draw noise. Nothing is saved
    then: for the backward, which must keep their gradients apart, everything is recomputed in plain PyTorch."""
    over_copies = _autograd.over_copies(overload, 1)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        x, route, update, tau, tau_value, seed, mode, context, threshold, _, *low = arguments
        copies = route[0].dim() > 2 or any(_autograd.batched(dim) for dim in in_dims[1:4])
        if mode == MODES["gumbel"] or copies or any(low):
            return over_copies(info, in_dims, *arguments)
        wide = _checks.compute_dtype(x)  # the penalty is computed from logits before rounding
        fronts = [
            _autograd.in_front(info, x, in_dims[0]).to(wide),
            *[[p.to(wide) for p in fnn] for fnn in (route, update)],
        ]
        out, _, logits, gate, kept = overload(*fronts, tau, tau_value, seed, mode, context, threshold, False)
        results = (out.to(x.dtype), penalties(logits, gate, threshold), logits.to(x.dtype), gate.to(x.dtype), kept)
        return results, (0, 0, 0, 0, None)

    return rule


#: out, penalty, routing logits, gate logits, activations for the backward (empty unless ``save``)
FORWARD = _autograd.define(
    "mfnnr_forward(Tensor x, Tensor[] route, Tensor[] update, Tensor? tau, float tau_value, Tensor? seed, int mode, "
    "bool context, float threshold, bool save, ScalarType? low=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_forward,
    _forward_rule,
)
BACKWARD = _autograd.define(
    "mfnnr_backward(Tensor? grad_out, Tensor? grad_penalty, Tensor x, Tensor[] route, Tensor[] update, Tensor? tau, "
    "float tau_value, Tensor? seed, int mode, bool context, float threshold, Tensor saved, bool need_x, "
    "bool need_params, ScalarType? low=None) -> Tensor[]",
    fake_backward,
    lambda overload: _autograd.over_copies(overload, 3),
)


class Mfnnr(_autograd.Op):
    """``numbers``: triton, how many parameters are route's, tau_value, mode, context, threshold, low."""

    @staticmethod
    def forward(
        numbers: tuple[Any, ...], x: Tensor, tau: Tensor | None, seed: Tensor | None, *params: Tensor
    ) -> tuple[Tensor, ...]:
        triton, cut, tau_value, mode, context, threshold, low = numbers
        route, update = params[:cut], params[cut:]
        return FORWARD[triton](x, route, update, tau, tau_value, seed, mode, context, threshold, True, low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = inputs[0]
        ctx.save_for_backward(output[4], *inputs[1:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        if grads[0] is None and grads[1] is None:
            return (None,) * len(needs)
        saved = ctx.saved_tensors
        wants = needs[1], saved[2] is not None, True in needs[4:]  # x, tau, any parameter
        numbers = ctx.numbers, wants
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grads[0], grads[1], *saved)
        return None, *placed(found, wants, 1), None, *(found[wants[0] + wants[1] :] or (None,) * (len(needs) - 4))


class _MfnnrAtOnce(torch.autograd.Function):
    """:class:`Mfnnr` with two results. The others go into a list, ``numbers[-1]``, around autograd, which would wrap
    each of them; not under torch.func, which needs pure functions."""

    @staticmethod
    def forward(ctx: Any, numbers: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, Tensor]:
        *ctx.numbers, shown = numbers
        out, penalty, logits, gate, kept = Mfnnr.forward(ctx.numbers, *inputs)
        shown += [logits, gate]
        ctx.save_for_backward(kept, *inputs)
        ctx.set_materialize_grads(False)
        return out, penalty

    backward = Mfnnr.backward


_at_once = without_binding(_MfnnrAtOnce)


def placed(found: tuple[Tensor, ...], wants: tuple[bool, bool, bool], taus: int) -> tuple[Tensor | None, ...]:
    """Gradients of x and the temperatures, None for those not needed."""
    first = found[:1] if wants[0] else (None,)
    return (*first, *found[wants[0] : wants[0] + taus]) if wants[1] else (*first, *(None,) * taus)


def _by_kernel(
    numbers: tuple[Any, ...],
    grad_out: Tensor | None,
    grad_penalty: Tensor | None,
    kept: Tensor,
    x: Tensor,
    tau: Tensor | None,
    seed: Tensor | None,
    *params: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of x, tau and all parameters, as far as they are needed."""
    (triton, cut, tau_value, mode, context, threshold, low), (need_x, need_tau, need_params) = numbers
    if kept.numel() == 0:  # nothing was saved: a batch of elements under vmap
        return _by_reference(numbers, grad_out, grad_penalty, kept, x, tau, seed, *params)
    found = BACKWARD[triton](
        grad_out, grad_penalty, x, params[:cut], params[cut:], tau, tau_value, seed, mode, context, threshold,
        kept, need_x, need_params, low,
    )  # fmt: skip
    if tau is not None:
        found[1] = found[1].to(tau.dtype)
    return (*found[not need_x : 1 + need_tau], *found[2:])


def _by_reference(
    numbers: tuple[Any, ...],
    grad_out: Tensor | None,
    grad_penalty: Tensor | None,
    kept: Tensor,
    *inputs: Tensor | None,
) -> tuple[Tensor, ...]:
    (_, cut, tau_value, mode, context, threshold, low), (need_x, need_tau, need_params) = numbers

    def plain(x: Tensor, tau: Tensor | None, seed: Tensor | None, *params: Tensor) -> tuple[Tensor, ...]:
        x, *cast = _checks.in_dtype(low, x, *params)
        result = reference(x, cast[:cut], cast[cut:], tau, tau_value, seed, mode, context, threshold)
        return with_gradient(result.out, result.penalty, grad_out, grad_penalty)[0]

    grads = with_gradient(None, None, grad_out, grad_penalty)[1]
    places = [*range(not need_x, 1 + need_tau), *(range(3, len(inputs)) if need_params else ())]
    return _autograd.vjp_at(_autograd.each_copy(plain, inputs[3]), places, grads, *inputs)


def with_gradient(
    out: Any, penalty: Any, grad_out: Tensor | None, grad_penalty: Tensor | None
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """The results, of two, that have a gradient, and the gradients."""
    pairs = [(a, g) for a, g in ((out, grad_out), (penalty, grad_penalty)) if g is not None]
    return tuple(a for a, _ in pairs), tuple(g for _, g in pairs)


def _node(numbers: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, ...]:
    """``(out, penalty, logits, gate)``"""
    if transformed():
        copies = _autograd.maps_copies(inputs[3:])
        return (MfnnrOfCopies if copies else Mfnnr).apply(numbers, *inputs)[:4]
    shown: list[Tensor] = []
    return *_at_once((*numbers, shown), *inputs), *shown


MfnnrOfCopies = _autograd.of_copies(Mfnnr, _node)


@in_graph
def _run(
    x: Tensor,
    route: Sequence[Tensor],
    update: Sequence[Tensor],
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    context: bool,
    threshold: float,
    triton: bool,
    low: torch.dtype | None,
) -> tuple[Tensor, ...]:
    if _autograd.wanted(x, *route, *update, tau):
        return _node((triton, len(route), tau_value, mode, context, threshold, low), x, tau, seed, *route, *update)
    return FORWARD[triton](x, route, update, tau, tau_value, seed, mode, context, threshold, False, low)[:4]


def _sample(label: str, route: Sequence[int], update: Sequence[int], m: int, d: int, mode: str) -> Sample:
    """Tensors: x, then both FNNs, then tau; with context when ``update`` reads more than the routed blocks."""
    n = route[-1] // m
    cut = 1 + 2 * (len(route) - 1)

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        result = mfnnr(
            tensors[0],
            list(tensors[1:cut]),
            list(tensors[cut:-1]),
            context=update[0] == (n + m) * d,
            mode=mode,
            tau=tensors[-1],
            seed=7,
            threshold=0.5,
        )
        return [result.out, result.penalty]

    return Sample("mfnnr", label, ((3, m, d), *fnn_shapes(*route), *fnn_shapes(*update), ()), call)


SAMPLES = (
    _sample("softmax", (35, 9, 15), (56, 9, 24), 5, 7, "softmax"),
    _sample("two layers, no context", (6, 11, 5, 6), (4, 3, 7, 6), 3, 2, "softmax"),
    _sample("gumbel", (35, 9, 15), (56, 9, 24), 5, 7, "gumbel"),
)
