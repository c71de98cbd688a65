"""mfnnr: one node against the composition of its parts, in fp64, in every mode and layout."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked, run

module = import_module("fastmod.ops.mfnnr")  # the package's attribute of this name is the function
Sizes = tuple[int, int, int, int, int, int]  # batch, M, N, D, hidden, layers
# A gradient passes up to nine products, whose factors multiply its error: among the draws one stands out by far, in the
# gradient of tau most of all, and whether plain PyTorch rounds well in just that one is luck. Outputs keep to 2.
GRAD_FACTOR = 3.0
SHAPES: list[Sizes] = [
    (128, 6, 8, 10, 100, 1),
    (1, 1, 1, 1, 3, 1),
    (70, 3, 2, 5, 13, 2),
    (33, 2, 3, 4, 70, 3),
    (9, 2, 3, 4, 5, 0),
]


def linears(widths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    found = []
    for i, o in pairwise(widths):
        found += [torch.randn(o, i, dtype=dtype) / i**0.5, torch.randn(o, dtype=dtype)]
    return found


def draw(sizes: Sizes, context: bool = True, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], int]:
    """``[x, tau, *route, *update]`` and the number of route tensors."""
    b, m, n, d, hidden, layers = sizes
    route = linears([m * d, *[hidden] * layers, m * n], dtype)
    update = linears([(n + m * context) * d, *[hidden] * layers, n * d + n], dtype)
    return [torch.randn(b, m, d, dtype=dtype), torch.tensor(0.8, dtype=dtype), *route, *update], len(route)


def call(route: int, **options):
    def function(x, tau, *params):
        return tuple(ops.mfnnr(x, params[:route], params[route:], tau=tau, seed=5, **options))

    return function


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["softmax", "gumbel", "argmax"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_matches_fp64(sizes: Sizes, mode: str, context: bool) -> None:
    route = draw(sizes, context)[1]
    function = call(route, mode=mode, context=context, threshold=0.5)
    assert_agrees(function, lambda: draw(sizes, context)[0], grad_factor=GRAD_FACTOR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    sizes = (9, 3, 2, 4, 7, 1)
    function = call(draw(sizes)[1], threshold=0.5)
    assert_agrees(function, lambda: [t.to(dtype) for t in draw(sizes)[0]], grad_factor=GRAD_FACTOR)
    inputs = [t.to(dtype) for t in draw(sizes)[0]]
    out, penalty, logits, gate = function(*inputs)
    assert out.dtype == logits.dtype == gate.dtype == dtype
    assert penalty.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# ------------------------------------------------------------------------------------------------- on every backend


class Net(NamedTuple):
    """An MFNNR whose two FNNs may have layers of their own."""

    lead: tuple[int, ...] = (5,)
    m: int = 3
    n: int = 4
    d: int = 5
    route: tuple[int, ...] = (12,)
    update: tuple[int, ...] = (12,)
    context: bool = True
    dtype: torch.dtype = torch.float32
    scale: float = 1.0  # of x

    def id(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items() if v != self._field_defaults[k])

    def call(self, **options):
        return call(2 * len(self.route) + 2, context=self.context, **{"threshold": 0.5, **options})

    def draw(self) -> list[torch.Tensor]:
        """``[x, tau, *route, *update]``"""
        m, n, d = self.m, self.n, self.d
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        params = linears([m * d, *self.route, m * n], torch.float32)
        params += linears([(n + m * self.context) * d, *self.update, n * d + n], torch.float32)
        x = torch.randn(*self.lead, m, d) * self.scale
        return [x.to(self.dtype), torch.tensor(0.6, dtype=wide), *(p.to(self.dtype) for p in params)]

    def check(self, *, layout: str = "contiguous", tau: bool = True, **options) -> None:
        def inputs():
            x, temperature, *params = self.draw()
            kept = params if layout == "expanded" else [laid_out(p, layout) for p in params]
            return [laid_out(x, layout), *([temperature] if tau else []), *kept]

        function = self.call(**options)
        if options.get("threshold", 0.5) is None:  # whether a penalty of zero carries a gradient is not told
            whole, function = function, lambda *inputs: whole(*inputs)[::2]
        # The gradient of tau is one sum over the whole batch: in two draws plain PyTorch's is right by luck. Those of
        # layers up to 128 take longer in the interpreter, and have more draws in test_smfr.py.
        wide = max((*self.route, *self.update), default=0) > 128
        assert_agrees(
            function if tau else lambda x, *params: function(x, 0.7, *params),
            inputs,
            draws=8 if tau and wide and backends.current() is backends.TRITON else None,
            grad_factor=GRAD_FACTOR if backends.current() in backends.NATIVE else 2.0,
            factors={1: GRAD_FACTOR} if tau and backends.current() is not backends.CUDA_HOST else None,
            scales={1: self.scale * torch.Size(self.lead).numel() * self.n} if tau else None,
            grad_layout=layout,
        )


#: Widths beyond 128 leave the fused CUDA and Triton kernels for a product per layer.
NETS = [
    Net(route=(), update=()),
    Net(route=(7, 9, 5), update=(7, 9, 5)),
    Net(route=(6, 5, 4, 3), update=(6, 5, 4, 3)),
    Net(route=(100,), update=(100,)),
    Net(route=(128,), update=(128,)),
    Net(route=(130,), update=(130,)),
    Net(route=(140, 7), update=(140, 7)),
    Net(route=(150, 130), update=(150, 130), context=False),
    Net((1,), 1, 1, 1, (1,), (1,)),
    Net((1,), 1, 1, 1, (), ()),
    Net((2,), 5, 3, 40),
    Net((2, 3, 3)),
    Net(()),
    Net((0,)),
    Net((0,), route=(130,), update=(130,)),
    Net((17,), route=(9,), update=(6, 7)),
    Net((17,), route=(9,), update=(6, 7), context=False),
    Net((17,), route=(130,), update=(140, 3)),
    Net((33,), 3, 2, 8, (136,), (72, 144, 16)),  # rows of 16 bytes, several tiles
    Net((2,), 35, 2, 3, (129,), ()),
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("net", NETS, ids=Net.id)
def test_nets(net: Net) -> None:
    net.check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", ["softmax", "gumbel", "argmax"])
@pytest.mark.parametrize("context", [True, False])
def test_modes(mode: str, context: bool) -> None:
    Net(context=context).check(mode=mode)
    Net(context=context).check(mode=mode, tau=False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["softmax", "gumbel", "argmax"])
def test_modes_of_wide_layers(mode: str, context: bool) -> None:
    Net((18,), route=(130,), update=(129, 9), context=context).check(mode=mode)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [(9,), (130,), (136, 132)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_on_every_backend(dtype: torch.dtype, hidden: tuple[int, ...]) -> None:
    Net(route=hidden, update=hidden, dtype=dtype).check(mode="gumbel")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize("threshold", [None, 0.0, 1.0])
def test_thresholds(threshold: float | None, hidden: tuple[int, ...]) -> None:
    Net(route=hidden, update=hidden).check(threshold=threshold)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_layouts(hidden: tuple[int, ...], layout: str) -> None:
    Net(route=hidden, update=hidden).check(layout=layout, tau=False)


#: More rows, columns and blocks than a tile of the CUDA kernels has.
LARGER = [
    *[
        (Net((33,), 6, 8, 10, (100,), (100,), dtype=dtype), mode)
        for dtype in (torch.float32, torch.float64)
        for mode in ("softmax", "gumbel", "argmax")
    ],
    (Net((16,), 5, 13, 11, (128, 1), ()), "gumbel"),  # 156 outputs: two chunks of columns
    (Net((5,), 40, 2, 3, (), (128, 128, 128), dtype=torch.float64), "softmax"),  # M in two chunks
]


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize(("net", "mode"), LARGER, ids=lambda value: value if isinstance(value, str) else value.id())
def test_larger_nets(backend: backends.Backend, net: Net, mode: str) -> None:
    net.check(mode=mode, threshold=1.0)


# The CPU's kernels are not held to this: logits near 10,000 make one rounding decide on the softmax, and their errors
# reach 2.5 times those of plain PyTorch. CUDA: tests/gpu/test_cuda_host.py.
@pytest.mark.interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_large_values_in_triton(hidden: tuple[int, ...]) -> None:
    with backends.chosen(backends.TRITON):
        Net(route=hidden, update=hidden, scale=1e4).check(threshold=20.0, tau=False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_not_finite_stays_in_its_batch_element(hidden: tuple[int, ...], value: float) -> None:
    net = Net((17,), route=hidden, update=hidden)
    inputs = net.draw()
    clean = net.call()(*inputs)[0]
    inputs[0][4, 1, 2] = value
    out, penalty, *_ = net.call()(*inputs)
    with fastmod.use_backend("reference"):
        expected = net.call()(*inputs)
    assert torch.equal(out.isfinite(), expected[0].isfinite()) and penalty.isfinite() == expected[1].isfinite()
    rest = [i for i in range(17) if i != 4]
    assert torch.equal(out[rest], clean[rest])


def kernel_arguments(net: Net, mode: int = 1, threshold: float = 0.5):
    x, tau, *params = net.draw()
    cut = 2 * len(net.route) + 2
    return x, params[:cut], params[cut:], tau, 1.0, torch.tensor(99), mode, net.context, threshold


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize("used", ["out", "penalty", "both"])
def test_kernels_compute_only_what_is_needed(used: str, hidden: tuple[int, ...]) -> None:
    """The same bits with and without the others; nothing that is handed over is written."""
    arguments = kernel_arguments(Net(route=hidden, update=hidden))
    x, route, update, *_ = arguments
    forward, backward = backends.kernel("mfnnr_forward"), backends.kernel("mfnnr_backward")
    *values, saved = forward(*arguments, True)
    for got, fake in zip((*values, saved), module.fake_forward(*arguments, True), strict=True):
        assert (got.shape, got.dtype) == (fake.shape, fake.dtype)
    *again, nothing = forward(*arguments, False)
    assert all(map(torch.equal, values, again)) and nothing.numel() == 0
    grads = (torch.randn(5, 4, 5) if used != "penalty" else None, torch.tensor(0.3) if used != "out" else None)
    handed = [x, *route, *update, saved, *(g for g in grads if g is not None)]
    before = [t.clone() for t in handed]
    full = backward(*grads, *arguments, saved, True, True)
    assert len(full) == 2 + len(route) + len(update)
    for need_x, need_params in ((True, False), (False, True), (False, False)):
        got_x, got_tau, *got_params = backward(*grads, *arguments, saved, need_x, need_params)
        assert torch.equal(got_x, full[0]) if need_x else got_x.numel() == 0
        assert torch.equal(got_tau, full[1])
        assert len(got_params) == (len(full) - 2) * need_params and all(map(torch.equal, got_params, full[2:]))
    assert all(map(backends.same_bits, handed, before))  # padding of what was saved may be NaN


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_kernels_without_any_gradient(hidden: tuple[int, ...]) -> None:
    arguments = kernel_arguments(Net(route=hidden, update=hidden))
    *_, saved = backends.kernel("mfnnr_forward")(*arguments, True)
    found = backends.kernel("mfnnr_backward")(None, None, *arguments, saved, True, True)
    assert all(not t.any() for t in found)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("hidden", [(12,), (130,)])
def test_repeats_are_bit_equal(hidden: tuple[int, ...]) -> None:
    net = Net(route=hidden, update=hidden)
    inputs, grads = net.draw(), [torch.randn(5, 4, 5), torch.ones(()), torch.randn(5, 3, 4), torch.randn(5, 4)]
    results = [run(net.call(mode="gumbel"), inputs, grads) for _ in range(3)]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.interpreted
@pytest.mark.parametrize("layers", [1, 2])
def test_launches_of_wide_layers_in_triton(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """2 L + 4 and the sum of the penalty's parts forward, 2 L + 6 backward, in bf16 as in fp32: no casts, no copies, no
    products of torch's."""
    names = {
        "mfnnr": ("linear_kernel", "linear_backward_kernel", "weights_kernel"),
        "multiplex": ("tiled_forward_kernel", "backward_logits_kernel", "backward_blocks_kernel"),
        "gated_residual": ("forward_kernel", "backward_kernel"),
    }
    kernels = {op: import_module(f"fastmod.kernels.{op}") for op in names}
    launched = [backends.watched(monkeypatch, kernels[op], *own) for op, own in names.items()]
    by_torch: set[str] = set()
    # But for copy_, by which the interpreter hands its results over.
    launches = {
        f"aten::{name}" for name in ("sum", "_to_copy", "clone", "cat", "zeros", "mm", "addmm", "addmm_", "add")
    }

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            by_torch.add(function.name().partition(".")[0])
            return function(*arguments, **(options or {}))

    hidden = (130,) * layers
    for dtype in (torch.float32, torch.bfloat16):
        x, route, update, *rest = kernel_arguments(Net(route=hidden, update=hidden, dtype=dtype))
        with Seen():
            *_, saved = kernels["mfnnr"].mfnnr_forward(x, route, update, *rest, True)
        assert sum(map(len, launched)) == 2 * layers + 4
        assert by_torch & launches == {"aten::sum"}
        by_torch.clear()
        with Seen():
            grads = torch.ones(5, 4, 5, dtype=dtype), torch.ones(())
            kernels["mfnnr"].mfnnr_backward(*grads, x, route, update, *rest, saved, True, True)
        assert sum(map(len, launched)) == 4 * layers + 10
        assert not by_torch & launches
        by_torch.clear()
        for each in launched:
            each.clear()


@pytest.mark.interpreted
def test_what_triton_saves() -> None:
    kernels = import_module("fastmod.kernels.mfnnr")
    x, route, update, *rest = kernel_arguments(Net(route=(6, 7), update=(6, 7)), mode=0)
    *_, logits, gate, saved = kernels.mfnnr_forward(x, route, update, *rest, True)
    cut = kernels.sections(saved, x, route, update)
    assert [t.shape[1] for t in cut.route] == [6, 7, 12]
    assert [t.shape[1] for t in cut.update] == [6, 7, 24]
    assert torch.equal(cut.route[-1].view_as(logits), logits)
    assert torch.equal(cut.update[-1][:, 20:], gate)


@pytest.mark.slow
@given(
    b=st.sampled_from([0, 1, 2, 65]),
    m=st.sampled_from([1, 2, 5]),
    n=st.sampled_from([1, 3]),
    d=st.sampled_from([1, 3, 17]),
    hidden=st.sampled_from([1, 6, 19]),
    layers=st.sampled_from([0, 1, 2]),
    context=st.booleans(),
    layout=st.sampled_from(["contiguous", "strided", "permuted", "expanded"]),
    scale=st.sampled_from([1.0, 1e2]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_layout(b, m, n, d, hidden, layers, context, layout, scale, seed) -> None:
    torch.manual_seed(seed)
    sizes = (b, m, n, d, hidden, layers)
    route = draw(sizes, context)[1]
    grad = laid_out(torch.randn(b, n, d), layout)

    def inputs():
        x, _, *params = draw(sizes, context)[0]
        return [laid_out(t, layout) for t in (x * scale, *params)]

    def function(x, *params):  # tau, a single number, is left to the shapes above: here luck would decide
        out, penalty, *_ = call(route, context=context, threshold=0.5)(x, 0.8, *params)
        return (out * grad).sum() + penalty

    # Gradients sum products of logits and blocks, each as large as `scale`, that all but cancel.
    # Two roundings more than elsewhere: with sizes of 1 a gradient is a single number, which plain PyTorch has right by
    # luck in one of the many shapes. Times `scale`: the rounding of a logit of that size is as many of its weight.
    assert_agrees(function, inputs, roundings=4 * scale, grad_factor=GRAD_FACTOR, scale=scale * scale * d)


def test_equals_the_composition_of_the_public_ops() -> None:
    (x, _, *params), route = draw((20, 4, 3, 5, 7, 2))
    rw, up = params[:route], params[route:]
    found = ops.mfnnr(x, rw, up, threshold=0.5)
    flat = x.flatten(1)

    def fnn(v, p):
        for i in range(0, len(p) - 2, 2):
            v = torch.nn.functional.leaky_relu(v @ p[i].T + p[i + 1], 0.01)
        return v @ p[-2].T + p[-1]

    logits = fnn(flat, rw).view(20, 4, 3)
    routed = ops.multiplex(x, logits)
    update = fnn(torch.cat([routed.flatten(1), flat], 1), up)
    new, gate = update[:, :15].view(20, 3, 5), update[:, 15:]
    torch.testing.assert_close(found.logits, logits)
    torch.testing.assert_close(found.gate, gate)
    torch.testing.assert_close(found.out, ops.gated_residual(routed, new, gate))
    torch.testing.assert_close(found.penalty, ops.range_penalty(logits, gate, threshold=0.5))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("context", [True, False])
def test_gradcheck(context: bool) -> None:
    inputs, route = draw((3, 3, 2, 2, 4, 1), context, torch.float64)
    function = call(route, context=context, threshold=0.5)
    assert torch.autograd.gradcheck(lambda *t: function(*t)[:2], [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("used", ["out", "penalty"])
@pytest.mark.parametrize("frozen", ["x", "params", "neither"])
def test_partial_gradients(used: str, frozen: str) -> None:
    inputs, route = draw((70, 3, 2, 5, 13, 1))

    def grads(backend: str):
        leaves = [t.clone().requires_grad_() for t in inputs]
        leaves[0].requires_grad_(frozen != "x")
        for p in leaves[2:]:
            p.requires_grad_(frozen != "params")
        with fastmod.use_backend(backend):
            out, penalty, *_ = call(route, threshold=0.5)(*leaves)
            (out.sum() if used == "out" else penalty).backward()
        return [t.grad for t in leaves]

    for ours, expected in zip(grads("native"), grads("reference"), strict=True):
        if expected is None or ours is None:  # a gradient of zeros may be left out
            assert (expected is None or not expected.any()) and (ours is None or not ours.any())
        else:
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_no_penalty() -> None:
    inputs, route = draw((5, 3, 2, 5, 13, 1))
    out, penalty, *_ = call(route, threshold=None)(*[t.requires_grad_() for t in inputs])
    assert penalty.item() == 0.0
    (out.sum() + penalty).backward()


def test_empty_batch_gives_zero_weight_gradients() -> None:
    inputs, route = draw((0, 3, 2, 5, 13, 1))
    results = run(call(route), inputs, [torch.zeros(0, 2, 5), torch.ones(())], "native")
    assert all(not r.any() for r in results)


@pytest.mark.parametrize("mode", [0, 1])
def test_opcheck(mode: int) -> None:
    (x, tau, *params), route = draw((6, 3, 2, 5, 7, 1))
    x, params = laid_out(x, "permuted"), [laid_out(p, "permuted") for p in params]
    seed = torch.tensor(3) if mode else None
    arguments = (x, params[:route], params[route:], tau, 1.0, seed, mode, True, 0.5)
    opchecked("mfnnr_forward", *arguments, False)
    opchecked("mfnnr_forward", *arguments, True, same_twice=False)  # activations are padded
    out, penalty, *_, saved = torch.ops.fastmod.mfnnr_forward(*arguments, True)
    opchecked("mfnnr_backward", laid_out(out, "permuted"), penalty, *arguments, saved, True, True)
    opchecked("mfnnr_backward", out, None, *arguments, saved, False, True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_compile_fullgraph_dynamic(mode: str) -> None:
    def function(x, tau, *params):
        out, penalty, *_ = call(route, mode=mode)(x, tau, *params)
        return out.sin().sum() + penalty

    compiled = None
    for b in (6, 9, 70):
        inputs, route = draw((b, 3, 2, 5, 7, 1))
        leaves = [t.requires_grad_() for t in inputs]
        compiled = compiled or torch.compile(function, fullgraph=True, dynamic=True)
        expected = torch.autograd.grad(function(*leaves), leaves)
        for a, e in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
            torch.testing.assert_close(a, e)


def test_bits_do_not_depend_on_threads_or_batch_split() -> None:
    inputs, route = draw((200, 6, 5, 10, 50, 1))
    grads = [torch.randn(200, 5, 10), torch.ones(())]
    whole = run(call(route, threshold=0.5), inputs, grads, "native")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run(call(route, threshold=0.5), inputs, grads, "native")
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))
    x, *rest = inputs
    assert torch.equal(call(route)(x[:70], *rest)[0], call(route)(*inputs)[0][:70])


def test_fifty_equal_repeats_and_untouched_inputs() -> None:
    inputs, route = draw((200, 6, 5, 10, 50, 1))
    copies = [t.clone() for t in inputs]
    grads = [torch.randn(200, 5, 10), torch.ones(())]
    results = [run(call(route, threshold=0.5), inputs, grads, "native") for _ in range(50)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_nan_stays_in_its_batch_element(isa: str) -> None:
    inputs, route = draw((130, 3, 2, 5, 7, 1))
    inputs[0][65, 1, 2] = float("nan")
    out = call(route)(*inputs)[0]
    assert out[65].isnan().all() and out.isnan().sum() == out[65].numel()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    inputs, route = draw((6, 3, 2, 5, 7, 1))
    leaves = [t.requires_grad_() for t in inputs]
    with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        out, penalty, *_ = call(route)(*leaves)
    assert out.dtype == torch.bfloat16 and penalty.dtype == torch.float32
    (out.sum() + penalty).backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
