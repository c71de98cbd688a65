"""Loss that keeps logits of softmax and gates in range: ``range_penalty``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample, Shape


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
        if backend.autocasts(logits[0]):  # a penalty is a loss and stays in fp32
            logits = tuple(t if t.dtype == torch.float64 else t.float() for t in logits)
        return _run(logits, threshold, chosen == "triton")
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
    _checks.one_device(*logits)
    wide = _checks.compute_dtype(logits[0])
    return logits[0].new_empty((), dtype=wide)


def fake_backward(grad: Tensor, logits: Sequence[Tensor], threshold: float) -> list[Tensor]:
    return [value.new_empty(value.shape) for value in logits]


def each(logits: Sequence[Tensor], threshold: float) -> Tensor:
    """The penalty of each element of the leading dimension, [V], in plain PyTorch."""
    wide = _checks.compute_dtype(logits[0])
    total = torch.zeros(logits[0].shape[0], dtype=wide, device=logits[0].device)
    for value in logits:
        value = value.to(wide).reshape(value.shape[0], -1)
        total = total + (value - value.clamp(-threshold, threshold)).square().sum(1)
    return total


def _forward_rule(overload: Any) -> _autograd.Rule:
    def rule(info: Any, in_dims: tuple[Any, ...], logits: Sequence[Tensor], threshold: float) -> tuple[Any, Any]:
        return each([_autograd.in_front(info, t, dim) for t, dim in zip(logits, in_dims[0], strict=True)], threshold), 0

    return rule


FORWARD = _autograd.define(
    "range_penalty_forward(Tensor[] logits, float threshold) -> Tensor", fake_forward, _forward_rule
)
BACKWARD = _autograd.define(
    "range_penalty_backward(Tensor grad, Tensor[] logits, float threshold) -> Tensor[]", fake_backward
)


class RangePenalty(_autograd.Op):
    @staticmethod
    def forward(triton: bool, threshold: float, *logits: Tensor) -> Tensor:
        return FORWARD[triton](logits, threshold)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return None, None, *BACKWARD[ctx.numbers[0]](grad, ctx.saved_tensors, ctx.numbers[1])
        return None, None, *_autograd.gradients(_by_kernel, _by_reference, ctx.numbers, grad, *ctx.saved_tensors)


def _by_kernel(numbers: tuple[bool, float], grad: Tensor, *logits: Tensor) -> tuple[Tensor, ...]:
    return tuple(BACKWARD[numbers[0]](grad, logits, numbers[1]))


def _by_reference(numbers: tuple[bool, float], grad: Tensor, *logits: Tensor) -> tuple[Tensor, ...]:
    return _autograd.vjp_at(lambda *values: reference(values, numbers[1]), range(len(logits)), grad, *logits)


@in_graph
def _run(logits: Sequence[Tensor], threshold: float, triton: bool) -> Tensor:
    if _autograd.wanted(*logits):
        return _autograd.apply(RangePenalty, triton, threshold, *logits)
    return FORWARD[triton](logits, threshold)


SAMPLES = (Sample("range_penalty", "two tensors", ((3, 5, 7), (3,)), lambda t: [range_penalty(*t, threshold=0.5)]),)
SHAPES = (Shape("range_penalty", "1024x8x8 + 1024x8", ((1024, 8, 8), (1024, 8)), lambda t: [range_penalty(*t)]),)
