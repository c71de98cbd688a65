"""What count_gpu.py and count_triton.py count: every op at shapes small enough to be interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod import backend, ops
from fastmod.gpu import shapes
from fastmod.ops import _pool_linear as _pool_linear_op
from fastmod.ops import _squeeze_excite as _squeeze_excite_op
from tests.helpers.cuda_host import recorder

#: Of a launch: the blocks to be interpreted, and what their instructions are divided by.
Part = Callable[[recorder.Launch], tuple[Sequence[int], int]]
#: Ops that take fp32 under autocast and round what they read.
ROUNDING = ("smfr", "mfnnr", "multiplex", "gated_residual", "masked_linear", "masked_conv2d")


class Case(NamedTuple):
    """``useful``: what the instructions of a kernel are divided by, of one product, though a kernel of a backward may
    have two. With a ``part`` only some blocks run, in CUDA C++ alone, and no value is compared. ``autocast``: fp32
    tensors where bf16 is asked for."""

    shape: shapes.Shape
    unit: str
    useful: int
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    part: Part | None = None
    autocast: bool = False
    triton: bool = True
    cuda: bool = True

    def sample(self) -> shapes.Shape:
        """What is run."""
        call = self.shape.call

        def lowered(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return call(tensors)

        return replace(self.shape, call=lowered) if self.autocast else self.shape


def _products(shape: shapes.Shape, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Case:
    return Case(shape, "multiply-add", shape.products, dtypes)


def _numbers(shape: shapes.Shape, unit: str = "number of x", dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Case:
    """Of an op whose work goes by the numbers of its first tensor."""
    return Case(shape, unit, math.prod(shape.shapes[0]), dtypes)


def _weights(shape: shapes.Shape, samples: int) -> Case:
    """Of an op whose work goes by weights."""
    return Case(shape, "weight and sample", samples * math.prod(shape.shapes[-1]))


def _masked_columns(launch: recorder.Launch) -> tuple[Sequence[int], int]:
    """Of 2000 x 2000, 4 samples: the blocks that share 64 columns of a product, or 64 x 64 of a gradient."""
    if "weight_kernel" in launch.name:
        return [33], 4 * 64 * 64
    across = 32  # blocks of 64 columns, the last of which is not whole
    return range(3, launch.grid[0], across), 4 * 64 * 2000


def _first_images(launch: recorder.Launch) -> tuple[Sequence[int], int]:
    """Of 64 to 64 channels, 3x3, 48 images of 16 px, two tiles of pixels each: the blocks of the first four images.
    Of the gradient of the weight, whose blocks share the images, none."""
    tiles = 96
    columns = 0 if "weight" in launch.name else launch.grid[0] // tiles
    return [column * tiles + tile for column in range(columns) for tile in range(8)], 4 * 16 * 16 * 64 * 64 * 9


def _one_block(shape: shapes.Shape) -> Case:
    """The fourth block of each launch, where blocks share the batch evenly."""

    def part(launch: recorder.Launch) -> tuple[Sequence[int], int]:
        return [3], shape.products // math.prod(launch.grid)

    return _products(shape)._replace(part=part)


def _op(op: str, label: str, call: shapes.Call, *tensors: tuple[int, ...], wide: tuple[int, ...] = ()) -> shapes.Shape:
    return shapes.Shape(op, label, tensors, call, wide=wide)


def _pixels(value: Tensor) -> Tensor:
    """``[..., H, W, C]`` as ``[..., C, H, W]``."""
    return value.movedim(-1, -3)


def _pool_linear(batch: int, channels: int, size: int, outputs: int) -> Case:
    """The end of a gater. It has no name in ``fastmod.ops``: ``plain`` is what it is compared with."""

    def call(run: Callable[..., Tensor]) -> shapes.Call:
        return lambda t: [run(_pixels(t[0]), t[1], t[2], t[3], t[4], True, 1, True)]

    tensors = (batch, size, size, channels), (channels,), (channels,), (outputs, channels), (outputs,)
    label = f"B{batch} {channels} channels {size} px to {outputs}"
    kernel, plain = call(_pool_linear_op._run), call(_pool_linear_op.reference)
    return _numbers(shapes.Shape("pool_linear", label, tensors, kernel, wide=(1, 2), plain=plain))


def _squeeze_excite(batch: int, experts: int, channels: int, size: int, squeezed: int) -> Case:
    """The same of a task's squeeze-excite in training."""

    def kernel(t: Sequence[Tensor]) -> Sequence[Tensor]:
        running = [torch.zeros_like(t[i]) for i in (4, 5, 7, 8)]
        moving = (0.1, 0.1), (1e-5, 1e-5)
        triton = backend.on_gpu("squeeze_excite_forward", "norm_conv", t[0]) == "triton"
        return [_squeeze_excite_op._run(triton, _pixels(t[0]), t[1], t[2], list(t[3:]), running, *moving)]

    def plain(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_squeeze_excite_op.reference(_pixels(t[0]), *t[1:], eps=(1e-5, 1e-5))]

    affine, small = (experts, channels), (experts, squeezed)
    layers = (experts, squeezed, channels), small, small, (experts, channels, squeezed), affine, affine
    tensors = ((batch, experts, size, size, channels), affine, affine, *layers)
    label = f"B{batch} E{experts} {channels} channels {size} px, {squeezed} squeezed"
    return _numbers(shapes.Shape("squeeze_excite", label, tensors, kernel, wide=tuple(range(1, 9)), plain=plain))


def _gated_residual(batch: int, n: int, d: int) -> Case:
    tensors = (batch, n, d), (batch, n, d), (batch, n)
    return _numbers(_op("gated_residual", f"B{batch} N{n} D{d}", lambda t: [ops.gated_residual(*t)], *tensors))


def _range_penalty(batch: int, n: int) -> Case:
    """A threshold that some logits are beyond."""
    shape = _op("range_penalty", f"{batch}x{n}", lambda t: [ops.range_penalty(*t, threshold=0.5)], (batch, n))
    return _numbers(shape, "logit")


def _norm_sum(batch: int, experts: int, channels: int, size: int) -> Case:
    """Without a gate."""
    images, affine = (batch, experts, size, size, channels), (experts, channels)
    label = f"B{batch} E{experts} {channels} channels {size} px no gate"

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.norm_sum(_pixels(t[0]), t[1], t[2], _pixels(t[3]))]

    return _numbers(_op("norm_sum", label, call, images, affine, affine, images, wide=(1, 2)))


def _norm_pool(batch: int, experts: int, channels: int, size: int) -> Case:
    images, affine = (batch, experts, size, size, channels), (experts, channels)
    label = f"B{batch} E{experts} {channels} channels {size} px"

    def call(t: Sequence[Tensor]) -> Sequence[Tensor]:
        return [ops.norm_pool(_pixels(t[0]), t[1], t[2])]

    return _numbers(_op("norm_pool", label, call, images, affine, affine, wide=(1, 2)))


def _template_mix(layers: int, templates: int, length: int) -> shapes.Shape:
    label = f"L{layers} K{templates} P{length}"
    shape = _op(
        "template_mix", label, lambda t: [ops.template_mix(t[0], t[1])], (layers, templates), (templates, length)
    )
    return replace(shape, products=layers * templates * length)


def _cluster_penalty(layers: int, templates: int, length: int) -> Case:
    label = f"L{layers} K{templates} P{length}"
    tensors = (templates, length), (layers, templates)
    shape = _op("cluster_penalty", label, lambda t: [ops.cluster_penalty(t[1], t[0])], *tensors)
    return _numbers(shape, "number of the bank")


def _entropy_penalty(rows: int, templates: int) -> Case:
    shape = _op("entropy_penalty", f"{rows}x{templates}", lambda t: [ops.entropy_penalty(*t)], (rows, templates))
    return _numbers(shape, "logit")


def _batch_affine() -> Case:
    (shape,) = (each for each in shapes.SHAPES if each.op == "batch_affine")
    return _numbers(shape, "channel", ("fp32",))


CASES = (
    _products(shapes.smfr(16, (6, 8, 8, 8, 5), 10, (100,))),
    _products(shapes.smfr(32, (3, 2), 40, (160,))),
    _products(shapes.multiplex(16, 8, 8, 10)),
    _products(shapes.multiplex(4, 16, 16, 32)),
    _products(shapes.multiplex(2, 5, 4, 196)),
    _one_block(shapes.multiplex(24 * 256, 8, 8, 10)),
    _one_block(shapes.multiplex(4 * 256, 16, 16, 32)),
    _one_block(shapes.multiplex(4 * 256, 5, 4, 196)),
    _gated_residual(64, 8, 10),
    _range_penalty(64, 64),
    _weights(shapes.sample_mask(8192, 4), 4),
    _weights(shapes.masked_linear(128, 128, 64, 4), 4),
    _weights(shapes.masked_linear(128, 2000, 2000, 4), 4)._replace(part=_masked_columns),
    # Sums as deep as in a large layer, of few columns: forward, and for the gradient of x.
    _weights(shapes.masked_linear(128, 2000, 64, 4), 4)._replace(cuda=False),
    _weights(shapes.masked_linear(128, 64, 2000, 4), 4)._replace(cuda=False),
    _products(shapes.masked_conv2d(4, 32, 8, 64, 2)),
    _products(shapes.norm_conv(4, 1, 16, 16, 32)),
    _products(shapes.norm_conv(4, 1, 32, 32, 16)),
    _products(shapes.norm_conv(4, 1, 64, 64, 8)),
    _products(shapes.norm_conv(48, 1, 64, 64, 16))._replace(part=_first_images),
    _products(shapes.norm_conv(4, 1, 16, 32, 32, 2)),
    _products(shapes.norm_conv(2, 1, 24, 144, 8, kernel=1), ("fp32",)),
    _products(shapes.norm_conv(2, 1, 144, 24, 8, kernel=1), ("fp32",)),
    _products(shapes.norm_conv(2, 1, 144, 144, 8, depthwise=True)),
    _numbers(shapes.norm_sum(4, 4, 16, 32)),
    _norm_sum(4, 4, 16, 32),
    _norm_pool(4, 2, 48, 16),
    _batch_affine(),
    _pool_linear(4, 32, 8, 10),
    _squeeze_excite(4, 1, 48, 8, 12),
    _products(_template_mix(16, 4, 20000)),
    _products(_template_mix(16, 32, 28000), ("fp32",)),
    _cluster_penalty(16, 8, 4000),
    _entropy_penalty(64, 32),
)
