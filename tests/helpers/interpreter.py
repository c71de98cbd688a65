"""What the tests of the Triton launchers share: a run in Triton's interpreter, and comparisons against fp64.

Triton decides at import whether it interprets, so that each test file runs itself once more in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# numpy tells of every overflow in the interpreter
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SOFTMAX, GUMBEL, ARGMAX = 0, 1, 2

if INTERPRETED:
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what a kernel leaves unwritten shows


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """Marks a case for the interpreter's process; elsewhere it does not exist."""
    return test if INTERPRETED else None


def run_of(file: str) -> Callable[[], None] | None:
    """The test that runs ``file`` in the interpreter; inside of it there is none."""

    def test_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        # From here, lest the package's sources in the working directory hide the installed package.
        here = os.path.dirname(os.path.abspath(file))
        done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return None if INTERPRETED else test_in_the_interpreter


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, *kernels: str) -> list[str]:
    """A list that the launches of these kernels of ``module`` enter their names into."""
    launched: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(self.name)
            return self.kernel[grid]

    for name in kernels:
        monkeypatch.setattr(module, name, Watched(name))
    return launched


def drawing(dtype: torch.dtype, *shapes: Sequence[int]) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape).to(dtype) for shape in shapes]


def close(name: str, got: Tensor, plain: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Error against fp64 at most ``factor`` x that of plain PyTorch in the same dtype, plus two roundings.

    bf16 gets one more ulp: the interpreter truncates fp32 to bf16, a GPU rounds.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == plain.dtype, f"{name}: {got.dtype}, expected {plain.dtype}"
    assert got.is_contiguous(), f"{name}: not contiguous"
    if exact.numel() == 0:
        return
    dtype = got.dtype
    got, plain, exact = got.double(), plain.double(), exact.double()
    odd = ~torch.isfinite(plain)
    torch.testing.assert_close(got[odd], plain[odd], equal_nan=True, msg=lambda m: f"{name}, not finite: {m}")
    if odd.all():
        return
    got, plain, exact = got[~odd], plain[~odd], exact[~odd]
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scale = exact.abs().max().item()
    # In fp64 plain PyTorch is itself the measure: its error, which is as large as ours, reads zero.
    units = 64 if dtype == torch.float64 else 2
    bound = factor * (plain - exact).abs().max().item() + units * wide * scale + 1e-30
    if dtype == torch.bfloat16:
        bound += torch.finfo(dtype).eps * scale
    error = (got - exact).abs().max().item()
    assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g} at scale {scale:.3g}"


#: What a kernel gave, what plain PyTorch gives in the same dtype, what it gives in fp64.
Gradient = tuple[Tensor, Tensor, Tensor]
DRAWS = 3


def draws_close(name: str, draw: Callable[[int], Gradient], factor: float = 2.0) -> None:
    """For a gradient that is one number: the worst errors of several draws, since a single sum can be right by luck."""
    drawn = [draw(seed) for seed in range(DRAWS)]
    got, plain, exact = (torch.stack([d[i] for d in drawn]) for i in range(3))
    close(name, got, plain, exact, factor)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def awkward(tensor: Tensor, kind: str) -> Tensor:
    """The same values, laid out as ``kind`` tells."""
    if kind == "strided":  # NaN between the elements
        wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    if kind == "permuted" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "expanded":
        return tensor[:1].expand(tensor.shape)
    return tensor


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Outputs of ``function`` and the gradients of its scalar ``loss`` (second result)."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out, loss = function(*leaves)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return out, [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
