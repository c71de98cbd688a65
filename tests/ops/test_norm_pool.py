"""norm_pool: agreement with fp64, and the contract of the op."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import same_bits

NAN, INF = float("nan"), float("inf")

everywhere = pytest.mark.parametrize("name", ["native", "reference"])
by_relu = pytest.mark.parametrize("relu", [True, False])
SHAPES = [(4, 1, 144, 8, 8), (2, 3, 5, 3, 2), (3, 2, 1, 1, 1), (2, 1, 17, 64, 48), (1, 2, 33, 11, 13)]
EMPTY = [(0, 2, 3, 4, 4), (2, 0, 3, 4, 4), (2, 3, 0, 4, 4)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, and what the kernels take with it: per-channel tensors in the dtype of the sums."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [torch.randn(shape).to(dtype), torch.randn(shape[1:3]).to(wide), torch.randn(shape[1:3]).to(wide)]


@by_relu
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[int, ...], relu: bool) -> None:
    assert_agrees(partial(ops.norm_pool, relu=relu), lambda: draw(*shape), draws=4)


@by_relu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("backend")
def test_dtypes(dtype: torch.dtype, relu: bool) -> None:
    assert_agrees(partial(ops.norm_pool, relu=relu), lambda: draw(3, 2, 19, 5, 3, dtype=dtype))


@given(
    b=st.sampled_from([0, 1, 3]),
    e=st.sampled_from([1, 2]),
    c=st.sampled_from([0, 1, 3, 19]),
    h=st.sampled_from([1, 3, 8]),
    w=st.sampled_from([1, 5]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    relu=st.booleans(),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("backend")
def test_any_shape_and_layout(b, e, c, h, w, layouts, relu, seed) -> None:
    torch.manual_seed(seed)

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(b, e, c, h, w), layouts, strict=False)]

    assert_agrees(partial(ops.norm_pool, relu=relu), inputs, grad_layout=layouts[3], scale=float(h * w))


@pytest.mark.usefixtures("backend")
def test_channels_innermost_and_not_agree_to_the_bit() -> None:
    x, scale, shift = draw(2, 3, 21, 5, 4)
    inner = x.movedim(2, -1).contiguous().movedim(-1, 2)
    results = []
    for value in (x, inner):
        leaves = [t.clone().requires_grad_() for t in (value, scale, shift)]
        out = ops.norm_pool(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("backend")
def test_as_convolution_norm_and_pool() -> None:
    """The mean of what torch's batch norm and relu give."""
    x, weight, bias = draw(4, 1, 6, 5, 3)
    mean, var = x.mean((0, 1, 3, 4)), x.var((0, 1, 3, 4), unbiased=False)
    scale = weight / (var + 1e-5).sqrt()
    found = ops.norm_pool(x, scale, bias - mean * scale)
    normed = torch.nn.functional.batch_norm(x[:, 0], None, None, weight[0], bias[0], training=True)
    torch.testing.assert_close(found[:, 0], normed.relu().mean((-1, -2)))


@by_relu
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.usefixtures("backend")
def test_not_finite_as_in_torch(value: float, relu: bool) -> None:
    def inputs():
        x, scale, shift = draw(2, 3, 5, 3, 2)
        x[1, 2, 3, 1, 1] = value
        scale[0, 1] = value
        return [x, scale.abs(), shift]

    assert_agrees(partial(ops.norm_pool, relu=relu), inputs)


@pytest.mark.usefixtures("backend")
def test_no_gradient_at_zero() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0, 0.0]).view(1, 1, 1, 2, 2).requires_grad_()
    scale, shift = torch.ones(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    out = ops.norm_pool(x, scale, shift)
    found = torch.autograd.grad(out, (x, scale, shift), torch.full((1, 1, 1), 4.0))
    assert out.item() == 0.5
    assert [g.flatten().tolist() for g in found] == [[0.0, 0.0, 1.0, 0.0], [2.0], [1.0]]


@by_relu
@pytest.mark.usefixtures("backend")
def test_derivatives(relu: bool) -> None:
    inputs = [t.requires_grad_() for t in draw(2, 2, 3, 2, 3, dtype=torch.float64)]
    function = partial(ops.norm_pool, relu=relu)
    assert torch.autograd.gradcheck(function, inputs)
    if fastmod.backend.active() != "triton":  # it is plain PyTorch's anyway, and slow when interpreted
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.usefixtures("backend")
def test_one_gradient_is_what_all_are() -> None:
    values, grad = draw(3, 2, 19, 5, 3), torch.randn(3, 2, 19)
    every = [t.clone().requires_grad_() for t in values]
    expected = torch.autograd.grad(ops.norm_pool(*every), every, grad)
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate(values)]
        (found,) = torch.autograd.grad(ops.norm_pool(*leaves), leaves[i], grad)
        assert torch.equal(found, expected[i])


def test_bits_do_not_depend_on_threads() -> None:
    leaves = [t.requires_grad_() for t in draw(64, 2, 40, 8, 8)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out = ops.norm_pool(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck() -> None:
    x, scale, shift = draw(2, 3, 4, 2, 5)
    arguments = laid_out(x, "permuted"), laid_out(scale, "permuted"), laid_out(shift, "permuted"), True
    opchecked("norm_pool_forward", *arguments)
    grad = laid_out(torch.randn(2, 3, 4), "permuted")
    opchecked("norm_pool_backward", grad, *arguments, [True, True, True])
    opchecked("norm_pool_backward", grad, *arguments, [True, False, False])


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    inputs = [t.requires_grad_() for t in draw(2, 3, 4, 2, 5)]
    expected = torch.autograd.grad(ops.norm_pool(*inputs).sin().sum(), inputs)
    compiled = torch.compile(ops.norm_pool, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected)


@everywhere
def test_autocast(name: str) -> None:
    inputs = [t.requires_grad_() for t in draw(2, 3, 4, 2, 5)]
    with fastmod.use_backend(name), torch.autocast("cpu", torch.bfloat16):
        out = ops.norm_pool(*inputs)
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), inputs))


X, S = torch.zeros(2, 3, 4, 5, 6), torch.zeros(3, 4)
BAD = {
    "rank": (lambda: ops.norm_pool(X[0], S, S), ValueError, r"x.*\[B, E, C, H, W\].*\[3, 4, 5, 6\]"),
    "no pixels": (lambda: ops.norm_pool(X[..., :0], S, S), ValueError, r"x.*at least one pixel.*\[2, 3, 4, 5, 0\]"),
    "scale shape": (lambda: ops.norm_pool(X, S[:2], S), ValueError, r"scale.*\[3, 4\].*\[2, 4\]"),
    "shift shape": (lambda: ops.norm_pool(X, S, S[:, :1]), ValueError, r"shift.*\[3, 4\].*\[3, 1\]"),
    "one channel vector": (lambda: ops.norm_pool(X, S[0], S), ValueError, r"scale.*\[3, 4\].*\[4\]"),
    "no scale": (lambda: ops.norm_pool(X, None, S), TypeError, "scale, shift.*None"),
    "scale list": (lambda: ops.norm_pool(X, [1.0], S), TypeError, "scale.*list"),
    "integers": (lambda: ops.norm_pool(X.long(), S, S), TypeError, "x.*int64"),
    "scale integers": (lambda: ops.norm_pool(X, S.long(), S), TypeError, "scale.*int64"),
    "not a tensor": (lambda: ops.norm_pool([1.0], S, S), TypeError, "x.*list"),
    "device": (lambda: ops.norm_pool(X, S.to("meta"), S), RuntimeError, "scale.*cpu.*meta"),
    "relu": (lambda: ops.norm_pool(X, S, S, relu=1), TypeError, "relu.*int"),
}


@everywhere
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, name: str) -> None:
    call, error, pattern = BAD[case]
    with fastmod.use_backend(name), pytest.raises(error, match=pattern):
        call()


def test_the_kernels_refuse_too() -> None:
    forward, backward = torch.ops.fastmod.norm_pool_forward, torch.ops.fastmod.norm_pool_backward
    for arguments in ((X[0], S, S), (X[..., :0], S, S), (X, S[:2], S), (X, S, S.double()), (X.long(), S, S)):
        with pytest.raises((ValueError, TypeError)):
            forward(*arguments, True)
    for grad in (torch.zeros(2, 3, 5), torch.zeros(24), torch.zeros(2, 3, 4).double()):
        with pytest.raises((ValueError, TypeError)):
            backward(grad, X, S, S, True, [True] * 3)
