"""The end of a gater in one launch: CUDA C++ on the host, against plain PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fastmod.ops._pool_linear import FORWARD, pool_linear, reference, served
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, assert_agrees, laid_out, run

pytestmark = pytest.mark.parametrize("backend", backends.parameters("native-", "triton", "cuda-triton"), indirect=True)


class Case(NamedTuple):
    sizes: tuple[int, int, int, int, int]  # B, C, H, W, outputs
    pooled: int = 2
    affine: bool = False
    relu: bool = True
    softmax: bool = True
    bias: bool = True


CASES = [
    Case((4, 64, 8, 8, 2)),
    Case((3, 5, 7, 5, 3), pooled=3, affine=True),  # regions overlap
    Case((2, 33, 1, 2, 7), pooled=2, affine=True, bias=False),  # more regions than pixels
    Case((5, 40, 3, 3, 10), pooled=1, relu=False, softmax=False),
    Case((1, 1, 1, 1, 1), pooled=1),
]


def shapes(case: Case) -> list[tuple[int, ...]]:
    batch, channels, high, wide, outputs = case.sizes
    found: list[tuple[int, ...]] = [(batch, channels, high, wide)]
    found += [(channels,)] * 2 if case.affine else []
    found += [(outputs, channels * case.pooled**2)]
    return found + ([(outputs,)] if case.bias else [])


def split(case: Case, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    x, *rest = tensors
    scale, shift = (rest.pop(0), rest.pop(0)) if case.affine else (None, None)
    return x, scale, shift, rest[0], rest[1] if case.bias else None


def function(case: Case) -> Any:
    def of_tensors(*tensors: Tensor) -> Tensor:
        x, scale, shift, weight, bias = split(case, tensors)
        if served(x, nn.Linear(1, 1, dtype=x.dtype)):
            how = {"relu": case.relu, "pooled": case.pooled, "softmax": case.softmax}
            return pool_linear(x, weight, bias, scale=scale, shift=shift, **how)
        return reference(x, scale, shift, weight, bias, case.relu, case.pooled, case.softmax)

    return of_tensors


def drawn(case: Case, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    places = (1, 2) if case.affine else ()
    # A linear layer whose outputs are all the same has gradients that cancel: only images are expanded.
    layouts = [layout if i == 0 or layout != "expanded" else "contiguous" for i in range(len(shapes(case)))]
    drawn = [torch.randn(s).to(wide if i in places else dtype) for i, s in enumerate(shapes(case))]
    return [laid_out(t, own) for t, own in zip(drawn, layouts, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees(backend: backends.Backend, case: Case, dtype: torch.dtype) -> None:
    # Gradients through a softmax start from its rounded result.
    assert_agrees(function(case), lambda: drawn(case, dtype), half_roundings=2.0, scale=4.0)


@pytest.mark.parametrize("layout", ["strided", "permuted", "expanded"])
def test_any_layout(backend: backends.Backend, layout: str) -> None:
    for case in CASES[:2]:
        assert_agrees(function(case), lambda case=case: drawn(case, torch.float32, layout), grad_layout="strided")


def test_special_values(backend: backends.Backend) -> None:
    case = Case((2, 3, 2, 2, 2))
    tensors = drawn(case, torch.float32)
    tensors[0][0, 1, 0, 0] = float("nan")
    found = function(case)(*tensors)
    assert found[0].isnan().all() and found[1].isfinite().all()
    tensors[0][0, 1, 0, 0] = -float("inf")  # cut off
    assert function(case)(*tensors).isfinite().all()


def test_empty_batch(backend: backends.Backend) -> None:
    case = Case((0, 3, 4, 4, 2), affine=True)
    found = run(function(case), drawn(case, torch.float32), [torch.zeros(0, 2)])
    assert found[0].shape == (0, 2) and all((g == 0).all() for g in found[2:])


def test_gradcheck(backend: backends.Backend) -> None:
    case = Case((2, 2, 3, 2, 2), affine=True)
    tensors = [t.requires_grad_() for t in drawn(case, torch.float64)]
    assert torch.autograd.gradcheck(function(case), tensors)
    assert torch.autograd.gradgradcheck(function(case), tensors)


def test_who_is_served(backend: backends.Backend) -> None:
    x, head = torch.zeros(2, 4, 3, 3), nn.Linear(4, 2)
    assert served(x, head)
    assert not served(x.bfloat16(), head)
    assert not served(x, nn.Linear(4, 9000))
    assert not served(x, nn.Sequential(head))
    head.register_forward_hook(lambda *_: None)
    assert not served(x, head)


def test_bad_input(backend: backends.Backend) -> None:
    x, weight = torch.zeros(2, 4, 3, 3), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="expected x"):
        FORWARD[0](x, None, None, weight, None, True, 1, True)
    with pytest.raises(ValueError, match="bias: expected"):
        FORWARD[0](x, None, None, weight, torch.zeros(3), True, 2, True)
    with pytest.raises(ValueError, match="both or none"):
        FORWARD[0](x, torch.zeros(4), None, weight, None, True, 2, True)
