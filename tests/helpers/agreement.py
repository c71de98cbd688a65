"""How a kernel is compared: with its fp64 reference, and no worse than twice plain PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fastmod
from tests.helpers import backends

Function = Callable[..., Tensor | tuple[Tensor, ...]]
LAYOUTS = ("contiguous", "strided", "permuted", "expanded")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout; gaps are NaN, so that a wrong stride shows."""
    if layout == "strided" and tensor.dim():
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"), dtype=tensor.dtype)
        view = wide[..., 1::2]
        return view.copy_(tensor)
    if layout == "permuted" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded" and tensor.dim() > 1 and tensor.shape[0] > 0:
        return tensor[:1].expand_as(tensor)
    return tensor.clone()


def run(
    function: Function,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    backend: str | None = None,
    grad_layout: str = "contiguous",
) -> list[Tensor]:
    """Outputs that carry a gradient, then the gradients of all inputs; by the test's backend unless one is given."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with fastmod.use_backend(backend or fastmod.backend.active()):
        result = function(*leaves)
        outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o.requires_grad]
        arriving = [laid_out(g.to(o.dtype), grad_layout) for g, o in zip(grads, outputs, strict=False)]
        torch.autograd.backward(outputs, arriving)
    found = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [o.detach() for o in outputs] + found


def assert_agrees(
    function: Function,
    draw: Callable[[], Sequence[Tensor]],
    *,
    draws: int | None = None,
    roundings: float = 2.0,
    half_roundings: float = 0.0,
    grad_factor: float = 2.0,
    scale: float = 0.0,
    grad_layout: str = "contiguous",
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    """Error against fp64 <= 2 x that of plain PyTorch, plus ``roundings`` of the largest result in the dtype of sums.

    ``half_roundings`` are more of them, in the dtype of the result where that is bf16 or fp16. The worst errors of
    several draws are compared, since a single sum can be right by luck. ``grad_factor`` takes the
    place of 2 for gradients. ``scale`` is how much larger than the largest result, or than 1, the terms of a sum are
    that may cancel; it counts for the roundings of fp64 only. ``memory_format`` is that of the outputs.
    """
    chosen = backends.current()
    draws = draws or (8 if chosen is None else chosen.draws)
    truncates = backends.INTERPRETED and fastmod.backend.active() == "triton"
    drawn: list[list[Results]] = []
    for _ in range(draws):
        inputs = list(draw())
        with fastmod.use_backend("reference"):
            shapes = function(*inputs)
        grads = [torch.randn(o.shape) for o in (shapes if isinstance(shapes, tuple) else (shapes,))]
        ours = run(function, inputs, grads, None, grad_layout)
        plain = run(function, inputs, grads, "reference", grad_layout)
        exact = run(function, [t.double() for t in inputs], grads, "reference", grad_layout)
        first_grad = len(exact) - len(inputs)
        for i, output in enumerate(ours[:first_grad]):
            assert output.is_contiguous(memory_format=memory_format), f"result {i}: not contiguous"
        drawn.append(list(zip(ours, exact, plain, strict=True)))
    for i, results in enumerate(zip(*drawn, strict=True)):
        factor = 2.0 if i < first_grad else grad_factor
        assert_close(f"result {i}", results, factor, roundings, half_roundings, scale, truncates)


#: What a kernel gave, what the reference gives in fp64, what it gives in the same dtype.
Results = tuple[Tensor, Tensor, Tensor]


def assert_close(
    name: str,
    draws: Sequence[Results],
    factor: float = 2.0,
    roundings: float = 2.0,
    half_roundings: float = 0.0,
    scale: float = 0.0,
    truncates: bool = False,
) -> None:
    """One result of several draws, as :func:`assert_agrees` tells. ``truncates``: the interpreter makes bf16 of fp32 by
    cutting it off, where a GPU rounds."""
    error = plain_error = limit = 0.0
    for got, exact, plain in draws:
        assert got.dtype == plain.dtype, f"{name}: {got.dtype}, expected {plain.dtype}"
        assert got.shape == exact.shape, f"{name}: {tuple(got.shape)}, expected {tuple(exact.shape)}"
        known, odd = exact.isfinite() & plain.isfinite(), ~plain.isfinite()
        assert torch.equal(got.isfinite(), ~odd), f"{name}: not finite where plain PyTorch is, or vice versa"
        torch.testing.assert_close(got[odd], plain[odd], rtol=0, atol=0, equal_nan=True, msg=f"{name}: NaN or infinity")
        if not known.any():
            continue
        error, plain_error = (
            max(worst, (t.double() - exact)[known].abs().max().item())
            for worst, t in ((error, got), (plain_error, plain))
        )
        size = exact[known].abs().max().item()
        allowed = _roundings(got.dtype, roundings, size, scale)
        if got.dtype in (torch.bfloat16, torch.float16):
            half = half_roundings + (truncates and got.dtype == torch.bfloat16)
            allowed += half * torch.finfo(got.dtype).eps * size
        limit = max(limit, allowed)
    assert error <= factor * plain_error + limit, (
        f"{name}: error {error:.3g}, plain PyTorch {plain_error:.3g}, allowed roundings {limit:.3g}"
    )


def _roundings(dtype: torch.dtype, roundings: float, size: float, scale: float) -> float:
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    # In fp64 plain PyTorch is itself the measure: its error, which is as large as ours, reads zero.
    limit = 8 * roundings * double * size if dtype == torch.float64 else roundings * single * size
    # The fp64 reference rounds as well: 1 - sigmoid(36) has no digit left.
    return limit + 48 * double * max(size, scale * max(1.0, size))


def opchecked(name: str, *arguments: object, same_twice: bool = True) -> None:
    """A kernel's schema and fake. ``same_twice=False``: its results have gaps, in which two calls differ."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        getattr(torch.ops.fastmod, name).default, arguments, test_utils=tests if same_twice else tests[:3]
    )
