"""norm_sum on every backend: agreement with fp64, and the contract of the op."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import Backend

op = import_module("fastmod.ops.norm_sum")


class Case(NamedTuple):
    shape: tuple[int, ...]  # [B, E, C, H, W]
    residual: str = "own"  # own, shared, none
    norm: bool = False  # of the residual
    gate: bool = False
    relu: bool = True


CASES = [
    Case((2, 3, 5, 4, 3), "own", norm=True, gate=True),
    Case((3, 3, 5, 4, 3), "shared", norm=True, gate=True),
    Case((2, 2, 70, 3, 5), "shared"),
    Case((2, 2, 16, 3, 7), "shared", gate=True, relu=False),
    Case((3, 1, 7, 11, 19)),
    Case((2, 2, 3, 17, 23), "none", gate=True),
    Case((3, 2, 4, 2, 2), "own", norm=True, relu=False),
    Case((2, 1, 64, 9, 1), "none"),
    Case((1, 1, 1, 1, 1), "shared", norm=True, gate=True),
    Case((0, 2, 3, 2, 2), "shared", norm=True, gate=True),
    Case((0, 2, 3, 2, 2)),
]
ids = {"ids": lambda case: "-".join(str(each) for each in case).replace(" ", "")}


def draw(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, scale, shift, and of residual, its scale and shift, and gate those that there are."""
    batch, experts, channels, high, wide = case.shape
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    found = [torch.randn(case.shape).to(dtype), *(torch.randn(experts, channels).to(stats) for _ in range(2))]
    if case.residual != "none":
        shape = case.shape if case.residual == "own" else (batch, channels, high, wide)
        found.append(torch.randn(shape).to(dtype))
    if case.norm:
        found += [torch.randn(experts, channels).to(stats) for _ in range(2)]
    return [*found, torch.randn(batch, experts).to(dtype)] if case.gate else found


def arguments(case: Case, tensors: list[Tensor]) -> list[Tensor | None]:
    """All seven of the kernels."""
    rest: list[Tensor | None] = list(tensors[3:])
    gate = rest.pop() if case.gate else None
    return [*tensors[:3], *rest, *[None] * (3 - len(rest)), gate]


def function(case: Case) -> Callable[..., Tensor]:
    def call(*tensors: Tensor) -> Tensor:
        *others, gate = arguments(case, list(tensors))
        return ops.norm_sum(*others, relu=case.relu, gate=gate).movedim(-3, -1)  # as it lies in memory

    return call


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", CASES, **ids)
def test_matches_fp64(case: Case) -> None:
    assert_agrees(function(case), lambda: draw(case))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", CASES[:4], **ids)
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert_agrees(function(case), lambda: draw(case, dtype))


@pytest.mark.usefixtures("backend")
@given(
    shape=st.tuples(*[st.sampled_from(sizes) for sizes in ([0, 1, 3], [1, 3], [1, 5, 17], [1, 4, 7], [1, 6])]),
    residual=st.sampled_from(["own", "shared", "none"]),
    norm=st.booleans(),
    gate=st.booleans(),
    relu=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 8),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_layout(shape, residual, norm, gate, relu, layouts, seed) -> None:
    torch.manual_seed(seed)
    case = Case(shape, residual, norm and residual != "none", gate, relu)

    def inputs() -> list[Tensor]:
        return [laid_out(t, kind) for t, kind in zip(draw(case), layouts, strict=False)]

    assert_agrees(function(case), inputs, scale=1.0, grad_layout=layouts[7])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_as_in_torch(value: float) -> None:
    def inputs() -> list[Tensor]:
        tensors = draw(CASES[0])
        tensors[0][0, 1, 2, 3, 1] = tensors[3][1, 0, 1, 0, 0] = value
        return tensors

    assert_agrees(function(CASES[0]), inputs)


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], **ids)
def test_results_lie_as_the_fakes_say(backend: Backend, case: Case) -> None:
    """Each gradient alone: the others are empty."""
    inputs = arguments(case, draw(case))
    triton = backend.choice == "triton"
    out = op.FORWARD[triton](*inputs, case.relu)
    assert out.stride() == op.fake_forward(*inputs, case.relu).stride()
    grad = torch.randn_like(out)
    every = op.BACKWARD[triton](grad, *inputs, case.relu, [t is not None for t in inputs])
    for i, tensor in enumerate(inputs):
        needs = [j == i and tensor is not None for j in range(7)]
        found = op.BACKWARD[triton](grad, *inputs, case.relu, needs)
        expected = op.fake_backward(grad, *inputs, case.relu, needs)
        for j, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), f"gradient {j}"
        torch.testing.assert_close(found[i], every[i])


@pytest.mark.usefixtures("backend")
def test_gradcheck() -> None:
    case = Case((2, 2, 3, 2, 1), "shared", norm=True, gate=True)
    assert torch.autograd.gradcheck(function(case), [t.requires_grad_() for t in draw(case, torch.float64)])


@pytest.mark.usefixtures("backend")
def test_inputs_stay_and_repeats_are_equal() -> None:
    inputs = [t.requires_grad_() for t in draw(CASES[1])]
    before = [t.detach().clone() for t in inputs]
    found = [torch.autograd.grad(function(CASES[1])(*inputs).sin().sum(), inputs) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


def test_opcheck() -> None:
    case = CASES[1]
    inputs = [None if t is None else laid_out(t, "permuted") for t in arguments(case, draw(case))]
    opchecked("norm_sum_forward", *inputs, case.relu)
    grad = laid_out(torch.randn(3, 5, 4, 3), "permuted")
    opchecked("norm_sum_backward", grad, *inputs, case.relu, [True] * 7)


@pytest.mark.usefixtures("backend")
def test_bad_input() -> None:
    x, scale, shift, residual = draw(Case((2, 3, 5, 4, 3)))
    with pytest.raises(ValueError, match=r"gate: expected \[B, E\] = \[2, 3\], got shape \[2, 5\]"):
        ops.norm_sum(x, scale, shift, residual, gate=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"residual: expected the shape of x"):
        ops.norm_sum(x, scale, shift, residual[:, :, :4])
    with pytest.raises(ValueError, match=r"scale: expected \[E, C\] = \[3, 5\]"):
        ops.norm_sum(x, scale[:2], shift, residual)
    with pytest.raises(ValueError, match="residual_scale, residual_shift: expected both or none"):
        ops.norm_sum(x, scale, shift, residual, scale)
    with pytest.raises(ValueError, match="residual: expected a tensor"):
        ops.norm_sum(x, scale, shift, None, scale, shift)
    with pytest.raises(TypeError, match="residual: expected the dtype of x"):
        ops.norm_sum(x, scale, shift, residual.double())
    with pytest.raises(TypeError, match="residual: expected the dtype of x"):
        ops.norm_sum(x.bfloat16(), scale, shift, residual)
    with pytest.raises(ValueError, match=r"x: expected \[B, E, C, H, W\]"):
        ops.norm_sum(x[0], scale, shift)
    with pytest.raises(TypeError, match="relu: expected True or False"):
        ops.norm_sum(x, scale, shift, relu="yes")
