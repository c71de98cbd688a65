"""Several convolutions with their batch norms: CUDA C++ on the host, which launches them together, and Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod.ops import _norm_convs
from fastmod.ops._norm_convs import Conv, Norm, norm_convs
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, assert_agrees, laid_out

pytestmark = pytest.mark.parametrize("backend", backends.parameters("native-"), indirect=True)


class Case(NamedTuple):
    """One convolution of a group."""

    sizes: tuple[int, int, int, int, int, int]  # B, E, Cin, Cout, H, W
    kernel: int = 3
    stride: int = 1
    shared: bool = False
    depthwise: bool = False
    affine: bool = True
    gate: bool = False
    bias: bool = False
    residual: bool = False
    norm: bool = True

    def shapes(self) -> list[tuple[int, ...] | None]:
        batch, experts, inputs, outputs, high, wide = self.sizes
        image = (batch, *([] if self.shared else [experts]), inputs, high, wide)
        return [
            image,
            (experts, outputs, 1 if self.depthwise else inputs, self.kernel, self.kernel),
            (experts, inputs) if self.affine else None,
            (experts, inputs) if self.affine else None,
            (batch, experts, inputs) if self.gate else None,
            (experts, outputs) if self.bias else None,
            image if self.residual else None,
            (experts, outputs) if self.norm else None,
            (experts, outputs) if self.norm else None,
        ]


#: What a mixture with a shortcut launches at once; then odd ones, of every form that a kernel has.
GROUPS: dict[str, list[Case]] = {
    "a mixture's first": [
        Case((2, 2, 16, 32, 8, 8), stride=2, shared=True, affine=False),
        Case((2, 2, 16, 32, 8, 8), kernel=1, stride=2, shared=True, affine=False),
        Case((2, 1, 16, 16, 8, 8), shared=True, affine=False, bias=True, norm=False),
    ],
    "its second": [Case((2, 2, 32, 32, 4, 4)), Case((2, 1, 16, 16, 8, 8), affine=False, bias=True, norm=False)],
    "odd": [
        Case((3, 2, 5, 7, 5, 3)),
        Case((3, 1, 3, 18, 7, 9), kernel=1, gate=True),
        Case((1, 3, 9, 33, 6, 8), stride=2, bias=True),  # norms over less than 12 numbers magnify single roundings
        Case((2, 1, 20, 5, 3, 5), shared=True, affine=False, norm=False),
    ],
    "more than a launch takes": [Case((2, 1, 16, 14 + i, 5, 4)) for i in range(6)],
    "one depthwise": [Case((2, 3, 6, 6, 5, 4), depthwise=True), Case((2, 3, 6, 4, 5, 4), kernel=1)],
    "residual": [Case((3, 2, 24, 40, 3, 4), kernel=1, residual=True)],
    "odd residual": [Case((2, 3, 5, 7, 3, 3), kernel=1, residual=True, bias=True), Case((2, 3, 5, 7, 3, 3))],
}


def draw(cases: Sequence[Case], dtype: torch.dtype, layout: str = "contiguous") -> Callable[[], list[Tensor]]:
    """The tensors of all cases that there are, in their order."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def drawn() -> list[Tensor]:
        found = []
        for case in cases:
            for i, shape in enumerate(case.shapes()):
                if shape is not None:
                    values = torch.randn(shape) * (0.3 if i == 1 else 1.0) + (1.5 if i == 7 else 0.0)
                    found.append(laid_out(values.to(wide if i in (2, 3, 7, 8) else dtype), layout))
        return found

    return drawn


def function(cases: Sequence[Case], running: list[Tensor] | None = None) -> Callable[..., tuple[Tensor, ...]]:
    """All results that have gradients, of all cases; running statistics, if given, move."""

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        left, convs = list(tensors), []
        for i, case in enumerate(cases):
            own = [None if shape is None else left.pop(0) for shape in case.shapes()]
            moving: Any = (None, None, None) if running is None else running[3 * i : 3 * i + 3]
            norm = Norm(own[7], own[8], *moving, 0.2, 1e-3) if case.norm else None
            relu = not case.residual
            convs.append(Conv(*own[:7], relu, case.stride, case.depthwise, norm))  # type: ignore[arg-type]
        found = norm_convs(convs)
        return tuple(t for each in found for t in each if t is not None)

    return of_tensors


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "residual"])
def test_one_launch_does_what_several_do(backend: backends.Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, as the same blocks do it; gradients pass by mean and variance there, which rounds them apart."""
    cases = [case for case in GROUPS[name] if not case.residual]
    tensors = draw(cases, torch.float32)()
    together = function(cases)(*tensors)
    monkeypatch.setattr(_norm_convs, "served", lambda _: False)
    for ours, theirs in zip(together, function(cases)(*tensors), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_agrees(backend: backends.Backend, name: str, dtype: torch.dtype) -> None:
    cases = GROUPS[name]
    assert_agrees(_inner(function(cases)), draw(cases, dtype), half_roundings=1.0, scale=20.0, grad_factor=2.0)


def _inner(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Images have their channels innermost; the comparator wants what it is given to be contiguous."""

    def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.contiguous() for t in run(*tensors))

    return contiguous


@pytest.mark.parametrize("layout", ["strided", "permuted", "expanded"])
def test_any_layout(backend: backends.Backend, layout: str) -> None:
    """Weights and parameters of batch norms as slices of a bank have gaps between experts; expanded ones have none."""
    for name in ("its second", "odd residual"):
        cases = GROUPS[name]
        assert_agrees(_inner(function(cases)), draw(cases, torch.float32, layout), scale=20.0)


def test_gaps_between_experts(backend: backends.Backend) -> None:
    """As template_mix leaves them: [T, P], cut into the parameters of a block. Nothing is copied on the way."""
    case = Case((2, 3, 8, 12, 4, 4), kernel=1)
    sizes = [8 * 12, 12, 12]

    def run(x: Tensor, bank: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        weight, factor, added = bank.split(sizes, -1)
        norm = Norm(factor, added, None, None, None, 0.1, 1e-5)
        conv = Conv(x, weight.reshape(3, 12, 8, 1, 1), scale, shift, relu=True, norm=norm)
        return tuple(t for t in norm_convs([conv])[0] if t is not None)

    shapes = [t for t in case.shapes() if t is not None]
    inputs = lambda: [torch.randn(s) for s in (shapes[0], (3, sum(sizes)), (3, 8), (3, 8))]  # noqa: E731
    assert_agrees(_inner(run), inputs, scale=20.0)


def test_running_statistics(backend: backends.Backend) -> None:
    """As batch_affine moves them; the counter goes up by one. In fp64 to its last digits."""
    cases = GROUPS["a mixture's first"][:2]
    tensors = draw(cases, torch.float64)()
    moved = []
    for choice in (backend.choice, "reference"):
        running: list[Tensor] = []
        for case in cases:
            shape = (case.sizes[1], case.sizes[3])
            running += [torch.full(shape, 0.5).double(), torch.full(shape, 2.0).double(), torch.tensor(3)]
        with fastmod.use_backend(choice):
            function(cases, running)(*tensors)
        moved.append(running)
    for ours, theirs in zip(*moved, strict=True):
        if ours.dtype == torch.int64:
            assert ours == 4 and theirs == 3  # who has no kernel counts all norms at once, elsewhere
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_only_what_is_needed(backend: backends.Backend) -> None:
    """Each parameter alone: frozen weights leave the batch norm's gradients to a launch of their own."""
    cases = GROUPS["its second"][:1]
    tensors = draw(cases, torch.float32)()
    run = function(cases)
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = run(*leaves)
    every = torch.autograd.grad(found, leaves, [torch.ones_like(t) for t in found])
    for i, whole in enumerate(every):
        own = [t.clone().requires_grad_(j == i) for j, t in enumerate(tensors)]
        found = run(*own)
        found = tuple(t for t in found if t.requires_grad)
        (alone,) = torch.autograd.grad(found, own[i], [torch.ones_like(t) for t in found])
        assert torch.equal(alone, whole), i


@pytest.mark.parametrize("which", [(0,), (1, 2), (2,)])
def test_gradients_of_some_results(backend: backends.Backend, which: tuple[int, ...]) -> None:
    cases = GROUPS["its second"][:1]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = function(cases)(*tensors)
        return tuple(found[i].contiguous() for i in which)

    assert_agrees(run, draw(cases, torch.float32), scale=20.0)


def test_empty_batch(backend: backends.Backend) -> None:
    case = Case((0, 2, 3, 4, 5, 5))
    tensors = [t.requires_grad_() for t in draw([case], torch.float32)()]
    y, scale, shift = function([case])(*tensors)
    assert y.shape == (0, 2, 4, 5, 5)
    torch.testing.assert_close(scale, tensors[4] / 1e-3**0.5)
    torch.testing.assert_close(shift, tensors[5])
    grads = torch.autograd.grad([y, scale, shift], tensors, [torch.ones_like(t) for t in (y, scale, shift)])
    assert all(g.abs().max() == 0 for g in grads[1:4])


def test_one_value_per_channel_is_refused(backend: backends.Backend) -> None:
    case = Case((1, 2, 3, 4, 1, 1))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        function([case])(*draw([case], torch.float32)())


def test_second_derivative(backend: backends.Backend) -> None:
    cases = [Case((2, 1, 2, 2, 2, 3)), Case((2, 1, 2, 3, 2, 2), kernel=1, residual=True)]
    tensors = [t.requires_grad_() for t in draw(cases, torch.float64)()]
    torch.manual_seed(3)
    for choice in (backend.choice, "reference"):
        with fastmod.use_backend(choice):
            found = function(cases)(*tensors)
            first = torch.autograd.grad(sum(t.square().sum() for t in found), tensors, create_graph=True)
            second = torch.autograd.grad(sum(t.square().sum() for t in first), tensors)
        if choice != "reference":
            ours = second
    for a, b in zip(ours, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(b.abs().max()))


def test_bit_equal_repeats(backend: backends.Backend) -> None:
    cases = GROUPS["odd"]
    tensors = [t.requires_grad_() for t in draw(cases, torch.float32)()]

    def once() -> list[Tensor]:
        found = function(cases)(*tensors)
        return [*found, *torch.autograd.grad(found, tensors, [torch.ones_like(t) for t in found])]

    first = once()
    for _ in range(3):
        assert all(backends.same_bits(a, b) for a, b in zip(first, once(), strict=True))


def test_compiles_and_maps(backend: backends.Backend) -> None:
    """One graph; and torch.vmap, one call an element."""
    cases = GROUPS["its second"]
    tensors = draw(cases, torch.float32)()
    compiled = torch.compile(function(cases), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*tensors), function(cases)(*tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    both = [torch.stack([t, 2 * t]) for t in tensors]
    mapped = torch.vmap(function(cases))(*both)
    for a, b in zip(mapped, function(cases)(*tensors), strict=True):
        torch.testing.assert_close(a[0], b, rtol=0, atol=0)


def test_bad_input(backend: backends.Backend) -> None:
    x, weight = torch.randn(2, 2, 3, 4, 4), torch.randn(2, 5, 4, 3, 3)
    with pytest.raises(ValueError, match=r"weight: expected \[E, Cout, Cin, k, k\] with Cin = 3"):
        norm_convs([Conv(x, weight)])
    ones = torch.ones(2, 3)
    wanted = (
        contextlib.nullcontext() if backend.choice == "triton" else pytest.raises(ValueError, match="residual: exp")
    )
    with wanted:  # Triton adds the residual before, whatever follows
        norm_convs([Conv(x, torch.randn(2, 5, 3, 3, 3), ones, ones, residual=x)])
    with pytest.raises(ValueError, match="norm: expected"):
        norm_convs([Conv(x, torch.randn(2, 5, 3, 3, 3), norm=Norm(ones, ones, None, None, None, 0.1, 1e-5))])


def test_not_served_by_plain_pytorch(backend: backends.Backend) -> None:
    x = torch.zeros(1)
    assert _norm_convs.served(x)
    with fastmod.use_backend("reference"):
        assert not _norm_convs.served(x)
