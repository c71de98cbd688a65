"""A stack of MFNNRs as one autograd node: ``smfr``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod._compiler import in_graph
from fastmod._private import transformed, without_binding
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample, fnn_shapes
from fastmod.ops.mfnnr import NO_PENALTY, check_layer, penalties, with_gradient
from fastmod.ops.mfnnr import fake_backward as mfnnr_fake_backward
from fastmod.ops.mfnnr import fake_forward as mfnnr_fake_forward
from fastmod.ops.mfnnr import reference as mfnnr_reference
from fastmod.ops.multiplex import MODES, mode_code

#: One layer: the tensors of its route FNN and those of its update FNN, each ``[weight, bias, weight, bias, ...]``.
LayerParams = tuple[Sequence[Tensor], Sequence[Tensor]]


class SMFROutput(NamedTuple):
    """What ``smfr`` returns; lists have one entry per layer. ``logits`` and ``gates`` carry no gradient."""

    out: Tensor  # [..., N, D]
    penalty: Tensor  # scalar, summed over the layers
    logits: list[Tensor]  # [..., M, N] routing logits, before temperature and noise
    gates: list[Tensor]  # [..., N] gate logits


def smfr(
    x: Tensor,
    layers: Sequence[LayerParams],
    *,
    context: bool = True,
    mode: str = "softmax",
    taus: Sequence[Tensor] | None = None,
    seeds: Sequence[int | Tensor] | None = None,
    threshold: float | None = 20.0,
) -> SMFROutput:
    """Pass blocks through a stack of MFNNRs; each is what :func:`fastmod.ops.mfnnr` computes.

    On the CPU a tile of the batch passes through all layers at once, which costs far less than a call per layer.

    Args:
        x: ``[..., M, D]``.
        layers: per layer ``(route, update)`` as in :func:`fastmod.ops.mfnnr`, all FNNs with the same number of layers.
        context, mode, threshold: as in :func:`fastmod.ops.mfnnr`.
        taus: per layer a 0-d temperature that may require grad; ``None`` for 1.
        seeds: per layer the seed of the Gumbel noise; ``None`` draws them from torch's generator.
    """
    code = mode_code(mode)
    _checks.flag("context", context)
    chosen = backend.resolve("smfr", x)
    limit = NO_PENALTY if threshold is None else _checks.threshold(threshold, "a float or None")
    if backend.checks_first(chosen):
        _check(x, layers, taus, seeds, context)
    try:
        params = [tensor for layer in layers for fnn in layer for tensor in fnn]
        fnn_tensors = len(layers[0][0])
        tau_tensors = [] if taus is None else list(taus)
        if taus is not None and (isinstance(taus, Tensor) or len(tau_tensors) != len(layers)):
            raise ValueError("taus")  # the check below words the error
        seed_tensors = _seed_tensors(mode, seeds, len(layers), x.device)
        if chosen == "reference":
            with backend.reference_autocast(x, *params) as (x, *params):
                return reference(x, params, fnn_tensors, tau_tensors, seed_tensors, code, context, limit)
        low, triton = None, chosen == "triton"
        if backend.autocasts(x):
            low = backend.rounded_by_kernel(x, *params)
            if low is None:
                x, *params = backend.lowered(x, *params)
        found = _run(x, params, fnn_tensors, tau_tensors, seed_tensors, code, context, limit, triton, low)
    except Exception:
        _check(x, layers, taus, seeds, context)
        raise
    depth = len(layers)
    return SMFROutput(found[0], found[1], list(found[2 : 2 + depth]), list(found[2 + depth : 2 + 2 * depth]))


def _check(
    x: Tensor,
    layers: Sequence[LayerParams],
    taus: Sequence[Tensor] | None,
    seeds: Sequence[int | Tensor] | None,
    context: bool,
) -> None:
    _checks.float_tensor("x", x, 2, "[..., M, D]")
    _checks.listed("layers", layers, "of (route, update)")
    if not layers:
        raise ValueError("layers: expected at least one (route, update), got none")
    for i, layer in enumerate(layers):
        _checks.listed(f"layers[{i}]", layer, "or tuple (route, update)")
        if len(layer) != 2:
            raise ValueError(f"layers[{i}]: expected two lists (route, update), got {len(layer)} entries")
        for name, fnn in zip(("route", "update"), layer, strict=True):
            _checks.listed(f"layers[{i}].{name}", fnn, "[weight, bias, ...]")
    lengths = {len(fnn) for layer in layers for fnn in layer}
    if len(lengths) > 1:
        raise ValueError(f"layers: expected FNNs of one number of layers, got {sorted(lengths)} tensors")
    m, d = x.shape[-2:]
    for i, (route, update) in enumerate(layers):
        m = check_layer(f"layers[{i}].", x, m, d, route, update, context)
    for name, values in (("taus", taus), ("seeds", seeds)):
        if values is None:
            continue
        _checks.listed(name, values, f"of {len(layers)}, one per layer, or None")
        if len(values) != len(layers):
            raise ValueError(f"{name}: expected one per layer, that is {len(layers)}, got {len(values)}")
    for i, tau in enumerate(taus or ()):
        if not isinstance(tau, Tensor):
            raise TypeError(f"taus[{i}]: expected a floating-point 0-d tensor, got {type(tau).__name__}")
        _checks.tau_tensor(f"taus[{i}]", tau, x, "a floating-point 0-d tensor")
        if tau.device.type == "cpu" and not transformed() and not tau.item() > 0:
            raise ValueError(f"taus[{i}]: expected a number > 0, got {tau.item()}")


def _seed_tensors(mode: str, seeds: Sequence[int | Tensor] | None, layers: int, device: torch.device) -> list[Tensor]:
    """One seed per layer of a stack with noise; without noise, given seeds are checked all the same."""
    if seeds is None and mode != "gumbel":
        return []
    if seeds is None and device.type != "cpu":  # in one launch
        return list(torch.randint(0, 2**63 - 1, (layers,), dtype=torch.int64, device=device).unbind())
    chosen: Sequence[int | Tensor | None] = [None] * layers if seeds is None else seeds
    found = [noise.seed_tensor(s, device, f"seeds[{i}]") for i, s in enumerate(chosen)]
    return found if mode == "gumbel" else []


def _each_layer(
    params: Sequence[Tensor], fnn_tensors: int, taus: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None, Tensor | None]]:
    """``(route, update, tau, seed)`` of every layer."""
    found = []
    for i, at in enumerate(range(0, len(params), 2 * fnn_tensors)):
        route, update = params[at : at + fnn_tensors], params[at + fnn_tensors : at + 2 * fnn_tensors]
        found.append((route, update, taus[i] if taus else None, seeds[i] if seeds else None))
    return found


def reference(
    x: Tensor,
    params: Sequence[Tensor],
    fnn_tensors: int,
    taus: Sequence[Tensor],
    seeds: Sequence[Tensor],
    mode: int,
    context: bool,
    threshold: float,
) -> SMFROutput:
    """Plain PyTorch, layer by layer; reduced precision is computed in fp32."""
    total = torch.zeros((), dtype=_checks.compute_dtype(x), device=x.device)
    logits, gates = [], []
    for route, update, tau, seed in _each_layer(params, fnn_tensors, taus, seeds):
        result = mfnnr_reference(x, route, update, tau, 1.0, seed, mode, context, threshold)
        x, total = result.out, total + result.penalty
        logits.append(result.logits)
        gates.append(result.gate)
    return SMFROutput(x, total, logits, gates)


def fake_forward(
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
    _checks.one_device(x, *params, *taus)
    logits, gates, saved = [], [], []
    layers = _each_layer(params, fnn_tensors, taus, seeds)
    for i, (route, update, tau, seed) in enumerate(layers):
        x, penalty, logit, gate, activations = mfnnr_fake_forward(
            x, route, update, tau, 1.0, seed, mode, context, threshold, save, low
        )
        logits.append(logit)
        gates.append(gate)
        if save:
            saved.append(activations)
            if i + 1 < len(layers):  # the input of the next layer; the CPU keeps it in the compute dtype
                wide = _checks.compute_dtype(x) if x.device.type == "cpu" else x.dtype
                saved.append(x.new_empty(x.shape, dtype=wide))
    return x, penalty, logits, gates, saved


def fake_backward(
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
    """``[grad x, grads of taus..., grads of params...]``; what is not needed is empty or left out."""
    grads = mfnnr_fake_backward(
        grad_out, grad_penalty, x, params, [], None, 1.0, None, mode, context, threshold, saved[0], need_x, need_params
    )
    return [grads[0], *[torch.empty_like(grads[1], dtype=_checks.tau_dtype(tau, x)) for tau in taus], *grads[2:]]


# ---------------------------------------------------------------------------------------------------- kernels


def _forward_rule(overload: Any) -> _autograd.Rule:
    """The vmap rule, as that of ``mfnnr``."""
    over_copies = _autograd.over_copies(overload, 1)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        x, params, fnn_tensors, taus, seeds, mode, context, threshold, _, *low = arguments
        copies = params[0].dim() > 2 or _autograd.batched(in_dims[1]) or _autograd.batched(in_dims[3])
        if mode == MODES["gumbel"] or copies or any(low):
            return over_copies(info, in_dims, *arguments)
        wide = _checks.compute_dtype(x)
        out, _, logits, gates, kept = overload(
            _autograd.in_front(info, x, in_dims[0]).to(wide), [p.to(wide) for p in params], fnn_tensors, taus, seeds,
            mode, context, threshold, False,
        )  # fmt: skip
        total = sum(penalties(a, b, threshold) for a, b in zip(logits, gates, strict=True))
        shown = [[t.to(x.dtype) for t in tensors] for tensors in (logits, gates)]
        return (out.to(x.dtype), total, *shown, kept), (0, 0, [0] * len(logits), [0] * len(gates), [])

    return rule


#: saved: activations of layer 0, its output, activations of layer 1, ...
FORWARD = _autograd.define(
    "smfr_forward(Tensor x, Tensor[] params, int fnn_tensors, Tensor[] taus, Tensor[] seeds, int mode, bool context, "
    "float threshold, bool save, ScalarType? low=None) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
    fake_forward,
    _forward_rule,
)
BACKWARD = _autograd.define(
    "smfr_backward(Tensor? grad_out, Tensor? grad_penalty, Tensor x, Tensor[] params, int fnn_tensors, Tensor[] taus, "
    "Tensor[] seeds, int mode, bool context, float threshold, Tensor[] saved, bool need_x, bool need_params, "
    "ScalarType? low=None) -> Tensor[]",
    fake_backward,
    lambda overload: _autograd.over_copies(overload, 3),
)


class Smfr(_autograd.Op):
    """``tensors``: temperatures, parameters, seeds. ``numbers``: triton, where parameters and seeds begin among these,
    fnn_tensors, mode, context, threshold, low."""

    @staticmethod
    def forward(numbers: tuple[Any, ...], x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, penalty, logits, gates, kept = _kept_forward(numbers, x, tensors)
        return out, penalty, *logits, *gates, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = _, first, last, fnn_tensors, *_ = inputs[0]
        layers = (last - first) // (2 * fnn_tensors)
        ctx.save_for_backward(*inputs[1:], *output[2 + 2 * layers :])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        if grads[0] is None and grads[1] is None:
            return (None,) * len(needs)
        _, first, last, *_ = ctx.numbers
        wants = needs[1], first > 0, True in needs[2 + first : 2 + last]  # x, temperatures, any parameter
        numbers = ctx.numbers, wants, len(needs) - 2
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grads[0], grads[1], *ctx.saved_tensors)
        result = (None, *found) if wants[0] else (None, None, *found)
        return (*result, *(None,) * (len(needs) - len(result)))


def _kept_forward(numbers: tuple[Any, ...], x: Tensor, tensors: Sequence[Tensor]) -> Any:
    triton, first, last, fnn_tensors, mode, context, threshold, low = numbers
    lists = tensors[first:last], fnn_tensors, tensors[:first], tensors[last:]
    return FORWARD[triton](x, *lists, mode, context, threshold, True, low)


class _SmfrAtOnce(torch.autograd.Function):
    """:class:`Smfr` with two results, as in ``mfnnr``."""

    @staticmethod
    def forward(ctx: Any, numbers: tuple[Any, ...], x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *ctx.numbers, shown = numbers
        out, penalty, logits, gates, kept = _kept_forward(ctx.numbers, x, tensors)
        shown += [*logits, *gates]
        ctx.save_for_backward(x, *tensors, *kept)
        ctx.set_materialize_grads(False)
        return out, penalty

    backward = Smfr.backward


_at_once = without_binding(_SmfrAtOnce)


def _by_kernel(
    numbers: tuple[Any, ...], grad_out: Tensor | None, grad_penalty: Tensor | None, x: Tensor, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of x, temperatures and parameters, as far as they are needed. What the forward saved comes after the
    ``count`` tensors."""
    (triton, first, last, fnn_tensors, mode, context, threshold, low), (need_x, _, need_params), count = numbers
    if len(tensors) == count:  # nothing was saved: a batch of elements under vmap
        return _by_reference(numbers, grad_out, grad_penalty, x, *tensors)
    found = BACKWARD[triton](
        grad_out, grad_penalty, x, tensors[first:last], fnn_tensors, tensors[:first], tensors[last:count],
        mode, context, threshold, tensors[count:], need_x, need_params, low,
    )  # fmt: skip
    for i in range(first):
        found[1 + i] = found[1 + i].to(tensors[i].dtype)
    return tuple(found if need_x else found[1:])


def _by_reference(
    numbers: tuple[Any, ...], grad_out: Tensor | None, grad_penalty: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, ...]:
    (_, first, last, fnn_tensors, mode, context, threshold, low), (need_x, _, need_params), count = numbers

    def plain(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, *params = _checks.in_dtype(low, x, *tensors[first:last])
        result = reference(x, params, fnn_tensors, tensors[:first], tensors[last:], mode, context, threshold)
        return with_gradient(result.out, result.penalty, grad_out, grad_penalty)[0]

    grads = with_gradient(None, None, grad_out, grad_penalty)[1]
    places = range(not need_x, 1 + (last if need_params else first))
    return _autograd.vjp_at(_autograd.each_copy(plain, inputs[1 + first]), places, grads, *inputs[: 1 + count])


def _node(numbers: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """``(out, penalty, *logits, *gates)``"""
    _, first, last, fnn_tensors, *_ = numbers
    if transformed():
        copies = _autograd.maps_copies(inputs[1 + first : 1 + last])
        found = (SmfrOfCopies if copies else Smfr).apply(numbers, *inputs)
        return found[: 2 + (last - first) // fnn_tensors]
    shown: list[Tensor] = []
    return *_at_once((*numbers, shown), *inputs), *shown


SmfrOfCopies = _autograd.of_copies(Smfr, _node)


@in_graph
def _run(
    x: Tensor,
    params: Sequence[Tensor],
    fnn_tensors: int,
    taus: Sequence[Tensor],
    seeds: Sequence[Tensor],
    mode: int,
    context: bool,
    threshold: float,
    triton: bool,
    low: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """``(out, penalty, *logits, *gates)``"""
    if _autograd.wanted(x, *params, *taus):
        numbers = triton, len(taus), len(taus) + len(params), fnn_tensors, mode, context, threshold, low
        return _node(numbers, x, *taus, *params, *seeds)
    found = FORWARD[triton](x, params, fnn_tensors, taus, seeds, mode, context, threshold, False, low)
    return found[0], found[1], *found[2], *found[3]


def _sample(label: str, counts: Sequence[int], d: int, hidden: int, mode: str) -> Sample:
    """Tensors: x, then both FNNs of every layer, then the temperatures."""
    shapes: list[tuple[int, ...]] = [(3, counts[0], d)]
    for m, n in pairwise(counts):
        shapes += fnn_shapes(m * d, hidden, m * n) + fnn_shapes((n + m) * d, hidden, n * d + n)
    depth = len(counts) - 1

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        layers = [(list(tensors[1 + 8 * i : 5 + 8 * i]), list(tensors[5 + 8 * i : 9 + 8 * i])) for i in range(depth)]
        taus = list(tensors[1 + 8 * depth :])
        result = smfr(tensors[0], layers, mode=mode, taus=taus, seeds=list(range(depth)), threshold=0.5)
        return [result.out, result.penalty]

    return Sample("smfr", label, (*shapes, *[()] * depth), call)


SAMPLES = (
    _sample("softmax", (3, 2, 2), 3, 4, "softmax"),
    _sample("gumbel", (2, 3), 3, 4, "gumbel"),
)
