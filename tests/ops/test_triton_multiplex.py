"""The Triton launchers of multiplex in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from fastmod import _extension, backend, noise
from fastmod.ops._checks import compute_dtype
from tests.helpers.interpreter import (
    ARGMAX,
    DTYPES,
    GUMBEL,
    INTERPRETED,
    QUIET,
    SOFTMAX,
    Gradient,
    awkward,
    close,
    draws_close,
    gradients,
    interpreted,
    normal,
    run_of,
)

if INTERPRETED:
    from fastmod.kernels._common import uniform

    from fastmod import kernels

pytestmark = QUIET
multiplex_op = import_module("fastmod.ops.multiplex")
test_in_the_interpreter = run_of(__file__)


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
        out = multiplex_op.multiplex(blocks, logits, mode="gumbel", seed=3)
    assert torch.equal(out, kernels.multiplex_forward(blocks, logits, None, 1.0, torch.tensor(3), GUMBEL))
