"""How a kernel is compared: with its fp64 reference, and no worse than twice plain PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fastmod

Function = Callable[..., Tensor | tuple[Tensor, ...]]
LAYOUTS = ("contiguous", "strided", "permuted", "expanded")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout; gaps are NaN, so that a wrong stride shows."""
    if layout == "strided":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"), dtype=tensor.dtype)
        view = wide[..., 1::2]
        return view.copy_(tensor)
    if layout == "permuted" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded" and tensor.dim() > 1 and tensor.shape[0] > 0:
        return tensor[:1].expand_as(tensor)
    return tensor.clone()


def run(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor], backend: str) -> list[Tensor]:
    """Outputs that carry a gradient, then the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with fastmod.use_backend(backend):
        result = function(*leaves)
        outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o.requires_grad]
        torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=False)])
    found = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [o.detach() for o in outputs] + found


def assert_agrees(
    function: Function,
    draw: Callable[[], Sequence[Tensor]],
    *,
    draws: int = 8,
    backend: str = "native",
    roundings: float = 2.0,
    grad_factor: float = 2.0,
    scale: float = 1.0,
) -> None:
    """Error against fp64 <= 2 x that of plain PyTorch, plus ``roundings`` of the largest result.

    The worst errors of several draws are compared, since a single sum can be right by luck. ``grad_factor`` takes the
    place of 2 for gradients. ``scale`` is the largest
    intermediate value relative to the largest result; it counts for the roundings of the fp64 reference only.
    """
    worst: list[list[float]] = []
    for _ in range(draws):
        inputs = list(draw())
        with fastmod.use_backend("reference"):
            shapes = function(*inputs)
        grads = [torch.randn(o.shape) for o in (shapes if isinstance(shapes, tuple) else (shapes,))]
        ours = run(function, inputs, grads, backend)
        plain = run(function, inputs, grads, "reference")
        exact = run(function, [t.double() for t in inputs], grads, "reference")
        worst = worst or [[0.0, 0.0, 0.0] for _ in exact]
        for i, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
            assert a.dtype == b.dtype and a.shape == c.shape, f"result {i}: {a.dtype} {a.shape}, {b.dtype} {c.shape}"
            if a.numel() == 0:
                continue
            finite = c.isfinite()
            assert torch.equal(a.isfinite(), b.isfinite()), f"result {i}: not finite where PyTorch is, or vice versa"
            assert torch.equal(a.isnan(), b.isnan()), f"result {i}: NaN where PyTorch has none, or vice versa"
            kept = finite & b.isfinite()
            if kept.any():
                errors = [(x.double() - c)[kept].abs().max().item() for x in (a, b)]
                size = c[kept].abs().max().item()
                # In fp64 plain PyTorch is itself the measure: its error, which is as large as ours, reads zero.
                units = 8 * roundings if a.dtype == torch.float64 else roundings
                limit = units * torch.finfo(a.dtype).eps * size
                # The fp64 reference rounds as well: 1 - sigmoid(36) has no digit left.
                limit += 100 * torch.finfo(torch.float64).eps * max(1.0, scale) * max(1.0, size)
                worst[i] = [max(p, q) for p, q in zip(worst[i], [*errors, limit], strict=True)]
    first_grad = len(worst) - len(inputs)
    for i, (error, plain_error, limit) in enumerate(worst):
        factor = 2.0 if i < first_grad else grad_factor
        assert error <= factor * plain_error + limit, (
            f"result {i}: error {error:.3g}, plain PyTorch {plain_error:.3g}, allowed roundings {limit:.3g}"
        )


def isas() -> list[str]:
    """Instruction sets whose CPU kernels this machine can run."""
    module = fastmod._extension.MODULE
    assert module is not None, "the tests need the extension: `make test` builds it"
    names = ["baseline", "avx2", "avx512"]
    return names[: names.index(module.best_cpu_isa()) + 1]


def opchecked(name: str, *arguments: object, same_twice: bool = True) -> None:
    """A kernel's schema and fake. ``same_twice=False``: its results have gaps, in which two calls differ."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        getattr(torch.ops.fastmod, name).default, arguments, test_utils=tests if same_twice else tests[:3]
    )
