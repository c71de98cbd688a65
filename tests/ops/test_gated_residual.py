"""gated_residual on every backend: agreement with fp64, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.casts import assert_casts_nothing

NAN, INF = float("nan"), float("inf")
SHAPES = [(128, 8, 10), (3, 1, 1), (300, 7, 33), (2, 3, 4, 5)]  # [..., N, D]
SMALL = [(1, 1, 1), (3, 8, 10), (3, 7, 3), (2, 4, 196), (70, 1, 3), (301, 1, 1), (2, 1, 300), (2, 2, 3, 5)]
EMPTY = [(0, 2, 3), (2, 0, 3), (2, 3, 0)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    return [(torch.randn(s) * scale).to(dtype) for s in (shape, shape, shape[:-1])]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_matches_fp64(shape: tuple[int, ...]) -> None:
    assert_agrees(ops.gated_residual, lambda: draw(*shape))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_agrees(ops.gated_residual, lambda: draw(*shape, dtype=dtype))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(2, 5, 130), (20, 5, 1000)], ids=str)
def test_long_rows(shape: tuple[int, ...]) -> None:
    assert_agrees(ops.gated_residual, lambda: draw(*shape))


@pytest.mark.usefixtures("backend")
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

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(b, n, d, scale=scale), layouts, strict=False)]

    assert_agrees(ops.gated_residual, inputs, scale=scale * max(d, 1), grad_layout=layouts[3])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    def inputs():
        return [laid_out(t, layout) for t in draw(3, 4, 5, dtype=dtype)]

    assert_agrees(ops.gated_residual, inputs, grad_layout=layout)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates(dtype: torch.dtype) -> None:
    def inputs():
        x, new, gate = draw(5, 8, 10, dtype=dtype)
        return [x, new, gate * 1e4]

    assert_agrees(ops.gated_residual, inputs, scale=1.0)  # gradients of the gates are differences of ones


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e4, -1e4])
def test_extreme_gates(value: float) -> None:
    x, new, gate = draw(2, 3, 4)
    gate[1, 2] = value
    expected = torch.sigmoid(gate)[..., None] * new + (1 - torch.sigmoid(gate))[..., None] * x
    torch.testing.assert_close(ops.gated_residual(x, new, gate), expected, equal_nan=True)
    if value == -1e4:
        assert torch.equal(ops.gated_residual(x, new, gate)[1, 2], x[1, 2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_not_finite_as_in_torch(value: float) -> None:
    def inputs():
        x, new, gate = draw(5, 8, 10)
        gate[0, 0] = new[-1, 0, 0] = value
        return [x, new, gate]

    assert_agrees(ops.gated_residual, inputs)


@pytest.mark.usefixtures("backend")
def test_extremes_of_everything() -> None:
    def inputs(odd: bool):
        x, new, _ = draw(1, 8, 3, scale=1e4)
        if odd:
            x[0, 7, 0], new[0, 7, 1], x[0, 0, 2] = INF, NAN, INF
        return [x, new, torch.tensor([[1e4, -1e4, 30.0, -80.0, INF, -INF, NAN, 0.0]])]

    for odd in (False, True):
        assert_agrees(ops.gated_residual, lambda odd=odd: inputs(odd))


@pytest.mark.usefixtures("backend")
def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(ops.gated_residual, inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
def test_autocast_casts_nothing(low: torch.dtype, wide: tuple[int, ...]) -> None:
    assert_casts_nothing(ops.gated_residual, draw(3, 4, 5), low, wide)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_autocast_dtypes_that_kernels_refuse() -> None:
    x, new, gate = draw(2, 3, 4)
    for tensors, low in (
        ((x, new, gate.half()), torch.bfloat16),
        ((x.double(), new, gate), torch.bfloat16),
        ((x, new, gate), torch.float32),
    ):
        with pytest.raises(TypeError):
            backends.kernel("gated_residual_forward")(*tensors, low)
    with pytest.raises(TypeError, match="grad"):
        backends.kernel("gated_residual_backward")(x, x, new, gate, torch.bfloat16)


def test_opcheck() -> None:
    x, new, gate = draw(3, 4, 5)
    arguments = laid_out(x, "permuted"), new, laid_out(gate, "permuted")
    opchecked("gated_residual_forward", *arguments)
    opchecked("gated_residual_backward", laid_out(new, "permuted"), *arguments)


@pytest.mark.slow
def test_compile_fullgraph_and_autocast() -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 5)]
    expected = torch.autograd.grad(ops.gated_residual(*inputs).sin().sum(), inputs)
    compiled = torch.compile(ops.gated_residual, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
            assert ops.gated_residual(*inputs).dtype == torch.bfloat16
