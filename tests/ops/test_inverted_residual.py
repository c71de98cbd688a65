"""inverted_residual: agreement with fp64, with the same block of torch's own layers, and the contract of the op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastmod
from fastmod import ops
from fastmod.nn.isometric_block import IsometricBlock
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import parameters, same_bits

NAN, INF = float("nan"), float("inf")
native = pytest.mark.parametrize("backend", parameters("triton", "cuda"), indirect=True)
everywhere = pytest.mark.parametrize("name", ["native", "reference"])
#: B, T, C, M, R (0: no squeeze-excite), H, W
SHAPES = [
    (4, 1, 3, 7, 0, 3, 2),
    (12, 2, 3, 7, 2, 3, 4),
    (24, 1, 24, 144, 36, 4, 4),
    (20, 1, 40, 33, 9, 5, 7),
    (16, 2, 2, 3, 2, 2, 1),
    (33, 1, 5, 18, 4, 1, 2),
    (3, 1, 4, 35, 0, 11, 13),
]
EMPTY = [(0, 2, 3, 4, 2, 3, 2), (0, 1, 3, 4, 0, 3, 2)]


def draw(b: int, t: int, c: int, m: int, r: int, h: int, w: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x and the parameters, those in the dtype of the sums."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [(t, m, c), (t, m, 3, 3), *([(t, r, m), (t, m, r)] if r else []), (t, c, m)]
    shapes = [shape for weight in weights for shape in (weight, weight[:2], weight[:2])]
    return [torch.randn(b, t, c, h, w).to(dtype), *[torch.randn(shape).to(wide) for shape in shapes]]


def block(x: Tensor, *params: Tensor) -> Tensor:
    """[B, T, H, W, C], as it lies in memory."""
    return ops.inverted_residual(x, params).y.movedim(2, -1)


@native
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[int, ...]) -> None:
    assert_agrees(block, lambda: draw(*shape), roundings=8.0, scale=1e3)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("backend")
def test_dtypes(dtype: torch.dtype) -> None:
    assert_agrees(block, lambda: draw(7, 2, 5, 19, 4, 3, 5, dtype=dtype), roundings=8.0, half_roundings=2.0, scale=1e3)


@native
@given(
    b=st.sampled_from([2, 3, 20]),
    t=st.sampled_from([1, 2]),
    c=st.sampled_from([1, 3, 17]),
    m=st.sampled_from([1, 5, 40]),
    r=st.sampled_from([0, 1, 4]),
    h=st.sampled_from([1, 3]),
    w=st.sampled_from([1, 5]),
    layouts=st.tuples(*[st.sampled_from([kind for kind in LAYOUTS if kind != "expanded"])] * 2),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("backend")
def test_any_shape_and_layout_in_fp64(b, t, c, m, r, h, w, layouts, seed) -> None:
    """In fp64, where no rounding decides on which side of a ReLU a value lies."""
    torch.manual_seed(seed)
    x, *params = draw(b, t, c, m, r, h, w, dtype=torch.float64)
    grad = laid_out(torch.randn(x.shape).double(), layouts[1])
    found = []
    for name in ("native", "reference"):
        leaves = [laid_out(x, layouts[0]).requires_grad_(), *[p.clone().requires_grad_() for p in params]]
        with fastmod.use_backend(name):
            result = ops.inverted_residual(leaves[0], leaves[1:], eps=1e-3)
        found.append([result.y, *result.means, *result.variances, *torch.autograd.grad(result.y, leaves, grad)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("se", [True, False])
@pytest.mark.parametrize("tasks", [1, 3])
def test_as_the_block_of_torchs_layers(se: bool, tasks: int) -> None:
    """Outputs, gradients and running statistics of IsometricBlock, whose forward is torch's own."""
    torch.manual_seed(0)
    plain = [IsometricBlock(5, se).double() for _ in range(tasks)]
    names = [n for n, _ in plain[0].named_parameters()]
    weights = {n: torch.stack([dict(b.named_parameters())[n].detach() for b in plain]).requires_grad_() for n in names}
    buffers = {n: torch.stack([dict(b.named_buffers())[n] for b in plain]) for n, _ in plain[0].named_buffers()}
    x = torch.randn(6, tasks, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    y = plain[0].forward_stacked(x, weights, buffers)
    assert "InvertedResidual" in type(y.grad_fn).__name__
    expected = torch.stack([b(x[:, t]) for t, b in enumerate(plain)], 1)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(x)
    found = torch.autograd.grad(y, [x, *weights.values()], grad)
    leaves = [x, *[p for b in plain for p in b.parameters()]]
    exact = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(found[0], exact[0], rtol=1e-9, atol=1e-9)
    for i, ours in enumerate(found[1:]):
        one = torch.stack([exact[1 + t * len(names) + i] for t in range(tasks)])
        torch.testing.assert_close(ours, one, rtol=1e-9, atol=1e-9)
    for name, values in buffers.items():
        if not name.endswith("num_batches_tracked"):
            now = torch.stack([dict(b.named_buffers())[name] for b in plain])
            torch.testing.assert_close(values, now, rtol=1e-10, atol=1e-10)


@native
@pytest.mark.usefixtures("backend")
def test_weights_in_the_shapes_of_convolutions() -> None:
    x, *params = draw(5, 2, 3, 7, 2, 3, 4)
    leaves = [p.clone().requires_grad_() for p in params]
    shaped = [p[:, :, None] if p.dim() == 4 else p[..., None, None] if p.dim() == 3 else p for p in leaves]
    y, expected = ops.inverted_residual(x, shaped).y, ops.inverted_residual(x, leaves).y
    assert torch.equal(y, expected)
    for found, exact in zip(*[torch.autograd.grad(out.sin().sum(), leaves) for out in (y, expected)], strict=True):
        assert torch.equal(found, exact)


@native
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.usefixtures("backend")
def test_not_finite_as_in_torch(value: float) -> None:
    def inputs() -> list[Tensor]:
        x, *params = draw(4, 2, 3, 6, 2, 3, 2)
        x[1, 1, 2, 1, 1] = value
        return [x, *params]

    x, *params = inputs()
    y = ops.inverted_residual(x, params).y
    assert y[:, 1].isnan().all()
    assert y[:, 0].isfinite().all()


@native
@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.usefixtures("backend")
def test_derivatives(r: int) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 2, 2, 3, r, 2, 2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(block, inputs)
    assert torch.autograd.gradgradcheck(block, inputs)


@native
@pytest.mark.usefixtures("backend")
def test_one_gradient_is_what_all_are() -> None:
    values, grad = draw(5, 2, 3, 7, 2, 3, 4), torch.randn(5, 2, 3, 4, 3)
    every = [t.clone().requires_grad_() for t in values]
    expected = torch.autograd.grad(block(*every), every, grad)
    for i in range(len(values)):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate(values)]
        (found,) = torch.autograd.grad(block(*leaves), leaves[i], grad)
        assert torch.equal(found, expected[i])


def test_bits_do_not_depend_on_threads() -> None:
    leaves = [t.requires_grad_() for t in draw(64, 1, 12, 40, 6, 8, 8)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            y = block(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_keeps_one_expanded_tensor() -> None:
    """What waits for the backward: one tensor of M channels, and narrow ones."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    inputs = [t.requires_grad_() for t in draw(8, 1, 4, 24, 6, 8, 8)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(*inputs)
    expanded = 8 * 24 * 64
    assert [size >= expanded for size in sizes].count(True) == 1
    assert sum(sizes) < 1.75 * expanded


@pytest.mark.parametrize("r", [0, 2])
def test_opcheck(r: int) -> None:
    x, *params = draw(3, 2, 3, 5, r, 2, 4)
    x = laid_out(x, "permuted")
    opchecked("inverted_residual_forward", x, params, 1e-5)
    _, stats, saved = torch.ops.fastmod.inverted_residual_forward(x, params, 1e-5)
    for need_x in (True, False):
        opchecked("inverted_residual_backward", torch.randn(x.shape), x, params, 1e-5, stats, saved, need_x)


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    inputs = [t.requires_grad_() for t in draw(3, 2, 3, 5, 2, 2, 4)]
    expected = torch.autograd.grad(block(*inputs).sin().sum(), inputs)
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected)


@everywhere
def test_autocast(name: str) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 2, 3, 5, 2, 2, 4)]
    with fastmod.use_backend(name), torch.autocast("cpu", torch.bfloat16):
        y = block(*inputs)
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), inputs))


X, *PARAMS = draw(2, 2, 3, 5, 2, 2, 4)


def changed(place: int, value: object) -> list:
    return [value if i == place else p for i, p in enumerate(PARAMS)]


BAD = {
    "rank": (X[0], PARAMS, ValueError, r"x.*\[B, T, C, H, W\]"),
    "no pixels": (X[..., :0], PARAMS, ValueError, r"x.*at least one.*pixel"),
    "no channels": (X[:, :, :0], PARAMS, ValueError, r"x.*at least one.*channel"),
    "one image": (X[:1], PARAMS, ValueError, "more than 1 value per channel"),
    "integers": (X.long(), PARAMS, TypeError, "x.*int64"),
    "not a tensor": ([1.0], PARAMS, TypeError, "x.*list"),
    "count": (X, PARAMS[:8], ValueError, "params.*9.*15.*8"),
    "no list": (X, X, TypeError, "params.*Tensor"),
    "expand": (X, changed(0, torch.zeros(2, 5, 4)), ValueError, r"params\[0\], expand.*\[2, 5, 3\].*\[2, 5, 4\]"),
    "depthwise": (X, changed(3, torch.zeros(2, 5, 1, 1)), ValueError, r"params\[3\], depthwise.*\[2, 5, 3, 3\]"),
    "excite": (X, changed(9, torch.zeros(2, 5, 3)), ValueError, r"params\[9\], excite.*\[2, 5, 2\].*\[2, 5, 3\]"),
    "norm": (X, changed(4, torch.zeros(2, 4)), ValueError, r"params\[4\], depthwise's norm.*\[2, 5\].*\[2, 4\]"),
    "kind": (X, changed(2, torch.zeros(2, 5).long()), TypeError, r"params\[2\].*int64"),
    "nothing": (X, changed(2, None), TypeError, r"params\[2\].*NoneType"),
    "device": (X, changed(1, torch.zeros(2, 5, device="meta")), RuntimeError, r"params\[1\].*cpu.*meta"),
}


@everywhere
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, name: str) -> None:
    x, params, error, pattern = BAD[case]
    with fastmod.use_backend(name), pytest.raises(error, match=pattern):
        ops.inverted_residual(x, params)


@everywhere
@pytest.mark.parametrize("eps", [-1.0, INF, "small"])
def test_bad_eps(eps: object, name: str) -> None:
    with fastmod.use_backend(name), pytest.raises(ValueError, match="eps"):
        ops.inverted_residual(X, PARAMS, eps=eps)


def test_the_kernels_refuse_too() -> None:
    forward, backward = torch.ops.fastmod.inverted_residual_forward, torch.ops.fastmod.inverted_residual_backward
    for x, params in ((X[0], PARAMS), (X, PARAMS[:7]), (X, changed(0, X)), (X, changed(5, PARAMS[5].double()))):
        with pytest.raises((ValueError, TypeError)):
            forward(x, params, 1e-5)
    _, stats, saved = forward(X, PARAMS, 1e-5)
    for grad, others in ((X[:1], saved), (X.double(), saved), (X, saved[:3]), (X, [saved[1], *saved[1:]])):
        with pytest.raises((ValueError, TypeError)):
            backward(grad, X, PARAMS, 1e-5, stats, others, True)
