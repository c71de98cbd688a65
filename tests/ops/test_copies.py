"""smfr and mfnnr over the parameters of many nets, by torch.vmap: each net's values bit for bit, all in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import laid_out, opchecked
from tests.ops.test_mfnnr import linears

COPIES = 3


class Net(NamedTuple):
    """An op as a function of ``x, seeds, *taus, *params``: one of each seed and temperature per layer."""

    counts: tuple[int, ...] = (3, 4, 2)
    d: int = 5
    hidden: int = 13
    mode: str = "softmax"
    context: bool = True

    @property
    def op(self) -> str:
        return "smfr" if len(self.counts) > 2 else "mfnnr"

    @property
    def depth(self) -> int:
        return len(self.counts) - 1

    def draw(self, batch: int | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        params = []
        for m, n in pairwise(self.counts):
            params += linears([m * self.d, self.hidden, m * n], torch.float64)
            params += linears([(n + m * self.context) * self.d, self.hidden, n * self.d + n], torch.float64)
        x = torch.randn(*([] if batch is None else [batch]), self.counts[0], self.d)
        taus = list(0.5 + torch.rand(self.depth))
        return [x.to(dtype), torch.randint(2**40, (self.depth,)), *[t.to(dtype) for t in (*taus, *params)]]

    def __call__(self, x: Tensor, seeds: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        taus, params = tensors[: self.depth], tensors[self.depth :]
        layers = [(params[i : i + 4], params[i + 4 : i + 8]) for i in range(0, len(params), 8)]
        if self.op == "mfnnr":
            found = ops.mfnnr(
                x, *layers[0], mode=self.mode, context=self.context, tau=taus[0], seed=seeds[0], threshold=0.5
            )
            return tuple(found)
        whole = ops.smfr(
            x, layers, mode=self.mode, context=self.context, taus=taus, seeds=list(seeds.unbind()), threshold=0.5
        )
        return whole.out, whole.penalty, *whole.logits, *whole.gates


@contextmanager
def calls() -> Iterator[list[str]]:
    """The kernels that are called meanwhile."""
    found: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "fastmod":
                found.append(function._opname)
            return function(*args, **(kwargs or {}))

    with Watching():
        yield found


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of sums that weigh every number of the two results that have a gradient differently."""
    weights = [torch.linspace(0.5, 2, o.numel(), dtype=o.dtype).view_as(o) for o in outputs[:2]]
    return torch.autograd.grad(outputs[:2], leaves, weights)


def drawn(net: Net, batch: int | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """With the copies in front."""
    return [torch.stack(same) for same in zip(*[net.draw(batch, dtype) for _ in range(COPIES)], strict=True)]


def check(net: Net, stacked: list[Tensor], dims: Sequence[int | None]) -> list[str]:
    """Compares with the nets alone and tells what was called. Copies are in front of ``stacked``; ``dims`` are those in
    which torch.vmap meets them, None for what all share, which is then that of the first."""
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in stacked]
    tensors = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(leaves, dims, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    with calls() as called:
        found = torch.vmap(net, tuple(dims))(*tensors)
        grads = gradients(found, wanted)
    alone = [net(*[t[0] if dim is None else t[i] for t, dim in zip(leaves, dims, strict=True)]) for i in range(COPIES)]
    for ours, *singles in zip(found, *alone, strict=True):
        assert all(torch.equal(own, single) for own, single in zip(ours, singles, strict=True))
    weighed = gradients([torch.stack(same) for same in list(zip(*alone, strict=True))[:2]], wanted)
    kinds = [dim for t, dim in zip(leaves, dims, strict=True) if t.requires_grad]
    for i, (ours, theirs, dim) in enumerate(zip(grads, weighed, kinds, strict=True)):
        if dim is None:  # a sum over the copies
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=f"gradient {i}")
        else:
            assert torch.equal(ours, theirs), f"gradient {i}"
    return called


def one_call(net: Net) -> list[str]:
    return [f"{net.op}_forward", f"{net.op}_backward"]


NETS = [
    Net(),
    Net(mode="gumbel"),
    Net(mode="argmax", context=False),
    Net((3, 2), mode="gumbel", context=False),
    Net((3, 4)),
]


@pytest.mark.parametrize("shared", ["nothing", "x", "a weight and a seed", "the last dimension"])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_copies_are_the_nets_alone(backend: backends.Backend, net: Net, shared: str) -> None:
    stacked = drawn(net, 2 if backend is backends.TRITON else 19)
    dims: list[int | None] = [-1 if shared == "the last dimension" else 0] * len(stacked)
    if shared == "x":
        dims[0] = None
    if shared == "a weight and a seed":
        dims[1] = dims[2 + net.depth] = dims[-1] = None
    called = check(net, stacked, dims)
    if backend is not backends.TRITON:
        assert called == one_call(net)


#: Of a step of a stack of any depth.
TRITON_KERNELS = ["forward_kernel", "penalty_kernel", "backward_kernel", "weight_kernel"]


@pytest.mark.interpreted
@pytest.mark.parametrize("net", [Net((2, 3, 2), 2, 3, "gumbel"), Net((3, 2), 2, 3)], ids=str)
def test_launches_in_triton_are_those_of_one_net(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    launched = backends.watched(monkeypatch, import_module("fastmod.kernels.smfr"), *TRITON_KERNELS)
    with backends.chosen(backends.TRITON):
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in drawn(net, 17)]
        found = torch.vmap(net)(*leaves)
        assert launched == TRITON_KERNELS[:2]
        gradients(found, [t for t in leaves if t.requires_grad])
        assert launched == TRITON_KERNELS


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("net", "batch", "dtype"),
    [
        (Net((2, 2, 1), 2, 3, "gumbel"), 17, torch.bfloat16),  # two programs a net, padded rows
        (Net((2, 2), 2, 130, "gumbel"), 2, torch.float32),  # copy by copy
        (Net((2, 2, 1), 2, 3), 2, torch.float64),
    ],
    ids=str,
)
def test_other_copies_in_triton(net: Net, batch: int, dtype: torch.dtype) -> None:
    with backends.chosen(backends.TRITON):
        dims: list[int | None] = [0] * (2 + 9 * net.depth)
        if dtype != torch.bfloat16:  # in which torch rounds each step of a sum over the copies, or none
            dims[0] = dims[-1] = None
        check(net, drawn(net, batch, dtype), dims)


@pytest.mark.interpreted
@pytest.mark.parametrize("shared", [False, True], ids=["each its x", "one x"])
def test_copies_that_kernels_of_triton_round(shared: bool) -> None:
    """`low` of the raw kernels: as casts of all."""
    net, low = Net((2, 3, 2), 2, 3), torch.bfloat16
    with backends.chosen(backends.TRITON):
        x, _, t0, t1, *params = drawn(net, 17)
        x = x[:1].expand_as(x) if shared else x
        results = []
        for given, own, dtype in ((x, params, low), (x.to(low), [p.to(low) for p in params], None)):
            arguments = given, own, 4, [t0, t1], [], 0, True, 0.5
            out, penalty, *shown, saved = backends.kernel("smfr_forward")(*arguments, True, dtype)
            last = saved, True, True, dtype
            grads = backends.kernel("smfr_backward")(torch.ones_like(out), penalty, *arguments, *last)
            results.append([out, penalty, *shown[0], *shown[1], *[g.to(low) for g in grads]])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_other_dtypes(backend: backends.Backend, dtype: torch.dtype) -> None:
    """fp64 is served copy by copy on a GPU."""
    net = Net(mode="gumbel")
    assert check(net, drawn(net, 4, dtype), [0] * (2 + net.depth + 8 * net.depth)) == one_call(net)


@pytest.mark.parametrize("batch", [None, 1, 64, 70])
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_batches(backend: backends.Backend, batch: int | None) -> None:
    """None: x is [M, D]. Activations of a copy are padded to 64 rows."""
    net = Net(d=2, hidden=4)
    assert check(net, drawn(net, batch), [0] * (2 + 9 * net.depth)) == one_call(net)


@pytest.mark.slow  # as elsewhere: the first test of the harness has it built
@pytest.mark.parametrize("backend", [pytest.param(backends.CUDA_HOST, id="cuda_host")], indirect=True)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "net",
    [Net((3, 2, 2), 2, 130), Net((3, 2), 2, 130, "gumbel", False), Net((2,) * 21, 2, 3)],
    ids=["wide", "wide mfnnr", "deep"],
)
def test_what_one_launch_does_not_take(backend: backends.Backend, net: Net, shared: bool) -> None:
    """shared: x, a weight and a bias are one for all copies."""
    dims: list[int | None] = [0] * (2 + 9 * net.depth)
    if shared:
        dims[0] = dims[2 + net.depth] = dims[-1] = None
    assert check(net, drawn(net, 3), dims) == one_call(net)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("net", NETS[1:4], ids=str)
def test_without_gradients_and_by_torch_func(backend: backends.Backend, net: Net) -> None:
    stacked = drawn(net, 9)
    alone = [net(*[t[i] for t in stacked]) for i in range(COPIES)]
    with torch.no_grad(), calls() as called:
        found = torch.vmap(net)(*stacked)
    assert called == one_call(net)[:1]
    for ours, *singles in zip(found, *alone, strict=True):
        assert torch.equal(ours, torch.stack(singles))

    def loss(*tensors: Tensor) -> Tensor:
        out, penalty, *_ = net(*tensors)
        return out.sin().sum() + penalty

    places = (0, *range(2, len(stacked)))
    with calls() as called:
        grads = torch.vmap(torch.func.grad(loss, places))(*stacked)
    assert called == one_call(net)
    for i in range(COPIES):
        own = [t[i].requires_grad_() if t.is_floating_point() else t[i] for t in stacked]
        expected = torch.autograd.grad(loss(*own), [own[place] for place in places])
        assert all(torch.equal(grad[i], want) for grad, want in zip(grads, expected, strict=True))


@pytest.mark.parametrize("net", [Net(d=2, hidden=4), Net((3, 2), mode="gumbel")], ids=str)
def test_second_derivatives(net: Net) -> None:
    stacked = [t.requires_grad_() if t.is_floating_point() else t for t in drawn(net, 5, torch.float64)]
    wanted = [t for t in stacked if t.requires_grad]

    def twice(function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        out, penalty, *_ = function(*stacked)
        first = torch.autograd.grad(out.sin().sum() + penalty.square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    def by_hand(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = [net(*[t[i] for t in tensors]) for i in range(COPIES)]
        return tuple(torch.stack(same) for same in zip(*found, strict=True))

    torch.testing.assert_close(twice(torch.vmap(net)), twice(by_hand))


@pytest.mark.parametrize("net", [Net(d=2, hidden=4), Net((3, 2), mode="gumbel")], ids=str)
def test_nested_maps(net: Net) -> None:
    """Copies inside of copies, elements of x around copies and inside of them, and Jacobians of copies."""
    stacked = drawn(net, 4, torch.float64)
    more = [torch.stack([t, t.flip(0)]) for t in stacked]
    found = torch.vmap(torch.vmap(net))(*more)
    xs = torch.randn(2, *stacked[0].shape[1:], dtype=torch.float64)
    rest = (None,) * (len(stacked) - 1)
    around = torch.vmap(torch.vmap(net, (None, *[0] * len(rest))), (0, *rest))(xs, *stacked[1:])
    inside = torch.vmap(torch.vmap(net, (0, *rest)), (None, *[0] * len(rest)))(xs, *stacked[1:])
    jacobians = torch.vmap(torch.func.jacrev(lambda *t: net(*t)[0]))(*stacked)
    for i in range(COPIES):
        own = [t[i] for t in stacked]
        expected = list(net(*own))
        torch.testing.assert_close([f[0, i] for f in found], expected)
        torch.testing.assert_close([f[1, COPIES - 1 - i] for f in found], expected)
        torch.testing.assert_close(jacobians[i], torch.func.jacrev(lambda *t: net(*t)[0])(*own))
        for j in range(2):
            expected = list(net(xs[j], *own[1:]))
            torch.testing.assert_close([f[j, i] for f in around], expected)
            torch.testing.assert_close([f[i, j] for f in inside], expected)


def test_any_number_of_copies_and_threads() -> None:
    """Whole nets by each thread, or tiles of all of them: not a bit changes."""
    net = Net((6, 8, 5), 10, 100)
    each = [net.draw(150) for _ in range(9)]
    expected = []
    for own in each:
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in own]
        outputs = net(*leaves)
        expected.append([*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1], [leaves[0], *leaves[2:]])])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            for copies in (1, 2, 3, 8, 9):
                stacked = [torch.stack(same).detach() for same in zip(*each[:copies], strict=True)]
                leaves = [t.requires_grad_() if t.is_floating_point() else t for t in stacked]
                outputs = torch.vmap(net)(*leaves)
                grads = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), [leaves[0], *leaves[2:]])
                for i in range(copies):
                    ours = [t[i] for t in (*outputs, *grads)]
                    assert all(torch.equal(a, b) for a, b in zip(ours, expected[i], strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("net", [NETS[1], NETS[3]], ids=str)
def test_an_empty_batch(backend: backends.Backend, net: Net) -> None:
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in drawn(net, 0)]
    out, penalty, *_ = torch.vmap(net)(*leaves)
    assert out.shape == (COPIES, 0, 2, 5) and not penalty.any()
    grads = torch.autograd.grad(out.sum() + penalty.sum(), [t for t in leaves if t.requires_grad])
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("mode", [0, 1])
def test_opcheck(mode: int) -> None:
    net = Net()
    x, seed, t0, t1, *params = drawn(net, 6)
    x, params = laid_out(x, "permuted"), [laid_out(p, "permuted") for p in params]
    params[1] = params[1][:1].expand_as(params[1])
    seeds = list(seed.unbind(1)) if mode else []
    for taus in ([t0, t1], []):
        arguments = (x, params, 4, taus, seeds, mode, True, 0.5)
        opchecked("smfr_forward", *arguments, False)
        opchecked("smfr_forward", *arguments, True, same_twice=False)  # activations are padded
        out, penalty, *_, saved = torch.ops.fastmod.smfr_forward(*arguments, True)
        assert penalty.shape == (COPIES,)
        opchecked("smfr_backward", laid_out(out, "permuted"), penalty, *arguments, saved, True, True)
        opchecked("smfr_backward", None, penalty, *arguments, saved, False, True)


@pytest.mark.parametrize("hidden", [13, 130])
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_raw_kernels_refuse_what_does_not_fit(backend: backends.Backend, hidden: int) -> None:
    net = Net(hidden=hidden)
    x, seed, t0, t1, *params = drawn(net, 6)
    forward = torch.ops.fastmod.smfr_forward

    def refused(message: str, x: Tensor, params: list[Tensor], taus: list[Tensor]) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            forward(x, params, 4, taus, [], 0, True, 0.5, True)

    refused(r"x: expected \[3, \.\.\., M, D\]", x[:2], params, [t0, t1])
    refused(r"route\[0\]: expected a weight", x, [*params[:1], params[1][:2], *params[2:]], [t0, t1])
    refused(r"route\[2\]: expected a weight", x, [*params[:2], params[2][0], *params[3:]], [t0, t1])
    refused("tau: expected", x, params, [t0[:2], t1])
    refused(r"x: expected \[2, \.\.\., M, D\]", x, [*params[:8], *[p[:2] for p in params[8:]]], [t0, t1])
    refused("params: expected as many copies of each", x, [*params[:8], *[p[0] for p in params[8:]]], [])
    found = forward(x, params, 4, [t0, t1], [], 0, True, 0.5, True)
    backward = torch.ops.fastmod.smfr_backward
    with pytest.raises(ValueError, match="saved: expected"):
        backward(found[0], found[1], x, params, 4, [t0, t1], [], 0, True, 0.5, [s[0] for s in found[4]], True, True)


def test_a_temperature_of_one_copy_that_is_not_positive() -> None:
    net = Net()
    stacked = drawn(net, 6)
    stacked[2][1] = -1.0
    with pytest.raises(ValueError, match="tau: expected a number > 0, got -1"):
        torch.vmap(net)(*stacked)
