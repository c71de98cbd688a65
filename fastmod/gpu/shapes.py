"""The papers' shapes of every op: what launches, bytes, multiply-adds and times are told of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fastmod import ops
from fastmod.samples import Sample, fnn_shapes


@dataclass(frozen=True)
class Shape(Sample):
    """``label`` is what tables show; without commas, as they are also csv."""

    products: int = 0  # multiply-adds of the forward that are matrix products; the backward has twice as many
    wide: tuple[int, ...] = ()  # tensors that are fp32 where others are bf16 or fp16: those of batch norm

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    def tensors(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        values = super().tensors(dtype=dtype, device=device, seed=seed)
        for i in self.wide if dtype.itemsize == 2 else ():
            values[i] = values[i].detach().float().requires_grad_()
        return values

    def bytes_moved(self, dtype: torch.dtype) -> tuple[int, int]:
        """Of forward and backward, if every input is read once and every result written once."""
        inputs = sum(math.prod(shape) for shape in self.shapes)
        with torch.device("meta"):
            found = self.call([torch.empty(shape, dtype=dtype) for shape in self.shapes])
        outputs = sum(out.numel() for out in found)
        return dtype.itemsize * (inputs + outputs), dtype.itemsize * (2 * inputs + outputs)


@functools.cache
def seed_on(device: torch.device) -> Tensor:
    """One that lives on the device already, as that of a layer does."""
    return torch.full((), 7, dtype=torch.int64, device=device)


def _seed(tensors: Sequence[Tensor]) -> Tensor:
    return seed_on(tensors[0].device)


def _smfr(batch: int, counts: Sequence[int], d: int, hidden: Sequence[int], mode: str = "softmax") -> Shape:
    """Tensors: x, then both FNNs of every layer."""
    shapes: list[tuple[int, ...]] = [(batch, counts[0], d)]
    products = 0
    for m, n in pairwise(counts):
        fnns = fnn_shapes(m * d, *hidden, m * n) + fnn_shapes((n + m) * d, *hidden, n * d + n)
        shapes += fnns
        products += batch * (sum(math.prod(shape) for shape in fnns if len(shape) == 2) + m * n * d)
    each = 2 * (len(hidden) + 1)
    starts = range(1, len(shapes), 2 * each)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        layers = [(t[at : at + each], t[at + each : at + 2 * each]) for at in starts]
        seeds = [_seed(t)] * len(layers) if mode == "gumbel" else None
        if len(layers) == 1:
            single = ops.mfnnr(t[0], *layers[0], mode=mode, seed=None if seeds is None else seeds[0])
            return [single.out, single.penalty]
        found = ops.smfr(t[0], layers, mode=mode, seeds=seeds)
        return [found.out, found.penalty]

    inner = f"w{counts[1]} d{len(counts) - 2}" if len(counts) > 2 else ""
    parts = [f"{counts[0]} to {counts[-1]} D{d}", inner, f"h{'+'.join(map(str, hidden))}", f"B{batch}"]
    label = " ".join(part for part in parts if part) + (f" {mode}" if mode != "softmax" else "")
    return Shape("smfr" if len(counts) > 2 else "mfnnr", label, tuple(shapes), call, products)


def _multiplex(batch: int, m: int, n: int, d: int, mode: str = "softmax") -> Shape:
    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.multiplex(t[0], t[1], mode=mode, seed=_seed(t) if mode == "gumbel" else None)]

    label = f"B{batch} M{m} N{n} D{d}" + (f" {mode}" if mode != "softmax" else "")
    return Shape("multiplex", label, ((batch, m, d), (batch, m, n)), call, batch * m * n * d)


def _masked_linear(rows: int, inputs: int, outputs: int, samples: int) -> Shape:
    weight = (outputs, inputs)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.masked_linear(t[0], t[1], t[2], samples, seed=_seed(t))]

    label = f"{rows}x{inputs} to {outputs} S{samples}"
    return Shape("masked_linear", label, ((rows, inputs), weight, weight), call, rows * inputs * outputs)


def _masked_conv2d(batch: int, inputs: int, size: int, outputs: int, samples: int) -> Shape:
    weight = (outputs, inputs, 3, 3)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.masked_conv2d(t[0], t[1], t[2], samples, padding=1, seed=_seed(t))]

    label = f"{batch}x{inputs}x{size}x{size} to {outputs} S{samples}"
    products = batch * size * size * math.prod(weight)
    return Shape("masked_conv2d", label, ((batch, inputs, size, size), weight, weight), call, products)


def _images(value: Tensor) -> Tensor:
    """``[..., H, W, C]`` as ``[..., C, H, W]``: with the channels innermost in memory, as layers hand images on."""
    return value.movedim(-1, -3)


def _norm_conv(batch: int, experts: int, inputs: int, outputs: int, size: int, stride: int = 1) -> Shape:
    weight = (experts, outputs, inputs, 3, 3)
    affine = (experts, inputs)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        found = ops.norm_conv(_images(t[0]), t[1], scale=t[2], shift=t[3], relu=True, stride=stride)
        return [each for each in found if each is not None]

    label = f"B{batch} E{experts} {inputs} to {outputs} {size} px" + (" stride 2" if stride == 2 else "")
    products = batch * (size // stride) ** 2 * math.prod(weight)
    shapes = ((batch, experts, size, size, inputs), weight, affine, affine)
    return Shape("norm_conv", label, shapes, call, products, (2, 3))


def _norm_sum(batch: int, experts: int, channels: int, size: int) -> Shape:
    images, affine = (batch, experts, size, size, channels), (experts, channels)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.norm_sum(_images(t[0]), t[1], t[2], _images(t[3]), gate=t[4])]

    label = f"B{batch} E{experts} {channels} channels {size} px"
    return Shape("norm_sum", label, (images, affine, affine, images, (batch, experts)), call, 0, (1, 2))


def _simple(op: str, label: str, call: Callable[[Sequence[Tensor]], Tensor], *shapes: tuple[int, ...]) -> Shape:
    return Shape(op, label, shapes, lambda t: [call(t)])


def _template_mix(rows: int, templates: int, size: int) -> Shape:
    label = f"L{rows} K{templates} P{size}"
    shapes = ((rows, templates), (templates, size))
    return Shape("template_mix", label, shapes, lambda t: [ops.template_mix(t[0], t[1])], rows * templates * size)


def _batch_affine(t: Sequence[Tensor]) -> Sequence[Tensor]:
    """Here in place of the variance stands any number: no more than counts and times are asked for."""
    return list(ops.batch_affine(t[0], t[1], t[2], t[3], count=1024, training=True))


SHAPES: tuple[Shape, ...] = (
    _smfr(128, (6, 8, 8, 8, 5), 10, (100,)),
    _smfr(128, (6, *[8] * 10, 5), 10, (100,)),
    _smfr(1024, (6, 8, 8, 8, 5), 10, (100,)),
    _smfr(128, (6, 8, 8, 8, 5), 10, (100,), "gumbel"),
    _smfr(128, (5, 4, 1), 196, (400,) * 4),
    _smfr(128, (8, 8), 10, (100,)),
    _smfr(128, (5, 4), 196, (400,) * 4),
    _multiplex(128, 6, 8, 10),
    _multiplex(1024, 8, 8, 10, "gumbel"),
    _multiplex(4096, 16, 16, 32),
    _multiplex(512, 5, 4, 196),
    _simple(
        "gated_residual", "B1024 N8 D10", lambda t: ops.gated_residual(*t), (1024, 8, 10), (1024, 8, 10), (1024, 8)
    ),
    _simple("range_penalty", "1024x8x8 + 1024x8", lambda t: ops.range_penalty(*t), (1024, 8, 8), (1024, 8)),
    _simple("sample_mask", "4000000 S4", lambda t: ops.sample_mask(t[0], 4, seed=_seed(t)), (4_000_000,)),
    _masked_linear(128, 2000, 2000, 4),
    _masked_linear(128, 400, 400, 4),
    _masked_linear(512, 400, 400, 4),
    _masked_conv2d(128, 32, 32, 64, 4),
    _norm_conv(64, 4, 16, 16, 32),
    _norm_conv(64, 2, 16, 32, 32, 2),
    _norm_conv(64, 1, 64, 64, 8),
    _norm_sum(64, 4, 16, 32),
    Shape("batch_affine", "E4 64 channels", ((4, 64),) * 4, _batch_affine, 0, (0, 1, 2, 3)),
    _template_mix(16, 4, 20000),
)


def find(name: str) -> Shape:
    """By what :attr:`Shape.name` is."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise KeyError(name)
