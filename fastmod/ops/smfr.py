"""A stack of MFNNRs as one autograd node: ``smfr``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks
from fastmod.ops.mfnnr import NO_PENALTY, check_layer
from fastmod.ops.mfnnr import fake_backward as mfnnr_fake_backward
from fastmod.ops.mfnnr import fake_forward as mfnnr_fake_forward
from fastmod.ops.mfnnr import reference as mfnnr_reference
from fastmod.ops.multiplex import mode_code

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
        layers: per layer ``(route, update)`` as in :func:`fastmod.ops.mfnnr`, all FNNs of one number of layers.
        context, mode, threshold: as in :func:`fastmod.ops.mfnnr`.
        taus: per layer a 0-d temperature that may require grad; ``None`` for 1.
        seeds: per layer the seed of the Gumbel noise; ``None`` draws them from torch's generator.
    """
    code = mode_code(mode)
    chosen = backend.resolve("smfr", x)
    if backend.checks_first(chosen):
        _check(x, layers, taus, seeds, context)
    limit = NO_PENALTY if threshold is None else _checks.threshold(threshold)
    params = [tensor for layer in layers for fnn in layer for tensor in fnn]
    fnn_tensors = len(layers[0][0]) if layers else 0
    tau_tensors = list(taus or ())
    seed_tensors: list[Tensor] = []
    if mode == "gumbel":
        chosen_seeds: Sequence[int | Tensor | None] = seeds or [None] * len(layers)
        seed_tensors = [noise.seed_tensor(s, x.device) for s in chosen_seeds]
    if chosen == "reference":
        with backend.reference_autocast(x, *params) as (x, *params):
            return reference(x, params, fnn_tensors, tau_tensors, seed_tensors, code, context, limit)
    try:
        found = torch.ops.fastmod.smfr.default(
            x, params, fnn_tensors, tau_tensors, seed_tensors, code, context, limit, chosen == "triton"
        )
    except Exception:
        _check(x, layers, taus, seeds, context)
        raise
    return SMFROutput(*found)


def _check(
    x: Tensor,
    layers: Sequence[LayerParams],
    taus: Sequence[Tensor] | None,
    seeds: Sequence[int | Tensor] | None,
    context: bool,
) -> None:
    _checks.float_tensor("x", x, 2, "[..., M, D]")
    if not layers:
        raise ValueError("layers: expected at least one (route, update), got none")
    lengths = {len(fnn) for layer in layers for fnn in layer}
    if len(lengths) > 1:
        raise ValueError(f"layers: expected FNNs of one number of layers, got {sorted(lengths)} tensors")
    m, d = x.shape[-2:]
    for i, (route, update) in enumerate(layers):
        m = check_layer(f"layers[{i}].", x, m, d, route, update, context)
    for name, values in (("taus", taus), ("seeds", seeds)):
        if values is not None and len(values) != len(layers):
            raise ValueError(f"{name}: expected one per layer, that is {len(layers)}, got {len(values)}")
    for tau in taus or ():
        _checks.positive_tau(tau, x)


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
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    logits, gates, saved = [], [], []
    layers = _each_layer(params, fnn_tensors, taus, seeds)
    for i, (route, update, tau, seed) in enumerate(layers):
        x, penalty, logit, gate, activations = mfnnr_fake_forward(
            x, route, update, tau, 1.0, seed, mode, context, threshold, save
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
) -> list[Tensor]:
    """``[grad x, grads of taus..., grads of params...]``; what is not needed is empty or left out."""
    grads = mfnnr_fake_backward(
        grad_out, grad_penalty, x, params, [], None, 1.0, None, mode, context, threshold, saved[0], need_x, need_params
    )
    wide = _checks.compute_dtype(x)
    return [grads[0], *[x.new_empty((), dtype=wide) for _ in taus], *grads[2:]]
