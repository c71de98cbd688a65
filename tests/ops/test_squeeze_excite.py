"""A squeeze-excite in one launch: CUDA C++ on the host and Triton, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod.ops import batch_affine
from fastmod.ops._norm_convs import Norm
from fastmod.ops._squeeze_excite import FORWARD, reference, served, squeeze_excite
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, assert_agrees, laid_out, run

pytestmark = pytest.mark.parametrize("backend", backends.parameters("native-"), indirect=True)

Sizes = tuple[int, int, int, int, int, int]  # B, E, C, R, H, W
CASES: list[Sizes] = [(4, 2, 24, 6, 3, 2), (3, 1, 33, 9, 5, 1), (7, 3, 5, 1, 2, 2), (40, 1, 8, 2, 1, 1)]


def calm(sizes: Sizes, dtype: torch.dtype) -> Sizes:
    """A batch norm of few images amplifies the last digits of what it reads by hundreds, and who is nearer to fp64 then
    is luck: few images are compared in fp64, where every digit counts, other dtypes with four times as many."""
    return sizes if dtype == torch.float64 else (4 * sizes[0], *sizes[1:])


def drawn(sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    batch, experts, channels, squeezed, high, wide = sizes
    small, large = (experts, squeezed), (experts, channels)
    shapes = [(batch, experts, channels, high, wide), large, large]
    shapes += [(experts, squeezed, channels), small, small, (experts, channels, squeezed), large, large]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    found = []
    for i, shape in enumerate(shapes):
        values = torch.randn(shape) + (1.0 if i in (1, 4, 7) else 0.0)
        found.append(values.to(kind if i else dtype))
    return found


def running(sizes: Sizes, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    _, experts, channels, squeezed, _, _ = sizes
    return [torch.full((experts, w), v, dtype=dtype) for w in (squeezed, channels) for v in (0.5, 2.0)]


def function(sizes: Sizes) -> Any:
    def of_tensors(*tensors: Tensor) -> Tensor:
        if not served(tensors[0], sizes[3]):
            return reference(*tensors, eps=(1e-3, 1e-2))
        x, scale, shift, *layers = tensors
        moving = running(sizes, scale.dtype)
        first = Norm(layers[1], layers[2], *moving[:2], None, 0.1, 1e-3)
        second = Norm(layers[4], layers[5], *moving[2:], None, 0.1, 1e-2)
        return squeeze_excite(x, scale, shift, layers[0], first, layers[3], second)

    return of_tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_agrees(backend: backends.Backend, sizes: Sizes, dtype: torch.dtype) -> None:
    sizes = calm(sizes, dtype)
    assert_agrees(function(sizes), lambda: drawn(sizes, dtype), half_roundings=2.0, scale=50.0)


@pytest.mark.parametrize("layout", ["strided", "permuted"])
def test_any_layout(backend: backends.Backend, layout: str) -> None:
    """To the last bit what dense tensors give."""
    tensors = drawn(CASES[0], torch.float32)
    grads = [torch.randn(CASES[0][:3])]
    expected = run(function(CASES[0]), tensors, grads)
    found = run(function(CASES[0]), [laid_out(t, layout) for t in tensors], grads, grad_layout="strided")
    assert all(backends.same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_running_statistics(backend: backends.Backend) -> None:
    """Both batch norms move theirs as batch_affine does."""
    sizes = CASES[0]
    x, scale, shift, *layers = drawn(sizes, torch.float64)
    ours, theirs = running(sizes), running(sizes)
    _, pooled, first, second, *_ = FORWARD[backend.choice == "triton"](
        x, scale, shift, layers, ours, (0.1, 0.3), (1e-3, 1e-2)
    )
    torch.testing.assert_close(pooled.transpose(0, 1), fastmod.ops.norm_pool(x, scale, shift))
    for i, values in enumerate((first, second)):
        var, mean = torch.var_mean(values, 1, correction=0)
        batch_affine(mean, var, None, None, *theirs[2 * i : 2 * i + 2], count=4, training=True, momentum=(0.1, 0.3)[i])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_empty_batch(backend: backends.Backend) -> None:
    sizes = (0, 2, 4, 2, 3, 3)
    found = run(function(sizes), drawn(sizes, torch.float32), [torch.zeros(0, 2, 4)])
    assert found[0].shape == (0, 2, 4) and all((g == 0).all() for g in found[2:])


def test_gradcheck(backend: backends.Backend) -> None:
    sizes = (3, 1, 3, 2, 2, 1)
    tensors = [t.requires_grad_() for t in drawn(sizes, torch.float64)]
    assert torch.autograd.gradcheck(function(sizes), tensors)


def test_one_image_is_refused(backend: backends.Backend) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        function((1, 1, 3, 2, 2, 2))(*drawn((1, 1, 3, 2, 2, 2), torch.float32))


def test_bad_input(backend: backends.Backend) -> None:
    x, scale, shift, *layers = drawn(CASES[0], torch.float32)
    moving = running(CASES[0], torch.float32)
    with pytest.raises(ValueError, match="layers: expected"):
        FORWARD[backend.choice == "triton"](
            x, scale, shift, [*layers[:3], layers[0], *layers[4:]], moving, (0.1, 0.1), (1e-5, 1e-5)
        )
    with pytest.raises(ValueError, match="running: expected"):
        FORWARD[backend.choice == "triton"](x, scale, shift, layers, moving[::-1], (0.1, 0.1), (1e-5, 1e-5))
