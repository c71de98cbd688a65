"""Gated rewriting of blocks: ``gated_residual``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmod import backend
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample, Shape


def gated_residual(x: Tensor, new: Tensor, gate: Tensor) -> Tensor:
    """``sigmoid(gate) * new + (1 - sigmoid(gate)) * x``, one gate logit per block.

    Args:
        x: ``[..., N, D]``, kept where the gate is closed.
        new: ``[..., N, D]``, taken where the gate is open.
        gate: logits ``[..., N]``.

    Returns:
        ``[..., N, D]``.
    """
    chosen = backend.resolve("gated_residual", x)
    if backend.checks_first(chosen):
        _check(x, new, gate)
    if chosen == "reference":
        with backend.reference_autocast(x, new, gate) as (x, new, gate):
            return reference(x, new, gate)
    try:
        low, triton = None, chosen == "triton"
        if backend.autocasts(x):
            low = backend.rounded_by_kernel(x, new, gate, alike=False)
            if low is None:
                x, new, gate = backend.lowered(x, new, gate)
        return _run(triton, x, new, gate) if low is None else _run(triton, x, new, gate, low)
    except Exception:
        _check(x, new, gate)
        raise


def _check(x: Tensor, new: Tensor, gate: Tensor) -> None:
    _checks.float_tensor("x", x, 2, "[..., N, D]")
    _checks.float_tensor("new", new, 2, "[..., N, D]")
    _checks.float_tensor("gate", gate, 1, "[..., N]")
    _checks.same_kind("x", x, "new", new)
    _checks.same_kind("x", x, "gate", gate)
    _checks.exact_shape("new", new, x.shape, "the shape of x")
    _checks.exact_shape("gate", gate, x.shape[:-1], "[..., N], the shape of x without D")


def reference(x: Tensor, new: Tensor, gate: Tensor, low: torch.dtype | None = None) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    x, new, gate = _checks.in_dtype(low, x, new, gate)
    wide = _checks.compute_dtype(x)
    logit = gate.to(wide).unsqueeze(-1)
    # sigmoid(-t) is 1 - sigmoid(t) without the cancellation.
    return (torch.sigmoid(logit) * new.to(wide) + torch.sigmoid(-logit) * x.to(wide)).to(x.dtype)


def fake_forward(x: Tensor, new: Tensor, gate: Tensor, low: torch.dtype | None = None) -> Tensor:
    _checks.one_device(x, new, gate)
    return x.new_empty(x.shape, dtype=low or x.dtype)


def fake_backward(
    grad: Tensor, x: Tensor, new: Tensor, gate: Tensor, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), new.new_empty(new.shape), gate.new_empty(gate.shape)


FORWARD = _autograd.define(
    "gated_residual_forward(Tensor x, Tensor new, Tensor gate, ScalarType? low=None) -> Tensor",
    fake_forward,
    lambda overload: _autograd.folded(overload, 3),
)
BACKWARD = _autograd.define(
    "gated_residual_backward(Tensor grad, Tensor x, Tensor new, Tensor gate, ScalarType? low=None) -> "
    "(Tensor, Tensor, Tensor)",
    fake_backward,
    lambda overload: _autograd.folded(overload, 4),
)

_run = _autograd.from_kernels("GatedResidual", FORWARD, BACKWARD, reference, 3)

SAMPLES = (
    Sample("gated_residual", "odd", ((3, 5, 7), (3, 5, 7), (3, 5)), lambda t: [gated_residual(*t)]),
    Sample("gated_residual", "one block", ((1, 1), (1, 1), (1,)), lambda t: [gated_residual(*t)]),
)
SHAPES = (
    Shape(
        "gated_residual",
        "B1024 N8 D10",
        ((1024, 8, 10), (1024, 8, 10), (1024, 8)),
        lambda t: [gated_residual(*t)],
    ),
)
