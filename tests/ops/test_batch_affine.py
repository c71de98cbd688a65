"""batch_affine on every backend: agreement with fp64, running statistics as nn.BatchNorm2d has them, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastmod import ops
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out, opchecked

SHAPES = [(3, 5), (1,), (), (2, 3, 4), (1, 300), (0, 5), (2, 0)]


def draw(shape: tuple[int, ...], parameters: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """mean, var and as many of weight and bias."""
    found = [torch.randn(shape, dtype=torch.float64) for _ in range(2 + parameters)]
    found[1] = found[1].square()
    return [each.to(dtype) for each in found]


def in_training(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return ops.batch_affine(*tensors, count=11, training=True)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("parameters", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape: tuple[int, ...], parameters: int, dtype: torch.dtype) -> None:
    assert_agrees(in_training, lambda: draw(shape, parameters, dtype))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    assert_agrees(in_training, lambda: [laid_out(t, layout) for t in draw((3, 5))], grad_layout=layout)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_reduced_precision(dtype: torch.dtype) -> None:
    """Statistics are fp32 all the same, and gradients have the dtypes of what they are of."""

    def inputs() -> list[Tensor]:
        mean, var, weight, bias = draw((3, 5))
        return [mean, var, weight.to(dtype), bias.to(dtype)]

    assert_agrees(in_training, inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_extreme_variances(value: float) -> None:
    """0 leaves eps, less than -eps has no root."""

    def inputs() -> list[Tensor]:
        tensors = draw((3, 5))
        tensors[1][1, 2] = value
        return tensors

    assert_agrees(in_training, inputs)


@pytest.mark.usefixtures("backend")
def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in draw((2, 3), dtype=torch.float64)]
    assert torch.autograd.gradcheck(in_training, inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("momentum", [0.1, 0.7, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
def test_running_statistics(layout: str, dtype: torch.dtype, momentum: float) -> None:
    """As nn.BatchNorm2d moves them; what is between their elements stays."""
    norm = nn.BatchNorm2d(6, momentum=momentum, dtype=torch.float64)
    mean, var = torch.zeros(2, 3), torch.ones(2, 3)
    running = [laid_out(t.to(dtype), layout) for t in (mean, var)]
    for _ in range(3):
        x = torch.randn(4, 6, 3, 2, dtype=torch.float64) * 2 + 1
        norm(x)
        found_var, found_mean = torch.var_mean(x, (0, 2, 3), correction=0)
        stats = [t.view(2, 3).to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
                 for t in (found_mean, found_var)]  # fmt: skip
        scale, _ = ops.batch_affine(*stats, None, None, *running, count=24, training=True, momentum=momentum)
        assert not running[0].requires_grad and scale.requires_grad
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}[dtype]
    for found, expected in zip(running, (norm.running_mean, norm.running_var), strict=True):
        torch.testing.assert_close(found.double(), expected.view(2, 3), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("backend")
def test_normalises_as_batch_norm_does() -> None:
    norm = nn.BatchNorm2d(3)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = torch.randn(4, 3, 5, 2)
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    running = torch.zeros(3), torch.ones(3)
    for training in (True, False):
        norm.train(training)
        scale, shift = ops.batch_affine(mean, var, norm.weight, norm.bias, *running, count=40, training=training)
        torch.testing.assert_close(x * scale[:, None, None] + shift[:, None, None], norm(x))


@pytest.mark.usefixtures("backend")
def test_an_empty_batch_leaves_the_running_statistics() -> None:
    running = torch.full((3,), 2.0), torch.full((3,), 3.0)
    ops.batch_affine(torch.zeros(3), torch.zeros(3), None, None, *running, count=0, training=True)
    assert running[0].tolist() == [2.0] * 3 and running[1].tolist() == [3.0] * 3


@pytest.mark.usefixtures("backend")
def test_inputs_stay_and_repeats_are_equal() -> None:
    inputs = [t.requires_grad_() for t in draw((3, 5))]
    before = [t.detach().clone() for t in inputs]
    found = [torch.autograd.grad([t.sin().sum() for t in in_training(*inputs)], inputs) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


def test_opcheck() -> None:
    mean, var, weight, bias = draw((3, 5))
    running = torch.zeros(3, 5), torch.ones(3, 5)
    opchecked("batch_affine_forward", laid_out(mean, "permuted"), var, weight, bias, *running, 11.0, 0.1, 1e-5)
    opchecked("batch_affine_forward", mean, var, None, None, None, None, 11.0, 0.1, 1e-5)
    opchecked("batch_affine_backward", laid_out(bias, "permuted"), bias, mean, laid_out(var, "permuted"), weight, 1e-5)


@pytest.mark.usefixtures("backend")
def test_bad_input() -> None:
    mean, var, weight, _ = draw((3, 5))
    with pytest.raises(ValueError, match="count: expected more than 1 value per channel"):
        ops.batch_affine(mean, var, count=1, training=True)
    with pytest.raises(ValueError, match=r"weight: expected the shape of mean = \[3, 5\], got shape \[5\]"):
        ops.batch_affine(mean, var, weight[0], count=2, training=True)
    with pytest.raises(ValueError, match="running_mean, running_var: expected both or none"):
        ops.batch_affine(mean, var, running_mean=mean, count=2, training=True)
    with pytest.raises(TypeError, match="var: expected the dtype of mean"):
        ops.batch_affine(mean, var.double(), count=2, training=True)
    with pytest.raises(ValueError, match="eps: expected a number > 0"):
        ops.batch_affine(mean, var, count=2, training=True, eps=0.0)
    with pytest.raises(ValueError, match="mean, var: expected tensors"):
        ops.batch_affine(None, None, count=2, training=True)
