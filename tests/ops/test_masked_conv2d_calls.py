"""masked_conv2d as torch calls it, and called wrongly."""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers.mask_cases import (
    assert_message,
    fuzzed,
    in_a_process,
    random_seed,
    random_tau,
    random_tensor,
    wrong_numbers,
)
from tests.helpers.masked_conv2d import draw, layer


def test_seed_rules() -> None:
    inputs = draw()[:3]
    torch.manual_seed(4)
    first, second = (ops.masked_conv2d(*inputs, 3) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.masked_conv2d(*inputs, 3), first)
    assert not torch.equal(first, second)
    assert torch.equal(*(ops.masked_conv2d(*inputs, 3, seed=s) for s in (-9, torch.tensor(-9))))


def test_two_backwards_and_untouched_inputs() -> None:
    inputs = [t.requires_grad_() for t in draw()]
    copies = [t.detach().clone() for t in inputs]
    out = layer()(*inputs)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_fifty_equal_repeats() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 2)]
    results = []
    for _ in range(50):
        out = layer(4, tau=0.5, padding=1)(*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_compile_fullgraph(padding: int | str, backend: str) -> None:
    torch._dynamo.reset()
    run = layer(tau=0.5, padding=padding)
    with fastmod.use_backend(backend):
        compiled = torch.compile(run, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for images in (1, 3):  # the second makes the batch dynamic
            inputs = [t.requires_grad_() for t in draw(images=images)]
            eager, found = run(*inputs), compiled(*inputs)
            torch.testing.assert_close(found, eager)
            torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in (found, eager)])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    inputs = [t.requires_grad_() for t in draw()]
    with fastmod.use_backend(backend):
        expected = layer()(*[t.bfloat16() for t in inputs])
        with torch.autocast("cpu", torch.bfloat16):
            out = layer()(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_part_of_the_samples(first: int, backend: str) -> None:
    """Private: sample ``first`` alone gets the masks that it has among all."""
    x, weight, logits, bias, bias_logits = draw()
    options = {"bias": bias, "bias_logits": bias_logits, "seed": 9, "padding": 1}
    each = x.shape[0] // 3
    rows = slice(each * first, each * (first + 1))
    private = import_module("fastmod.ops.masked_conv2d")._masked_conv2d
    with fastmod.use_backend(backend):
        leaf, other = (logits.clone().requires_grad_() for _ in range(2))
        whole = ops.masked_conv2d(x, weight, leaf, 3, **options)
        part = private(x[rows], weight, other, 1, first=first, **options)
        torch.testing.assert_close(part, whole[rows])
        expected = torch.autograd.grad(whole[rows].square().sum(), leaf)
        torch.testing.assert_close(torch.autograd.grad(part.square().sum(), other), expected)
    with pytest.raises(ValueError, match="first: expected an int"):
        private(x, weight, logits, 3, first=-1)


# --------------------------------------------------------------------------------------------------------- bad input

X, W, B = torch.zeros(6, 4, 5, 7), torch.zeros(8, 4, 3, 3), torch.zeros(8)


def wrong(samples: object = 2, **changes: object):
    """A call with some arguments of a right one changed."""
    arguments = {"x": X, "weight": W, "logits": W, "samples": samples, **changes}
    return lambda: ops.masked_conv2d(**arguments)


CASES = {
    "batch": (wrong(4), ValueError, r"x.*multiple of 4 samples.*\[6, 4, 5, 7\]"),
    "x rank": (wrong(x=X[0]), ValueError, r"x.*\[B, in, H, W\].*\[4, 5, 7\]"),
    "x rank 5": (wrong(x=X[None]), ValueError, r"x.*\[B, in, H, W\].*\[1, 6, 4, 5, 7\]"),
    "x integers": (wrong(x=X.long()), TypeError, "x.*int64"),
    "x list": (wrong(x=[1.0]), TypeError, "x.*list"),
    "channels": (
        wrong(weight=W[:, :3], logits=W[:, :3]),
        ValueError,
        r"weight.*4 channels in 1 groups.*\[8, 3, 3, 3\]",
    ),
    "weight rank": (wrong(weight=W[0], logits=W[0]), ValueError, r"weight.*\[out, in / groups, h, w\].*\[4, 3, 3\]"),
    "weight dtype": (wrong(weight=W.double()), TypeError, "weight.*float32.*float64"),
    "weight device": (wrong(weight=W.to("meta")), RuntimeError, "weight.*cpu.*meta"),
    "logits shape": (wrong(logits=W[:4]), ValueError, r"logits.*\[8, 4, 3, 3\].*\[4, 4, 3, 3\]"),
    "logits dtype": (wrong(logits=W.half()), TypeError, "logits.*float32.*float16"),
    "logits integers": (wrong(logits=W.int()), TypeError, "logits.*int32"),
    "logits device": (wrong(logits=W.to("meta")), RuntimeError, "logits.*cpu.*meta"),
    "bias shape": (wrong(bias=B[:4]), ValueError, r"bias.*\[8\].*\[4\]"),
    "bias dtype": (wrong(bias=B.double()), TypeError, "bias.*float32.*float64"),
    "no bias": (wrong(bias_logits=B), ValueError, "bias_logits.*without a bias"),
    "bias_logits shape": (wrong(bias=B, bias_logits=B[:1]), ValueError, r"bias_logits.*\[8\].*\[1\]"),
    "bias_logits device": (wrong(bias=B, bias_logits=B.to("meta")), RuntimeError, "bias_logits.*cpu.*meta"),
    "groups": (wrong(groups=3), ValueError, "weight.*4 channels in 3 groups"),
    "groups of outputs": (wrong(weight=W[:7, :2], logits=W[:7, :2], groups=2), ValueError, "weight.*2 groups"),
    "groups zero": (wrong(groups=0), ValueError, "groups.*>= 1.*0"),
    "groups float": (wrong(groups=1.0), ValueError, "groups.*int.*1.0"),
    "groups bool": (wrong(groups=True), ValueError, "groups.*int.*True"),
    "same, stride": (wrong(padding="same", stride=2), ValueError, "padding.*'same' with stride 1.*stride"),
    "same, even kernel": (
        wrong(weight=W[..., :2], logits=W[..., :2], padding="same"),
        ValueError,
        "padding.*even total",
    ),
    "padding word": (wrong(padding="full"), ValueError, "padding.*'valid'.*'full'"),
    **{
        f"{name} {value!r}": (wrong(**{name: value}), ValueError, f"{name}.*expected an int")
        for name in ("stride", "padding", "dilation")
        for value in (-1, 1.5, (1, 2, 3), (1, 1.0), (), True, None, torch.tensor(1))
    },
    "stride zero": (wrong(stride=0), ValueError, "stride.*>= 1.*0"),
    "dilation zero": (wrong(dilation=(1, 0)), ValueError, r"dilation.*>= 1.*\(1, 0\)"),
    "kernel too large": (wrong(dilation=4), RuntimeError, "[Kk]ernel size.*input size"),
    **wrong_numbers(partial(ops.masked_conv2d, X, W, W)),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)

    def t(*shapes: tuple[int, ...]) -> torch.Tensor | None:
        """Mostly right: of five tensors at least one is wrong soon enough."""
        return random_tensor(choose, *shapes) if choose.random() < 0.2 else torch.zeros(choose.choice(shapes))

    pair = lambda *usual: choose.choice([*usual] * 5 + [[-1, 1], [1], [], [1, 2, 3], [0, 0], [9, 9]])  # noqa: E731

    def arguments():
        out, kernel = choose.choice([0, 2, 4, 4, 4]), choose.choice([0, 1, 3, 3])
        groups = choose.choice([1, 1, 1, 2, 0, -1, 3])
        weight = (out, 4 // max(groups, 1), kernel, kernel)
        tensors = (
            t((6, 4, 5, 5), (6, 4, 5, 5), (0, 4, 5, 5), (6, 4, 0, 5)),
            t(weight),
            t(weight),
            t((out,)),
            t((out,)),
        )
        geometry = pair([1, 1], [2, 1]), pair([0, 0], [1, 1]), pair([1, 1], [1, 2]), groups
        return (*tensors, random_seed(choose), choose.choice([1, 2, 2, 3, 0, -1, 4]), *geometry)

    def backward(right: bool):
        *tensors, seed, samples, stride, padding, dilation, groups = arguments()
        leaves = [None if t is None or not t.is_floating_point() else t.requires_grad_() for t in tensors]
        run = import_module("fastmod.ops.masked_conv2d")._run
        geometry = stride, padding, dilation, groups
        out = run(*leaves, seed, samples, *geometry, random_tau(choose), choose.choice([0] * 8 + [1, -1]), False, None)
        size = choose.choice([1, 3, 5])
        if choose.random() < 0.7:
            return
        out.backward(torch.zeros_like(out) if right else t((6, 4, size, size), (6, 2, 5, 5), (0, 4, 5, 5)))

    calls = [partial(backward, True), partial(backward, False)]
    fuzzed(choose, calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_masked_conv2d_calls import fuzz; fuzz({seed})")
