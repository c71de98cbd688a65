"""norm_conv on the host harness: cases and their check against fp64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.cuda_host import Harness, Out
from tests.helpers.cuda_host.checks import F32, F64, Results, assert_draws_close, random

NAMES = ("grad_x", "grad_weight", "grad_scale", "grad_shift", "grad_channel_gate", "grad_bias")


class Conv(NamedTuple):
    sizes: tuple[int, int, int, int, int, int]  # B, E, Cin, Cout, H, W
    dtype: torch.dtype = F32
    kernel: int = 3
    stride: int = 1
    shared: bool = False
    depthwise: bool = False
    affine: str = "each"  # "each" expert its own, "one" for all, "none"
    relu: bool = True
    gate: bool = False
    bias: bool = False
    stats: bool = True
    tf32: bool = False

    def id(self) -> str:
        flags = [
            name for name in ("shared", "depthwise", "relu", "gate", "bias", "stats", "tf32") if getattr(self, name)
        ]
        sizes = "B{}-E{}-{}to{}-{}x{}".format(*self.sizes)
        return f"{sizes}-k{self.kernel}s{self.stride}-{str(self.dtype)[6:]}-{self.affine}-{'-'.join(flags)}"

    @property
    def wide(self) -> torch.dtype:
        return F64 if self.dtype == F64 else F32


def inputs_of(case: Conv, draw: int) -> list[Tensor | None]:
    """x, weight, scale, shift, channel_gate, bias"""
    batch, experts, inputs, outputs, high, wide = case.sizes
    seed, dtype = 100 * draw, case.dtype
    depth = 1 if case.depthwise else inputs
    rows = 1 if case.affine == "one" else experts
    x = random(batch, *([] if case.shared else [experts]), inputs, high, wide, dtype=dtype, seed=seed)
    weight = random(experts, outputs, depth, case.kernel, case.kernel, dtype=dtype, scale=0.2, seed=seed + 1)
    scale = None if case.affine == "none" else random(rows, inputs, dtype=case.wide, seed=seed + 2)
    shift = None if case.affine == "none" else random(rows, inputs, dtype=case.wide, seed=seed + 3)
    gate = random(batch, experts, inputs, dtype=dtype, seed=seed + 4) if case.gate else None
    bias = random(experts, outputs, dtype=dtype, scale=5.0, seed=seed + 5) if case.bias else None  # far from zero
    return [x, weight, scale, shift, gate, bias]


def model(case: Conv, dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, var; reduced precision is computed in fp32, what a layer would write rounded."""
    wide = F64 if dtype == F64 else F32
    x, weight, scale, shift, gate, bias = (None if t is None else t.to(wide) for t in tensors)
    assert x is not None and weight is not None
    experts, outputs = weight.shape[:2]
    z = x.unsqueeze(1) if case.shared else x  # [B, E or 1, Cin, H, W]
    if scale is not None and shift is not None:
        z = z * scale[:, :, None, None] + shift[:, :, None, None]
    z = z.relu() if case.relu else z
    z = z if gate is None else z * gate[..., None, None]
    z = z.to(dtype).to(wide).expand(-1, experts, -1, -1, -1).flatten(1, 2)
    groups = experts * (outputs if case.depthwise else 1)
    y = F.conv2d(z, weight.flatten(0, 1), None, case.stride, case.kernel // 2, groups=groups)
    y = y.unflatten(1, (experts, outputs))
    y = (y if bias is None else y + bias[:, :, None, None]).to(dtype)
    if x.shape[0] == 0:
        return y, *torch.zeros(2, experts, outputs, dtype=wide)
    var, mean = torch.var_mean(y.to(wide), (0, 3, 4), correction=0)
    return y, mean, var


def values(case: Conv, dtype: torch.dtype, tensors: list[Tensor | None], grads: list[Tensor]) -> dict[str, Tensor]:
    """Of the model and of its gradients."""
    leaves = [None if t is None else t.to(dtype if t.dtype == case.dtype else case.wide) for t in tensors]
    if dtype == F64:
        leaves = [None if t is None else t.to(F64) for t in leaves]
    leaves = [None if t is None else t.detach().requires_grad_() for t in leaves]
    found = model(case, dtype, *leaves)
    count = 3 if case.stats else 1
    given = [t for t in leaves if t is not None]
    derived = torch.autograd.grad(
        found[:count], given, [g.to(v.dtype) for g, v in zip(grads, found, strict=False)][:count]
    )
    result = {"y": found[0], "mean": found[1], "var": found[2]}
    names = [name for name, t in zip(NAMES, leaves, strict=True) if t is not None]
    result.update(zip(names, derived, strict=True))
    return {name: value.detach() for name, value in result.items()}


def inner(image: Tensor) -> Tensor:
    """[..., C, H, W] with the channels innermost, as the kernels want it."""
    return image.movedim(-3, -1).contiguous()


def outer(image: Tensor) -> Tensor:
    return image.movedim(-1, -3)


def ints(case: Conv) -> list[int]:
    rows = 1 if case.affine == "one" else case.sizes[1]
    flags = [case.shared, case.depthwise]
    return [*case.sizes, case.kernel, case.stride, *map(int, flags), rows, int(case.relu), int(case.tf32)]


def run(harness: Harness, case: Conv, tensors: list[Any], grads: list[Tensor]) -> dict[str, Tensor]:
    """What the three launches leave."""
    x, weight, scale, shift, gate, bias = tensors
    batch, experts, inputs, outputs, high, wide = case.sizes
    high_out, wide_out = -(-high // case.stride), -(-wide // case.stride)
    shape, dtype = (batch, experts, high_out, wide_out, outputs), case.dtype
    statistics = [Out(experts, outputs, dtype=case.wide) if case.stats else None for _ in range(2)]
    got = harness.call(
        "norm_conv_forward", inner(x), scale, shift, gate, weight, bias, Out(*shape, dtype=dtype), *statistics,
        ints=ints(case), dtype=dtype,
    )  # fmt: skip
    found = dict(zip(("y", "mean", "var"), got, strict=False))
    y, mean = found["y"], found.get("mean")
    found["y"] = outer(y)
    count = batch * high_out * wide_out
    gradient = [inner(grads[0]), *((y, mean, grads[1], grads[2]) if case.stats else (None,) * 4)]
    sources = [*gradient, inner(x), scale, shift, gate]
    rest: dict[str, Any] = {"ints": ints(case), "floats": [1.0 / count if count else 0.0], "dtype": dtype}
    of_affine = [None if t is None else Out(*t.shape, dtype=t.dtype) for t in (scale, shift)]
    of_gate = None if gate is None else Out(*gate.shape, dtype=dtype)
    got = harness.call(
        "norm_conv_backward_x", *sources, weight, Out(*inner(x).shape, dtype=dtype), *of_affine, of_gate, **rest
    )
    names = ["grad_x", *(NAMES[2:4] if scale is not None else ()), *(NAMES[4:5] if case.gate else ())]
    found.update(zip(names, got, strict=True))
    found["grad_x"] = outer(found["grad_x"])
    of_bias = None if bias is None else Out(*bias.shape, dtype=dtype)
    got = harness.call("norm_conv_backward_weight", *sources, Out(*weight.shape, dtype=dtype), of_bias, **rest)
    found.update(zip(("grad_weight", "grad_bias"), got, strict=False))
    return found


def results(harness: Harness, case: Conv, draw: int) -> Results:
    tensors = inputs_of(case, draw)
    batch, experts, _, outputs, high, wide = case.sizes
    size = (batch, experts, outputs, -(-high // case.stride), -(-wide // case.stride))
    grads = [random(*size, dtype=case.dtype, seed=100 * draw + 6)]
    grads += [random(experts, outputs, dtype=case.wide, scale=10.0, seed=100 * draw + seed) for seed in (7, 8)]
    exact, usual = values(case, F64, tensors, grads), values(case, case.dtype, tensors, grads)
    got = run(harness, case, tensors, grads)
    return {name: (value, exact[name], usual[name]) for name, value in got.items()}


def check_conv(harness: Harness, case: Conv, draws: int = 1) -> None:
    found = [results(harness, case, draw) for draw in range(draws)]
    assert_draws_close(found, half_roundings=1.0)  # z is rounded before it is multiplied, and results are once more
