"""norm_sum on the host harness: cases and their check against fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.helpers.cuda_host import Harness, Out
from tests.helpers.cuda_host.checks import F32, F64, Results, assert_draws_close, random
from tests.helpers.cuda_host.norm_conv import inner, outer

NAMES = ("x", "scale", "shift", "residual", "residual_scale", "residual_shift", "gate")


class Sum(NamedTuple):
    sizes: tuple[int, int, int, int, int]  # B, E, C, H, W
    dtype: torch.dtype = F32
    residual: str = "each"  # "each" expert its own, "shared", "none"
    scaled: bool = False
    gate: bool = False
    relu: bool = True

    def id(self) -> str:
        flags = [name for name in ("scaled", "gate", "relu") if getattr(self, name)]
        return "-".join(["B{}-E{}-C{}-{}x{}".format(*self.sizes), str(self.dtype)[6:], self.residual, *flags])

    @property
    def wide(self) -> torch.dtype:
        return F64 if self.dtype == F64 else F32


def inputs_of(case: Sum, draw: int) -> list[Tensor | None]:
    batch, experts, channels, high, wide = case.sizes
    seed = 100 * draw
    image = (channels, high, wide)
    per_channel = [random(experts, channels, dtype=case.wide, seed=seed + i) for i in range(4)]
    residual = random(batch, *([] if case.residual == "shared" else [experts]), *image, dtype=case.dtype, seed=seed + 4)
    return [
        random(batch, experts, *image, dtype=case.dtype, seed=seed + 5),
        *per_channel[:2],
        None if case.residual == "none" else residual,
        *(per_channel[2:] if case.scaled else (None, None)),
        random(batch, experts, dtype=case.dtype, seed=seed + 6) if case.gate else None,
    ]


def model(case: Sum, dtype: torch.dtype, *tensors: Tensor | None) -> Tensor:
    wide = F64 if dtype == F64 else F32
    x, scale, shift, residual, *scaling, gate = (None if t is None else t.to(wide) for t in tensors)
    residual_scale, residual_shift = scaling
    assert x is not None and scale is not None and shift is not None
    total = x * scale[..., None, None] + shift[..., None, None]
    if residual is not None:
        residual = residual.unsqueeze(1) if case.residual == "shared" else residual
        if residual_scale is not None and residual_shift is not None:
            residual = residual * residual_scale[..., None, None] + residual_shift[..., None, None]
        total = total + residual
    total = total.relu() if case.relu else total
    total = total if gate is None else (total * gate[..., None, None, None]).sum(1)
    return total.to(dtype)


def values(case: Sum, dtype: torch.dtype, tensors: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    to = {case.dtype: dtype, case.wide: F64 if dtype == F64 else case.wide}
    leaves = [None if t is None else t.to(to[t.dtype]).requires_grad_() for t in tensors]
    found = model(case, dtype, *leaves)
    return [found.detach(), *torch.autograd.grad(found, [t for t in leaves if t is not None], grad.to(found.dtype))]


def results(harness: Harness, case: Sum, draw: int) -> Results:
    tensors = inputs_of(case, draw)
    batch, experts, channels, high, wide = case.sizes
    size = (batch, *([] if case.gate else [experts]), channels, high, wide)
    grad = random(*size, dtype=case.dtype, seed=100 * draw + 7)
    exact, usual = values(case, F64, tensors, grad), values(case, case.dtype, tensors, grad)
    ints = [batch, experts, channels, high * wide, int(case.residual == "shared"), int(case.relu)]
    given = [inner(t) if t is not None and t.dim() > 2 else t for t in tensors]
    got = harness.call(
        "norm_sum_forward", *given, Out(*inner(grad).shape, dtype=case.dtype), ints=ints, dtype=case.dtype
    )
    outs = [None if t is None else Out(*t.shape, dtype=t.dtype) for t in given]
    got += harness.call("norm_sum_backward", inner(grad), *given, *outs, ints=ints, dtype=case.dtype)
    got = [outer(t) if t.dim() > 2 else t for t in got]
    names = ["out", *(f"grad_{name}" for name, t in zip(NAMES, tensors, strict=True) if t is not None)]
    return {name: three for name, *three in zip(names, got, exact, usual, strict=True)}  # type: ignore[misc]


def check_sum(harness: Harness, case: Sum, draws: int = 1) -> None:
    assert_draws_close([results(harness, case, draw) for draw in range(draws)])
