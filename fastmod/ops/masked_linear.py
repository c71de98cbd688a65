"""A linear layer under sampled weight masks: ``masked_linear``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks, _masked


def masked_linear(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    samples: int,
    *,
    bias: Tensor | None = None,
    bias_logits: Tensor | None = None,
    seed: int | Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Part s of the batch through ``weight * mask_s``, the masks sampled as :func:`fastmod.ops.sample_mask` does.

    The masked copies of the weight never exist all at once, and not even one of them unless a sample has many rows:
    more than 256 on the CPU, 64 on a GPU.

    Args:
        x: ``[B, in]`` or ``[B, ..., in]``, B a multiple of S; rows ``s * B / S`` and on meet mask s.
        weight: ``[out, in]``; gets a gradient only if it requires one, like bias.
        logits: ``[out, in]``.
        samples: number of masks S.
        bias: ``[out]``.
        bias_logits: ``[out]``, masks over the bias; without them the bias is added as it is.
        seed: of the noise, an int or an int64 0-d tensor; ``None`` draws one from torch's generator.
        tau: temperature of the relaxed sample, whose gradient the logits get.

    Returns:
        ``[B, ..., out]``.
    """
    chosen = backend.resolve("masked_linear", x)
    samples, tau = _checks.sample_count(samples), _checks.float_tau(tau)
    if backend.checks_first(chosen):
        _check(x, weight, logits, bias, bias_logits, samples)
    key = noise.seed_tensor(seed, x.device)
    if chosen == "reference":
        with _masked.reference_autocast(x, weight, logits, bias, bias_logits) as inputs:
            x, weight, logits, bias, bias_logits = inputs
            return reference(x, weight, logits, bias, bias_logits, key, samples, tau)
    try:
        return torch.ops.fastmod.masked_linear.default(
            x, weight, logits, bias, bias_logits, key, samples, tau, chosen == "triton"
        )
    except Exception:
        _check(x, weight, logits, bias, bias_logits, samples)
        raise


def _check(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int
) -> None:
    _checks.float_tensor("x", x, 2, "[B, ..., in]")
    _checks.float_tensor("weight", weight, 2, "[out, in]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [out, in] with in = {x.shape[-1]}, got shape {_checks.shape(weight)}")
    _masked.check_layer(x, weight, logits, bias, bias_logits, samples)


def reference(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
) -> Tensor:
    """Plain PyTorch: all S masked copies of the weight in memory; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    weights, biases = _masked.reference_weights(weight, logits, bias, bias_logits, seed, samples, tau)
    parts = x.to(wide).reshape(samples, x.shape[:-1].numel() // samples, x.shape[-1])
    out = parts @ weights.to(wide).transpose(1, 2)
    if biases is not None:
        out = out + biases.to(wide).unsqueeze(1)
    return out.reshape(*x.shape[:-1], weight.shape[0]).to(x.dtype)


def fake_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float = 1.0,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    return _masked.fake_gradients((x, weight, logits, bias, bias_logits), needs)
