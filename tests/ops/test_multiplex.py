"""multiplex: the native kernels against the reference, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out, opchecked

SHAPES = [(128, 6, 8, 10), (5, 16, 16, 32), (3, 5, 4, 196), (1, 1, 1, 1), (67, 3, 5, 7), (2, 40, 33, 3)]
# Too large for a tile, so one element after the other: rows that fill no block of a product and columns that fill no
# vector; N a multiple of a vector, whose logits are read where they lie.
LARGE = [(3, 17, 13, 37), (2, 9, 32, 65), (3, 12, 16, 48), (66, 31, 16, 20), (2, 16, 48, 15), (2, 11, 15, 130)]
MODES = ("softmax", "gumbel", "argmax")


def draw(b: int, m: int, n: int, d: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    return [(torch.randn(b, m, d) * scale).to(dtype), (torch.randn(b, m, n) * scale).to(dtype)]


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("tau", [0.7, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_matches_fp64(shape: tuple[int, ...], mode: str, tau: float) -> None:
    def function(blocks, logits, tau):
        return ops.multiplex(blocks, logits, mode=mode, tau=tau, seed=11)

    def inputs():
        return [*draw(*shape), torch.tensor(tau)]

    assert_agrees(function, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_dtypes(dtype: torch.dtype, mode: str) -> None:
    assert_agrees(lambda b, w: ops.multiplex(b, w, mode=mode, seed=3), lambda: draw(9, 4, 3, 5, dtype))


@given(
    b=st.sampled_from([0, 1, 2, 5]),
    m=st.sampled_from([1, 2, 3, 9, 21]),
    n=st.sampled_from([0, 1, 5, 16, 17]),
    d=st.sampled_from([0, 1, 3, 19, 66]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    mode=st.sampled_from(MODES),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_layout_and_range(b, m, n, d, layouts, mode, scale, seed) -> None:
    torch.manual_seed(abs(seed) % 1000)
    grad = laid_out(torch.randn(b, n, d), layouts[2])

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(b, m, n, d, scale=scale), layouts, strict=False)]

    def function(x, y):  # the layout of the gradient that arrives is that of `grad`
        return (ops.multiplex(x, y, mode=mode, seed=seed) * grad).sum()

    # The gradient of a logit is a difference of products as large as |blocks| * |grad| * D.
    assert_agrees(function, inputs, scale=scale * max(d, 1) * 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["blocks", "logits"])
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 16, 16, 32), (4, 17, 13, 37)], ids=str)
def test_nan_and_inf_travel_as_in_torch(value: float, where: str, shape: tuple[int, ...], isa: str) -> None:
    blocks, logits = draw(*shape)
    (blocks if where == "blocks" else logits)[1, 2, 1] = value
    with fastmod.use_backend("reference"):
        expected = ops.multiplex(blocks, logits)
    torch.testing.assert_close(ops.multiplex(blocks, logits), expected, equal_nan=True)
    logits[3] = float("-inf")
    assert ops.multiplex(blocks, logits)[3].isnan().all()
    logits[3, 0] = float("nan")
    assert ops.multiplex(blocks, logits, mode="argmax")[3].isnan().all()


def test_softmax_is_the_textbook_formula() -> None:
    blocks, logits = draw(7, 4, 3, 5)
    expected = logits.softmax(-2).transpose(-1, -2) @ blocks
    torch.testing.assert_close(ops.multiplex(blocks, logits), expected)


def test_gumbel_picks_one_block_and_carries_the_relaxed_gradient() -> None:
    blocks, logits = draw(50, 6, 4, 3, torch.float64)
    logits.requires_grad_()
    out = ops.multiplex(blocks, logits, mode="gumbel", tau=0.5, seed=5)
    picked = (out.unsqueeze(-3) == blocks.unsqueeze(-2)).all(-1)  # [B, M, N]
    assert (picked.sum(1) == 1).all()
    noise = fastmod.noise.gumbel(
        torch.tensor(5), logits.shape, stream=0, dtype=torch.float64, device=torch.device("cpu")
    )
    soft = ((logits + noise) / 0.5).softmax(1)
    assert torch.equal(picked.double().argmax(1), soft.argmax(1))
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(soft.transpose(1, 2) @ blocks, logits, grad)[0]
    torch.testing.assert_close(torch.autograd.grad(out, logits, grad)[0], expected)


def test_gumbel_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1).expand(20000, 3, 1)
    blocks = torch.eye(3).expand(20000, 3, 3)
    share = ops.multiplex(blocks, logits, mode="gumbel", seed=1).mean(0).squeeze()
    torch.testing.assert_close(share, logits[0, :, 0].softmax(0), atol=0.015, rtol=0)


def test_seed_rules() -> None:
    blocks, logits = draw(64, 6, 4, 3)
    torch.manual_seed(4)
    first, second = (ops.multiplex(blocks, logits, mode="gumbel") for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.multiplex(blocks, logits, mode="gumbel"), first)
    assert not torch.equal(first, second)
    as_int, as_tensor = (ops.multiplex(blocks, logits, mode="gumbel", seed=s) for s in (-9, torch.tensor(-9)))
    assert torch.equal(as_int, as_tensor)


def test_noise_does_not_depend_on_batch_split_or_threads() -> None:
    blocks, logits = draw(1000, 6, 5, 7)
    whole = ops.multiplex(blocks, logits, mode="gumbel", seed=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.multiplex(blocks, logits, mode="gumbel", seed=2), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ops.multiplex(blocks[:3], logits[:3], mode="gumbel", seed=2), whole[:3])
    assert torch.equal(
        ops.multiplex(blocks.view(10, 100, 6, 7), logits.view(10, 100, 6, 5), mode="gumbel", seed=2).view_as(whole),
        whole,
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("mode", ["softmax"])
def test_gradcheck(mode: str) -> None:
    blocks, logits = (t.requires_grad_() for t in draw(3, 4, 3, 5, torch.float64))
    tau = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b, w, t: ops.multiplex(b, w, tau=t), (blocks, logits, tau))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_opcheck(mode: int) -> None:
    blocks, logits = draw(4, 3, 5, 6)
    permuted, seed = laid_out(blocks, "permuted"), torch.tensor(3) if mode == 1 else None
    for tau in (None, torch.tensor(0.7)):
        opchecked("multiplex_forward", permuted, logits, tau, 1.0, seed, mode)
        grad = torch.randn_like(torch.ops.fastmod.multiplex_forward(blocks, logits, tau, 1.0, seed, mode))
        opchecked("multiplex_backward", laid_out(grad, "permuted"), permuted, logits, tau, 1.0, seed, mode)


def test_two_backwards_and_untouched_inputs() -> None:
    blocks, logits = (t.requires_grad_() for t in draw(65, 3, 4, 5))
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


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_tau_that_is_not_positive(backend: str) -> None:
    blocks, logits = draw(2, 3, 4, 5)
    with fastmod.use_backend(backend):
        for tau in (0.0, -1.0, float("nan"), torch.tensor(0.0), torch.tensor(-2.0), torch.tensor(float("nan"))):
            with pytest.raises(ValueError, match="tau"):
                ops.multiplex(blocks, logits, tau=tau)
