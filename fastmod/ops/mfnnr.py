"""A whole MFNNR (Multiplexer, then FNN with gated residual) as one autograd node: ``mfnnr``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks
from fastmod.ops.gated_residual import reference as gated_residual_reference
from fastmod.ops.multiplex import mode_code
from fastmod.ops.multiplex import reference as multiplex_reference
from fastmod.ops.range_penalty import reference as range_penalty_reference

LEAKY_SLOPE = 0.01
#: The kernels keep activations of the batch in tiles of this many columns.
BATCH_TILE = 64
#: `threshold` of an op call that wants no penalty.
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
        context: whether ``update`` reads ``x`` beside the routed blocks.
        mode, tau, seed: as in :func:`fastmod.ops.multiplex`.
        threshold: of the range penalty over the routing and gate logits; ``None`` for no penalty (a zero).
    """
    code = mode_code(mode)
    chosen = backend.resolve("mfnnr", x)
    if backend.checks_first(chosen):
        _check(x, route, update, context)
    limit = NO_PENALTY if threshold is None else _checks.threshold(threshold)
    tau_tensor, tau_value = _checks.positive_tau(tau, x)
    seed_value = noise.seed_tensor(seed, x.device) if mode == "gumbel" else None
    if chosen == "reference":
        with backend.reference_autocast(x, *route, *update) as (x, *params):
            route, update = params[: len(route)], params[len(route) :]
            return reference(x, route, update, tau_tensor, tau_value, seed_value, code, context, limit)
    try:
        found = torch.ops.fastmod.mfnnr.default(
            x, route, update, tau_tensor, tau_value, seed_value, code, context, limit, chosen == "triton"
        )
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
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"{name}: expected a list [weight, bias, ...], got {type(params).__name__}")
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
    return sum(bias.shape[0] for bias in [*route[1::2], *update[1::2]]) + route[-1].shape[0] // m * d


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *batch, m, d = x.shape
    n = route[-1].shape[0] // m
    wide = _checks.compute_dtype(x)
    elements = 1
    for size in batch:
        elements = elements * size
    padded = (elements + BATCH_TILE - 1) // BATCH_TILE * BATCH_TILE
    return (
        x.new_empty(*batch, n, d),
        x.new_empty((), dtype=wide),
        x.new_empty(*batch, m, n),
        x.new_empty(*batch, n),
        x.new_empty(padded * saved_rows(x, route, update) if save else 0, dtype=wide),
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
) -> list[Tensor]:
    """``[grad x, grad tau, grads of route..., grads of update...]``; what is not needed is empty or left out."""
    wide = _checks.compute_dtype(x)
    grads = [x.new_empty(x.shape if need_x else (0,)), x.new_empty((), dtype=wide)]
    if need_params:
        grads += [p.new_empty(p.shape) for p in [*route, *update]]
    return grads
