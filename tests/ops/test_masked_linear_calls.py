"""masked_linear as torch calls it, and called wrongly."""

from __future__ import annotations

import itertools
import random
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import laid_out, opchecked
from tests.helpers.casts import assert_casts_nothing
from tests.helpers.mask_cases import (
    assert_message,
    fuzzed,
    in_a_process,
    random_needs,
    random_seed,
    random_tau,
    random_tensor,
    wrong_numbers,
)
from tests.helpers.masked_linear import MASKED_LINEAR, draw, layer
from tests.helpers.masked_linear import one_row_limit as one_row_limit

pytestmark = pytest.mark.usefixtures("one_row_limit")


@pytest.mark.usefixtures("backend")
def test_seed_rules() -> None:
    inputs = draw(2, 3, 7, 5)
    torch.manual_seed(4)
    first, second = (ops.masked_linear(*inputs[:3], 2) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.masked_linear(*inputs[:3], 2), first)
    assert not torch.equal(first, second)
    assert torch.equal(*(ops.masked_linear(*inputs[:3], 2, seed=s) for s in (-9, torch.tensor(-9))))


def test_opcheck() -> None:
    x, weight, logits, bias, bias_logits = draw(3, 2, 4, 5)
    permuted, key = [laid_out(t, "permuted") for t in (x, weight, logits)], torch.tensor(3)
    opchecked("masked_linear_forward", *permuted, torch.randn(3, 5), key, 3)
    opchecked("masked_linear_forward", torch.randn(3, 2, 4), weight, logits, None, key, 3)
    grad = laid_out(torch.randn(6, 5), "permuted")
    for needs in ([True, True, True], [False, True, False]):
        opchecked("masked_linear_backward", grad, *permuted, key, 3, 0.5, needs)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shared", ["nothing", "x", "seed", "weight", "logits"])
def test_layers_side_by_side_are_each_as_alone(backend: backends.Backend, dtype: torch.dtype, shared: str) -> None:
    side_by_side(dtype, shared, 3, (2, 5, 36, 33))


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shared"),
    [(torch.float32, "x"), (torch.bfloat16, "nothing"), (torch.float32, "weight"), (torch.float64, "seed")],
    ids=str,
)
def test_layers_side_by_side_in_triton(dtype: torch.dtype, shared: str) -> None:
    with backends.chosen(backends.TRITON):
        side_by_side(dtype, shared, 2, (2, 3, 5, 4))


@pytest.mark.interpreted
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_layers_side_by_side_are_one_launch_in_triton(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """17 outputs and 20 inputs in quads: more than one program for each layer."""
    kernels = ["forward_kernel", "backward_x_kernel", "backward_weight_kernel"]
    launched = backends.watched(monkeypatch, import_module("fastmod.kernels.masked_linear"), *kernels)
    with backends.chosen(backends.TRITON):
        layers = [draw(2, 2, 20, 17)[: 4 if biased else 3] for _ in range(3)]
        stacked = [torch.stack(same).requires_grad_() for same in zip(*layers, strict=True)]
        seeds = torch.tensor([5, -3, 2**62])

        def function(seed, x, weight, logits, bias=None):
            return ops.masked_linear(x, weight, logits, 2, bias=bias, seed=seed)

        out = torch.vmap(function)(seeds, *stacked)
        assert launched == kernels[:1]
        grads = torch.autograd.grad(out, stacked, out.detach() + 1)
        assert launched == kernels
        for i in range(3):
            own = [t[i].detach().requires_grad_() for t in stacked]
            alone = function(seeds[i], *own)
            assert torch.equal(out[i], alone)
            for ours, theirs in zip(grads, torch.autograd.grad(alone, own, alone.detach() + 1), strict=True):
                assert torch.equal(ours[i], theirs)


def side_by_side(dtype: torch.dtype, shared: str, count: int, sizes: tuple[int, int, int, int]) -> None:
    """vmap over stacked parameters: values, masks and gradients bit for bit."""
    copies = [draw(*sizes, dtype) for _ in range(count)]
    seeds = torch.tensor([5, -3, 2**62])[:count]
    x, weight, logits, bias, bias_logits = (torch.stack(each) for each in zip(*copies, strict=True))
    given = {"x": x, "weight": weight, "logits": logits, "bias": bias, "bias_logits": bias_logits, "seed": seeds}
    dims = {name: None if name == shared else 0 for name in given}
    given = {name: value if dims[name] == 0 else value[1] for name, value in given.items()}

    def function(x, weight, logits, bias, bias_logits, seed):
        return ops.masked_linear(x, weight, logits, 2, bias=bias, bias_logits=bias_logits, seed=seed, tau=0.7)

    def gradients(*values):
        return torch.func.grad(lambda *v: function(*v).square().sum(), argnums=(0, 1, 2, 3, 4))(*values)

    order, in_dims = list(given.values()), tuple(dims.values())
    found = torch.vmap(function, in_dims)(*order), *torch.vmap(gradients, in_dims)(*order)
    for i in range(count):
        own = [value if dim is None else value[i] for value, dim in zip(order, in_dims, strict=True)]
        alone = function(*own), *gradients(*own)
        for got, expected in zip(found, alone, strict=True):
            assert torch.equal(got[i], expected)


class Calls(TorchDispatchMode):
    """The kernels that are called, below all transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastmod":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def test_one_call_serves_layers_side_by_side() -> None:
    """Of vmaps inside each other the outer one loops."""
    x, weight, logits = (torch.stack([t, t + 1]).requires_grad_() for t in draw(2, 3, 8, 4)[:3])
    function = partial(ops.masked_linear, samples=2, seed=3)
    with Calls() as calls:
        out = torch.vmap(function)(x, weight, logits)
        torch.autograd.grad(out.sum(), (x, weight, logits))
    assert calls.names == ["masked_linear_forward", "masked_linear_backward"]
    twice = [torch.stack([t, t]).detach() for t in (x, weight, logits)]
    with Calls() as calls:
        nested = torch.vmap(torch.vmap(function))(*twice)
    assert calls.names == ["masked_linear_forward"] * 2
    assert torch.equal(nested, torch.stack([out, out]))


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_two_backwards_and_untouched_inputs(backend: backends.Backend) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 70)]
    copies = [t.detach().clone() for t in inputs]
    out = layer(3)(*inputs)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("tensors", [3, 5])
def test_compile_fullgraph(tensors: int, backend: str) -> None:
    torch._dynamo.reset()
    run = layer(3, tau=0.5)
    with fastmod.use_backend(backend):
        compiled = torch.compile(run, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for rows in (2, 4):  # the second makes the batch dynamic
            inputs = [t.requires_grad_() for t in draw(3, rows, 7, 5)[:tensors]]
            eager, found = run(*inputs), compiled(*inputs)
            torch.testing.assert_close(found, eager)
            torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in (found, eager)])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 5)]
    with fastmod.use_backend(backend):
        expected = layer(3)(*[t.bfloat16() for t in inputs])
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(3)(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [(0, 1, 2, 3), (1, 2, 3), (2,), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 20, 5), (3, 18, 7, 33)], ids=str)
def test_autocast_casts_nothing(low: torch.dtype, wide: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Kernels round what they read: x, weight, logits and, if there are four, a bias."""
    samples, rows, inputs, outputs = sizes
    tensors = draw(samples, rows, inputs, outputs)[: 3 if wide in ((0,), (0, 1, 2)) else 4]

    def op(x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.masked_linear(x, weight, logits, samples, bias=bias, seed=3)

    assert_casts_nothing(op, tensors, low, wide)


def test_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(3, 4, 7, 5)
    expected = layer(3)(*inputs)
    for limit in (4, 3):  # at once, by samples
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        with torch.inference_mode():
            torch.testing.assert_close(layer(3)(*inputs), expected)


def test_backward_by_samples_inside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton: 0)
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 5)]
    out = layer(3)(*inputs)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


X, W, L, B = torch.zeros(6, 4), torch.zeros(5, 4), torch.zeros(5, 4), torch.zeros(5)


CASES = {
    "batch": (lambda: ops.masked_linear(X, W, L, 4), ValueError, r"x.*multiple of 4 samples.*\[6, 4\]"),
    "rank of x": (lambda: ops.masked_linear(X[0], W, L, 2), ValueError, r"x.*\[B, \.\.\., in\].*\[4\]"),
    "x integers": (lambda: ops.masked_linear(X.long(), W, L, 2), TypeError, "x.*int64"),
    "x list": (lambda: ops.masked_linear([1.0], W, L, 2), TypeError, "x.*list"),
    "x sparse": (lambda: ops.masked_linear(X.to_sparse(), W, L, 2), TypeError, "x.*dense"),
    "features": (lambda: ops.masked_linear(X, W[:, :3], L[:, :3], 2), ValueError, r"weight.*in = 4.*\[5, 3\]"),
    "rank of weight": (lambda: ops.masked_linear(X, W[0], L[0], 2), ValueError, r"weight.*\[out, in\].*\[4\]"),
    "weight dtype": (lambda: ops.masked_linear(X, W.double(), L, 2), TypeError, "weight.*float32.*float64"),
    "weight integers": (lambda: ops.masked_linear(X, W.int(), L, 2), TypeError, "weight.*int32"),
    "weight device": (lambda: ops.masked_linear(X, W.to("meta"), L, 2), RuntimeError, "weight.*cpu.*meta"),
    "weight none": (lambda: ops.masked_linear(X, None, L, 2), TypeError, "weight.*NoneType"),
    "logits shape": (lambda: ops.masked_linear(X, W, L[:4], 2), ValueError, r"logits.*\[5, 4\].*\[4, 4\]"),
    "logits transposed": (lambda: ops.masked_linear(X, W, L.T, 2), ValueError, r"logits.*\[5, 4\].*\[4, 5\]"),
    "logits dtype": (lambda: ops.masked_linear(X, W, L.double(), 2), TypeError, "logits.*float32.*float64"),
    "logits integers": (lambda: ops.masked_linear(X, W, L.long(), 2), TypeError, "logits.*int64"),
    "logits device": (lambda: ops.masked_linear(X, W, L.to("meta"), 2), RuntimeError, "logits.*cpu.*meta"),
    "bias shape": (lambda: ops.masked_linear(X, W, L, 2, bias=B[:4]), ValueError, r"bias.*\[out\] = \[5\].*\[4\]"),
    "bias rank": (lambda: ops.masked_linear(X, W, L, 2, bias=W), ValueError, "bias.*out"),
    "bias dtype": (lambda: ops.masked_linear(X, W, L, 2, bias=B.double()), TypeError, "bias.*float32.*float64"),
    "bias device": (lambda: ops.masked_linear(X, W, L, 2, bias=B.to("meta")), RuntimeError, "bias.*cpu.*meta"),
    "no bias": (lambda: ops.masked_linear(X, W, L, 2, bias_logits=B), ValueError, "bias_logits.*without a bias"),
    "bias_logits": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B[:2]),
        ValueError,
        r"bias_logits.*\[5\]",
    ),
    "bias_logits integers": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B.long()),
        TypeError,
        "bias_logits.*int64",
    ),
    "bias_logits device": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B.to("meta")),
        RuntimeError,
        "bias_logits.*cpu.*meta",
    ),
    **wrong_numbers(partial(ops.masked_linear, X, W, L)),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)
    raw = torch.ops.fastmod
    t = lambda *shapes: random_tensor(choose, *shapes)  # noqa: E731

    def arguments():
        out = choose.choice([0, 1, 5, 5, 5])
        matrix, vector = [(out, 4)] * 5 + [(5, 4), (5, 0)], [(out,)] * 5 + [(5,)]
        samples = choose.choice([1, 2, 2, 3, 0, -1, 4])
        tensors = (t((6, 4), (6, 4), (0, 4), (6, 0)), t(*matrix), t(*matrix), t(*vector), t(*vector))
        return (*tensors, random_seed(choose), samples), t((6, out), (6, out), (6, 5), (0, 5))

    def product():
        (x, weight, logits, *_, seed, samples), grad = arguments()
        raw.masked_linear_forward(
            x, weight, logits, t((max(samples, 0), 5), (max(samples, 0), 1), (2, 5)), seed, samples
        )
        raw.masked_linear_backward(grad, x, weight, logits, seed, samples, random_tau(choose), random_needs(choose)[:3])

    def whole():
        (*tensors, seed, samples), grad = arguments()
        leaves = [None if t is None or not t.is_floating_point() else t.requires_grad_() for t in tensors]
        wrapped = MASKED_LINEAR._run
        first = choose.choice([0] * 8 + [1, -1])
        wrapped(*leaves, seed, samples, random_tau(choose), first, False, None).backward(grad)

    calls = [whole, product]
    fuzzed(choose, calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_masked_linear_calls import fuzz; fuzz({seed})")


def test_near_misses_of_the_raw_ops() -> None:
    """One argument of a right call made wrong: always an error, never a result."""
    raw, key = torch.ops.fastmod, torch.tensor(1)
    forward, grad, tail = [X, W, L, torch.zeros(2, 5), key, 2], torch.zeros(6, 5), (1.0, [True] * 3)
    raw.masked_linear_forward(*forward)
    raw.masked_linear_backward(grad, X, W, L, key, 2, *tail)
    wrong = {i: [t[:-1], t.double(), t.unsqueeze(0), t.new_zeros(0)] for i, t in enumerate(forward[:4])}
    wrong |= {0: [X[:5], X.double(), X[:, :3], X[0]], 4: [torch.tensor(1.0), torch.tensor([1])], 5: [0, -1, 4]}
    for index, values in wrong.items():
        for value in values:
            changed = [*forward[:index], value, *forward[index + 1 :]]
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.masked_linear_forward(*changed)
            if index != 3:
                with pytest.raises((ValueError, TypeError, RuntimeError)):
                    raw.masked_linear_backward(grad, *changed[:3], *changed[4:], *tail)
    for value in (grad[:5], grad[:, :4], grad.double(), grad.view(6, 1, 5), grad.view(5, 6)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            raw.masked_linear_backward(value, X, W, L, key, 2, *tail)
    with pytest.raises(RuntimeError, match="meta"):
        raw.masked_linear_forward(X, W, L.to("meta"), None, key, 2)


def test_gradients_only_where_they_are_required() -> None:
    values = draw(3, 4, 7, 70)
    everything = [t.clone().requires_grad_() for t in values]
    grad = torch.randn(12, 70)
    layer(3)(*everything).backward(grad)
    for wanted in itertools.product([False, True], repeat=5):
        inputs = [t.clone().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        out = layer(3)(*inputs)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(grad)
        for tensor, other, want in zip(inputs, everything, wanted, strict=True):
            assert (tensor.grad is None) != want
            assert not want or torch.equal(tensor.grad, other.grad)
        # The kernel itself computes nothing that nobody asked for.
        found = torch.ops.fastmod.masked_linear_backward(grad, *values[:3], torch.tensor(11), 3, 1.0, wanted[:3])
        assert [t.numel() for t in found] == [t.numel() if w else 0 for t, w in zip(values, wanted[:3], strict=False)]


def no_outputs() -> None:
    x, weight, logits, bias, bias_logits = (t.requires_grad_() for t in draw(2, 2, 3, 0))
    out = layer(2)(x, weight, logits, bias, bias_logits)
    assert out.shape == (4, 0)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x)) and weight.grad.shape == (0, 3)


@pytest.mark.slow
def test_no_outputs() -> None:
    in_a_process("from tests.ops.test_masked_linear_calls import no_outputs; no_outputs()")


@pytest.mark.parametrize("sizes", [(3, 0, 4, 5), (3, 2, 0, 5)], ids=["batch", "in"])
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    inputs = [t.requires_grad_() for t in draw(*sizes)]
    out = layer(3)(*inputs)
    assert out.shape == (3 * sizes[1], 5)
    out.sum().backward()
    for tensor in inputs[:3]:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
    with fastmod.use_backend("reference"):
        torch.testing.assert_close(out, layer(3)(*inputs))
