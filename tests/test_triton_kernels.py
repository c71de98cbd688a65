"""The Triton launchers in Triton's interpreter, against the reference in fp64.

Triton decides at import whether it interprets, so this file runs itself once more in a process of its own.
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

from fastmod import _extension, backend, noise
from fastmod.ops import gated_residual, mfnnr, multiplex, range_penalty  # noqa: F401 - loads the submodules
from fastmod.ops._checks import compute_dtype

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# numpy tells of every overflow in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """Marks a case for the interpreter's process; elsewhere it does not exist."""
    return test if INTERPRETED else None


gated_residual_op = sys.modules["fastmod.ops.gated_residual"]
mfnnr_op = sys.modules["fastmod.ops.mfnnr"]
multiplex_op = sys.modules["fastmod.ops.multiplex"]
range_penalty_op = sys.modules["fastmod.ops.range_penalty"]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SOFTMAX, GUMBEL, ARGMAX = 0, 1, 2

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        # From here, lest the package's sources in the working directory hide the installed package.
        here = os.path.dirname(os.path.abspath(__file__))
        done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

else:
    from fastmod.kernels._common import uniform
    from fastmod.kernels.mfnnr import sections

    from fastmod import kernels

    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what a kernel leaves unwritten shows


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


# multiplex


def check_multiplex(
    blocks: Tensor, logits: Tensor, grad: Tensor, mode: int, tau: Tensor | None, tau_value: float = 1.0
) -> Gradient:
    """Returns the gradient of tau, which is to be compared over several draws."""
    seed = torch.tensor(-(2**62) + 12345) if mode == GUMBEL else None
    inputs = [blocks, logits] + ([] if tau is None else [tau])

    def reference(blocks: Tensor, logits: Tensor, tau: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = multiplex_op.reference(blocks, logits, tau, tau_value, seed, mode)
        wide = compute_dtype(out)
        return out, (out.to(wide) * grad.to(wide)).sum()

    out, grads = gradients(reference, inputs)
    out64, grads64 = gradients(reference, [t.double() for t in inputs])
    got = kernels.multiplex_forward(blocks, logits, tau, tau_value, seed, mode)
    close("out", got, out, out64)
    dblocks, dlogits, dtau = kernels.multiplex_backward(grad, blocks, logits, tau, tau_value, seed, mode)
    close("dblocks", dblocks, grads[0], grads64[0])
    close("dlogits", dlogits, grads[1], grads64[1])
    if tau is None:
        assert dtau.item() == 0
        return dtau, dtau, dtau
    return dtau, grads[2].to(dtau.dtype), grads64[2]


SHAPES = [(3, 6, 8, 10), (2, 5, 4, 196), (1, 1, 1, 1), (9, 3, 9, 7), (2, 2, 1, 300)]
LARGER = [(2, 16, 16, 32), (2, 40, 3, 5)]  # without noise, which is slow to interpret


@interpreted
@pytest.mark.parametrize(
    ("mode", "shape"),
    [(mode, s) for s in SHAPES for mode in (SOFTMAX, GUMBEL, ARGMAX)] + [(m, s) for s in LARGER for m in (0, 2)],
    ids=str,
)
def test_multiplex_shapes(shape: tuple[int, ...], mode: int) -> None:
    b, m, n, d = shape
    f32 = torch.float32
    check_multiplex(normal((b, m, d), f32, 0), normal((b, m, n), f32, 1), normal((b, n, d), f32, 2), mode, None, 0.7)


@interpreted
@pytest.mark.parametrize("mode", [SOFTMAX, GUMBEL, ARGMAX])
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiplex_dtypes_and_tau(dtype: torch.dtype, mode: int) -> None:
    tau = torch.tensor(0.6, dtype=compute_dtype(torch.empty(0, dtype=dtype)))

    def check(seed: int, tau: Tensor | None, tau_value: float = 1.0) -> Gradient:
        blocks, logits = normal((2, 2, 5, 6), dtype, 10 * seed), normal((2, 2, 5, 3), dtype, 10 * seed + 1)
        return check_multiplex(blocks, logits, normal((2, 2, 3, 6), dtype, 10 * seed + 2), mode, tau, tau_value)

    draws_close("dtau", lambda seed: check(seed, tau))
    check(0, None, 0.3)  # 0.3 is not an fp32 number


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
def test_multiplex_layouts(kind: str) -> None:
    f32 = torch.float32
    blocks, logits = awkward(normal((3, 4, 5), f32, 0), kind), awkward(normal((3, 4, 2), f32, 1), kind)
    grad = torch.ones(()).expand(3, 2, 5) if kind == "expanded" else awkward(normal((3, 2, 5), f32, 2), kind)
    check_multiplex(blocks, logits, grad, GUMBEL, None)


@interpreted
@pytest.mark.parametrize("mode", [SOFTMAX, GUMBEL, ARGMAX])
def test_multiplex_large_values(mode: int) -> None:
    f32 = torch.float32
    blocks, logits = normal((2, 6, 5), f32, 0, 1e4), normal((2, 6, 4), f32, 1, 1e4)
    check_multiplex(blocks, logits, normal((2, 4, 5), f32, 2), mode, None)


@interpreted
@pytest.mark.parametrize("mode", [SOFTMAX, ARGMAX])
def test_multiplex_not_finite(mode: int) -> None:
    inf, nan = float("inf"), float("nan")
    logits = normal((1, 4, 7), torch.float32, 1)
    logits[0, 1, 0] = nan
    logits[0, 0, 1] = inf
    logits[0, :, 2] = -inf
    logits[0, 0, 3] = -inf  # at the front, then finite values: an ordinary column
    logits[0, :3, 4] = -inf
    logits[0, 3, 5] = -1e4
    grad = normal((1, 7, 3), torch.float32, 2)
    check_multiplex(normal((1, 4, 3), torch.float32, 0), logits, grad, mode, None)
    blocks = normal((1, 4, 3), torch.float32, 0)
    blocks[0, 2, 1] = inf
    blocks[0, 3, 0] = nan
    check_multiplex(blocks, normal((1, 4, 7), torch.float32, 1), grad, mode, None)


@interpreted
def test_multiplex_ties_take_the_first() -> None:
    blocks = torch.arange(6.0).view(1, 3, 2)
    out = kernels.multiplex_forward(blocks, torch.zeros(1, 3, 4), None, 1.0, None, ARGMAX)
    assert torch.equal(out, blocks[:, :1].expand(1, 4, 2))


@interpreted
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_multiplex_bad_tau_tensor_gives_nan(value: float) -> None:
    out = kernels.multiplex_forward(torch.ones(1, 2, 3), torch.ones(1, 2, 2), torch.tensor(value), 1.0, None, SOFTMAX)
    assert out.isnan().all()


@interpreted
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_multiplex_empty(shape: tuple[int, ...]) -> None:
    b, m, n, d = shape
    ones = torch.ones(b, m, d), torch.ones(b, m, n), torch.ones(b, n, d)
    close("dtau", *check_multiplex(*ones, SOFTMAX, torch.tensor(1.0)))


@interpreted
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("start", [0, 2**32 - 2, 2**34 - 3, 2**40 + 1])
def test_noise_is_that_of_the_contract(seed: int, start: int) -> None:
    import triton
    import triton.language as tl

    global uniform_kernel

    @triton.jit
    def uniform_kernel(out_ptr, seed_ptr, start_ptr, SIZE: tl.constexpr):  # noqa: N803
        i = tl.arange(0, SIZE)
        tl.store(out_ptr + i, uniform(tl.load(seed_ptr), tl.load(start_ptr) + i, tl.float64))

    out = torch.empty(8, dtype=torch.float64)
    uniform_kernel[(1,)](out, torch.tensor(seed), torch.tensor(start), SIZE=8)
    index = torch.arange(start, start + 8)
    group, mask = index // 4, 0xFFFFFFFF
    zeros = torch.zeros_like(group)
    key = torch.tensor(seed)
    words = torch.stack(
        noise.philox4x32((group & mask, group >> 32, zeros, zeros), (key & mask, (key >> 32) & mask)), dim=-1
    )
    word = words.gather(-1, (index % 4)[:, None])[:, 0]
    assert torch.equal(out, ((word >> 9).double() + 0.5) * 2.0**-23)
    if start == 0:
        size = torch.Size([8])
        assert torch.equal(out, noise.uniform(key, size, stream=0, dtype=torch.float64, device=torch.device("cpu")))


@interpreted
def test_seed_by_pointer_is_seed_by_value() -> None:
    import triton.language as tl
    from fastmod.kernels._common import OPTIONS
    from fastmod.kernels.multiplex import forward_kernel

    blocks, logits = normal((2, 5, 3), torch.float32, 0), normal((2, 5, 4), torch.float32, 1)
    seed = torch.tensor(2**40 + 7)
    expected = kernels.multiplex_forward(blocks, logits, None, 1.0, seed, GUMBEL)
    out = torch.empty(2, 4, 3)
    forward_kernel[(1,)](
        blocks_ptr=blocks, logits_ptr=logits, out_ptr=out, copy_ptr=None, partials_ptr=None, tau_ptr=None,
        tau_value=1.0, seed_ptr=seed, seed_value=0, threshold=0.0, R=8, M=5, N=4, D=3, MODE=GUMBEL, PENALTY=False,
        BLOCK_R=8, BLOCK_D=4, CT=tl.float32, **OPTIONS,
    )  # fmt: skip
    assert torch.equal(out, expected)


# gated_residual


def check_gated_residual(x: Tensor, new: Tensor, gate: Tensor, grad: Tensor) -> None:
    def reference(x: Tensor, new: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        out = gated_residual_op.reference(x, new, gate)
        wide = compute_dtype(out)
        return out, (out.to(wide) * grad.to(wide)).sum()

    out, grads = gradients(reference, [x, new, gate])
    out64, grads64 = gradients(reference, [x.double(), new.double(), gate.double()])
    close("out", kernels.gated_residual_forward(x, new, gate), out, out64)
    got = kernels.gated_residual_backward(grad, x, new, gate)
    for name, value, plain, exact in zip(("dx", "dnew", "dgate"), got, grads, grads64, strict=True):
        close(name, value, plain, exact)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8, 10), (2, 4, 196), (1, 1, 1), (70, 1, 3), (2, 1, 300), (2, 2, 3, 5)])
def test_gated_residual(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_gated_residual(
        normal(shape, dtype, 0), normal(shape, dtype, 1), normal(shape[:-1], dtype, 2), normal(shape, dtype, 3)
    )


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
def test_gated_residual_layouts(kind: str) -> None:
    x, new, grad = (awkward(normal((3, 4, 5), torch.float32, seed), kind) for seed in range(3))
    check_gated_residual(x, new, awkward(normal((3, 4), torch.float32, 3), kind), grad)


@interpreted
def test_gated_residual_extremes() -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[1e4, -1e4, 30.0, -80.0, inf, -inf, nan, 0.0]])
    x, new, grad = (normal((1, 8, 3), torch.float32, seed, 1e4) for seed in range(3))
    check_gated_residual(x, new, gate, grad)
    x[0, 7, 0], new[0, 7, 1], x[0, 0, 2] = inf, nan, inf
    check_gated_residual(x, new, gate, grad)


@interpreted
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_gated_residual_empty(shape: tuple[int, ...]) -> None:
    check_gated_residual(torch.ones(shape), torch.ones(shape), torch.ones(shape[:-1]), torch.ones(shape))


# range_penalty


def check_range_penalty(logits: list[Tensor], threshold: float) -> None:
    def reference(*logits: Tensor) -> tuple[Tensor, Tensor]:
        out = range_penalty_op.reference(logits, threshold)
        return out, out * 0.3

    out, grads = gradients(reference, logits)
    out64, grads64 = gradients(reference, [t.double() for t in logits])
    got = kernels.range_penalty_forward(logits, threshold)
    close("penalty", got, out, out64)
    dlogits = kernels.range_penalty_backward(torch.tensor(0.3, dtype=got.dtype), logits, threshold)
    for value, plain, exact in zip(dlogits, grads, grads64, strict=True):
        close("dlogits", value, plain, exact)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [20.0, 0.0, 0.1])
def test_range_penalty(dtype: torch.dtype, threshold: float) -> None:
    check_range_penalty(
        [normal((3, 5, 7), dtype, 0, 25), normal((1100,), dtype, 1, 25), normal((), dtype, 2)], threshold
    )


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
def test_range_penalty_layouts(kind: str) -> None:
    check_range_penalty([awkward(normal((3, 4, 5), torch.float32, s, 30), kind) for s in range(2)], 20.0)


@interpreted
@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan"), 1e4])
def test_range_penalty_extremes(odd: float) -> None:
    check_range_penalty([torch.tensor([1.0, odd, -30.0, 20.0, -20.0])], 20.0)


@interpreted
def test_range_penalty_empty() -> None:
    check_range_penalty([torch.ones(0, 3)], 20.0)
    check_range_penalty([torch.ones(0), torch.full((2, 3), 21.0)], 20.0)


# mfnnr

# For the gradient of tau behind the route FNN: one number per draw, and the FNN multiplies the error of one draw far
# beyond that of the others, so that luck decides how plain PyTorch fares in just that one.
TAU_FACTOR = 3.0


def fnn_params(sizes: Sequence[int], dtype: torch.dtype, seed: int, scale: float) -> list[Tensor]:
    params = []
    for i in range(len(sizes) - 1):
        params.append(normal((sizes[i + 1], sizes[i]), dtype, seed + 2 * i, scale / sizes[i] ** 0.5))
        params.append(normal((sizes[i + 1],), dtype, seed + 2 * i + 1, scale))
    return params


class Case:
    """An MFNNR with random parameters."""

    def __init__(
        self,
        lead: Sequence[int] = (5,),
        m: int = 3,
        n: int = 4,
        d: int = 5,
        hidden: Sequence[int] = (12,),
        context: bool = True,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.5,
        seed: int = 0,
    ) -> None:
        self.context, self.dtype = context, dtype
        self.x = normal((*lead, m, d), dtype, 1000 * seed)
        self.grad = normal((*lead, n, d), dtype, 1000 * seed + 1)
        self.route = fnn_params([m * d, *hidden, m * n], dtype, 1000 * seed + 100, scale)
        widths = [n * d + (m * d if context else 0), *hidden, n * d + n]
        self.update = fnn_params(widths, dtype, 1000 * seed + 200, scale)

    def check(
        self,
        mode: int = SOFTMAX,
        tau: Tensor | None = None,
        threshold: float = 0.5,
        need_x: bool = True,
        need_params: bool = True,
        use_out: bool = True,
        use_penalty: bool = True,
    ) -> Gradient:
        """Returns the gradient of tau, which is to be compared over several draws."""
        wide = compute_dtype(self.x)
        seed = torch.tensor(99) if mode == GUMBEL else None
        tau_value = 0.7
        params = [*self.route, *self.update]
        inputs = [self.x, *params] + ([] if tau is None else [tau])

        def reference(x: Tensor, *rest: Tensor) -> tuple[Any, Tensor]:
            route, update = rest[: len(self.route)], rest[len(self.route) : len(params)]
            temperature = None if tau is None else rest[-1]
            result = mfnnr_op.reference(x, route, update, temperature, tau_value, seed, mode, self.context, threshold)
            loss = 0.0 * result.out.to(compute_dtype(x)).nan_to_num().sum()
            if use_out:
                loss = loss + (result.out.to(compute_dtype(x)) * self.grad.to(compute_dtype(x))).sum()
            if use_penalty:
                loss = loss + 0.3 * result.penalty
            return result, loss

        result, grads = gradients(reference, inputs)
        result64, grads64 = gradients(reference, [t.double() for t in inputs])
        arguments = (self.x, self.route, self.update, tau, tau_value, seed, mode, self.context, threshold)
        out, penalty, logits, gate, saved = kernels.mfnnr_forward(*arguments, True)
        for name, got in zip(("out", "penalty", "logits", "gate"), (out, penalty, logits, gate), strict=True):
            close(name, got, getattr(result, name).detach(), getattr(result64, name).detach())
        fake = mfnnr_op.fake_forward(*arguments, True)
        for got, shape in zip((out, penalty, logits, gate, saved), fake, strict=True):
            assert (got.shape, got.dtype) == (shape.shape, shape.dtype)
        again = kernels.mfnnr_forward(*arguments, False)
        assert torch.equal(again[0], out)
        assert again[4].numel() == 0
        before = [t.clone() for t in (self.x, saved, self.grad, *params)]
        got_grads = kernels.mfnnr_backward(
            self.grad if use_out else None,
            torch.tensor(0.3, dtype=wide) if use_penalty else None,
            *arguments,
            saved,
            need_x,
            need_params,
        )
        for old, new in zip(before, (self.x, saved, self.grad, *params), strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)  # inputs are never written
        assert len(got_grads) == 2 + (len(params) if need_params else 0)
        if need_x:
            close("dx", got_grads[0], grads[0], grads64[0])
        else:
            assert got_grads[0].shape == (0,)
        for i, got in enumerate(got_grads[2:]):
            close(f"dparams[{i}]", got, grads[1 + i], grads64[1 + i])
        dtau = got_grads[1]
        if tau is None:
            assert dtau.item() == 0
            return dtau, dtau, dtau
        return dtau, grads[-1].to(wide), grads64[-1]


@interpreted
@pytest.mark.parametrize("mode", [SOFTMAX, GUMBEL, ARGMAX])
@pytest.mark.parametrize("context", [True, False])
def test_mfnnr(mode: int, context: bool) -> None:
    Case(context=context).check(mode)
    draws_close("dtau", lambda seed: Case(context=context, seed=seed).check(mode, tau=torch.tensor(0.6)), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"hidden": ()},
        {"hidden": (7, 9, 5)},
        {"hidden": (6, 5, 4, 3)},
        {"hidden": (100,)},
        {"hidden": (128,)},
        {"hidden": (130,)},
        {"hidden": (140, 7)},
        {"hidden": (150, 130), "context": False},
        {"m": 1, "n": 1, "d": 1, "hidden": (1,), "lead": (1,)},
        {"m": 5, "n": 3, "d": 40, "lead": (2,)},
        {"lead": (2, 3, 3)},
        {"lead": ()},
        {"lead": (0,)},
        {"lead": (0,), "hidden": (130,)},
    ],
    ids=str,
)
def test_mfnnr_shapes(case: dict[str, Any]) -> None:
    Case(**case).check()


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mfnnr_dtypes(dtype: torch.dtype, hidden: tuple[int, ...]) -> None:
    tau = torch.tensor(0.6, dtype=compute_dtype(torch.empty(0, dtype=dtype)))
    draws_close("dtau", lambda seed: Case(dtype=dtype, hidden=hidden, seed=seed).check(GUMBEL, tau=tau), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize(
    "what",
    [
        {"need_x": False},
        {"need_params": False},
        {"need_x": False, "need_params": False},
        {"use_out": False},
        {"use_penalty": False},
        {"use_out": False, "use_penalty": False},
        {"threshold": -1.0},
        {"threshold": 0.0},
    ],
    ids=str,
)
def test_mfnnr_partial(what: dict[str, Any], hidden: tuple[int, ...]) -> None:
    draws_close("dtau", lambda seed: Case(hidden=hidden, seed=seed).check(tau=torch.tensor(0.6), **what), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_large_values(hidden: tuple[int, ...]) -> None:
    case = Case(hidden=hidden, scale=1.0)
    case.x = case.x * 1e4
    case.check(threshold=20.0)


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_not_finite_stays_in_its_batch_element(hidden: tuple[int, ...], value: float) -> None:
    case = Case(hidden=hidden)
    case.x[1, 0, 0] = value
    arguments = (case.route, case.update, None, 1.0, None, SOFTMAX, True, 0.5)
    expected = mfnnr_op.reference(case.x, *arguments)
    out, penalty, *_ = kernels.mfnnr_forward(case.x, *arguments, False)
    assert torch.equal(out.isfinite(), expected.out.isfinite())
    assert penalty.isfinite() == expected.penalty.isfinite()
    rest = [0, 2, 3, 4]
    torch.testing.assert_close(out[rest], expected.out[rest], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_layouts(kind: str, hidden: tuple[int, ...]) -> None:
    case = Case(hidden=hidden)
    case.x, case.grad = awkward(case.x, kind), awkward(case.grad, kind)
    if kind != "expanded":
        case.route = [awkward(p, kind) for p in case.route]
        case.update = [awkward(p, kind) for p in case.update]
    case.check()


@interpreted
def test_mfnnr_saved_sections() -> None:
    case = Case(hidden=(6, 7))
    *_, logits, gate, saved = kernels.mfnnr_forward(
        case.x, case.route, case.update, None, 1.0, None, SOFTMAX, True, 0.5, True
    )
    cut = sections(saved, case.x, case.route, case.update)
    assert [t.shape[1] for t in cut.route] == [6, 7, 12]
    assert [t.shape[1] for t in cut.update] == [6, 7, 24]
    assert torch.equal(cut.route[-1].view_as(logits), logits)
    assert torch.equal(cut.update[-1][:, 20:], gate)


@interpreted
def test_repeats_are_bit_equal() -> None:
    case = Case()
    arguments = (case.x, case.route, case.update, None, 1.0, torch.tensor(5), GUMBEL, True, 0.5)
    results = []
    for _ in range(3):
        *out, saved = kernels.mfnnr_forward(*arguments, True)
        results.append(out + kernels.mfnnr_backward(case.grad, torch.tensor(1.0), *arguments, saved, True, True))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@interpreted
def test_registered_under_the_schemas() -> None:
    assert _extension.LOADED, _extension.STATUS
    assert _extension.triton_ops() == frozenset(backend.OPS)
    for name in kernels.LAUNCHERS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod::{name}.triton", "CPU"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod::{name}.triton", "CUDA"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod::{name}", "CUDA"), name
    blocks, logits = normal((2, 3, 4), torch.float32, 0), normal((2, 3, 5), torch.float32, 1)
    with backend.use_backend("triton"):
        out = multiplex(blocks, logits, mode="gumbel", seed=3)
    assert torch.equal(out, kernels.multiplex_forward(blocks, logits, None, 1.0, torch.tensor(3), GUMBEL))
