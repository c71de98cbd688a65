"""Ensemble: each copy has the values of the net alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastmod
from fastmod.models import PlainSMFR
from fastmod.nn import MFNNR, SMFR, Ensemble, Multiplexer
from fastmod.optim import Adam
from tests.ops.test_copies import calls

COPIES = 3


class Masked(nn.Module):
    """A linear layer with 2 samples of masks from one seed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(5, 12)), nn.Parameter(torch.randn(5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return fastmod.ops.masked_linear(x.flatten(1), self.weight, self.logits, 2, seed=7)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SMFR": (lambda: SMFR(3, 2, 4, 3, 2, hidden=6, threshold=0.01), (6, 3, 4)),
    "MFNNR": (lambda: MFNNR(3, 2, 4, hidden=6, layers=2), (6, 3, 4)),
    "Multiplexer": (lambda: Multiplexer(3, 2, 4, hidden=6), (6, 3, 4)),
    "masked_linear": (Masked, (6, 3, 4)),
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2)), (6, 4)),
    "tied": (Tied, (6, 4)),
}


#: Nets with kernels that run all copies at once and compute each exactly as alone.
EXACT = ("SMFR", "MFNNR", "masked_linear")


def close(got: Tensor, want: Tensor, exact: bool = False) -> None:
    torch.testing.assert_close(got, want, rtol=0 if exact else 2e-6, atol=0 if exact else 2e-6)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_outputs_and_gradients_are_those_of_the_net_alone(name: str, each: bool) -> None:
    factory, shape = NETS[name]
    nets = Ensemble(factory, COPIES)
    alone = [nets.copy(i) for i in range(COPIES)]
    x = torch.randn(COPIES, *shape) if each else torch.randn(shape)
    out = nets(x, each=each)
    grad = torch.randn_like(out)
    out.backward(grad)
    for i, net in enumerate(alone):
        single = net(x[i] if each else x)
        single.backward(grad[i])
        close(out[i], single, name in EXACT)
        for (key, p), (other, q) in zip(nets.model.named_parameters(), net.named_parameters(), strict=True):
            assert key == other and p.grad is not None and q.grad is not None
            close(p.grad[i], q.grad, name in EXACT)
        for p, q in zip(nets.model.buffers(), net.buffers(), strict=True):  # running statistics
            close(p[i], q)


def test_copies_differ_and_seeds_repeat_a_net() -> None:
    factory, _ = NETS["SMFR"]
    nets = Ensemble(factory, COPIES)
    first = next(iter(nets.parameters()))
    assert first.shape[0] == COPIES and not torch.equal(first[0], first[1])
    state = torch.get_rng_state()
    seeded = Ensemble(factory, 2, seeds=[5, 3])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    for p, q in zip(seeded.copy(1).parameters(), factory().parameters(), strict=True):
        assert torch.equal(p, q)


def test_training_is_that_of_each_net_alone() -> None:
    factory, shape = NETS["SMFR"]
    nets = Ensemble(factory, COPIES)
    alone = [nets.copy(i) for i in range(COPIES)]
    together = Adam(nets.parameters(), 1e-2)
    own = [Adam(net.parameters(), 1e-2, max_norm=0.1) for net in alone]
    for step in range(5):
        torch.manual_seed(step)
        x, target = torch.randn(shape), torch.randn(6, 2, 4)
        together.zero_grad()
        out, penalty = nets.map(lambda net, x: (net(x), net.penalty()), x)
        ((out - target).square().mean((1, 2, 3)) + penalty).sum().backward()
        norms = nets.clip_grad_norm_(0.1)
        assert norms.shape == (COPIES,) and (norms > 0.1).all()
        together.step()
        for net, optimizer in zip(alone, own, strict=True):
            optimizer.zero_grad()
            assert isinstance(net, SMFR)
            ((net(x) - target).square().mean() + net.penalty()).backward()
            optimizer.step()
    for i, net in enumerate(alone):
        for p, q in zip(nets.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p[i], q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_a_step_of_many_copies_is_one_call_of_each_kernel(mode: str) -> None:
    nets = Ensemble(lambda: SMFR(3, 2, 4, 3, 2, hidden=6, mode=mode), 64)
    optimizer = Adam(nets.parameters(), 1e-2)
    before = [p.detach().clone() for p in nets.parameters()]
    with calls() as called:
        out, penalty = nets.map(lambda net, x: (net(x), net.penalty()), torch.randn(6, 3, 4))
        (out.square().sum() + penalty.sum()).backward()
        optimizer.step()
    assert called == ["smfr_forward", "smfr_backward", "adam_"]
    for p, old in zip(nets.parameters(), before, strict=True):
        assert p.grad is not None and p.grad.is_contiguous()
        assert (p != old).view(64, -1).any(1).all()  # of every copy


def test_it_is_a_module() -> None:
    factory, shape = NETS["SMFR"]
    nets = Ensemble(factory, COPIES)
    x = torch.randn(shape)
    want = nets(x)
    other = Ensemble(factory, COPIES)
    assert not torch.equal(other(x), want)
    file = io.BytesIO()
    torch.save(nets.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), want)
    assert list(nets.state_dict()) == [f"model.{name}" for name in factory().state_dict()]
    assert torch.equal(copy.deepcopy(nets)(x), want)
    wide = copy.deepcopy(nets).double()
    torch.testing.assert_close(wide(x.double()).float(), want, rtol=1e-5, atol=1e-5)
    assert not nets.eval().model.training
    assert "copies=3" in repr(nets)


def test_a_copy_is_independent() -> None:
    nets = Ensemble(NETS["MLP"][0], COPIES)
    for p in nets.model[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    before = [p.detach().clone() for p in nets.parameters()]
    net = nets.copy(-1)
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in nets.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert all(map(torch.equal, before, nets.parameters()))
    tied: Any = Ensemble(Tied, 2)
    assert tied.model.first.weight is tied.model.second.weight
    one = tied.copy(0)
    assert one.first.weight is one.second.weight and one.first.weight.shape == (4, 4)


def test_noise_is_drawn_for_each_copy() -> None:
    def factory() -> nn.Module:
        torch.manual_seed(0)  # equal copies
        return SMFR(3, 2, 4, 3, 1, hidden=6, mode="gumbel")

    nets = Ensemble(factory, 2)
    out = nets(torch.randn(64, 3, 4))
    assert not torch.equal(out[0], out[1])
    nets.eval()
    out = nets(torch.randn(64, 3, 4))
    assert torch.equal(out[0], out[1])


def test_compiled() -> None:
    nets = Ensemble(NETS["SMFR"][0], COPIES)
    x = torch.randn(NETS["SMFR"][1])
    with torch.no_grad():
        close(torch.compile(nets, backend="eager")(x), nets(x))


class Counting(nn.Module):
    """Counts its calls in a buffer, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 2), in_place
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return self.layer(x) * self.count


class Remembering(nn.Module):
    """Has names that layers of ours have too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._last, self._penalty = 3, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self._last * self._penalty


def test_attributes_of_other_nets_are_left_alone() -> None:
    torch.manual_seed(0)
    nets, x = Ensemble(Remembering, COPIES), torch.randn(2, 4)
    first = nets(x)
    torch.testing.assert_close(nets(x), first)
    torch.testing.assert_close(nets.copy(0)(x), first[0])


def test_buffers_that_are_assigned_are_refused() -> None:
    nets = Ensemble(lambda: nn.Sequential(Counting(in_place=True)), COPIES)
    nets(torch.randn(6, 4))
    nets(torch.randn(6, 4))
    assert nets.model[0].count.tolist() == [2.0] * COPIES  # type: ignore[index]
    lost = Ensemble(lambda: nn.Sequential(Counting(in_place=False)), COPIES)
    with pytest.raises(RuntimeError, match=r"0\.count: the net puts another tensor in its place.*in place"):
        lost(torch.randn(6, 4))
    assert lost.model[0].count.tolist() == [0.0] * COPIES  # type: ignore[index]


@pytest.mark.parametrize("kind", [*NETS, "PlainSMFR"])
def test_compiled_with_gradients(kind: str) -> None:
    """A net may keep state of its last forward; it belongs to one copy, and a compiled graph cannot return it."""
    factory, shape = {**NETS, "PlainSMFR": (lambda: PlainSMFR(3, 2, 4, 3, 1, hidden=5), (6, 3, 4))}[kind]
    torch.manual_seed(0)
    nets = Ensemble(factory, COPIES)
    twin = copy.deepcopy(nets)  # with the statistics of batch norm
    x = torch.randn(shape)
    torch._dynamo.reset()
    run = torch.compile(nets, backend="aot_eager")
    found = []
    for owner, call in ((twin, twin), (nets, run)):
        out = call(x)
        out.square().sum().backward()
        found.append([out.detach(), *owner.buffers(), *[p.grad for p in owner.parameters() if p.grad is not None]])
    assert len(found[0]) > 2
    torch.testing.assert_close(found[1], found[0])


def test_bad_input() -> None:
    factory, shape = NETS["SMFR"]
    with pytest.raises(ValueError, match="copies: expected an int >= 1, got 0"):
        Ensemble(factory, 0)
    with pytest.raises(TypeError, match="model_factory: expected a function"):
        Ensemble(3, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model_factory: expected it to return an nn.Module, got int"):
        Ensemble(lambda: 3, 2)  # type: ignore[arg-type, return-value]
    net = factory()
    with pytest.raises(ValueError, match="a new net at every call"):
        Ensemble(lambda: net, 2)
    with pytest.raises(ValueError, match="seeds: expected one per copy, that is 2, got 1"):
        Ensemble(factory, 2, seeds=[1])
    nets = Ensemble(factory, 2)
    with pytest.raises(ValueError, match=r"inputs\[0\]: expected \[2, ...\], one per copy, got \[6, 3, 4\]"):
        nets(torch.randn(shape), each=True)
    with pytest.raises(IndexError, match="index: expected an int from 0 to 1, got 2"):
        nets.copy(2)


@pytest.mark.parametrize("shared_first", [False, True])
def test_torch_func_over_copies(shared_first: bool) -> None:
    """Gradients per copy by vmap over grad, also where the copies share a parameter, and second derivatives."""
    factory, shape = NETS["SMFR"]
    nets = Ensemble(factory, COPIES)
    alone = [nets.copy(i) for i in range(COPIES)]
    x = torch.randn(shape)
    state = dict(nets.model.named_parameters())
    names = list(state)
    dims: dict[str, int | None] = dict.fromkeys(names, 0)
    if shared_first:
        state[names[0]], dims[names[0]] = state[names[0]][1].detach().requires_grad_(), None
        for net in alone:
            with torch.no_grad():
                next(net.parameters()).copy_(state[names[0]])

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(nets.model, values, (x,)).square().sum()

    per_copy = torch.vmap(torch.func.grad(loss), in_dims=(dims,))(state)
    total = torch.vmap(loss, in_dims=(dims,))(state).sum()
    first = torch.autograd.grad(total, list(state.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), list(state.values()))
    wants, twice = [], []
    for net in alone:
        own = list(net.parameters())
        wants.append(torch.autograd.grad(net(x).square().sum(), own, create_graph=True))
        twice.append(torch.autograd.grad(sum(g.square().sum() for g in wants[-1]), own) if not shared_first else None)
    for j, name in enumerate(names):
        want = torch.stack([grads[j].detach() for grads in wants])
        torch.testing.assert_close(per_copy[name], want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(first[j], want if dims[name] == 0 else want.sum(0), rtol=1e-5, atol=1e-5)
        if not shared_first:
            want = torch.stack([grads[j] for grads in twice])
            torch.testing.assert_close(second[j], want, rtol=1e-4, atol=1e-4)
