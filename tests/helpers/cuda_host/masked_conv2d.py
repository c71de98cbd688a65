"""Checks of the CUDA C++ kernels of ``masked_conv2d`` against fp64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import noise
from fastmod.ops.masked_conv2d import out_size, reference
from tests.helpers.cuda_host import Harness, Out
from tests.helpers.cuda_host.checks import F32, F64, INF, NAN, SEED, Results, assert_draws_close, gradients, random

NAMES = ("out", "grad_x", "grad_weight", "grad_logits", "grad_bias", "grad_bias_logits")


class MaskedConv(NamedTuple):
    sizes: tuple[int, int, int, int, int]  # images of a sample, in, out, H, W
    dtype: torch.dtype = F32
    samples: int = 2
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    tau: float = 1.0
    biases: int = 2  # 1: without logits of the bias, 0: without a bias
    pointer: bool = False  # the seed in device memory
    last: bool = False  # channels innermost in memory
    first: int = 0  # sample of the noise
    special: bool = False  # NaN and infinite logits
    tf32: bool = False

    def id(self) -> str:
        pairs = self.kernel, self.stride, self.padding, self.dilation
        filters = "-".join(f"{name}{a}x{b}" for name, (a, b) in zip("kspd", pairs, strict=True))
        kinds = f"S{self.samples}-b{self.biases}-tau{self.tau:g}{'-last' * self.last}{'-special' * self.special}"
        return f"{'x'.join(map(str, self.sizes))}-{str(self.dtype)[6:]}-{filters}-{kinds}"


def check_masked_conv(harness: Harness, case: MaskedConv, draws: int = 1) -> None:
    assert_draws_close([results(harness, case, draw) for draw in range(draws if case.dtype == F32 else 1)])


def results(harness: Harness, case: MaskedConv, draw: int) -> Results:
    """Of the convolution and of all its gradients."""
    (images, inputs, outputs, high, wide), samples, dtype = case.sizes, case.samples, case.dtype
    geometry = zip((high, wide), case.kernel, case.stride, case.padding, case.dilation, strict=True)
    size = [out_size(*each) for each in geometry]
    weights = (outputs, inputs, *case.kernel)
    shapes = [(samples * images, inputs, high, wide), weights, weights, (outputs,), (outputs,)]
    shapes = shapes[: 3 + case.biases]
    x, *filters = (random(*shape, dtype=dtype, seed=10 * draw + i) for i, shape in enumerate(shapes))
    grad = random(samples * images, outputs, *size, dtype=dtype, seed=10 * draw + 7)
    if case.special:
        filters[1].view(-1)[:4] = torch.tensor([NAN, INF, -INF, 1e4], dtype=dtype)
    seed = torch.tensor(SEED) if case.pointer else None
    pairs = [*case.kernel, *case.stride, *case.padding, *case.dilation]
    noise_ints = [int(case.last), case.first, samples, noise.STREAM_MASK, 0 if case.pointer else SEED]
    ints = [*noise_ints, images, inputs, outputs, high, wide, *pairs, int(case.tf32)]
    options: dict[str, Any] = {"ints": ints, "dtype": dtype}
    given = [*filters, *[None] * (4 - len(filters))]

    def in_memory(value: Tensor) -> Tensor:
        return value.movedim(1, -1) if case.last else value

    def shape_of(value: Tensor) -> Out:
        return Out(*in_memory(value).shape, dtype=dtype)

    (out,) = harness.call("masked_conv2d_forward", in_memory(x), *given, seed, shape_of(grad), **options)
    (dx,) = harness.call("masked_conv2d_backward_x", in_memory(grad), *given, seed, shape_of(x), **options)
    wanted = [Out(*value.shape, dtype=dtype) for value in filters]
    rest = harness.call(
        "masked_conv2d_backward_weight", in_memory(grad), *given, seed, in_memory(x), *wanted,
        *[None] * (4 - len(wanted)), floats=[case.tau], **options,
    )  # fmt: skip
    got = [value.movedim(-1, 1) if case.last else value for value in (out, dx)] + rest

    def plain(*tensors: Tensor) -> Tensor:
        padded = [*tensors, *[None] * (5 - len(tensors))]
        pairs = list(case.stride), list(case.padding), list(case.dilation)
        return reference(*padded, torch.tensor(SEED), samples, *pairs, 1, case.tau, case.first)  # type: ignore[arg-type]

    exact, usual = (gradients(plain, [x, *filters, grad], kind) for kind in (F64, dtype))
    return {name: each for name, *each in zip(NAMES, got, exact, usual, strict=False)}  # type: ignore[misc]
