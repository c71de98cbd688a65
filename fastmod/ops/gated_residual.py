"""Gated rewriting of blocks: ``gated_residual``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks


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
        if backend.autocast_enabled(x.device.type):
            x, new, gate = backend.lowered(x, new, gate)
        return _run(x, new, gate, chosen == "triton")
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


def reference(x: Tensor, new: Tensor, gate: Tensor) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    logit = gate.to(wide).unsqueeze(-1)
    # sigmoid(-t) is 1 - sigmoid(t) without the cancellation.
    return (torch.sigmoid(logit) * new.to(wide) + torch.sigmoid(-logit) * x.to(wide)).to(x.dtype)


def fake_forward(x: Tensor, new: Tensor, gate: Tensor) -> Tensor:
    _checks.one_device(x, new, gate)
    return x.new_empty(x.shape)


def fake_backward(grad: Tensor, x: Tensor, new: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), new.new_empty(new.shape), gate.new_empty(gate.shape)


FORWARD = _autograd.define(
    "gated_residual_forward(Tensor x, Tensor new, Tensor gate) -> Tensor",
    fake_forward,
    lambda overload: _autograd.folded(overload, 3),
)
BACKWARD = _autograd.define(
    "gated_residual_backward(Tensor grad, Tensor x, Tensor new, Tensor gate) -> (Tensor, Tensor, Tensor)",
    fake_backward,
    lambda overload: _autograd.folded(overload, 4),
)


class GatedResidual(_autograd.Op):
    @staticmethod
    def forward(triton: bool, x: Tensor, new: Tensor, gate: Tensor) -> Tensor:
        return FORWARD[triton](x, new, gate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.triton = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return None, *BACKWARD[ctx.triton](grad, *ctx.saved_tensors)
        return None, *_autograd.gradients(_by_kernel, _by_reference, ctx.triton, grad, *ctx.saved_tensors)


def _by_kernel(triton: bool, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return BACKWARD[triton](grad, *tensors)


def _by_reference(triton: bool, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return _autograd.pulled(reference, (0, 1, 2), grad, *tensors)


@in_graph
def _run(x: Tensor, new: Tensor, gate: Tensor, triton: bool) -> Tensor:
    if _autograd.wanted(x, new, gate):
        return _autograd.apply(GatedResidual, triton, x, new, gate)
    return FORWARD[triton](x, new, gate)
