"""Loss that makes a mixture choose one template: ``entropy_penalty``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmod import backend
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample
from fastmod.ops.template_mix import check_logits


def entropy_penalty(logits: Tensor) -> Tensor:
    """Sum over rows of the entropy of ``softmax(logits)``, in nats; accurate to the last digits near one-hot rows.

    Args:
        logits: ``[..., K]``.

    Returns:
        A scalar, in fp64 for fp64 logits, else in fp32.
    """
    chosen = backend.resolve("entropy_penalty", logits)
    if backend.checks_first(chosen):
        check_logits(logits)
    if chosen == "reference":
        return reference(logits)
    try:
        if backend.autocasts(logits) and logits.dtype != torch.float64:
            logits = logits.float()  # a penalty is a loss and stays in fp32
        return _run(chosen == "triton", logits)
    except Exception:
        check_logits(logits)
        raise


def reference(logits: Tensor) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    return each(logits.to(_checks.compute_dtype(logits))).sum()


def each(logits: Tensor) -> Tensor:
    """The entropies of rows [..., K]: with u = largest logit - logit, log(1 + sum of the others' exp(-u)) + mean of u.

    All terms are positive. In -sum(p log p), the largest p rounds to 1 near one-hot rows, and its term is lost.
    """
    place = logits.argmax(-1, keepdim=True)
    largest = logits.gather(-1, place)
    is_largest = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, place, True)
    gone = (logits == -_checks.INFINITY) & (largest != -_checks.INFINITY)
    left_out = (is_largest & ~logits.isnan()) | gone
    apart = torch.where(left_out, 0.0, largest - torch.where(gone, 0.0, logits))
    shares = torch.where(left_out, 0.0, (-apart).exp())
    total = shares.sum(-1)
    return torch.log1p(total) + (shares * apart).sum(-1) / (1 + total)


def fake_forward(logits: Tensor) -> Tensor:
    return logits.new_empty((), dtype=_checks.compute_dtype(logits))


def fake_backward(grad: Tensor, logits: Tensor) -> Tensor:
    _checks.one_device(grad, logits)
    return logits.new_empty(logits.shape)


def _forward_rule(overload: Any) -> _autograd.Rule:
    def rule(info: Any, in_dims: tuple[Any, ...], logits: Tensor) -> tuple[Any, Any]:
        many = _autograd.in_front(info, logits, in_dims[0])
        rows = each(many.to(_checks.compute_dtype(many)))  # [V, ...]
        return rows.reshape(rows.shape[0], -1).sum(-1), 0

    return rule


#: logits [..., K] -> scalar
FORWARD = _autograd.define("entropy_penalty_forward(Tensor logits) -> Tensor", fake_forward, _forward_rule)
BACKWARD = _autograd.define("entropy_penalty_backward(Tensor grad, Tensor logits) -> Tensor", fake_backward)

_run = _autograd.from_kernels("EntropyPenalty", FORWARD, BACKWARD, reference, 1)

SAMPLES = (Sample("entropy_penalty", "odd", ((2, 3, 5),), lambda t: [entropy_penalty(t[0])]),)
