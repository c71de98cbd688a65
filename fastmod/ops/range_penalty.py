"""Loss that keeps softmax and gate logits in range: ``range_penalty``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmod import backend
from fastmod.ops import _checks


def range_penalty(*logits: Tensor, threshold: float = 20.0) -> Tensor:
    """Sum of ``(t - clamp(t, -threshold, threshold)) ** 2`` over every element, the clamped target detached.

    Args:
        logits: any number of tensors of any shape, one dtype, one device.
        threshold: finite, >= 0.

    Returns:
        A scalar, in fp64 for fp64 logits, else in fp32: in fp16 a single logit of 300 would overflow it.
    """
    threshold = _checks.threshold(threshold)
    if not logits:
        raise ValueError("logits: expected at least one tensor, got none")
    chosen = backend.resolve("range_penalty", logits[0])
    if backend.checks_first(chosen):
        _check(logits)
    if chosen == "reference":
        return reference(logits, threshold)
    try:
        return torch.ops.fastmod.range_penalty.default(logits, threshold, chosen == "triton")
    except Exception:
        _check(logits)
        raise


def _check(logits: Sequence[Tensor]) -> None:
    for i, value in enumerate(logits):
        _checks.float_tensor(f"logits[{i}]", value, 0, "[...]")
        _checks.same_kind("logits[0]", logits[0], f"logits[{i}]", value)


def reference(logits: Sequence[Tensor], threshold: float) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(logits[0])
    total = torch.zeros((), dtype=wide, device=logits[0].device)
    for value in logits:
        value = value.to(wide)
        total = total + (value - value.detach().clamp(-threshold, threshold)).square().sum()
    return total


def fake_forward(logits: Sequence[Tensor], threshold: float) -> Tensor:
    wide = _checks.compute_dtype(logits[0])
    return logits[0].new_empty((), dtype=wide)


def fake_backward(grad: Tensor, logits: Sequence[Tensor], threshold: float) -> list[Tensor]:
    return [value.new_empty(value.shape) for value in logits]
