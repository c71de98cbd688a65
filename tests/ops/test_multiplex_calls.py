"""multiplex as torch calls it."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import laid_out, opchecked
from tests.helpers.casts import Casts, assert_casts_nothing
from tests.ops.test_multiplex import MODES, draw, route


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_opcheck(mode: int) -> None:
    blocks, logits = draw(4, 3, 5, 6)
    permuted, seed = laid_out(blocks, "permuted"), torch.tensor(3) if mode == 1 else None
    for tau in (None, torch.tensor(0.7)):
        opchecked("multiplex_forward", permuted, logits, tau, 1.0, seed, mode)
        grad = torch.randn_like(torch.ops.fastmod.multiplex_forward(blocks, logits, tau, 1.0, seed, mode))
        opchecked("multiplex_backward", laid_out(grad, "permuted"), permuted, logits, tau, 1.0, seed, mode)


@pytest.mark.usefixtures("backend")
def test_two_backwards_and_untouched_inputs() -> None:
    blocks, logits = (t.requires_grad_() for t in draw(17, 3, 4, 5))
    copies = blocks.detach().clone(), logits.detach().clone()
    out = ops.multiplex(blocks, logits)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, (blocks, logits), grad, retain_graph=True)
    second = torch.autograd.grad(out, (blocks, logits), grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and torch.equal(blocks, copies[0]) and torch.equal(logits, copies[1])


def test_fifty_equal_repeats() -> None:
    blocks, logits = (t.requires_grad_() for t in draw(700, 6, 8, 10))
    results = []
    for _ in range(50):
        out = ops.multiplex(blocks, logits)
        results.append([out, *torch.autograd.grad(out.sum(), (blocks, logits))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_compile_fullgraph(mode: str) -> None:
    def function(b, w, t):
        return ops.multiplex(b, w, mode=mode, tau=t, seed=3)

    inputs = [*draw(6, 3, 4, 5), torch.tensor(0.9)]
    plain, compiled = (
        [t.clone().requires_grad_() for t in inputs],
        [t.clone().requires_grad_() for t in inputs],
    )
    function(*plain).sin().sum().backward()
    torch.compile(function, fullgraph=True)(*compiled).sin().sum().backward()
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    blocks, logits = (t.requires_grad_() for t in draw(6, 3, 4, 5))
    with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        out = ops.multiplex(blocks, logits.bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert blocks.grad.dtype == torch.float32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(
    ("mode", "shape"),
    [("gumbel", (3, 4, 5, 6)), ("softmax", (9, 4, 8, 8)), ("argmax", (2, 3, 3, 7)), ("gumbel", (2, 3, 2, 18_000))],
)
def test_autocast_casts_nothing(
    backend: backends.Backend, low: torch.dtype, wide: tuple[int, ...], mode: str, shape: tuple[int, ...]
) -> None:
    """tau is fp32 and stays so. The last shape has no place in shared memory, nor, here, in a tile of Triton's."""
    by_rows = mock.patch("fastmod.kernels.multiplex.tile_of", return_value=None)
    beyond, triton = shape[-1] > 1000, backend is backends.TRITON
    with by_rows if triton and beyond else contextlib.nullcontext():
        b, m, n, d = shape
        tensors = draw(b, m, n, 6 if triton and beyond else d)
        assert_casts_nothing(route(mode), [*tensors, torch.tensor(0.7)], low, wide, left=(2,))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (40, 2, 1, 200)], ids=str)
def test_temperature_of_16_bits_casts_nothing(low: torch.dtype, shape: tuple[int, ...]) -> None:
    """It is read and its gradient written as it is: that of fp32, rounded once."""
    found = []
    for dtype in (low, torch.float32):
        torch.manual_seed(0)
        leaves = [*[t.to(low) for t in draw(*shape)], torch.tensor(0.75, dtype=dtype)]
        for leaf in leaves:
            leaf.requires_grad_()
        with Casts() as casts:
            out = route("gumbel")(*leaves)
            grads = torch.autograd.grad(out, leaves, out.detach() + 1)
        assert casts.seen == []
        found.append([out, *grads])
    assert [t.dtype for t in found[0]] == [low] * 4
    found[1][-1] = found[1][-1].to(low)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
@pytest.mark.parametrize("shape", [(6, 3, 5, 7), (6, 3, 5, 2), (6, 3, 4, 4)], ids=str)
def test_autocast_of_what_begins_anywhere(shape: tuple[int, ...], mode: str) -> None:
    """Batches whose first row lies at no multiple of 16 bytes, read and rounded by fours."""

    def op(blocks: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return route(mode)(blocks[1:], logits[1:])

    assert_casts_nothing(op, draw(*shape), torch.bfloat16, (0, 1))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_autocast_dtypes_that_kernels_refuse() -> None:
    blocks, logits = draw(2, 3, 4, 5)
    for tensors, low in (
        ((blocks.double(), logits), torch.bfloat16),
        ((blocks, logits.half()), torch.bfloat16),
        ((blocks, logits), torch.float32),
    ):
        with pytest.raises(TypeError):
            backends.kernel("multiplex_forward")(*tensors, None, 1.0, None, 0, low)
    grad = torch.randn(2, 4, 5)
    with pytest.raises(TypeError, match="grad"):
        backends.kernel("multiplex_backward")(grad, blocks, logits, None, 1.0, None, 0, torch.bfloat16)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_tau_that_is_not_positive(backend: str) -> None:
    blocks, logits = draw(2, 3, 4, 5)
    with fastmod.use_backend(backend):
        for tau in (0.0, -1.0, float("nan"), torch.tensor(0.0), torch.tensor(-2.0), torch.tensor(float("nan"))):
            with pytest.raises(ValueError, match="tau"):
                ops.multiplex(blocks, logits, tau=tau)
