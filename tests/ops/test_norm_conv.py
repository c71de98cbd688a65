"""norm_conv on every backend: agreement with fp64, statistics without cancellation, and the contract of the op."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import Backend

op = import_module("fastmod.ops.norm_conv")


class Case(NamedTuple):
    batch: int
    experts: int
    inputs: int
    outputs: int
    high: int
    wide: int
    size: int = 3
    stride: int = 1
    depthwise: bool = False
    shared: bool = False  # x of all experts
    affine: str = ""  # experts: a scale and shift of each, one: of all
    relu: bool = False
    gate: bool = False
    bias: bool = False
    stats: bool = True

    @property
    def form(self) -> Any:
        return op.Form(self.relu, self.stride, self.depthwise)


FULL: dict[str, Any] = {"affine": "experts", "relu": True, "gate": True, "bias": True}
CASES = [
    Case(2, 2, 5, 7, 5, 6, **FULL),
    Case(2, 2, 5, 7, 5, 7, stride=2, **FULL),
    Case(2, 2, 6, 16, 6, 4, size=1, stride=2, **FULL),
    Case(2, 1, 17, 5, 3, 4, size=1, affine="experts", relu=True),
    Case(2, 2, 20, 20, 4, 5, depthwise=True, **FULL),
    Case(2, 2, 3, 3, 7, 4, stride=2, depthwise=True, shared=True, affine="one", relu=True),
    Case(3, 1, 4, 4, 3, 5, size=1, depthwise=True, stats=False),
    Case(3, 3, 3, 7, 9, 7, shared=True),
    Case(3, 3, 5, 7, 4, 5, shared=True, affine="one", relu=True, bias=True),
    Case(2, 3, 5, 7, 9, 7, stride=2, shared=True, affine="experts", relu=True),
    Case(2, 3, 5, 7, 5, 3, shared=True, affine="one", gate=True, stats=False),
    Case(2, 2, 3, 70, 1, 5, gate=True),
    Case(2, 1, 70, 3, 4, 1, **FULL),
    Case(2, 1, 2, 3, 19, 17, relu=True, gate=True),  # several tiles of one image, and parts of the weight's gradient
    Case(1, 1, 3, 5, 1, 1, stride=2, **FULL),
    Case(1, 1, 1, 1, 2, 1, size=1),
    Case(0, 2, 5, 7, 5, 7, stats=False, **FULL),
    Case(0, 2, 5, 5, 5, 7, depthwise=True, shared=True, affine="one", stats=False),
]
ids = {"ids": lambda case: "-".join(str(each) for each in case)}


def draw(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, and of scale, shift, channel_gate and bias those that there are."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    experts, inputs = case.experts, case.inputs
    image = (inputs, case.high, case.wide)
    x = torch.randn((case.batch, *image) if case.shared else (case.batch, experts, *image))
    weight = torch.randn(experts, case.outputs, 1 if case.depthwise else inputs, case.size, case.size)
    found = [x.to(dtype), weight.to(dtype)]
    if case.affine:
        found += [torch.randn((inputs,) if case.affine == "one" else (experts, inputs)).to(wide) for _ in range(2)]
    if case.gate:
        found.append(torch.randn(case.batch, experts, inputs).to(dtype))
    return [*found, torch.randn(experts, case.outputs).to(dtype)] if case.bias else found


def arguments(case: Case, tensors: list[Tensor]) -> list[Tensor | None]:
    """All six."""
    rest: list[Tensor | None] = list(tensors[2:])
    bias = rest.pop() if case.bias else None
    gate = rest.pop() if case.gate else None
    return [*tensors[:2], *(rest or (None, None)), gate, bias]


def function(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, weight, scale, shift, gate, bias = arguments(case, list(tensors))
        how = {"scale": scale, "shift": shift, "channel_gate": gate, "bias": bias, **case.form._asdict()}
        y, mean, var = ops.norm_conv(x, weight, **how, stats=case.stats)
        y = y.movedim(-3, -1)  # as it lies in memory
        return (y, mean, var) if case.stats else (y,)

    return call


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", CASES, **ids)
def test_matches_fp64(case: Case) -> None:
    assert_agrees(function(case), lambda: draw(case))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 9)], **ids)
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert_agrees(function(case), lambda: draw(case, dtype))


@pytest.mark.usefixtures("backend")
def test_many_pixels() -> None:
    """More tiles than one step of what adds up their parts."""
    case = Case(3, 1, 2, 3, 31, 29, size=1, affine="experts", relu=True)
    # Plain PyTorch adds up so well here that of two draws the worst says little.
    assert_agrees(function(case), lambda: draw(case), draws=8)


@pytest.mark.usefixtures("backend")
@given(
    sizes=st.tuples(*[st.sampled_from(each) for each in ([0, 1, 3], [1, 3], [1, 5], [1, 6, 17], [1, 4, 7], [1, 6])]),
    size=st.sampled_from([1, 3]),
    stride=st.sampled_from([1, 2]),
    depthwise=st.booleans(),
    shared=st.booleans(),
    affine=st.sampled_from(["", "experts", "one"]),
    flags=st.tuples(*[st.booleans()] * 4),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 7),
    seed=st.integers(0, 1000),
)
@settings(derandomize=True)  # among endless cases a few miss the limit on tensor cores, which round sums towards zero
def test_any_shape_and_layout(sizes, size, stride, depthwise, shared, affine, flags, layouts, seed) -> None:
    torch.manual_seed(seed)
    batch, experts, inputs, outputs, high, wide = sizes
    if affine == "one" and not shared:
        affine = "experts"
    outputs = inputs if depthwise else outputs
    # Plain PyTorch knows no gradient of the statistics of nothing: a test of their own.
    flags = (*flags[:3], flags[3] and batch > 0)
    case = Case(batch, experts, inputs, outputs, high, wide, size, stride, depthwise, shared, affine, *flags)

    def inputs_() -> list[Tensor]:
        return [laid_out(t, kind) for t, kind in zip(draw(case), layouts, strict=False)]

    # Of a single value per channel the gradient through the variance is a difference of equal numbers.
    scale = float(inputs * size * size)
    assert_agrees(function(case), inputs_, scale=scale, grad_layout=layouts[6], draws=8)


@pytest.mark.usefixtures("backend")
def test_variance_far_from_zero() -> None:
    """E[y^2] - E[y]^2 would be off by eps * mean^2, deviations from fp32 means by eps * mean * deviation at most. y
    itself is exact, being of whole numbers."""
    far, case = 2.0**14, Case(2, 2, 3, 4, 19, 8, size=1)
    x, weight = (t.mul(2).round() for t in draw(case))
    y, mean, var = ops.norm_conv(x, weight, bias=torch.full((2, 4), far))
    exact_var, exact_mean = torch.var_mean(y.double(), (0, 3, 4), correction=0)
    eps = torch.finfo(torch.float32).eps
    assert ((var.double() - exact_var).abs() <= eps * far * exact_var.sqrt()).all()
    assert ((mean.double() - exact_mean).abs() <= 2 * eps * far).all()


@pytest.mark.usefixtures("backend")
def test_statistics_and_gradients_of_an_empty_batch() -> None:
    case = Case(0, 2, 5, 7, 5, 6, **FULL)
    inputs = [t.requires_grad_() for t in draw(case)]
    y, mean, var = function(case)(*inputs)
    assert y.shape == (0, 2, 5, 6, 7) and mean.shape == var.shape == (2, 7)
    assert not mean.any() and not var.any()
    for grad in torch.autograd.grad(y.sum() + (mean + var).sum(), inputs):
        assert not grad.any()


@pytest.mark.usefixtures("backend")
def test_weights_with_channels_innermost() -> None:
    case = CASES[1]

    def inputs() -> list[Tensor]:
        x, weight, *others = draw(case)
        return [x, weight.movedim(2, -1).contiguous().movedim(-1, 2), *others]

    assert_agrees(function(case), inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_reaches_what_it_should(value: float) -> None:
    """NaN and inf are not swallowed by relu, and stay in their image, expert and window."""
    case = Case(2, 2, 3, 4, 6, 5, affine="experts", relu=True)
    x, weight, _, _ = draw(case)
    x[1, 0, 1, 0, 0] = value
    y = ops.norm_conv(x, weight, scale=torch.ones(2, 3), shift=torch.zeros(2, 3), relu=True).y
    odd = ~y.isfinite()
    assert odd[1, 0, :, :2, :2].all() and odd.sum() == 4 * 2 * 2


@pytest.mark.usefixtures("backend")
def test_is_a_batch_norm_between_two_convolutions() -> None:
    """Two convolutions, batch norm and relu by PyTorch, outputs and gradients, in fp64 to the last digits."""
    first, second = (nn.Conv2d(i, o, 3, padding=1, bias=False, dtype=torch.float64) for i, o in ((3, 5), (5, 4)))
    norm = nn.BatchNorm2d(5, dtype=torch.float64)
    x = torch.randn(4, 3, 6, 5, dtype=torch.float64)
    parameters = [first.weight, norm.weight, norm.bias, second.weight]
    expected = second(norm(first(x)).relu())
    y, mean, var = ops.norm_conv(x, first.weight[None])
    affine = ops.batch_affine(mean, var, norm.weight[None], norm.bias[None], count=4 * 6 * 5, training=True)
    found = ops.norm_conv(y, second.weight[None], scale=affine.scale, shift=affine.shift, relu=True, stats=False).y
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(each.sin().sum(), parameters) for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[8], CASES[10]], **ids)
def test_results_lie_as_the_fakes_say(backend: Backend, case: Case) -> None:
    """Each gradient alone: the others are empty."""
    x, weight, scale, shift, gate, bias = arguments(case, draw(case))
    scale, shift = (None if t is None else t.reshape(-1, case.inputs) for t in (scale, shift))
    inputs = (x, weight, scale, shift, gate, bias)
    triton = backend.choice == "triton"
    found = op.FORWARD[triton](*inputs, *case.form, case.stats)
    for a, b in zip(found, op.fake_forward(*inputs, *case.form, case.stats), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    y, mean, _ = found
    grads = [torch.randn_like(y), *((torch.randn_like(mean), torch.randn_like(mean)) if case.stats else (None, None))]
    kept = (y, mean) if case.stats else (None, None)
    there = [t is not None for t in inputs]
    every = op.BACKWARD[triton](*grads, *kept, *inputs[:5], *case.form, there)
    for i in range(6):
        needs = [j == i and there[i] for j in range(6)]
        found = op.BACKWARD[triton](*grads, *kept, *inputs[:5], *case.form, needs)
        expected = op.fake_backward(*grads, *kept, *inputs[:5], *case.form, needs)
        for j, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), f"gradient {j}"
        torch.testing.assert_close(found[i], every[i])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_outputs(used: tuple[int, ...]) -> None:
    case = Case(2, 2, 3, 4, 4, 3, affine="experts", relu=True)

    def some(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = function(case)(*tensors)
        return tuple(found[i] for i in used)

    assert_agrees(some, lambda: draw(case))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck(shared: bool) -> None:
    case = Case(2, 2, 2, 3, 3, 2, stride=2, shared=shared, **FULL)
    inputs = [t.requires_grad_() for t in draw(case, torch.float64)]
    assert torch.autograd.gradcheck(function(case), inputs, fast_mode=True)


@pytest.mark.usefixtures("backend")
def test_inputs_stay_and_repeats_are_equal() -> None:
    case = CASES[13]._replace(affine="experts", bias=True)
    inputs = [t.requires_grad_() for t in draw(case)]
    before = [t.detach().clone() for t in inputs]
    found = []
    for _ in range(2):
        outputs = function(case)(*inputs)
        found.append([*outputs, *torch.autograd.grad(sum(o.sin().sum() for o in outputs), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


@pytest.mark.slow
def test_opcheck() -> None:
    for case in (CASES[1], CASES[5]):
        x, weight, scale, shift, gate, bias = arguments(case, draw(case))
        scale, shift = (t.reshape(-1, case.inputs) for t in (scale, shift))
        inputs = [None if t is None else laid_out(t, "permuted") for t in (x, weight, scale, shift, gate, bias)]
        opchecked("norm_conv_forward", *inputs, *case.form, True)
        y, mean, var = op.FORWARD[False](*inputs, *case.form, True)
        grads = [laid_out(torch.randn_like(t), "permuted") for t in (y, mean, var)]
        needs = [t is not None for t in inputs]
        opchecked("norm_conv_backward", *grads, y, mean, *inputs[:5], *case.form, needs)


@pytest.mark.usefixtures("backend")
def test_bad_input() -> None:
    x, weight, scale, shift, gate, bias = draw(CASES[0])
    for wrong, message in (
        ({"stride": 3}, "stride: expected 1 or 2, got 3"),
        ({"scale": scale}, "scale, shift: expected both or none"),
        ({"scale": scale[:1], "shift": shift[:1]}, r"scale: expected \[E, Cin\] = \[2, 5\], got shape \[1, 5\]"),
        ({"channel_gate": gate[:1]}, r"channel_gate: expected \[B, E, Cin\] = \[2, 2, 5\]"),
        ({"bias": bias[:, :3]}, r"bias: expected \[E, Cout\] = \[2, 7\]"),
        ({"depthwise": True}, r"weight: expected \[E, C, 1, k, k\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.norm_conv(x, weight, **wrong)
    with pytest.raises(ValueError, match=r"x: expected \[B, E, Cin, H, W\] with E = 2"):
        ops.norm_conv(x[:, :1], weight)
    with pytest.raises(ValueError, match=r"weight: expected .* with Cin = 4"):
        ops.norm_conv(x[:, :, :4], weight)
    with pytest.raises(ValueError, match="k = 1 or 3"):
        ops.norm_conv(x, weight[..., :2, :2])
    with pytest.raises(ValueError, match="x: expected at least one pixel"):
        ops.norm_conv(x[..., :0], weight)
    with pytest.raises(TypeError, match="weight: expected the dtype of x"):
        ops.norm_conv(x, weight.double())
    with pytest.raises(TypeError, match="bias: expected the dtype of x"):
        ops.norm_conv(x.bfloat16(), weight.bfloat16(), bias=bias)
    with pytest.raises(TypeError, match="stats: expected True or False"):
        ops.norm_conv(x, weight, stats="yes")
