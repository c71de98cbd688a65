"""gated_residual: the native kernels against the reference, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out, opchecked


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    return [(torch.randn(s) * scale).to(dtype) for s in (shape, shape, shape[:-1])]


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("shape", [(128, 8, 10), (3, 1, 1), (300, 7, 33), (2, 3, 4, 5)], ids=str)
def test_matches_fp64(shape: tuple[int, ...]) -> None:
    assert_agrees(ops.gated_residual, lambda: draw(*shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    assert_agrees(ops.gated_residual, lambda: draw(9, 4, 5, dtype=dtype))


@given(
    b=st.sampled_from([0, 1, 5]),
    n=st.sampled_from([0, 1, 5, 17]),
    d=st.sampled_from([0, 1, 3, 19]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_any_shape_layout_and_range(b, n, d, layouts, scale, seed) -> None:
    torch.manual_seed(seed)
    grad = laid_out(torch.randn(b, n, d), layouts[3])

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(b, n, d, scale=scale), layouts, strict=False)]

    assert_agrees(lambda *t: (ops.gated_residual(*t) * grad).sum(), inputs, scale=scale * max(d, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e4, -1e4])
def test_extreme_gates(value: float, isa: str) -> None:
    x, new, gate = draw(2, 3, 4)
    gate[1, 2] = value
    expected = torch.sigmoid(gate)[..., None] * new + (1 - torch.sigmoid(gate))[..., None] * x
    torch.testing.assert_close(ops.gated_residual(x, new, gate), expected, equal_nan=True)
    if value == -1e4:
        assert torch.equal(ops.gated_residual(x, new, gate)[1, 2], x[1, 2])


@pytest.mark.usefixtures("isa")
def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(ops.gated_residual, inputs)


def test_opcheck() -> None:
    x, new, gate = draw(3, 4, 5)
    arguments = laid_out(x, "permuted"), new, laid_out(gate, "permuted")
    opchecked("gated_residual_forward", *arguments)
    opchecked("gated_residual_backward", laid_out(new, "permuted"), *arguments)


def test_compile_fullgraph_and_autocast() -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 5)]
    expected = torch.autograd.grad(ops.gated_residual(*inputs).sin().sum(), inputs)
    compiled = torch.compile(ops.gated_residual, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
            assert ops.gated_residual(*inputs).dtype == torch.bfloat16
