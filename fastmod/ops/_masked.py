"""What the masked layers ``masked_linear`` and ``masked_conv2d`` share: checks, reference weights, fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks
from fastmod.ops.sample_mask import reference as reference_sample


def check_layer(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int
) -> None:
    """What holds for every masked layer, after x and weight have been found to fit."""
    _checks.float_tensor("logits", logits, 0, "of the shape of weight")
    _checks.same_kind("x", x, "weight", weight)
    _checks.same_kind("x", x, "logits", logits)
    _checks.exact_shape("logits", logits, weight.shape, "the shape of weight")
    if x.shape[0] % samples:
        raise ValueError(f"x: expected a batch that is a multiple of {samples} samples, got shape {_checks.shape(x)}")
    if bias is None and bias_logits is not None:
        raise ValueError("bias_logits: expected None without a bias")
    for name, value in (("bias", bias), ("bias_logits", bias_logits)):
        if value is not None:
            _checks.float_tensor(name, value, 1, "[out]")
            _checks.same_kind("x", x, name, value)
            _checks.exact_shape(name, value, weight.shape[:1], "[out]")


@contextlib.contextmanager
def reference_autocast(*tensors: Tensor | None) -> Iterator[Any]:
    """:func:`fastmod.backend.reference_autocast` where some tensors may be absent."""
    with backend.reference_autocast(*[t for t in tensors if t is not None]) as present:
        rest = iter(present)
        yield [None if t is None else next(rest) for t in tensors]


def reference_weights(
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
) -> tuple[Tensor, Tensor | None]:
    """Masked weights [S, ...] and biases [S, out] in plain PyTorch."""
    weights = reference_sample(logits, weight, 0, samples, seed, noise.STREAM_MASK, tau)
    if bias is None:
        return weights, None
    if bias_logits is None:
        return weights, bias.expand(samples, -1)
    return weights, reference_sample(bias_logits, bias, 0, samples, seed, noise.STREAM_MASK_BIAS, tau)


def fake_gradients(
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, weight, logits, bias and bias_logits; empty where not needed."""
    like = inputs[0]
    assert like is not None
    return [
        torch.empty(value.shape, dtype=like.dtype, device=like.device)
        if needed and value is not None
        else like.new_empty(0)
        for value, needed in zip(inputs, needs, strict=True)
    ]
