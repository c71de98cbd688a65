"""Binary masks over weights: ``sample_mask`` and, times the weights, ``masked_weight``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample

#: The number of values that ``word >> 9`` of the noise can take.
WORDS = 2**23
_LN2_LOW = float.fromhex("-0x1.bd01p-13")


def sample_mask(logits: Tensor, samples: int, seed: int | Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Draw binary masks: a weight is kept with probability ``sigmoid(logit)``.

    The forward is exactly 0 or 1; the gradient is that of the relaxed sample ``s = sigmoid((l + noise) / tau)``, noise
    from the logistic distribution: ``s * (1 - s) / tau`` (straight through). ``tau`` does not change the masks.

    Args:
        logits: of any shape. ``+-inf`` gives a sure 1 or 0; NaN gives NaN.
        samples: number of masks S.
        seed: of the noise, an int or an int64 0-d tensor; ``None`` draws one from torch's generator. A tensor
            may be advanced in place after the backward, which reads it again, and not before.
        tau: temperature of the relaxed sample.

    Returns:
        ``[S, *logits.shape]`` in the dtype of ``logits``; bit for bit the same on every backend.
    """
    return _sample(logits, None, 0, samples, seed, noise.STREAM_MASK, tau)


def masked_weight(
    weight: Tensor, logits: Tensor, samples: int, seed: int | Tensor | None = None, tau: float = 1.0
) -> Tensor:
    """``weight * sample_mask(logits, samples, seed, tau)`` in one pass.

    Args:
        weight: of the shape of ``logits``; gets a gradient only if it requires one.
        logits, samples, seed, tau: as in :func:`sample_mask`.

    Returns:
        ``[S, *weight.shape]``.
    """
    return _sample(logits, weight, 0, samples, seed, noise.STREAM_MASK, tau)


def _sample(
    logits: Tensor,
    weight: Tensor | None,
    first: int,
    samples: int,
    seed: int | Tensor | None,
    stream: int,
    tau: float,
) -> Tensor:
    chosen = backend.resolve("sample_mask", logits)
    samples, tau = _checks.sample_count(samples), _checks.float_tau(tau)
    if backend.checks_first(chosen):
        _check(logits, weight)
    key = noise.seed_tensor(seed, logits.device)
    if chosen == "reference":
        return reference(logits, weight, first, samples, key, stream, tau)
    try:
        return _run(logits, weight, first, samples, key, stream, tau, chosen == "triton")
    except Exception:
        _check(logits, weight)
        raise


def _check(logits: Tensor, weight: Tensor | None) -> None:
    _checks.float_tensor("logits", logits, 0, "of any shape")
    if weight is not None:
        _checks.float_tensor("weight", weight, 0, "of the shape of logits")
        _checks.same_kind("logits", logits, "weight", weight)
        _checks.exact_shape("weight", weight, logits.shape, "the shape of logits")


def words_off(logits: Tensor) -> Tensor:
    """For each weight, how many of the 2**23 values of the noise switch it off, int64: see ``csrc/constants.h``.

    Every backend computes it in fp32 in this order, so that all agree on every mask.
    """
    logit = logits.detach().float()
    d = logit.abs().clamp(max=32.0)
    n = torch.floor(d * 1.44269504088896341 + 0.5)
    x = (n * 0.693359375 - d) + n * _LN2_LOW
    p = torch.full_like(x, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * x + coefficient
    power = (127 - n.int() << 23).view(torch.float32)  # 2**-n
    a = (p * (x * x) + x + 1.0) * power
    off = torch.floor(a / (a + 1.0) * WORDS + 0.5)
    off = torch.where(logit < 0, WORDS - off, off)
    return torch.where(logit.isnan(), WORDS, off).long()


def reference(
    logits: Tensor, weight: Tensor | None, first: int, samples: int, seed: Tensor, stream: int, tau: float
) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(logits)
    shape = torch.Size((samples, *logits.shape))
    words = noise.words(seed, shape, stream=stream, device=logits.device, start=first * logits.numel()) >> 9
    hard = (words >= words_off(logits)).to(wide)
    u = (words.to(wide) + 0.5) * 2.0**-23
    soft = torch.sigmoid((logits.to(wide) + (u.log() - (1 - u).log())) / tau)
    mask = hard + (soft - soft.detach())  # a NaN stays a NaN
    return (mask if weight is None else mask * weight.to(wide)).to(logits.dtype)


def fake_forward(logits: Tensor, weight: Tensor | None, first: int, samples: int, seed: Tensor, stream: int) -> Tensor:
    _checks.one_device(logits, weight)
    return logits.new_empty((samples, *logits.shape))


def fake_backward(
    grad: Tensor,
    logits: Tensor,
    weight: Tensor | None,
    first: int,
    samples: int,
    seed: Tensor,
    stream: int,
    tau: float,
    base: Tensor | None,
) -> Tensor:
    return logits.new_empty(logits.shape)


#: Samples ``first .. first + samples - 1`` of the noise, times weight if there is one.
FORWARD = _autograd.define(
    "sample_mask_forward(Tensor logits, Tensor? weight, int first, int samples, Tensor seed, int stream) -> Tensor",
    fake_forward,
)
#: The gradient of the logits, summed over the samples, plus base.
BACKWARD = _autograd.define(
    "sample_mask_backward(Tensor grad, Tensor logits, Tensor? weight, int first, int samples, Tensor seed, int stream, "
    "float tau, Tensor? base) -> Tensor",
    fake_backward,
)


class SampleMask(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool,
        first: int,
        samples: int,
        stream: int,
        tau: float,
        logits: Tensor,
        weight: Tensor | None,
        seed: Tensor,
    ) -> Tensor:
        return FORWARD[triton](logits, weight, first, samples, seed, stream)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[:5]
        ctx.save_for_backward(*inputs[5:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        numbers = ctx.numbers, needs[5], needs[6]  # logits, weight
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grad, *ctx.saved_tensors)
        logits, weight = found[0] if needs[5] else None, found[-1] if needs[6] else None
        return None, None, None, None, None, logits, weight, None


def _by_kernel(
    numbers: tuple[Any, ...], grad: Tensor, logits: Tensor, weight: Tensor | None, seed: Tensor
) -> tuple[Tensor, ...]:
    (triton, first, samples, stream, tau), need_logits, need_weight = numbers
    found: tuple[Tensor, ...] = ()
    if need_logits:
        found = (BACKWARD[triton](grad, logits, weight, first, samples, seed, stream, tau, None),)
    if need_weight:
        found = (*found, (grad * FORWARD[triton](logits, None, first, samples, seed, stream)).sum(0))
    return found


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    (_, first, samples, stream, tau), need_logits, need_weight = numbers

    def plain(logits: Tensor, weight: Tensor | None, seed: Tensor) -> Tensor:
        return reference(logits, weight, first, samples, seed, stream, tau)

    places = [i for i, need in enumerate((need_logits, need_weight)) if need]
    return _autograd.vjp_at(plain, places, grad, *tensors)


@in_graph
def _run(
    logits: Tensor,
    weight: Tensor | None,
    first: int,
    samples: int,
    seed: Tensor,
    stream: int,
    tau: float,
    triton: bool,
) -> Tensor:
    if _autograd.wanted(logits, weight):
        return _autograd.apply(SampleMask, triton, first, samples, stream, tau, logits, weight, seed)
    return FORWARD[triton](logits, weight, first, samples, seed, stream)


SAMPLES = (
    Sample("sample_mask", "odd", ((5, 7),), lambda t: [sample_mask(t[0], 3, seed=7)]),
    Sample(
        "sample_mask",
        "weights, warm, permuted",
        ((7, 3, 5), (5, 3, 7)),
        lambda t: [masked_weight(t[0].permute(2, 1, 0), t[1], 2, seed=-7, tau=2.0)],
    ),
)
