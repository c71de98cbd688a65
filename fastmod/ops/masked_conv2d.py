"""A 2-d convolution under sampled weight masks: ``masked_conv2d``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod._compiler import in_graph
from fastmod._private import is_registered
from fastmod.ops import _autograd, _checks, _masked
from fastmod.ops._masked import Draws
from fastmod.ops._samples import Sample


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
    """Convolve part s of the batch with ``weight * mask_s``. Where GPU kernels serve it (:func:`at_once`), no masked
    copy of the weight is made; elsewhere one at a time.

    Args:
        x: ``[B, in, H, W]``, B a multiple of S; mask s applies to images ``s * B / S`` and on.
        weight: ``[out, in / groups, h, w]``; gets a gradient only if it requires one, like bias.
        logits: of the shape of ``weight``.
        samples: number of masks S.
        bias, bias_logits, seed, tau: as in :func:`fastmod.ops.masked_linear`.
        stride, padding, dilation, groups: as in :func:`torch.nn.functional.conv2d`; padding may be ``"valid"`` or, if
            it comes out even, ``"same"``.

    Returns:
        ``[B, out, H', W']``.
    """
    return _masked_conv2d(
        x, weight, logits, samples, bias=bias, bias_logits=bias_logits, stride=stride, padding=padding,
        dilation=dilation, groups=groups, seed=seed, tau=tau,
    )  # fmt: skip


def _masked_conv2d(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    samples: int,
    *,
    first: int = 0,
    bias: Tensor | None = None,
    bias_logits: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    seed: int | Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """:func:`masked_conv2d` with samples ``first .. first + samples - 1`` of the noise."""
    chosen = backend.resolve("masked_conv2d", x)
    samples, tau = _checks.sample_count(samples), _checks.float_tau(tau)
    if first:
        _masked.sample_range(first, samples)
    steps, spread = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups: expected an int >= 1, got {groups!r}")
    if backend.checks_first(chosen) or isinstance(padding, str):
        _check(x, weight, logits, bias, bias_logits, samples, groups)
    margin = _padding(padding, weight, steps, spread)
    key = noise.seed_tensor(seed, x.device)
    if chosen == "reference":
        with backend.reference_autocast(x, weight, logits, bias, bias_logits) as (x, weight, logits, bias, bias_logits):
            tensors = x, weight, logits, bias, bias_logits, key
            return reference(*tensors, samples, steps, margin, spread, groups, tau, first)
    _check(x, weight, logits, bias, bias_logits, samples, groups)  # the time is small beside that of a convolution
    low, triton, geometry = None, chosen == "triton", (steps, margin, spread, groups)
    if backend.autocasts(x):
        if at_once(x, weight, *geometry, triton):
            params = [t for t in (weight, logits, bias, bias_logits) if t is not None]
            low = backend.rounded_by_kernel(x, *params)
        if low is None:
            x, weight, logits, bias, bias_logits = backend.lowered(x, weight, logits, bias, bias_logits)
    return _run(x, weight, logits, bias, bias_logits, key, samples, *geometry, tau, first, triton, low)


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
    if len(pair) != 2 or any(isinstance(v, bool) or not isinstance(v, int) for v in pair):
        raise ValueError(f"{name}: expected an int >= {low} or two of them, got {value!r}")
    if not all(low <= v <= _checks.LARGEST for v in pair):
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
    first: int = 0,
) -> Tensor:
    """Plain PyTorch, sample by sample; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    weights, biases = _masked.reference_weights(weight, logits, bias, bias_logits, seed, samples, tau, first)
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


def channels_last(x: Tensor) -> bool:
    """Results and gradients have the memory layout of x, if that is one of the two usual ones."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _empty_images(x: Tensor, shape: Sequence[int], low: torch.dtype | None = None) -> Tensor:
    layout = torch.channels_last if channels_last(x) else torch.contiguous_format
    return torch.empty(shape, dtype=low or x.dtype, device=x.device, memory_format=layout)


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The output size in one dimension; less than 1 if the filter is larger than the image."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def out_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    pairs = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [x.shape[0], weight.shape[0], *[out_size(*each) for each in pairs]]


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
    first: int = 0,
    low: torch.dtype | None = None,
) -> Tensor:
    _checks.one_device(x, weight, logits, bias, bias_logits)
    return _empty_images(x, out_shape(x, weight, stride, padding, dilation), low)


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
    tau: float,
    needs: Sequence[bool],
    first: int = 0,
    low: torch.dtype | None = None,
) -> list[Tensor]:
    rest = zip((weight, logits, bias, bias_logits), needs[1:], strict=True)
    return [
        _empty_images(x, x.shape) if needs[0] else x.new_empty(0),
        *[weight.new_empty(value.shape if needed and value is not None else 0) for value, needed in rest],
    ]


#: x [B, in, H, W], part s of the batch convolved with sample first + s of the masked weight [out, in, h, w], plus the
#: masked bias [out]. GPUs only, not of fp64.
FORWARD = _autograd.define(
    "masked_conv2d_forward(Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, Tensor seed, "
    "int samples, int[2] stride, int[2] padding, int[2] dilation, int first=0, "
    "ScalarType? low=None) -> Tensor",
    fake_forward,
)
#: gradients of x, weight, logits, bias and bias_logits; empty where not needed
BACKWARD = _autograd.define(
    "masked_conv2d_backward(Tensor grad, Tensor x, Tensor weight, Tensor logits, Tensor? bias, Tensor? bias_logits, "
    "Tensor seed, int samples, int[2] stride, int[2] padding, int[2] dilation, float tau, bool[5] needs, "
    "int first=0, ScalarType? low=None) -> Tensor[]",
    fake_backward,
)

#: The most rows and columns of a filter that the kernels serve.
LARGEST_FILTER = 7


def at_once(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    triton: bool,
) -> bool:
    """Whether kernels serve all samples at once; decided here alone. Otherwise torch's libraries convolve sample by
    sample: on the CPU, with groups, filters over 7 x 7 or images of 2**31 numbers, on empty tensors, in fp64."""
    name = f"{_autograd.NAMESPACES[triton]}::masked_conv2d_forward"
    key = "CUDA" if x.is_cuda else "CPU"  # where the host harness and Triton's interpreter have it, none else
    if not is_registered(name, key):
        return False
    if groups != 1 or x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0:
        return False
    if max(weight.shape[2:]) > LARGEST_FILTER or min(out_shape(x, weight, stride, padding, dilation)) < 1:
        return False
    image = max(x.shape[1], weight.shape[0])
    for size, margin in zip(x.shape[2:], padding, strict=True):
        image *= size + 4 * margin
    return max(image, weight.numel(), *stride, *dilation) < 2**31


class Geometry(NamedTuple):
    """The arguments of the kernels besides the tensors."""

    triton: bool
    samples: int
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    tau: float
    first: int
    low: torch.dtype | None

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """x, weight, logits, bias, bias_logits, seed"""
        sizes = self.samples, self.stride, self.padding, self.dilation
        return FORWARD[self.triton](*tensors, *sizes, self.first, self.low)

    def reference(
        self, x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor, bias_logits: Tensor, seed: Tensor
    ) -> Tensor:
        sizes = self.samples, self.stride, self.padding, self.dilation
        x, weight, logits = _checks.in_dtype(self.low, x, weight, logits)
        bias, bias_logits = (t if t is None else _checks.in_dtype(self.low, t)[0] for t in (bias, bias_logits))
        return reference(x, weight, logits, bias, bias_logits, seed, *sizes, 1, self.tau, self.first)


class MaskedConv2d(_autograd.Op):
    """All samples at once."""

    @staticmethod
    def forward(geometry: Geometry, *tensors: Any) -> Tensor:
        return geometry.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.geometry = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:6]
        found = iter(_autograd.gradients(_by_kernel, _by_reference, (ctx.geometry, needs), grad, *ctx.saved_tensors))
        return None, *[next(found) if need else None for need in needs], None


def _by_kernel(numbers: tuple[Any, ...], grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    own, needs = numbers
    sizes = own.samples, own.stride, own.padding, own.dilation
    found = BACKWARD[own.triton](grad, *tensors, *sizes, own.tau, needs, own.first, own.low)
    return tuple([value for value, need in zip(found, needs, strict=True) if need])


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    own, needs = numbers
    places = [i for i, need in enumerate(needs) if need]
    return _autograd.vjp_at(own.reference, places, grad, *tensors)


_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


class Convolution(NamedTuple):
    """The geometry, see :mod:`fastmod.ops._masked`, of a convolution; sample by sample torch's libraries compute it."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    always_masked: bool = True

    def reference(
        self, draws: Draws, x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor, bias_logits: Tensor, seed: Tensor
    ) -> Tensor:
        own = self.stride, self.padding, self.dilation, self.groups
        inputs = x, weight, logits, bias, bias_logits, seed
        return reference(*inputs, draws.samples, *own, draws.tau, draws.first)

    def parts(self, batch: Tensor, samples: int) -> Sequence[Tensor]:
        return batch.chunk(samples) if batch.shape[0] else [batch] * samples

    def buffers(self, x: Tensor, samples: int, features: int) -> Sequence[Tensor | None]:
        return [None] * samples

    def whole(self, parts: list[Tensor], x: Tensor) -> Tensor:
        return torch.cat(parts)

    def forward(self, part: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return torch.conv2d(part, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(
        self, grad: Tensor, part: Tensor, weight: Any, needs: tuple[bool, bool], out: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        own = self.stride, self.padding, self.dilation, False, [0, 0], self.groups
        return _CONVOLUTION_BACKWARD(grad, part, weight, None, *own, [*needs, False])[:2]

    def bias_sum(self, grad: Tensor, dtype: torch.dtype, kept: int = 0) -> Tensor:
        return grad.sum((kept, -2, -1), dtype=dtype)

    def forward_at_once(self, draws: Draws, *tensors: Tensor | None) -> Tensor:
        raise NotImplementedError

    def backward_at_once(self, draws: Draws, *tensors: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
        raise NotImplementedError


@in_graph
def _run(
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
    first: int,
    triton: bool,
    low: torch.dtype | None,
) -> Tensor:
    tensors = x, weight, logits, bias, bias_logits, seed
    if at_once(x, weight, stride, padding, dilation, groups, triton):
        own = Geometry(triton, samples, stride, padding, dilation, tau, first, low)
        return _autograd.apply(MaskedConv2d, own, *tensors) if _autograd.wanted(*tensors) else own.forward(*tensors)
    geometry = Convolution(stride, padding, dilation, groups)
    return _masked.run(geometry, Draws(triton, first, samples, tau), False, *tensors)


def _grouped(t: Sequence[Tensor]) -> Sequence[Tensor]:
    x, weight, logits, bias, bias_logits = t
    geometry: dict[str, Any] = {"stride": (1, 2), "padding": 1, "groups": 2}
    return [masked_conv2d(x, weight, logits, 3, bias=bias, bias_logits=bias_logits, seed=7, **geometry)]


SAMPLES = (
    Sample(
        "masked_conv2d",
        "plain bias, cold",
        ((4, 3, 5, 4), (2, 3, 3, 1), (2, 3, 3, 1), (2,)),
        lambda t: [masked_conv2d(t[0], t[1], t[2], 2, bias=t[3], seed=7, tau=0.5)],
    ),
    Sample("masked_conv2d", "groups, masked bias", ((3, 4, 5, 7), (6, 2, 3, 3), (6, 2, 3, 3), (6,), (6,)), _grouped),
)
