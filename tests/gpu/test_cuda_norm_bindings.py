"""The bindings of norm_conv, norm_sum and batch_affine over the host harness, on CPU tensors, against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastmod.ops._checks import FLOAT_DTYPES
from fastmod.ops.batch_affine import reference as batch_affine_reference
from tests.helpers.agreement import assert_close
from tests.helpers.cuda_host import build_bindings
from tests.helpers.cuda_host import norm_conv as conv
from tests.helpers.cuda_host import norm_sum as sums
from tests.helpers.cuda_host.checks import F32, F64, random
from tests.helpers.cuda_host.norm_conv import Conv
from tests.helpers.cuda_host.norm_sum import Sum


@pytest.fixture(scope="module")
def bindings() -> Any:
    torch.ops.load_library(str(build_bindings()))
    return torch.ops.fastmod_cuda_host


@pytest.fixture(autouse=True)
def three_products() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def is_inner(images: Tensor) -> bool:
    return images.movedim(-3, -1).is_contiguous()


CONVS = [
    Conv((2, 2, 5, 7, 9, 6), gate=True, bias=True),
    Conv((3, 2, 8, 7, 5, 6), stride=2),
    Conv((2, 3, 5, 7, 4, 6), shared=True, affine="one", kernel=1),
    Conv((2, 2, 5, 5, 9, 6), depthwise=True, bias=True, stats=False),
    Conv((0, 2, 5, 7, 9, 6), gate=True, bias=True),
]


def gradients_of(case: Conv) -> list[Tensor]:
    batch, experts, _, outputs, high, wide = case.sizes
    size = (batch, experts, outputs, -(-high // case.stride), -(-wide // case.stride))
    statistics = [random(experts, outputs, dtype=case.wide, seed=seed) for seed in (7, 8)]
    return [random(*size, dtype=case.dtype, seed=6), *statistics]


def bound_conv(bindings: Any, case: Conv, tensors: list[Any], grads: list[Tensor], needs: Any) -> list[Tensor]:
    numbers = (case.relu, case.stride, case.depthwise)
    y, mean, var = bindings.norm_conv_forward(*tensors, *numbers, case.stats)
    statistics = (grads[1], grads[2], y, mean) if case.stats else (None,) * 4
    return [y, mean, var, *bindings.norm_conv_backward(grads[0], *statistics, *tensors[:5], *numbers, needs)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", CONVS, ids=Conv.id)
def test_bound_norm_conv(bindings: Any, case: Conv, dtype: torch.dtype) -> None:
    case = case._replace(dtype=dtype)
    tensors, grads = conv.inputs_of(case, 0), gradients_of(case)
    given = [t is not None for t in tensors]
    names = ["y", "mean", "var", *conv.NAMES]
    got = dict(zip(names, bound_conv(bindings, case, tensors, grads, given), strict=True))
    assert is_inner(got["y"]) and is_inner(got["grad_x"])
    if not case.stats:
        assert got.pop("mean").numel() == got.pop("var").numel() == 0
    if case.sizes[0] == 0:
        assert all((value == 0).all() for value in got.values())
        assert got["grad_weight"].shape == tensors[1].shape  # type: ignore[union-attr]
        assert got["mean"].shape == (2, 7)
        return
    draws = [got]
    exact, usual = [conv.values(case, F64, tensors, grads)], [conv.values(case, dtype, tensors, grads)]
    if dtype == F32:  # a single variance can be right by luck
        tensors = conv.inputs_of(case, 1)
        draws.append(dict(zip(names, bound_conv(bindings, case, tensors, grads, given), strict=True)))
        exact.append(conv.values(case, F64, tensors, grads))
        usual.append(conv.values(case, dtype, tensors, grads))
    for name, value in got.items():
        if name in exact[0]:
            three = [(d[name], e[name], u[name]) for d, e, u in zip(draws, exact, usual, strict=True)]
            assert_close(name, three)
        else:
            assert value.numel() == 0


def test_bound_norm_conv_makes_what_is_needed(bindings: Any) -> None:
    case = CONVS[0]
    tensors, grads = conv.inputs_of(case, 0), gradients_of(case)
    everything = bound_conv(bindings, case, tensors, grads, [True] * 6)
    for needs in itertools.product([False, True], repeat=6):
        for needed, some, whole in zip(
            needs, bound_conv(bindings, case, tensors, grads, needs)[3:], everything[3:], strict=True
        ):
            assert torch.equal(some, whole) if needed else some.numel() == 0


def test_bound_norm_conv_in_any_layout(bindings: Any) -> None:
    """Channels innermost, or not, or gradients that are one number: the same bits."""
    case = CONVS[0]
    tensors, grads = conv.inputs_of(case, 0), gradients_of(case)
    grads[0] = random(1).expand(grads[0].shape)
    want = bound_conv(bindings, case, tensors, grads, [True] * 6)
    moved = [None if t is None else t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    moved[0] = conv.outer(conv.inner(tensors[0]))  # type: ignore[arg-type]
    for got, expected in zip(
        bound_conv(bindings, case, moved, [g.contiguous() for g in grads], [True] * 6), want, strict=True
    ):
        assert torch.equal(got, expected)


def test_bound_norm_conv_off_the_grid(bindings: Any) -> None:
    """A dense view may begin anywhere in memory: 16 bytes at a time would be misaligned."""
    for dtype in (F32, torch.bfloat16):
        case = Conv((2, 1, 8, 8, 5, 6), dtype, gate=True, bias=True)
        tensors, grads = conv.inputs_of(case, 0), gradients_of(case)
        tensors[0] = conv.outer(conv.inner(tensors[0]))  # type: ignore[arg-type]
        want = bound_conv(bindings, case, tensors, grads, [True] * 6)

        def shifted(tensor: Tensor) -> Tensor:
            flat = torch.cat([tensor.new_zeros(1), conv.inner(tensor).flatten()])[1:]
            return conv.outer(flat.view(conv.inner(tensor).shape))

        given: list[Any] = tensors
        moved = [shifted(given[0]), *(torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in given[1:])]
        for got, expected in zip(
            bound_conv(bindings, case, moved, [shifted(grads[0]), *grads[1:]], [True] * 6), want, strict=True
        ):
            assert torch.equal(got, expected)


def test_tf32_where_torch_allows_it(bindings: Any) -> None:
    case = Conv((1, 1, 32, 16, 8, 8), stats=False)
    tensors, grads = conv.inputs_of(case, 0), gradients_of(case)
    exact = conv.values(case, F64, tensors, grads)
    errors = []
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        found = bound_conv(bindings, case, tensors, grads, [True] * 4 + [False] * 2)
        got = dict(zip(["y", "mean", "var", *conv.NAMES], found, strict=True))
        errors.append({name: (got[name] - exact[name]).abs().max().item() for name in ("y", "grad_x", "grad_weight")})
    for name, error in errors[1].items():
        size = exact[name].abs().max().item()
        assert 20 * errors[0][name] < error < 2**-9 * size, (name, errors)


SUMS = [
    Sum((2, 3, 5, 4, 7), scaled=True, gate=True),
    Sum((2, 3, 8, 4, 7), residual="shared"),
    Sum((2, 3, 8, 4, 7), residual="none", relu=False, gate=True),
    Sum((0, 2, 3, 4, 4), residual="shared", gate=True),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", SUMS, ids=Sum.id)
def test_bound_norm_sum(bindings: Any, case: Sum, dtype: torch.dtype) -> None:
    case = case._replace(dtype=dtype)
    tensors = sums.inputs_of(case, 0)
    batch, experts, *image = case.sizes
    grad = random(1, dtype=dtype).expand(batch, *([] if case.gate else [experts]), *image)
    out = bindings.norm_sum_forward(*tensors, case.relu)
    arguments = (grad, *tensors, case.relu)
    everything = bindings.norm_sum_backward(*arguments, [True] * 7)
    assert is_inner(out) and is_inner(everything[0])
    got = [out, *(g for g, t in zip(everything, tensors, strict=True) if t is not None)]
    if batch == 0:
        assert all((value == 0).all() for value in got)
    else:
        exact, usual = sums.values(case, F64, tensors, grad), sums.values(case, dtype, tensors, grad)
        for i, values in enumerate(zip(got, exact, usual, strict=True)):
            assert values[0].dtype == values[2].dtype
            assert_close(f"result {i}", [values])
    for needs in ([True] + [False] * 6, [False] * 3 + [True] * 4, [False] * 6 + [True]):
        for needed, some, whole in zip(needs, bindings.norm_sum_backward(*arguments, needs), everything, strict=True):
            assert torch.equal(some, whole) if needed else some.numel() == 0


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("stored", [F32, F64, torch.bfloat16], ids=str)
def test_bound_batch_affine(bindings: Any, dtype: torch.dtype, stored: torch.dtype) -> None:
    mean, var = random(2, 5, dtype=dtype), random(2, 5, dtype=dtype, seed=1).abs()
    weight, bias, running_mean = (random(2, 5, dtype=stored, seed=seed) for seed in (2, 3, 4))
    running = [running_mean, random(5, 2, dtype=stored, seed=5).abs().T]  # not contiguous
    ours, theirs = [t.clone() for t in running], [t.clone() for t in running]
    got = bindings.batch_affine_forward(mean, var, weight, bias, *ours, 7.0, 0.2, 1e-5)
    want = batch_affine_reference(mean, var, weight, bias, *theirs, 7.0, 0.2, 1e-5)
    for mine, other in zip([*got, *ours], [*want, *theirs], strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other)
    kept = [t.clone() for t in running]
    bindings.batch_affine_forward(mean, var, None, None, *kept, 0.0, 0.2, 1e-5)
    assert all(map(torch.equal, kept, running))
    grads = [random(2, 5, dtype=dtype, seed=seed) for seed in (6, 7)]
    for factor in (weight.to(dtype), None):
        found = bindings.batch_affine_backward(*grads, mean, var, factor, 1e-5)
        leaves = [None if t is None else t.clone().requires_grad_() for t in (mean, var, factor)]
        value = batch_affine_reference(*leaves, None, None, None, 7.0, 0.2, 1e-5)
        derived = torch.autograd.grad(value, [t for t in leaves if t is not None], grads)
        for mine, other in zip(found, derived, strict=False):
            torch.testing.assert_close(mine, other)
        assert torch.equal(found[3], grads[1])


def test_bound_ops_refuse(bindings: Any) -> None:
    x, weight = random(2, 3, 5, 4, 4), random(3, 7, 5, 3, 3)
    nothing = (None, None, None, None)
    with pytest.raises(ValueError, match="stride: expected 1 or 2"):
        bindings.norm_conv_forward(x, weight, *nothing, False, 3, False, True)
    with pytest.raises(ValueError, match="expected x"):
        bindings.norm_conv_forward(x[:, :2], weight, *nothing, False, 1, False, True)
    with pytest.raises(ValueError, match="grad: expected the shape"):
        bindings.norm_sum_backward(x[:1], x, *(random(3, 5) for _ in range(2)), *nothing, True, [True] * 7)
    with pytest.raises(ValueError, match="gate: expected"):
        bindings.norm_sum_forward(x, *(random(3, 5) for _ in range(2)), None, None, None, random(3, 2), True)
