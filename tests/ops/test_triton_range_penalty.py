"""The Triton launchers of range_penalty in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

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
range_penalty_op = import_module("fastmod.ops.range_penalty")
test_in_the_interpreter = run_of(__file__)


def check_range_penalty(logits: list[Tensor], threshold: float) -> None:
    def reference(*logits: Tensor) -> tuple[Tensor, Tensor]:
        out = range_penalty_op.reference(logits, threshold)
        return out, out * 0.3

    out, grads = gradients(reference, logits)
    out64, grads64 = gradients(reference, [t.double() for t in logits])
    got = kernels.range_penalty_forward(logits, threshold)
    close("penalty", got, out, out64)
    dlogits = kernels.range_penalty_backward(torch.tensor(0.3, dtype=got.dtype), logits, threshold)
    for value, plain, exact in zip(dlogits, grads, grads64, strict=True):
        close("dlogits", value, plain, exact)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [20.0, 0.0, 0.1])
def test_range_penalty(dtype: torch.dtype, threshold: float) -> None:
    check_range_penalty(
        [normal((3, 5, 7), dtype, 0, 25), normal((1100,), dtype, 1, 25), normal((), dtype, 2)], threshold
    )


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
def test_range_penalty_layouts(kind: str) -> None:
    check_range_penalty([awkward(normal((3, 4, 5), torch.float32, s, 30), kind) for s in range(2)], 20.0)


@interpreted
@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan"), 1e4])
def test_range_penalty_extremes(odd: float) -> None:
    check_range_penalty([torch.tensor([1.0, odd, -30.0, 20.0, -20.0])], 20.0)


@interpreted
def test_range_penalty_empty() -> None:
    check_range_penalty([torch.ones(0, 3)], 20.0)
    check_range_penalty([torch.ones(0), torch.full((2, 3), 21.0)], 20.0)
