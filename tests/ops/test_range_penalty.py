"""range_penalty on every backend: agreement with fp64, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked

NAN, INF = float("nan"), float("inf")
# The sums of several tensors share one array of partial sums in the CUDA kernels.
SEVERAL = [((300, 7), (2, 3, 4)), ((3, 5, 7), (1100,), ()), ((1,), (0,), (2049,), (63,)), ((0, 3),), ((0,), (2, 3))]


def penalty(threshold: float):
    return lambda *tensors: ops.range_penalty(*tensors, threshold=threshold)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 20.0])
@pytest.mark.parametrize("shapes", SEVERAL, ids=str)
def test_matches_fp64(shapes: tuple[tuple[int, ...], ...], threshold: float, dtype: torch.dtype) -> None:
    for scale in (1.0, 25.0):
        assert_agrees(penalty(threshold), lambda scale=scale: [(torch.randn(s) * scale).to(dtype) for s in shapes])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_values_and_the_dtype_of_the_sum(dtype: torch.dtype) -> None:
    for scale in (100.0, 5e3):
        assert_agrees(penalty(1.25), lambda scale=scale: [(torch.randn(40) * scale).to(dtype)])
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert ops.range_penalty(torch.zeros(3, dtype=dtype)).dtype == expected


@pytest.mark.usefixtures("backend")
@given(
    shape=st.lists(st.sampled_from([0, 1, 3, 19]), max_size=3),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    threshold=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_layout_and_range(shape, layout, scale, threshold, seed) -> None:
    torch.manual_seed(seed)
    assert_agrees(penalty(threshold), lambda: [laid_out(torch.randn(shape) * scale, layout)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    def inputs():
        tensors = [laid_out((torch.randn(3, 4, 5) * 30).to(dtype), layout) for _ in range(2)]
        return [*tensors, tensors[0][:0], torch.randn(()).to(dtype)]

    assert_agrees(penalty(20.0), inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("odd", [INF, -INF, NAN, 1e4])
def test_extremes(odd: float) -> None:
    assert_agrees(penalty(20.0), lambda: [torch.tensor([1.0, odd, -30.0, 20.0, -20.0])])


@pytest.mark.usefixtures("backend")
def test_values_by_hand() -> None:
    t = torch.tensor([-25.0, -20.0, 0.0, 19.0, 22.0], requires_grad=True)
    penalty = ops.range_penalty(t)
    penalty.backward()
    assert penalty.item() == 25 + 4
    assert t.grad.tolist() == [-10.0, 0.0, 0.0, 0.0, 4.0]


@pytest.mark.usefixtures("backend")
def test_nan_and_inf_as_in_torch() -> None:
    assert ops.range_penalty(torch.tensor([1.0, float("nan")])).isnan()
    assert ops.range_penalty(torch.tensor([1.0, float("-inf")])).item() == float("inf")


def test_the_sum_does_not_depend_on_threads() -> None:
    value = torch.randn(500_000) * 30
    threads = torch.get_num_threads()
    expected = ops.range_penalty(value)
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.range_penalty(value), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("backend")
def test_gradcheck() -> None:
    # The target is detached, so the numeric derivative of the forward is that of the squared excess only.
    value = (torch.randn(3, 4, dtype=torch.float64) * 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ops.range_penalty(t, threshold=1.0), value)


def test_opcheck() -> None:
    permuted = laid_out(torch.randn(3, 4, 5) * 30, "permuted")
    opchecked("range_penalty_forward", [permuted, torch.randn(3)], 20.0)
    opchecked("range_penalty_backward", torch.tensor(2.0), [permuted, torch.randn(3)], 20.0)


def test_compile_fullgraph_and_autocast() -> None:
    value = (torch.randn(5, 6) * 30).requires_grad_()
    compiled = torch.compile(lambda t: ops.range_penalty(t, t.tanh()), fullgraph=True)
    expected = torch.autograd.grad(ops.range_penalty(value, value.tanh()), value)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(value), value)[0], expected)
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
            assert ops.range_penalty(value, value.bfloat16()).dtype == torch.float32
