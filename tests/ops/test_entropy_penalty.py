"""entropy_penalty: agreement with fp64, near one-hot rows too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked

NAN, INF = float("nan"), float("inf")

everywhere = pytest.mark.parametrize("name", ["native", "reference"])
SHAPES = [(16, 4), (3, 5, 17), (300, 33), (1,), (5,), (2, 3, 1), (0, 3), (2, 0, 3)]


def plain(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for scale in (1.0, 20.0):
        assert_agrees(ops.entropy_penalty, lambda scale=scale: [(torch.randn(shape) * scale).to(dtype)])
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert ops.entropy_penalty(torch.zeros(shape, dtype=dtype)).dtype == expected


@given(
    lead=st.lists(st.sampled_from([0, 1, 3, 19]), max_size=2),
    k=st.sampled_from([1, 2, 5, 19]),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("backend")
def test_any_shape_layout_and_range(lead, k, layout, scale, seed) -> None:
    torch.manual_seed(seed)
    assert_agrees(ops.entropy_penalty, lambda: [laid_out(torch.randn(*lead, k) * scale, layout)])


@everywhere
def test_values_by_hand(name: str) -> None:
    with fastmod.use_backend(name):
        assert ops.entropy_penalty(torch.zeros(3, 8)).item() == pytest.approx(3 * math.log(8))
        assert ops.entropy_penalty(torch.tensor([7.0])).item() == 0
        half = torch.tensor([2.0, -INF, 2.0], requires_grad=True)  # two of three
        value = ops.entropy_penalty(half)
        assert value.item() == pytest.approx(math.log(2))
        assert torch.autograd.grad(value, half)[0].tolist() == [0.0, 0.0, 0.0]


@everywhere
@pytest.mark.parametrize("gap", [5.0, 12.0, 25.0, 80.0])
def test_near_one_hot(gap: float, name: str) -> None:
    """Every digit is there where fp32's 1 - p is none: with u = gap + .., H = log(1 + sum e^-u) + mean of u."""
    logits = (-gap - torch.rand(5, 7)).requires_grad_()
    with torch.no_grad():
        logits[torch.arange(5), torch.arange(5)] = 0
    with fastmod.use_backend(name):
        value = ops.entropy_penalty(logits)
        (grad,) = torch.autograd.grad(value, logits)
    u = -logits.detach().double()
    rest = torch.exp(-u) * (u > 0)  # [5, 7]
    mean = (rest * u).sum(-1, keepdim=True) / (1 + rest.sum(-1, keepdim=True))
    exact = (torch.log1p(rest.sum(-1, keepdim=True)) + mean).sum()
    exact_grad = torch.exp(-u) / (1 + rest.sum(-1, keepdim=True)) * (u - mean)
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-5, atol=1e-6 * exact_grad.abs().max().item())


@everywhere
def test_exactly_one_hot(name: str) -> None:
    for far in (1e4, INF):
        logits = torch.full((3, 4), -far)
        logits[:, 1] = 2.0
        logits.requires_grad_()
        with fastmod.use_backend(name):
            value = ops.entropy_penalty(logits)
            (grad,) = torch.autograd.grad(value, logits)
        assert value.item() == 0 and torch.equal(grad, torch.zeros(3, 4))


@everywhere
@pytest.mark.parametrize("row", [[NAN, 0.0, 1.0], [0.0, 1.0, NAN], [INF, 0.0, 1.0], [-INF] * 3], ids=str)
def test_no_softmax_is_nan(row: list[float], name: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], row], requires_grad=True)
    with fastmod.use_backend(name):
        value = ops.entropy_penalty(logits)
        (grad,) = torch.autograd.grad(value, logits)
    assert value.isnan() and grad[0].isfinite().all() and grad[1].isnan().any()


@everywhere
def test_is_the_plain_formula(name: str) -> None:
    logits = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    with fastmod.use_backend(name):
        found = ops.entropy_penalty(logits)
    torch.testing.assert_close(found, plain(logits))
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(plain(logits), logits))


@pytest.mark.usefixtures("backend")
def test_derivatives() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.entropy_penalty, logits)
    assert torch.autograd.gradgradcheck(ops.entropy_penalty, logits)


def test_bits_do_not_depend_on_threads() -> None:
    logits = torch.randn(5000, 33)
    threads = torch.get_num_threads()
    expected = ops.entropy_penalty(logits)
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.entropy_penalty(logits), expected)
    finally:
        torch.set_num_threads(threads)


def test_opcheck() -> None:
    permuted = laid_out(torch.randn(3, 4, 5), "permuted")
    opchecked("entropy_penalty_forward", permuted)
    opchecked("entropy_penalty_backward", torch.tensor(2.0), permuted)


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    logits = torch.randn(5, 6, requires_grad=True)
    compiled = torch.compile(ops.entropy_penalty, fullgraph=True)
    expected = torch.autograd.grad(ops.entropy_penalty(logits).sin(), logits)
    torch.testing.assert_close(torch.autograd.grad(compiled(logits).sin(), logits), expected)


@everywhere
def test_autocast(name: str) -> None:
    with fastmod.use_backend(name), torch.autocast("cpu", torch.bfloat16):
        assert ops.entropy_penalty(torch.randn(2, 3)).dtype == torch.float32


BAD = {
    "rank": (lambda: ops.entropy_penalty(torch.tensor(1.0)), ValueError, r"logits.*\[\.\.\., K\]"),
    "no templates": (lambda: ops.entropy_penalty(torch.zeros(2, 0)), ValueError, "logits.*K >= 1"),
    "integers": (lambda: ops.entropy_penalty(torch.zeros(2, 3).long()), TypeError, "logits.*int64"),
    "not a tensor": (lambda: ops.entropy_penalty([1.0]), TypeError, "logits.*list"),
    "sparse": (lambda: ops.entropy_penalty(torch.zeros(2, 3).to_sparse()), TypeError, "logits.*dense"),
}


@everywhere
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, name: str) -> None:
    call, error, pattern = BAD[case]
    with fastmod.use_backend(name), pytest.raises(error, match=pattern):
        call()


def test_the_kernels_refuse_too() -> None:
    with pytest.raises(ValueError, match="logits"):
        torch.ops.fastmod.entropy_penalty_forward(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="grad"):
        torch.ops.fastmod.entropy_penalty_backward(torch.zeros(2), torch.zeros(2, 3))
