"""The Triton launchers of gated_residual in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from fastmod.ops._checks import compute_dtype
from tests.helpers.interpreter import (
    DTYPES,
    INTERPRETED,
    QUIET,
    awkward,
    close,
    gradients,
    interpreted,
    normal,
    run_of,
)

if INTERPRETED:
    from fastmod import kernels

pytestmark = QUIET
gated_residual_op = import_module("fastmod.ops.gated_residual")
test_in_the_interpreter = run_of(__file__)


def check_gated_residual(x: Tensor, new: Tensor, gate: Tensor, grad: Tensor) -> None:
    def reference(x: Tensor, new: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        out = gated_residual_op.reference(x, new, gate)
        wide = compute_dtype(out)
        return out, (out.to(wide) * grad.to(wide)).sum()

    out, grads = gradients(reference, [x, new, gate])
    out64, grads64 = gradients(reference, [x.double(), new.double(), gate.double()])
    close("out", kernels.gated_residual_forward(x, new, gate), out, out64)
    got = kernels.gated_residual_backward(grad, x, new, gate)
    for name, value, plain, exact in zip(("dx", "dnew", "dgate"), got, grads, grads64, strict=True):
        close(name, value, plain, exact)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8, 10), (2, 4, 196), (1, 1, 1), (70, 1, 3), (2, 1, 300), (2, 2, 3, 5)])
def test_gated_residual(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_gated_residual(
        normal(shape, dtype, 0), normal(shape, dtype, 1), normal(shape[:-1], dtype, 2), normal(shape, dtype, 3)
    )


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
def test_gated_residual_layouts(kind: str) -> None:
    x, new, grad = (awkward(normal((3, 4, 5), torch.float32, seed), kind) for seed in range(3))
    check_gated_residual(x, new, awkward(normal((3, 4), torch.float32, 3), kind), grad)


@interpreted
def test_gated_residual_extremes() -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[1e4, -1e4, 30.0, -80.0, inf, -inf, nan, 0.0]])
    x, new, grad = (normal((1, 8, 3), torch.float32, seed, 1e4) for seed in range(3))
    check_gated_residual(x, new, gate, grad)
    x[0, 7, 0], new[0, 7, 1], x[0, 0, 2] = inf, nan, inf
    check_gated_residual(x, new, gate, grad)


@interpreted
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_gated_residual_empty(shape: tuple[int, ...]) -> None:
    check_gated_residual(torch.ones(shape), torch.ones(shape), torch.ones(shape[:-1]), torch.ones(shape))
