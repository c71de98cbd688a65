"""masked_conv2d: agreement with fp64, the formula, masks, what is not finite."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import conv2d

import fastmod
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out
from tests.helpers.mask_cases import (
    SEEDS,
    TAUS,
    drawn,
    relaxed,
    threads,
)
from tests.helpers.masked_conv2d import HALF_ROUNDINGS, OPTIONS, draw, layer
from tests.helpers.masked_linear import NAMES
from tests.ops.test_sample_mask import by_reference, module


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("tensors", [3, 4, 5], ids=["no bias", "bias", "masked bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_fp64(name: str, tensors: int) -> None:
    options = OPTIONS[name]
    tau = TAUS[tensors - 3]
    assert_agrees(layer(tau=tau, **options), lambda: draw(groups=options.get("groups", 1))[:tensors], draws=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    assert_agrees(layer(4, tau=0.5, padding=1), lambda: draw(4, dtype=dtype), half_roundings=HALF_ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_samples_are_summed_in_fp32(dtype: torch.dtype) -> None:
    assert_agrees(layer(256, padding=1), lambda: draw(256, 1, dtype=dtype), draws=3, half_roundings=HALF_ROUNDINGS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula(name: str, seed: int) -> None:
    """Written out with the masks of the contract: images s * B / S and on meet mask s."""
    options = OPTIONS[name]
    x, weight, logits, bias, bias_logits = draw(groups=options.get("groups", 1), dtype=torch.float64)
    masks = drawn(3, logits.numel(), seed).view(3, *logits.shape) >= module.words_off(logits)
    kept = drawn(3, 8, seed, stream=2) >= module.words_off(bias_logits)
    parts = [conv2d(x[2 * s : 2 * s + 2], weight * masks[s], bias * kept[s], **options) for s in range(3)]
    found = layer(seed=seed, **options)(x, weight, logits, bias, bias_logits)
    torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("name", ["padding", "all"])
def test_logits_get_the_gradient_of_the_relaxed_sample(name: str, tau: float) -> None:
    options = OPTIONS[name]
    inputs = [t.requires_grad_() for t in draw(groups=options.get("groups", 1), dtype=torch.float64)]
    x, weight, logits, bias, bias_logits = inputs
    out = layer(seed=-6, tau=tau, **options)(*inputs)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (logits, bias_logits), grad)
    weights, biases = weight * relaxed(logits, 3, -6, tau), bias * relaxed(bias_logits, 3, -6, tau, stream=2)
    soft = torch.cat([conv2d(x[2 * s : 2 * s + 2], weights[s], biases[s], **options) for s in range(3)])
    torch.testing.assert_close(found, torch.autograd.grad(soft, (logits, bias_logits), grad), rtol=1e-10, atol=1e-11)


@given(
    sizes=st.fixed_dictionaries(
        {
            "samples": st.sampled_from([1, 2, 3]),
            "images": st.sampled_from([0, 1, 2]),
            "channels": st.sampled_from([2, 6]),
            "outputs": st.sampled_from([2, 4]),
            "size": st.sampled_from([(3, 3), (5, 4), (1, 7)]),
            "kernel": st.sampled_from([(1, 1), (1, 3), (2, 1)]),
            "groups": st.sampled_from([1, 2]),
            "scale": st.sampled_from([1.0, 1e4]),
        }
    ),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 6),
    tensors=st.integers(3, 5),
    tau=st.sampled_from(TAUS),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_layout_and_range(sizes, layouts, tensors, tau, seed) -> None:
    torch.manual_seed(abs(seed) % 1000)
    run = layer(sizes["samples"], seed=seed, tau=tau, padding=1, groups=sizes["groups"])
    grad = laid_out(torch.randn(by_reference(run, *draw(**sizes)).shape), layouts[5])

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(**sizes)[:tensors], layouts, strict=False)]

    # The gradient of a logit passes |x| * |weight| * pixels.
    assert_agrees(lambda *t: (run(*t) * grad).sum(), inputs, draws=3, scale=sizes["scale"] ** 2 * 100)


def test_channels_last() -> None:
    def inputs():
        x, *rest = draw()
        return [x.to(memory_format=torch.channels_last), *rest]

    assert_agrees(layer(padding=1), inputs, draws=3, memory_format=torch.channels_last)


def test_empty_batch() -> None:
    inputs = [t.requires_grad_() for t in draw(images=0)]
    out = layer(padding=1)(*inputs)
    assert out.shape == (0, 8, 7, 9)
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


def test_gradients_only_where_they_are_required() -> None:
    values = draw()
    everything = [t.clone().requires_grad_() for t in values]
    out = layer()(*everything)
    grad = torch.randn_like(out)
    out.backward(grad)
    for wanted in itertools.product([False, True], repeat=5):
        inputs = [t.clone().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        out = layer()(*inputs)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(grad)
        for tensor, other, want in zip(inputs, everything, wanted, strict=True):
            assert (tensor.grad is None) != want
            assert not want or torch.equal(tensor.grad, other.grad)


@pytest.mark.parametrize("name", ["padding", "all"])
def test_gradcheck(name: str) -> None:
    """Of what the output depends on smoothly: x, weight, bias; for logits see the relaxed sample."""
    options = OPTIONS[name]
    x, weight, logits, bias, bias_logits = draw(
        2, 1, 2, 2, size=(4, 5), groups=options.get("groups", 1), dtype=torch.float64
    )
    smooth = tuple(t.requires_grad_() for t in (x, weight, bias))
    run = layer(2, **options)
    assert torch.autograd.gradcheck(lambda a, w, b: run(a, w, logits, b, bias_logits), smooth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", range(5), ids=NAMES)
def test_nan_and_inf_travel_as_in_torch(where: int, value: float) -> None:
    inputs = draw(2, 2)
    inputs[where].view(-1)[2:4] = value
    leaves = [t.requires_grad_() for t in inputs]
    results = []
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend):
            out = layer(2, padding=1)(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
    # As in test_masked_linear.py: not finite in the same places.
    for found, expected in zip(*results, strict=True):
        pair = [torch.nan_to_num(t, 1e30, 1e30, 1e30) for t in (found, expected)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("value", [1e4, float("inf")])
def test_sure_masks(value: float, tau: float) -> None:
    x, weight, _, bias, _ = draw()
    for sign in (1, -1):
        logits = [torch.full_like(t, sign * value).requires_grad_() for t in (weight, bias)]
        out = layer(tau=tau)(x, weight, logits[0], bias, logits[1])
        expected = conv2d(x, weight, bias)
        torch.testing.assert_close(out, expected if sign > 0 else torch.zeros_like(expected))
        for found in torch.autograd.grad(out.sum(), logits):
            assert torch.equal(found, torch.zeros_like(found))


def test_masks_do_not_depend_on_threads() -> None:
    inputs = draw(4, 3)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(layer(4)(*inputs))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    samples, out = 48, 20
    shapes = ((samples * 2, 3, 4, 4), (out, 3, 1, 1), (out, 3, 1, 1), (out,), (out,))
    x, weight, logits, bias, bias_logits = (torch.randn(shape).to(dtype) for shape in shapes)
    grad = torch.randn(samples * 2, out, 4, 4).to(dtype)

    def grads(backend: str, wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(wide).requires_grad_() for t in (bias, bias_logits)]
        with fastmod.use_backend(backend):
            found = fastmod.ops.masked_conv2d(
                x.to(wide), weight.to(wide), logits.to(wide), samples, bias=leaves[0], bias_logits=leaves[1], seed=1
            )
        return list(torch.autograd.grad(found, leaves, grad.to(wide)))

    for ours, exact in zip(grads("native", dtype), grads("reference", torch.float64), strict=True):
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((ours.double() - exact).abs() <= 1.01 * rounding + 1e-5 * exact.abs().max()).all()
