"""sample_mask as torch calls it, and called wrongly."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers.agreement import laid_out, opchecked
from tests.helpers.mask_cases import (
    assert_message,
    fuzzed,
    in_a_process,
    random_seed,
    random_tau,
    random_tensor,
    wrong_numbers,
)
from tests.ops.test_sample_mask import logits_of


def test_opcheck() -> None:
    logits, weight, seed = laid_out(logits_of((4, 5, 3)), "permuted"), torch.randn(4, 5, 3), torch.tensor(3)
    opchecked("sample_mask_forward", logits, None, 0, 3, seed, 1)
    opchecked("sample_mask_forward", logits, laid_out(weight, "permuted"), 2, 3, seed, 1)
    grad = laid_out(torch.randn(3, 4, 5, 3), "permuted")
    opchecked("sample_mask_backward", grad, logits, None, 0, 3, seed, 1, 0.5, None)
    opchecked("sample_mask_backward", grad, logits, laid_out(weight, "permuted"), 2, 3, seed, 1, 1.0, weight)


@pytest.mark.usefixtures("backend")
def test_two_backwards_and_untouched_inputs() -> None:
    weight, logits = torch.randn(33, 7, requires_grad=True), logits_of((33, 7)).requires_grad_()
    copies = weight.detach().clone(), logits.detach().clone()
    out = ops.masked_weight(weight, logits, 3, seed=1)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, (weight, logits), grad, retain_graph=True)
    second = torch.autograd.grad(out, (weight, logits), grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and torch.equal(weight, copies[0]) and torch.equal(logits, copies[1])


def test_fifty_equal_repeats() -> None:
    weight, logits = torch.randn(93, 101, requires_grad=True), logits_of((93, 101)).requires_grad_()
    results = []
    for _ in range(50):
        out = ops.masked_weight(weight, logits, 4, seed=1, tau=0.5)
        results.append([out, *torch.autograd.grad(out.sum(), (weight, logits))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_compile_fullgraph(tau: float, backend: str) -> None:
    torch._dynamo.reset()

    def function(w, t):
        return ops.sample_mask(t, 3, 5, tau), ops.masked_weight(w, t, 3, 6, tau)

    with fastmod.use_backend(backend):
        compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for shape in ((6, 5), (9, 5)):  # the second makes the size dynamic
            inputs = [torch.randn(shape, requires_grad=True), logits_of(shape).requires_grad_()]
            eager, found = function(*inputs), compiled(*inputs)
            assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
            grads = [torch.autograd.grad([o.sin().sum() for o in outs], inputs) for outs in (eager, found)]
            torch.testing.assert_close(*grads)


def test_compiled_layers_draw_from_torchs_generator() -> None:
    torch._dynamo.reset()
    logits = logits_of((40, 5))
    compiled = torch.compile(lambda t: ops.sample_mask(t, 2), fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(logits), compiled(logits)
    torch.manual_seed(1)
    assert torch.equal(compiled(logits), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast_leaves_masks_alone(backend: str) -> None:
    logits = logits_of((6, 5)).requires_grad_()
    expected = ops.sample_mask(logits, 3, seed=1)
    with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        masks = ops.sample_mask(logits, 3, seed=1)
    assert masks.dtype == torch.float32 and torch.equal(masks, expected)
    masks.sum().backward()
    assert logits.grad.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- bad input

L = torch.zeros(3, 4)
CASES = {
    "integers": (lambda: ops.sample_mask(L.long(), 2), TypeError, "logits.*int64"),
    "complex": (lambda: ops.sample_mask(L.to(torch.complex64), 2), TypeError, "logits.*complex64"),
    "not a tensor": (lambda: ops.sample_mask([1.0], 2), TypeError, "logits.*list"),
    "sparse": (lambda: ops.sample_mask(L.to_sparse(), 2), TypeError, "logits.*dense"),
    **wrong_numbers(partial(ops.sample_mask, L)),
    "weight shape": (lambda: ops.masked_weight(L[:2], L, 2), ValueError, r"weight.*\[3, 4\].*\[2, 4\]"),
    "weight rank": (lambda: ops.masked_weight(L[0], L, 2), ValueError, "weight.*shape of logits"),
    "weight dtype": (lambda: ops.masked_weight(L.double(), L, 2), TypeError, "weight.*float32.*float64"),
    "weight integers": (lambda: ops.masked_weight(L.int(), L, 2), TypeError, "weight.*int32"),
    "weight device": (lambda: ops.masked_weight(L.to("meta"), L, 2), RuntimeError, "weight.*cpu.*meta"),
    "weight list": (lambda: ops.masked_weight([1.0], L, 2), TypeError, "weight.*list"),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)
    raw = torch.ops.fastmod
    t = lambda: random_tensor(choose, (3, 4), (0, 4), ())  # noqa: E731
    number = lambda *odd: choose.choice([1, 2, 3, *odd])  # noqa: E731
    tail = lambda: (number(0, -1, 2**61), number(0, -1), random_seed(choose), number(0, -1, 2**33))  # noqa: E731
    grad = lambda: random_tensor(choose, (2, 3, 4), (1, 3, 4), (3, 0, 4), (2,))  # noqa: E731
    calls = [
        lambda: raw.sample_mask_forward(t(), t(), *tail()),
        lambda: raw.sample_mask_backward(grad(), t(), t(), *tail(), random_tau(choose), t()),
    ]
    fuzzed(choose, calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_sample_mask_calls import fuzz; fuzz({seed})")


def test_near_misses_of_the_raw_ops() -> None:
    """One argument of a right call made wrong: always an error, never a result."""
    raw, key = torch.ops.fastmod, torch.tensor(1)
    forward, backward = [L, L, 0, 2, key, 1], [torch.zeros(2, 3, 4), L, L, 0, 2, key, 1, 1.0, L]
    raw.sample_mask_forward(*forward)
    raw.sample_mask_backward(*backward)
    with pytest.raises(RuntimeError, match="meta"):
        raw.sample_mask_forward(L, L.to("meta"), 0, 2, key, 1)
    wrong = {
        0: [L[:2], L.double(), L.long(), torch.zeros(3, 3, 4)],
        1: [L[0], L.double(), L.unsqueeze(0)],
        2: [-1],
        3: [0, -1],
        4: [torch.tensor(1.0), torch.tensor([1])],
        5: [-1],
    }
    for index, values in wrong.items():
        for value in values:
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.sample_mask_forward(*forward[:index], value, *forward[index + 1 :])
    shifted = {index + 1: values for index, values in wrong.items()}
    for index, values in {**shifted, 0: [L, torch.zeros(3, 3, 4)], 7: [0.0], 8: [L[:2]]}.items():
        for value in values:
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.sample_mask_backward(*backward[:index], value, *backward[index + 1 :])
