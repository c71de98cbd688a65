"""smfr: a stack in one node against the same layers one by one, and against fp64."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import assert_agrees, laid_out, opchecked, run
from tests.helpers.casts import Casts
from tests.ops.test_mfnnr import GRAD_FACTOR, linears

COUNTS = (3, 4, 4, 2)


def draw(batch: int, d: int = 5, hidden: int = 13, layers: int = 1, counts=COUNTS, context=True, dtype=torch.float32):
    """``[x, taus..., params...]``"""
    params = []
    for m, n in pairwise(counts):
        params += linears([m * d, *[hidden] * layers, m * n], dtype)
        params += linears([(n + m * context) * d, *[hidden] * layers, n * d + n], dtype)
    taus = [torch.tensor(0.8, dtype=dtype), torch.tensor(1.1, dtype=dtype), torch.tensor(0.6, dtype=dtype)]
    return [torch.randn(batch, counts[0], d, dtype=dtype), *taus[: len(counts) - 1], *params]


def call(depth: int = 3, fnn_tensors: int = 4, **options):
    def function(x, *tensors):
        taus, params = list(tensors[:depth]), tensors[depth:]
        cut = [params[i : i + fnn_tensors] for i in range(0, len(params), fnn_tensors)]
        pairs = list(zip(cut[::2], cut[1::2], strict=True))
        result = ops.smfr(x, pairs, taus=taus, seeds=list(range(depth)), threshold=0.5, **options)
        return result.out, result.penalty

    return function


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["softmax", "gumbel", "argmax"])
@pytest.mark.parametrize("batch", [1, 70, 128])
def test_matches_fp64(batch: int, mode: str, context: bool) -> None:
    function = call(mode=mode, context=context)
    draws = 8 if batch > 1 else 16
    assert_agrees(function, lambda: draw(batch, context=context), draws=draws, grad_factor=GRAD_FACTOR)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["softmax", "gumbel", "argmax"])
def test_every_backend_matches_fp64(backend: backends.Backend, mode: str, context: bool) -> None:
    function = call(mode=mode, context=context)
    # The gradient of one tau is a single number: in few draws plain PyTorch's is right by luck.
    draws = 12 if backend is backends.TRITON else 8
    assert_agrees(function, lambda: draw(3, context=context), draws=draws, grad_factor=GRAD_FACTOR)


@pytest.mark.usefixtures("backend")
def test_equals_single_layers_bit_for_bit() -> None:
    x, t0, t1, t2, *params = draw(9)
    out, penalty = call()(x, t0, t1, t2, *params)
    total = 0.0
    for i, tau in enumerate((t0, t1, t2)):
        layer = params[8 * i : 8 * i + 8]
        x, one, *_ = ops.mfnnr(x, layer[:4], layer[4:], tau=tau, threshold=0.5)
        total += one.item()
    assert torch.equal(out, x)
    assert penalty.item() == pytest.approx(total, rel=1e-6)


ON_GPUS = pytest.mark.parametrize("backend", backends.parameters("native"), indirect=True)


@ON_GPUS
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (33, {"counts": (6, 8, 5), "d": 10, "hidden": 100}),  # three tiles of rows; weights copied four at a time
        (17, {"counts": (2, 3, 2), "d": 7, "hidden": 128}),
        (5, {"counts": (3, 4, 2), "layers": 3, "hidden": 9}),  # hidden layers by turns in two places
        (4, {"counts": (3, 4, 2), "layers": 0}),
        (4, {"counts": (3, 2, 2), "hidden": 130}),  # too wide for one launch
        (2, {"counts": (20, 3), "d": 3}),  # 60 logits, M in one go
    ],
    ids=str,
)
def test_stacks_in_one_launch(backend: backends.Backend, batch: int, options: dict) -> None:
    depth, tensors = len(options["counts"]) - 1, 2 * options.get("layers", 1) + 2
    draws = 2 if backend is backends.TRITON else 8
    assert_agrees(call(depth, tensors), lambda: draw(batch, **options), draws=draws, grad_factor=GRAD_FACTOR)


@ON_GPUS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_in_one_launch(backend: backends.Backend, dtype: torch.dtype) -> None:
    assert_agrees(call(), lambda: [t.to(dtype) for t in draw(9)])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "wide"), [(12, "all"), (12, "params"), (12, "x"), (130, "all"), (130, "params")])
def test_autocast_casts_nothing(backend: backends.Backend, low: torch.dtype, hidden: int, wide: str) -> None:
    """Kernels round what they read: results are those of casts, and so are gradients before they were rounded."""
    with torch.random.fork_rng():
        x, *rest = draw(5 if backend is backends.TRITON and hidden > 128 else 19, 4, hidden, counts=(3, 4, 2))
    x, taus, params = x if wide != "params" else x.to(low), rest[:2], rest[2:]
    params = params if wide != "x" else [p.to(low) for p in params]
    found = []
    for tensors in ([x, *taus, *params], [x.to(low), *taus, *[p.to(low) for p in params]]):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        with torch.autocast(x.device.type, low), Casts() as casts:
            results = out, penalty = call(2)(*leaves)
        with torch.random.fork_rng():
            given = torch.randn_like(out), torch.ones_like(penalty)
        with casts:
            grads = torch.autograd.grad(results, leaves, given)
        assert casts.seen == []
        assert [g.dtype for g in grads] == [t.dtype for t in tensors]
        found.append([out, penalty, *[g.to(low) for g in grads]])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "mixed"), [(12, False), (12, True), (130, False), (130, True)])
def test_temperatures_of_16_bits_cast_nothing(
    backend: backends.Backend, low: torch.dtype, hidden: int, mixed: bool
) -> None:
    """They are read and their gradients written as they are. One of fp32 beside them, which no net has, may cast."""
    with torch.random.fork_rng():
        x, *rest = draw(5 if backend is backends.TRITON and hidden > 128 else 19, 4, hidden, counts=(3, 4, 2))
    taus, params = [t.to(low) for t in rest[:2]], [p.to(low) for p in rest[2:]]
    found = []
    for own in ([taus[0], taus[1].float() if mixed else taus[1]], [t.float() for t in taus]):
        leaves = [t.detach().clone().requires_grad_() for t in (x.to(low), *own, *params)]
        with Casts() as casts:
            results = call(2)(*leaves)
            grads = torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results])
        assert casts.seen == [] or mixed
        assert [g.dtype for g in grads] == [t.dtype for t in leaves]
        found.append([*results, *[g.to(low) for g in grads]])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_second_derivative_under_autocast() -> None:
    """Of what the kernels rounded: as that of casts, up to the rounding of gradients."""
    found = []
    for cast in (False, True):
        torch.manual_seed(0)
        leaves = [t.requires_grad_() for t in draw(5, counts=(3, 2))]
        with torch.autocast("cpu", torch.bfloat16):
            tensors = [leaves[0].bfloat16(), leaves[1], *[t.bfloat16() for t in leaves[2:]]] if cast else leaves
            out, penalty = call(1)(*tensors)
        grads = torch.autograd.grad(out.float().sin().sum() + penalty, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


@pytest.mark.interpreted
@pytest.mark.parametrize(("depth", "hidden"), [(1, 3), (3, 3), (10, 3), (3, 130)])
def test_launches_in_triton(monkeypatch: pytest.MonkeyPatch, depth: int, hidden: int) -> None:
    module = import_module("fastmod.kernels.smfr")
    kernels = ["forward_kernel", "penalty_kernel", "backward_kernel", "weight_kernel"]
    launched = backends.watched(monkeypatch, module, *kernels)
    with backends.chosen(backends.TRITON):
        x, *rest = draw(17, 2, hidden, counts=(2,) * (depth + 1))
        params = [p.requires_grad_() for p in rest[min(depth, 3) :]]
        layers = [(params[i : i + 4], params[i + 4 : i + 8]) for i in range(0, len(params), 8)]
        found = ops.smfr(x, layers, threshold=0.5, mode="gumbel")
        assert launched == (kernels[:2] if hidden < 130 else [])
        (found.out.sum() + found.penalty).backward()
        assert launched == (kernels if hidden < 130 else [])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [3, 129])
def test_a_stack_too_deep_for_one_launch(hidden: int) -> None:
    inputs = draw(2, 2, hidden, counts=(2,) * 21)
    x, *params = (t.requires_grad_() for t in (inputs[0], *inputs[4:]))
    layers = [(params[i : i + 4], params[i + 4 : i + 8]) for i in range(0, len(params), 8)]
    found = ops.smfr(x, layers, threshold=0.5)
    expected, total = x, 0.0
    for route, update in layers:
        expected, one, *_ = ops.mfnnr(expected, route, update, threshold=0.5)
        total = total + one
    assert torch.equal(found.out, expected)
    grads = [
        torch.autograd.grad(out.sum() + p, [x, *params]) for out, p in ((found.out, found.penalty), (expected, total))
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


WIDE = {
    "one hidden layer": (17, {"counts": (3, 4, 2), "hidden": 136, "d": 8}),  # rows of 16 bytes
    "three": (33, {"counts": (2, 3, 1), "hidden": 131, "layers": 3, "d": 3}),
    "no context": (5, {"counts": (2, 3, 2), "hidden": 129, "context": False}),
    "one wide layer of the two": (3, {"counts": (2, 60, 1), "d": 4}),  # 240 features in the second
}


@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
@pytest.mark.parametrize("case", WIDE)
def test_wide_stacks(backend: backends.Backend, case: str, mode: str) -> None:
    """The layers one by one, which are compared with fp64 in test_mfnnr.py; bit for bit unless one of them would have
    fitted into three launches alone."""
    batch, options = WIDE[case]
    batch = min(batch, 17) if backend is backends.TRITON else batch  # two tiles of rows
    x, t0, t1, *params = draw(batch, **options)
    tensors, context = 2 * options.get("layers", 1) + 2, options.get("context", True)
    inputs = [t.requires_grad_() for t in (x, t0, t1, *params)]
    out, penalty = call(2, tensors, mode=mode, context=context)(*inputs)
    grads = torch.autograd.grad(out.square().sum() + penalty, inputs)
    expected, total = x, 0.0
    for i, tau in enumerate((t0, t1)):
        layer = params[2 * tensors * i : 2 * tensors * (i + 1)]
        expected, one, *_ = ops.mfnnr(
            expected, layer[:tensors], layer[tensors:], tau=tau, seed=i, mode=mode, context=context, threshold=0.5
        )
        total = total + one
    alone = torch.autograd.grad(expected.square().sum() + total, inputs)
    if case == "one wide layer of the two":
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(out, expected)
    torch.testing.assert_close(penalty, total, rtol=1e-5, atol=0)
    for got, want in zip(grads, alone, strict=True):  # the CPU keeps more digits between the layers
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.usefixtures("isa")
def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in draw(2, 2, 3, 1, (2, 3, 1), dtype=torch.float64)]
    assert torch.autograd.gradcheck(call(2), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0, 1])
def test_opcheck(mode: int) -> None:
    x, t0, t1, t2, *params = draw(6)
    x, params = laid_out(x, "permuted"), [laid_out(p, "permuted") for p in params]
    seeds = [torch.tensor(i) for i in range(3)] if mode else []
    for taus in ([t0, t1, t2], []):
        arguments = (x, params, 4, taus, seeds, mode, True, 0.5)
        opchecked("smfr_forward", *arguments, False)
        opchecked("smfr_forward", *arguments, True, same_twice=False)  # activations are padded
        out, penalty, *_, saved = torch.ops.fastmod.smfr_forward(*arguments, True)
        opchecked("smfr_backward", laid_out(out, "permuted"), penalty, *arguments, saved, True, True)
        opchecked("smfr_backward", None, penalty, *arguments, saved, False, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision(dtype: torch.dtype) -> None:
    # Between the layers the kernel keeps fp32 where the reference rounds.
    assert_agrees(call(), lambda: [t.to(dtype) for t in draw(9)])


@pytest.mark.parametrize("frozen", ["x", "params"])
def test_partial_gradients(frozen: str) -> None:
    inputs = draw(70)

    def grads(backend: str):
        leaves = [t.clone().requires_grad_() for t in inputs]
        for leaf in leaves[:1] if frozen == "x" else leaves[4:]:
            leaf.requires_grad_(False)
        with fastmod.use_backend(backend):
            call()(*leaves)[0].sum().backward()
        return [t.grad for t in leaves]

    for ours, expected in zip(grads("native"), grads("reference"), strict=True):
        assert (ours is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_empty_batch_repeats_and_threads() -> None:
    results = run(call(), draw(0), [torch.zeros(0, 2, 5), torch.ones(())], "native")
    assert all(not r.any() for r in results)
    inputs, grads = draw(200), [torch.randn(200, 2, 5), torch.ones(())]
    expected = run(call(), inputs, grads, "native")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for _ in range(17):
                found = run(call(), inputs, grads, "native")
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_messages() -> None:
    x, *_ = draw(2)
    route, update = linears([15, 6], torch.float32), linears([25, 12], torch.float32)
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend):
            with pytest.raises(ValueError, match="layers: expected at least one"):
                ops.smfr(x, [])
            with pytest.raises(ValueError, match=r"layers\[1\]\.route\[0\].*in = 10"):
                ops.smfr(x, [(route, update), (route, update)])
            with pytest.raises(ValueError, match=r"taus.*1, got 2"):
                ops.smfr(x, [(route, update)], taus=[torch.tensor(1.0)] * 2)
            with pytest.raises(ValueError, match=r"seeds.*1, got 2"):
                ops.smfr(x, [(route, update)], mode="gumbel", seeds=[1, 2])
            with pytest.raises(ValueError, match="one number of layers"):
                ops.smfr(x, [(route, linears([25, 3, 12], torch.float32))])
