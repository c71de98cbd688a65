"""Small, odd-shaped sample inputs of every op, for ``fastmod doctor`` and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastmod import ops


@dataclass(frozen=True)
class Sample:
    """One call of an op: the shapes of its tensors and how to call it with them."""

    op: str
    label: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # tensors -> differentiable outputs

    def tensors(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        """Leaves that require grad, of the same values for every dtype and device; 0-d ones (temperatures) are > 0."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        values = [value if value.dim() else value.abs() + 0.5 for value in values]
        return [value.to(device=device, dtype=dtype).requires_grad_() for value in values]

    def run(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Forward and backward with fixed output gradients: named outputs and gradients, detached."""
        outputs = list(self.call(tensors))
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        found = torch.autograd.grad(outputs, list(tensors), grads)
        named = [(f"output {i}", out.detach()) for i, out in enumerate(outputs)]
        return named + [(f"gradient {i}", grad) for i, grad in enumerate(found)]


def fnn_shapes(*sizes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for i, o in pairwise(sizes) for shape in ((o, i), (o,)))


def _mfnnr(label: str, route: Sequence[int], update: Sequence[int], m: int, d: int, mode: str) -> Sample:
    """Tensors: x, then both FNNs, then tau; with context when ``update`` reads more than the routed blocks."""
    n = route[-1] // m
    cut = 1 + 2 * (len(route) - 1)

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        result = ops.mfnnr(
            tensors[0],
            list(tensors[1:cut]),
            list(tensors[cut:-1]),
            context=update[0] == (n + m) * d,
            mode=mode,
            tau=tensors[-1],
            seed=7,
            threshold=0.5,
        )
        return [result.out, result.penalty]

    return Sample("mfnnr", label, ((3, m, d), *fnn_shapes(*route), *fnn_shapes(*update), ()), call)


def _smfr(label: str, counts: Sequence[int], d: int, hidden: int, mode: str) -> Sample:
    """Tensors: x, then both FNNs of every layer, then the temperatures."""
    shapes: list[tuple[int, ...]] = [(3, counts[0], d)]
    for m, n in pairwise(counts):
        shapes += fnn_shapes(m * d, hidden, m * n) + fnn_shapes((n + m) * d, hidden, n * d + n)
    depth = len(counts) - 1

    def call(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        layers = [(list(tensors[1 + 8 * i : 5 + 8 * i]), list(tensors[5 + 8 * i : 9 + 8 * i])) for i in range(depth)]
        taus = list(tensors[1 + 8 * depth :])
        result = ops.smfr(tensors[0], layers, mode=mode, taus=taus, seeds=list(range(depth)), threshold=0.5)
        return [result.out, result.penalty]

    return Sample("smfr", label, (*shapes, *[()] * depth), call)


def _masked_conv2d(t: Sequence[Tensor]) -> Sequence[Tensor]:
    x, weight, logits, bias, bias_logits = t
    geometry: dict[str, Any] = {"stride": (1, 2), "padding": 1, "groups": 2}
    return [ops.masked_conv2d(x, weight, logits, 3, bias=bias, bias_logits=bias_logits, seed=7, **geometry)]


def _norm_conv(
    label: str, x: tuple[int, ...], weight: tuple[int, ...], affine: tuple[int, ...] | None, **how: Any
) -> Sample:
    """Tensors: x, weight, scale and shift if ``affine``, and with stride 2 channel_gate and bias."""
    shapes = [x, weight, *([affine, affine] if affine else [])]
    full = how.get("stride") == 2
    shapes += [(x[0], weight[0], x[-3]), weight[:2]] if full else []

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        scale, shift = t[2:4] if affine else (None, None)
        channel_gate, bias = t[-2:] if full else (None, None)
        found = ops.norm_conv(t[0], t[1], scale=scale, shift=shift, channel_gate=channel_gate, bias=bias, **how)
        return [each for each in found if each is not None]

    return Sample("norm_conv", label, tuple(shapes), call)


def _inverted_residual(label: str, x: tuple[int, ...], expanded: int, squeezed: int) -> Sample:
    """Tensors: x, then weight and batch norm of every convolution."""
    tasks, channels = x[1:3]
    weights: list[tuple[int, ...]] = [(tasks, expanded, channels), (tasks, expanded, 3, 3)]
    weights += [(tasks, squeezed, expanded), (tasks, expanded, squeezed)] if squeezed else []
    weights += [(tasks, channels, expanded)]
    shapes = [shape for weight in weights for shape in (weight, weight[:2], weight[:2])]
    call = lambda t: [ops.inverted_residual(t[0], list(t[1:])).y]  # noqa: E731
    return Sample("inverted_residual", label, (x, *shapes), call)


def _batch_affine(t: Sequence[Tensor]) -> Sequence[Tensor]:
    return list(ops.batch_affine(t[0], t[1].square() + 0.5, *t[2:], count=7, training=True))


SAMPLES: tuple[Sample, ...] = (
    _smfr("softmax", (3, 2, 2), 3, 4, "softmax"),
    _smfr("gumbel", (2, 3), 3, 4, "gumbel"),
    Sample("multiplex", "softmax", ((3, 5, 7), (3, 5, 3), ()), lambda t: [ops.multiplex(t[0], t[1], tau=t[2])]),
    Sample("multiplex", "one block", ((2, 3, 1, 1), (2, 3, 1, 5)), lambda t: [ops.multiplex(t[0], t[1])]),
    Sample(
        "multiplex",
        "gumbel",
        ((7, 3, 5), (7, 3, 9), ()),
        lambda t: [ops.multiplex(t[0], t[1], mode="gumbel", tau=t[2], seed=7)],
    ),
    Sample(
        "multiplex",
        "argmax, permuted",
        ((5, 3, 4), (9, 3, 4)),
        lambda t: [ops.multiplex(t[0].permute(2, 1, 0), t[1].permute(2, 1, 0), mode="argmax")],
    ),
    Sample("gated_residual", "odd", ((3, 5, 7), (3, 5, 7), (3, 5)), lambda t: [ops.gated_residual(*t)]),
    Sample("gated_residual", "one block", ((1, 1), (1, 1), (1,)), lambda t: [ops.gated_residual(*t)]),
    Sample("range_penalty", "two tensors", ((3, 5, 7), (3,)), lambda t: [ops.range_penalty(*t, threshold=0.5)]),
    _mfnnr("softmax", (35, 9, 15), (56, 9, 24), 5, 7, "softmax"),
    _mfnnr("two layers, no context", (6, 11, 5, 6), (4, 3, 7, 6), 3, 2, "softmax"),
    _mfnnr("gumbel", (35, 9, 15), (56, 9, 24), 5, 7, "gumbel"),
    Sample("sample_mask", "odd", ((5, 7),), lambda t: [ops.sample_mask(t[0], 3, seed=7)]),
    Sample(
        "sample_mask",
        "weights, warm, permuted",
        ((7, 3, 5), (5, 3, 7)),
        lambda t: [ops.masked_weight(t[0].permute(2, 1, 0), t[1], 2, seed=-7, tau=2.0)],
    ),
    Sample(
        "masked_linear", "odd", ((6, 7), (5, 7), (5, 7)), lambda t: [ops.masked_linear(t[0], t[1], t[2], 3, seed=7)]
    ),
    Sample(
        "masked_linear",
        "masked bias, cold",
        ((4, 3, 7), (5, 7), (5, 7), (5,), (5,)),
        lambda t: [ops.masked_linear(t[0], t[1], t[2], 2, bias=t[3], bias_logits=t[4], seed=7, tau=0.5)],
    ),
    Sample(
        "masked_conv2d",
        "plain bias, cold",
        ((4, 3, 5, 4), (2, 3, 3, 1), (2, 3, 3, 1), (2,)),
        lambda t: [ops.masked_conv2d(t[0], t[1], t[2], 2, bias=t[3], seed=7, tau=0.5)],
    ),
    Sample(
        "masked_conv2d", "groups, masked bias", ((3, 4, 5, 7), (6, 2, 3, 3), (6, 2, 3, 3), (6,), (6,)), _masked_conv2d
    ),
    _norm_conv("gates, stride 2", (2, 3, 5, 4, 3), (3, 4, 5, 3, 3), (3, 5), relu=True, stride=2),
    _norm_conv("shared, depthwise", (2, 5, 3, 4), (2, 5, 1, 3, 3), (5,), depthwise=True),
    _norm_conv("1x1, no statistics", (3, 2, 3, 1, 5), (2, 7, 3, 1, 1), None, stats=False),
    Sample("batch_affine", "odd", ((3, 5), (3, 5), (3, 5), (3, 5)), _batch_affine),
    Sample("batch_affine", "no parameters", ((7,), (7,)), _batch_affine),
    Sample(
        "norm_sum",
        "mixture, shared residual",
        ((2, 3, 5, 3, 4), (3, 5), (3, 5), (2, 5, 3, 4), (3, 5), (3, 5), (2, 3)),
        lambda t: [ops.norm_sum(*t[:6], gate=t[6])],
    ),
    Sample(
        "norm_sum",
        "no residual, linear",
        ((3, 1, 7, 1, 5), (1, 7), (1, 7)),
        lambda t: [ops.norm_sum(t[0], t[1], t[2], relu=False)],
    ),
    Sample("template_mix", "odd", ((3, 5), (5, 7)), lambda t: [ops.template_mix(t[0], t[1])]),
    Sample(
        "template_mix",
        "tanh, permuted",
        ((5, 2, 3), (9, 5)),
        lambda t: [ops.template_mix(t[0].permute(1, 2, 0), t[1].T, mixing="tanh")],
    ),
    Sample("template_mix", "none", ((3,), (3, 21)), lambda t: [ops.template_mix(t[0], t[1], mixing="none")]),
    Sample("cluster_penalty", "odd", ((2, 3, 5), (5, 7)), lambda t: [ops.cluster_penalty(t[0], t[1])]),
    Sample("cluster_penalty", "squared", ((3, 4), (4, 9)), lambda t: [ops.cluster_penalty(t[0], t[1], squared=True)]),
    Sample("entropy_penalty", "odd", ((2, 3, 5),), lambda t: [ops.entropy_penalty(t[0])]),
    _inverted_residual("odd", (7, 2, 3, 3, 2), 5, 0),
    _inverted_residual("squeeze-excite", (9, 1, 2, 2, 3), 7, 3),
    Sample("norm_pool", "odd", ((2, 3, 5, 3, 2), (3, 5), (3, 5)), lambda t: [ops.norm_pool(t[0], t[1], t[2])]),
    Sample(
        "norm_pool",
        "no relu",
        ((2, 1, 17, 2, 2), (1, 17), (1, 17)),
        lambda t: [ops.norm_pool(t[0], t[1], t[2], relu=False)],
    ),
)
