"""What the masked layers ``masked_linear`` and ``masked_conv2d`` share: checks, reference weights, the autograd node.

By default a layer is computed sample by sample: torch's own libraries multiply or convolve with one masked copy of the
weight at a time, and the gradient of the logits is accumulated over the samples. The geometry of a layer says where
kernels compute all samples at once. Biases are small and handled here for both layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _autograd, _checks
from fastmod.ops.sample_mask import BACKWARD, FORWARD
from fastmod.ops.sample_mask import reference as reference_sample


def check_layer(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int
) -> None:
    """The checks of every masked layer, after x and weight were found to fit."""
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


def sample_range(first: int, samples: int) -> int:
    """``first`` of a private call, checked."""
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= _checks.LARGEST - samples:
        raise ValueError(f"first: expected an int from 0 to {_checks.LARGEST - samples}, got {first!r}")
    return first


def reference_weights(
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Masked weights [S, ...] and biases [S, out] in plain PyTorch."""
    weights = reference_sample(logits, weight, first, samples, seed, noise.STREAM_MASK, tau)
    if bias is None:
        return weights, None
    if bias_logits is None:
        return weights, bias.expand(samples, -1)
    return weights, reference_sample(bias_logits, bias, first, samples, seed, noise.STREAM_MASK_BIAS, tau)


def fake_gradients(inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of x, weight and logits; empty where not needed."""
    return [value.new_empty(value.shape if needed else 0) for value, needed in zip(inputs, needs, strict=True)]


class Geometry(Protocol):
    """What differs between the masked layers. ``weight`` is one masked copy."""

    @property
    def always_masked(self) -> bool:
        """Whether the backward reads the masked weight even if no gradient of x is needed."""

    @property
    def reference(self) -> Callable[..., Tensor]: ...

    def parts(self, batch: Tensor, samples: int) -> Sequence[Tensor]:
        """x, or the gradient of the result, split into the parts of the samples."""

    def buffers(self, x: Tensor, samples: int, features: int) -> Sequence[Tensor | None]:
        """Output buffers for the results of the samples, or for gradients like x; None where results cannot be written
        to a given buffer."""

    def whole(self, parts: list[Tensor], x: Tensor) -> Tensor:
        """The results of all samples joined; for parts like x, the gradient of x."""

    def forward(self, part: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor: ...

    def backward(self, grad: Tensor, part: Tensor, weight: Any, needs: tuple[bool, bool], out: Tensor | None) -> Any:
        """Gradients of the part, written to ``out``, and of the masked weight."""

    def bias_sum(self, grad: Tensor, dtype: torch.dtype, kept: int = 0) -> Tensor:
        """[out], with the first ``kept`` dimensions of ``grad`` in front."""

    def forward_at_once(self, draws: Draws, *tensors: Tensor | None) -> Tensor: ...

    def backward_at_once(self, draws: Draws, *tensors: Tensor | None, needs: Sequence[bool]) -> list[Tensor]: ...


class Draws(NamedTuple):
    """Which samples of the noise are drawn (``first .. first + samples - 1``), and by which kernels."""

    triton: bool
    first: int
    samples: int
    tau: float
    low: torch.dtype | None = None  # what kernels round x, weight, logits and an unmasked bias to

    def masked(self, logits: Tensor, weight: Tensor | None, seed: Tensor, sample: int) -> Tensor:
        """One masked copy."""
        return FORWARD[self.triton](logits, weight, self.first + sample, 1, seed, noise.STREAM_MASK).select(0, 0)

    def slope(self, grad: Tensor, logits: Tensor, weight: Tensor, seed: Tensor, sample: int, base: Any) -> Tensor:
        """The gradient of the logits, given that of one masked copy, added to ``base``."""
        first, stream = self.first + sample, noise.STREAM_MASK
        return BACKWARD[self.triton](grad.unsqueeze(0), logits, weight, first, 1, seed, stream, self.tau, base)

    def biases(self, bias: Tensor, bias_logits: Tensor | None, seed: Tensor) -> Tensor:
        """The bias of every sample [S, out]."""
        if bias_logits is None:
            return bias.expand(self.samples, -1)
        return FORWARD[self.triton](bias_logits, bias, self.first, self.samples, seed, noise.STREAM_MASK_BIAS)

    def bias_gradient(self, sums: Tensor, bias_logits: Tensor, seed: Tensor) -> Tensor:
        """The gradient of a masked bias from the gradients [S, out] of :meth:`biases`."""
        stream = noise.STREAM_MASK_BIAS
        return (sums * FORWARD[self.triton](wide(bias_logits), None, self.first, self.samples, seed, stream)).sum(0)

    def bias_slope(self, sums: Tensor, bias: Tensor, bias_logits: Tensor, seed: Tensor) -> Tensor:
        """Likewise the gradient of the bias logits."""
        return BACKWARD[self.triton](
            sums, wide(bias_logits), wide(bias), self.first, self.samples, seed, noise.STREAM_MASK_BIAS, self.tau, None
        )


def wide(tensor: Tensor) -> Tensor:
    """In the dtype in which rows and samples are summed, so that rounding happens once: fp32 for bf16 and fp16."""
    dtype = tensor.dtype
    return tensor if dtype == torch.float32 or dtype == torch.float64 else tensor.float()


def _forward(
    geometry: Geometry,
    draws: Draws,
    at_once: bool,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
) -> Tensor:
    biases = None if bias is None else draws.biases(bias, bias_logits, seed)
    if at_once:
        return geometry.forward_at_once(draws, x, weight, logits, biases, seed)
    buffers = geometry.buffers(x, draws.samples, weight.shape[0])
    results = [
        geometry.forward(part, draws.masked(logits, weight, seed, s), None if biases is None else biases[s], buffers[s])
        for s, part in enumerate(geometry.parts(x, draws.samples))
    ]
    return geometry.whole(results, x)


def _backward(
    geometry: Geometry,
    draws: Draws,
    at_once: bool,
    needs: Sequence[bool],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
) -> list[Tensor | None]:
    """Gradients of x, weight, logits, bias and bias_logits; None where not needed."""
    need_x, need_weight, need_logits, need_bias, need_bias_logits = needs
    result: list[Tensor | None] = [None] * 5
    if not at_once and x.shape[0] == 0:
        inputs = (x, weight, logits, bias, bias_logits)
        return [torch.zeros_like(t) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)]
    if need_x or need_weight or need_logits:
        if at_once:
            found = geometry.backward_at_once(draws, grad, x, weight, logits, seed, needs=needs[:3])
            result[:3] = [value if need else None for value, need in zip(found, needs, strict=False)]
        else:
            result[:3] = _by_samples(geometry, draws, needs, grad, x, weight, logits, seed)
    if bias is not None and bias_logits is None and need_bias:
        result[3] = geometry.bias_sum(grad, bias.dtype)
    elif bias is not None and bias_logits is not None and (need_bias or need_bias_logits):
        parts = grad.unflatten(0, (draws.samples, grad.shape[0] // draws.samples))
        sums = geometry.bias_sum(parts, _checks.compute_dtype(grad), kept=1)  # [S, out]
        if need_bias:
            result[3] = draws.bias_gradient(sums, bias_logits, seed).to(bias.dtype)
        if need_bias_logits:
            result[4] = draws.bias_slope(sums, bias, bias_logits, seed).to(bias_logits.dtype)
    return result


def _by_samples(
    geometry: Geometry,
    draws: Draws,
    needs: Sequence[bool],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    seed: Tensor,
) -> list[Tensor | None]:
    """Gradients of x, weight and logits."""
    if backend.autocasts(x):  # a backward has the dtypes of its forward
        with torch.autocast(x.device.type, enabled=False):
            return _by_samples(geometry, draws, needs, grad, x, weight, logits, seed)
    need_x, need_weight, need_logits = needs[:3]
    wide_weight, wide_logits = wide(weight), wide(logits)
    buffers = geometry.buffers(x, draws.samples, x.shape[-1]) if need_x else [None] * draws.samples
    grad_x: list[Tensor] = []
    grad_weight: Tensor | None = None
    grad_logits: Tensor | None = None
    parts = zip(geometry.parts(grad, draws.samples), geometry.parts(x, draws.samples), strict=True)
    for s, (g, part) in enumerate(parts):
        masked = draws.masked(logits, weight, seed, s) if need_x or geometry.always_masked else None
        own_x, own = geometry.backward(g, part, masked, (need_x, need_weight or need_logits), buffers[s])
        if need_x:
            grad_x.append(own_x)
        if need_logits:
            grad_logits = draws.slope(wide(own), wide_logits, wide_weight, seed, s, grad_logits)
        if need_weight:
            kept = draws.masked(wide_logits, wide(own), seed, s)
            grad_weight = kept if grad_weight is None else grad_weight + kept
    return [
        geometry.whole(grad_x, x) if need_x else None,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_logits is None else grad_logits.to(logits.dtype),
    ]


class MaskedLayer(_autograd.Op):
    """``numbers``: geometry, draws, whether the kernels serve all samples at once."""

    @staticmethod
    def forward(numbers: tuple[Any, ...], *tensors: Any) -> Tensor:
        geometry, draws, at_once = numbers
        return _forward(geometry, draws, at_once, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:6]
        geometry, draws, at_once = ctx.numbers
        saved = x, weight, logits, bias, _, seed = ctx.saved_tensors
        if at_once and bias is None and not torch.is_grad_enabled():  # the same with less overhead
            found = geometry.backward_at_once(draws, grad, x, weight, logits, seed, needs=needs[:3])
            return None, *[value if need else None for value, need in zip(found, needs, strict=False)], None, None, None
        numbers = geometry, draws, at_once, needs
        found = iter(_autograd.gradients(_by_kernel, _by_reference, numbers, grad, *saved))
        return None, *[next(found) if need else None for need in needs], None


def _by_kernel(numbers: tuple[Any, ...], grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    geometry, draws, at_once, needs = numbers
    found = _backward(geometry, draws, at_once, needs, grad, *tensors)
    return tuple([value for value in found if value is not None])


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    geometry, draws, _, needs = numbers
    places = [i for i, need in enumerate(needs) if need]
    return _autograd.vjp_at(lambda *values: geometry.reference(draws, *values), places, grad, *tensors)


def run(geometry: Geometry, draws: Draws, at_once: bool, *tensors: Any) -> Tensor:
    """``tensors``: x, weight, logits, bias, bias_logits and seed. ``at_once``: by the geometry's kernels."""
    if _autograd.wanted(*tensors):
        return _autograd.apply(MaskedLayer, (geometry, draws, at_once), *tensors)
    return _forward(geometry, draws, at_once, *tensors)
