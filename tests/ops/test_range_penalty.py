"""range_penalty: the native kernels against the reference, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out, opchecked


@pytest.mark.usefixtures("filled_memory", "isa")
def test_matches_fp64() -> None:
    assert_agrees(lambda *t: ops.range_penalty(*t, threshold=0.5), lambda: [torch.randn(300, 7), torch.randn(2, 3, 4)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    assert_agrees(lambda t: ops.range_penalty(t), lambda: [(torch.randn(40) * 100).to(dtype)])
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert ops.range_penalty(torch.zeros(3, dtype=dtype)).dtype == expected


@given(
    shape=st.lists(st.sampled_from([0, 1, 3, 19]), max_size=3),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    threshold=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_layout_and_range(shape, layout, scale, threshold, seed) -> None:
    torch.manual_seed(seed)

    def inputs():
        value = torch.randn(shape) * scale
        return [laid_out(value, layout) if shape else value]

    assert_agrees(lambda t: ops.range_penalty(t, threshold=threshold), inputs)


def test_values_by_hand() -> None:
    t = torch.tensor([-25.0, -20.0, 0.0, 19.0, 22.0], requires_grad=True)
    penalty = ops.range_penalty(t)
    penalty.backward()
    assert penalty.item() == 25 + 4
    assert t.grad.tolist() == [-10.0, 0.0, 0.0, 0.0, 4.0]


def test_nan_and_inf_as_in_torch(isa: str) -> None:
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


def test_gradcheck_and_opcheck(isa: str) -> None:
    # The target is detached, so the numeric derivative of the forward is that of the squared excess only.
    value = (torch.randn(3, 4, dtype=torch.float64) * 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ops.range_penalty(t, threshold=1.0), value)
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
