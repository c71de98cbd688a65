"""A 2-d convolution under sampled weight masks: ``masked_conv2d``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks, _masked


def masked_conv2d(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    samples: int,
    *,
    bias: Tensor | None = None,
    bias_logits: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    seed: int | Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Part s of the batch through a convolution with ``weight * mask_s``; one masked copy exists at a time.

    Args:
        x: ``[B, in, H, W]``, B a multiple of S; images ``s * B / S`` and on meet mask s.
        weight: ``[out, in / groups, h, w]``; gets a gradient only if it requires one, like bias.
        logits: of the shape of ``weight``.
        samples: number of masks S.
        bias, bias_logits, seed, tau: as in :func:`fastmod.ops.masked_linear`.
        stride, padding, dilation, groups: as in :func:`torch.nn.functional.conv2d`; padding may be ``"valid"`` or, if
            it comes out even, ``"same"``.

    Returns:
        ``[B, out, H', W']``.
    """
    chosen = backend.resolve("masked_conv2d", x)
    samples, tau = _checks.sample_count(samples), _checks.float_tau(tau)
    steps, spread = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups: expected an int >= 1, got {groups!r}")
    if backend.checks_first(chosen) or isinstance(padding, str):
        _check(x, weight, logits, bias, bias_logits, samples, groups)
    margin = _padding(padding, weight, steps, spread)
    key = noise.seed_tensor(seed, x.device)
    if chosen == "reference":
        with _masked.reference_autocast(x, weight, logits, bias, bias_logits) as inputs:
            x, weight, logits, bias, bias_logits = inputs
            return reference(x, weight, logits, bias, bias_logits, key, samples, steps, margin, spread, groups, tau)
    try:
        return torch.ops.fastmod.masked_conv2d.default(
            x, weight, logits, bias, bias_logits, key, samples, steps, margin, spread, groups, tau, chosen == "triton"
        )
    except Exception:
        _check(x, weight, logits, bias, bias_logits, samples, groups)
        raise


def _check(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    samples: int,
    groups: int,
) -> None:
    _checks.float_tensor("x", x, 4, "[B, in, H, W]")
    _checks.float_tensor("weight", weight, 4, "[out, in / groups, h, w]")
    if x.dim() != 4:
        raise ValueError(f"x: expected [B, in, H, W], got shape {_checks.shape(x)}")
    if weight.dim() != 4 or weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups:
        raise ValueError(
            f"weight: expected [out, in / groups, h, w] for {x.shape[1]} channels in {groups} groups, "
            f"got shape {_checks.shape(weight)}"
        )
    _masked.check_layer(x, weight, logits, bias, bias_logits, samples)


def _pair(name: str, value: int | Sequence[int], low: int) -> list[int]:
    pair = list(value) if isinstance(value, Sequence) else [value, value]
    if len(pair) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < low for v in pair):
        raise ValueError(f"{name}: expected an int >= {low} or two of them, got {value!r}")
    return pair


def _padding(padding: int | Sequence[int] | str, weight: Tensor, stride: list[int], dilation: list[int]) -> list[int]:
    if not isinstance(padding, str):
        return _pair("padding", padding, 0)
    if padding == "valid":
        return [0, 0]
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if padding != "same" or stride != [1, 1] or any(t % 2 for t in total):
        raise ValueError(
            f"padding: expected an int, two of them, 'valid', or 'same' with stride 1 and an even total, got "
            f"{padding!r} with kernel {list(weight.shape[2:])}, stride {stride} and dilation {dilation}"
        )
    return [t // 2 for t in total]


def reference(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    tau: float,
) -> Tensor:
    """Plain PyTorch, sample by sample; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    weights, biases = _masked.reference_weights(weight, logits, bias, bias_logits, seed, samples, tau)
    parts = [
        torch.nn.functional.conv2d(
            part.to(wide),
            weights[s].to(wide),
            None if biases is None else biases[s].to(wide),
            stride,
            padding,
            dilation,
            groups,
        )
        for s, part in enumerate(x.chunk(samples) if x.shape[0] else [x] * samples)
    ]
    return torch.cat(parts).to(x.dtype)


def fake_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    tau: float = 1.0,
) -> Tensor:
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return x.new_empty((x.shape[0], weight.shape[0], *sizes))


def fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    tau: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    return _masked.fake_gradients((x, weight, logits, bias, bias_logits), needs)
