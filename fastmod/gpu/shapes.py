"""The papers' shapes of every op, for which launches, bytes, multiply-adds and times are counted.

``SHAPES`` of the files in ``fastmod/ops``, and those made here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastmod import ops
from fastmod.bench import baselines
from fastmod.ops._samples import Call, Shape, fnn_shapes
from fastmod.samples import declared


@functools.cache
def seed_on(device: torch.device) -> Tensor:
    """A seed that is already on the device, like that of a layer."""
    return torch.full((), 7, dtype=torch.int64, device=device)


def _seed(tensors: Sequence[Tensor]) -> Tensor:
    return seed_on(tensors[0].device)


def smfr(
    batch: int, counts: Sequence[int], d: int, hidden: Sequence[int], mode: str = "softmax", copies: int = 0
) -> Shape:
    """Tensors: x, then both FNNs of every layer; with ``copies``, those of so many nets under torch.vmap."""
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
    if copies:
        label += f" {copies} copies"
        shapes = [(copies, *shape) for shape in shapes]

    @functools.cache
    def stack() -> list[baselines.MFNNR]:
        options: dict[str, Any] = {"hidden": hidden[0], "layers": len(hidden), "threshold": 20.0}
        with torch.device("meta"):
            return [baselines.MFNNR(m, n, d, **options) for m, n in pairwise(counts)]

    def plain(t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, total = t[0], None
        for layer, at in zip(stack(), starts, strict=True):
            named = dict(zip([name for name, _ in layer.named_parameters()], t[at : at + 2 * each], strict=True))
            x, penalty = torch.func.functional_call(layer, named, (x,))
            total = penalty if total is None else total + penalty
        assert total is not None
        return [x, total]

    def mapped(one: Call) -> Call:
        def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
            stack()  # outside vmap, as making layers draws random numbers
            return torch.vmap(lambda *own: tuple(one(own)))(*t)

        return call if copies else one

    op = "smfr" if len(counts) > 2 else "mfnnr"
    compared = mapped(plain) if mode == "softmax" else None
    return Shape(op, label, tuple(shapes), mapped(call), max(copies, 1) * products, (), compared, copies)


def _call(function: Callable[..., Any]) -> Call:
    """Wraps a function that takes tensors one by one and returns one or several."""

    def run(t: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(*t)
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def multiplex(batch: int, m: int, n: int, d: int, mode: str = "softmax") -> Shape:
    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.multiplex(t[0], t[1], mode=mode, seed=_seed(t) if mode == "gumbel" else None)]

    label = f"B{batch} M{m} N{n} D{d}" + (f" {mode}" if mode != "softmax" else "")
    shapes = ((batch, m, d), (batch, m, n))
    plain = _call(baselines.multiplex) if mode == "softmax" else None
    return Shape("multiplex", label, shapes, call, batch * m * n * d, (), plain)


def sample_mask(count: int, samples: int) -> Shape:
    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.sample_mask(t[0], samples, seed=_seed(t))]

    plain = _call(lambda logits: baselines.sample_mask(logits, samples))
    return Shape("sample_mask", f"{count} S{samples}", ((count,),), call, 0, (), plain)


def masked_linear(rows: int, inputs: int, outputs: int, samples: int) -> Shape:
    weight = (outputs, inputs)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.masked_linear(t[0], t[1], t[2], samples, seed=_seed(t))]

    label = f"{rows}x{inputs} to {outputs} S{samples}"
    plain = _call(lambda x, w, logits: baselines.masked_linear(x, w, logits, samples))
    return Shape("masked_linear", label, ((rows, inputs), weight, weight), call, rows * inputs * outputs, (), plain)


@functools.cache
def seeds_on(device: torch.device, copies: int) -> Tensor:
    return torch.arange(copies, device=device)


def masked_linear_copies(copies: int, rows: int, inputs: int, outputs: int, samples: int) -> Shape:
    """``copies`` layers at once, each with its own seed, under ``torch.vmap``."""
    one = masked_linear(rows, inputs, outputs, samples)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        def layer(x: Tensor, w: Tensor, logits: Tensor, seed: Tensor) -> Tensor:
            return ops.masked_linear(x, w, logits, samples, seed=seed)

        return [torch.vmap(layer)(t[0], t[1], t[2], seeds_on(t[0].device, copies))]

    stacked = tuple((copies, *shape) for shape in one.shapes)
    return Shape(one.op, f"{one.label} {copies} copies", stacked, call, copies * one.products)


def masked_conv2d(batch: int, inputs: int, size: int, outputs: int, samples: int) -> Shape:
    weight = (outputs, inputs, 3, 3)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.masked_conv2d(t[0], t[1], t[2], samples, padding=1, seed=_seed(t))]

    label = f"{batch}x{inputs}x{size}x{size} to {outputs} S{samples}"
    products = batch * size * size * math.prod(weight)
    plain = _call(lambda x, w, logits: baselines.masked_conv2d(x, w, logits, samples))
    return Shape("masked_conv2d", label, ((batch, inputs, size, size), weight, weight), call, products, (), plain)


def _images(value: Tensor) -> Tensor:
    """``[..., H, W, C]`` as ``[..., C, H, W]``: channels innermost in memory, as layers pass images on."""
    return value.movedim(-1, -3)


def norm_conv(
    batch: int,
    experts: int,
    inputs: int,
    outputs: int,
    size: int,
    stride: int = 1,
    kernel: int = 3,
    depthwise: bool = False,
) -> Shape:
    weight = (experts, outputs, 1 if depthwise else inputs, kernel, kernel)
    affine = (experts, inputs)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weight, scale, shift = _images(t[0]), *t[1:]
        found = ops.norm_conv(x, weight, scale=scale, shift=shift, relu=True, stride=stride, depthwise=depthwise)
        return [each for each in found if each is not None]

    label = f"B{batch} E{experts} {inputs} to {outputs} {size} px" + (" stride 2" if stride == 2 else "")
    label += (" 1x1" if kernel == 1 else "") + (" depthwise" if depthwise else "")
    products = batch * (size // stride) ** 2 * math.prod(weight)
    shapes = ((batch, experts, size, size, inputs), weight, affine, affine)
    usual = kernel == 3 and not depthwise
    plain = _call(lambda x, w, *_: baselines.norm_conv(_images(x), w, stride)) if usual else None
    return Shape("norm_conv", label, shapes, call, products, (2, 3), plain)


def norm_sum(batch: int, experts: int, channels: int, size: int) -> Shape:
    images, affine = (batch, experts, size, size, channels), (experts, channels)

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.norm_sum(_images(t[0]), t[1], t[2], _images(t[3]), gate=t[4])]

    label = f"B{batch} E{experts} {channels} channels {size} px"
    plain = _call(lambda x, scale, shift, r, gate: baselines.norm_sum(_images(x), scale, shift, _images(r), gate))
    return Shape("norm_sum", label, (images, affine, affine, images, (batch, experts)), call, 0, (1, 2), plain)


#: Of ops whose shapes are made by the functions above, which other tools use too; a new op says its own `SHAPES`.
_BUILT: dict[str, tuple[Shape, ...]] = {
    "smfr": (
        smfr(128, (6, 8, 8, 8, 5), 10, (100,)),
        smfr(128, (6, *[8] * 10, 5), 10, (100,)),
        smfr(1024, (6, 8, 8, 8, 5), 10, (100,)),
        smfr(128, (6, 8, 8, 8, 5), 10, (100,), "gumbel"),
        smfr(128, (6, 8, 8, 8, 5), 10, (100,), copies=8),
        smfr(128, (6, 8, 8, 8, 5), 10, (100,), "gumbel", copies=8),
        smfr(128, (5, 4, 1), 196, (400,) * 4),
    ),
    "mfnnr": (
        smfr(128, (8, 8), 10, (100,)),
        smfr(128, (8, 8), 10, (100,), copies=8),
        smfr(128, (5, 4), 196, (400,)),
        smfr(128, (5, 4), 196, (400,) * 4),
    ),
    "multiplex": (
        multiplex(128, 6, 8, 10),
        multiplex(1024, 8, 8, 10, "gumbel"),
        multiplex(4096, 16, 16, 32),
        multiplex(512, 5, 4, 196),
    ),
    "sample_mask": (sample_mask(4_000_000, 4),),
    "masked_linear": (
        masked_linear(128, 2000, 2000, 4),
        masked_linear(128, 400, 400, 4),
        masked_linear(512, 400, 400, 4),
        masked_linear_copies(8, 128, 400, 400, 4),
    ),
    "masked_conv2d": (masked_conv2d(128, 32, 32, 64, 4),),
    "norm_conv": (
        norm_conv(64, 4, 16, 16, 32),
        norm_conv(64, 2, 16, 32, 32, 2),
        norm_conv(64, 1, 64, 64, 8),
    ),
    "norm_sum": (norm_sum(64, 4, 16, 32),),
}


def _beside_plain(shape: Shape) -> Shape:
    """With the baseline of the same name, unless it has a plain version of its own."""
    function = getattr(baselines, shape.op, None)
    return shape if shape.plain or function is None else replace(shape, plain=_call(function))


SHAPES: tuple[Shape, ...] = tuple(
    shape for op, own in declared("SHAPES") for shape in (*_BUILT.get(op, ()), *map(_beside_plain, own))
)


def find(name: str) -> Shape:
    """The shape with this :attr:`Shape.name`."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise KeyError(name)
