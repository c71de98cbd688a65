"""``MaskedModel`` as it is called: arguments and outputs of all kinds, checkpoints, threads, dtypes, evaluation."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastmod
from fastmod.masks import MaskedModel
from tests.helpers.masked_nets import SAMPLES, Looped, masked_and_seeds, weights_of

# ------------------------------------------------------------------------------------- what goes in and what comes out


class Output(NamedTuple):
    y: Tensor
    extra: Any


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    cache: Any = None


def returning(make: Callable[[Tensor], Any]) -> nn.Module:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return make(self.linear(x))

    return Returning()


def test_outputs_of_all_kinds() -> None:
    x = torch.randn(8, 8)
    for make, read in (
        (lambda y: (y, None), lambda out: out[0]),
        (lambda y: {"y": y, "n": 3}, lambda out: out["y"]),
        (lambda y: Output(y, [y * 2]), lambda out: out.extra[0] / 2),
        (lambda y: Result(y.mean(), y), lambda out: out.logits),
        (lambda y: [y, y.sum(0, keepdim=True)], lambda out: out[0]),
    ):
        net = returning(make)
        out, masked, seeds = masked_and_seeds(net, lambda m: m(x))
        wanted = [
            F.linear(part, weights_of(masked, seeds, s)["linear.weight"], net.linear.bias)
            for s, part in enumerate(x.chunk(SAMPLES))
        ]
        torch.testing.assert_close(read(out), torch.cat(wanted))
        assert type(out) is type(make(torch.zeros(1, 3)))
        if isinstance(out, Result):
            torch.testing.assert_close(out.loss, torch.cat(wanted).mean())


def test_scalar_output_is_the_mean_over_the_examples() -> None:
    net = returning(lambda y: y.square().mean())
    for x in (torch.randn(8, 8), torch.randn(7, 8)):
        out, masked, seeds = masked_and_seeds(net, lambda m, x=x: m(x))
        wanted = [
            F.linear(part, weights_of(masked, seeds, s)["linear.weight"], net.linear.bias)
            for s, part in enumerate(x.tensor_split(SAMPLES))
        ]
        torch.testing.assert_close(out, torch.cat(wanted).square().mean())


class Objects:
    def __init__(self, rows: int, tensor: Tensor | None = None) -> None:
        self.rows, self.inner = rows, [{"keys": tensor}]


def test_objects_come_back_part_by_part() -> None:
    net = returning(lambda y: (y, Objects(len(y))))
    y, objects = MaskedModel(net, SAMPLES)(torch.randn(10, 8))
    assert y.shape == (10, 3) and [o.rows for o in objects] == [3, 3, 2, 2]
    cached = MaskedModel(returning(lambda y: (y, Objects(len(y), y))), SAMPLES)
    for batch in (8, 10):  # together, and one by one
        y, none = cached(torch.randn(batch, 8))
        assert y.shape == (batch, 3) and none is None and cached._together


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions, self.out = nn.Embedding(11, 8), nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, position_ids: Tensor, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids) + self.positions(position_ids)
        return self.out(hidden if mask is None else mask @ hidden)


def test_arguments_without_a_batch() -> None:
    net = Named()
    ids, positions, mask = torch.randint(11, (8, 5)), torch.arange(5).unsqueeze(0), torch.rand(5, 5)
    masked = MaskedModel(net, SAMPLES, init=1e4)
    for args, kwargs in (
        ((positions, ids), {}),
        ((), {"position_ids": positions, "input_ids": ids}),
        ((positions, ids, mask), {}),
    ):
        torch.testing.assert_close(masked(*args, **kwargs), net(*args, **kwargs))
    square = torch.rand(8, 8)  # as large as the batch, and not one
    ids = torch.randint(11, (8, 8))
    longer = Named()
    longer.positions = nn.Embedding(8, 8)
    positions = torch.arange(8).unsqueeze(0)
    told = MaskedModel(longer, SAMPLES, init=1e4, in_dims={"mask": None})
    torch.testing.assert_close(told(positions, ids, square), longer(positions, ids, square))
    torch.testing.assert_close(told(positions, ids, mask=square), longer(positions, ids, square))
    with pytest.raises(ValueError, match="in_dims: expected names or positions"):
        MaskedModel(net, in_dims={"mask": -1})


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_dict_inputs(kind: Callable[..., Any]) -> None:
    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, batch: Any) -> Tensor:
            return self.linear(batch["x"]) * batch["scale"]

    net = Dict()
    inputs = kind({"x": torch.randn(8, 8), "scale": 2.0})
    torch.testing.assert_close(MaskedModel(net, SAMPLES, init=1e4)(inputs), net(inputs))


class Generator(nn.Module):
    """Writes on, as a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.config = {"words": 11}

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x))

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x


def test_other_methods_run_under_the_thresholded_masks() -> None:
    net = Generator()
    masked = MaskedModel(net)
    with torch.no_grad():
        for _, logits in masked.named_logits():
            nn.init.normal_(logits)
    x = torch.randint(11, (2, 3))
    weight = net.out.weight * masked.hard_masks()["out.weight"]
    expected = x
    for _ in range(4):
        step = F.linear(net.embedding(expected), weight, net.out.bias)[:, -1:].argmax(-1)
        expected = torch.cat([expected, step], 1)
    for mode in (True, False):
        assert torch.equal(masked.train(mode).generate(x, steps=4), expected)
    assert masked.config is net.config
    with pytest.raises(AttributeError, match="'Generator' object has no attribute 'generat'"):
        _ = masked.generat


def test_changes_on_the_net_are_followed() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    masked = MaskedModel(net, SAMPLES, init=1e4)
    x = torch.ones(8, 8)
    net.eval()  # masks in training, the net not
    torch.testing.assert_close(masked(x), net(x))
    net[0] = nn.Identity()
    net.append(nn.Sigmoid())
    torch.testing.assert_close(masked.eval()(x), torch.sigmoid(x))
    net = nn.Linear(8, 8)
    masked = MaskedModel(net, SAMPLES, init=1e4).eval()
    net.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(masked(x), net(x))


def test_what_the_net_writes_in_evaluation_reaches_it() -> None:
    class Seen(Looped):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.inner(x)
            return self.seen

    net = Seen()
    masked = MaskedModel(net).eval()
    out = masked(torch.randn(4, 8))
    assert net.seen is out
    smfr = fastmod.nn.SMFR(5, 3, 8, 4, 1)
    MaskedModel(smfr).eval()(torch.randn(4, 5, 8))
    assert len(smfr.routing()) == 2


# ----------------------------------------------------------------------------------------------- checkpoints, threads


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant, self.on = reentrant, True

    def inner(self, x: Tensor) -> Tensor:
        return self.second(self.second(torch.tanh(x)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.on:
            return self.out(checkpoint(self.inner, hidden, use_reentrant=self.reentrant))
        return self.out(self.inner(hidden))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_meet_the_masks_of_their_forward(reentrant: bool) -> None:
    net, x, other = Checkpointed(reentrant), torch.randn(8, 8), torch.randn(8, 8)
    found = []
    for on in (True, False):
        net.on = on
        masked = MaskedModel(net, SAMPLES, init=0.5)
        torch.manual_seed(1)
        out = masked(x)
        masked(other)  # a second forward before the backward of the first
        out.square().sum().backward()
        found.append([out.detach(), *[p.grad for p in masked.parameters()]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_masked_net_inside_of_a_checkpoint() -> None:
    masked = MaskedModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), SAMPLES, init=0.5)
    x = torch.randn(8, 8, requires_grad=True)
    found = []
    for call in (masked, lambda v: checkpoint(masked, v, use_reentrant=False)):
        torch.manual_seed(1)
        out = call(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *masked.parameters()])
        found.append([out, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_two_threads_share_a_masked_net() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    masked = MaskedModel(net, SAMPLES, init=0.0)
    x = torch.randn(8, 32)
    keep = {name: torch.ones_like(p, dtype=torch.bool) for name, p in masked.named_logits()}
    none = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in masked.named_logits()}
    with torch.no_grad():
        expected = {
            True: net(x),
            False: torch.func.functional_call(net, {n: p * 0 for n, p in masked.named_logits()}, (x,)),
        }
    problems: list[str] = []

    def work(kept: bool) -> None:
        for _ in range(50):
            with torch.no_grad(), masked.using(keep if kept else none):
                if not torch.allclose(masked(x), expected[kept]):
                    problems.append("another thread's masks")
            out = masked(x)
            if not all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), list(masked.parameters()))):
                problems.append("gradients")

    threads = [threading.Thread(target=work, args=(kept,)) for kept in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert all(isinstance(value, nn.Parameter) for value in net.parameters())


# ------------------------------------------------------------------------------------------------- dtypes, evaluation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_reduced_net_are_fp32_and_move(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    later = MaskedModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), SAMPLES).to(dtype)
    for masked in (MaskedModel(net, SAMPLES), later):
        assert all(p.dtype == torch.float32 for p in masked.parameters())
        assert all(p.dtype == dtype for p in masked.model.parameters())
        before = [p.detach().clone() for p in masked.parameters()]
        out = masked(torch.randn(8, 8, dtype=dtype))
        assert out.dtype == dtype
        out.float().square().sum().backward()
        torch.optim.SGD(masked.parameters(), 1e-3).step()
        assert all((p != b).any() for p, b in zip(masked.parameters(), before, strict=True))
        masked.eval()(torch.randn(8, 8, dtype=dtype))


def test_masked_weights_are_kept_until_something_changes() -> None:
    net = nn.Linear(8, 8)
    masked = MaskedModel(net).eval()
    x = torch.randn(4, 8)

    def expected() -> Tensor:
        return F.linear(x, net.weight * masked.hard_masks()["weight"], net.bias)

    def kept() -> Tensor:
        return masked._cached["weight"].result

    with torch.no_grad():
        torch.testing.assert_close(masked(x), expected())
        first = kept()
        masked(x)
        assert kept() is first
        masked.logits["weight"][0] = -1.0
        torch.testing.assert_close(masked(x), expected())
        net.weight.mul_(2)
        torch.testing.assert_close(masked(x), expected())
        net.weight.data = torch.randn(8, 8)
        torch.testing.assert_close(masked(x), expected())
        net.weight = nn.Parameter(torch.randn(8, 8))
        torch.testing.assert_close(masked(x), expected())
        masked.load_state_dict({"logits.weight": torch.randn(8, 8)})
        torch.testing.assert_close(masked(x), expected())
    for optimizer in (torch.optim.Adam, fastmod.optim.Adam):
        masked.train()
        steps = optimizer(masked.parameters(), 3.0)
        masked(x).square().sum().backward()
        steps.step()
        masked.eval()
        torch.testing.assert_close(masked(x), expected())
        masked.logits["weight"].grad = torch.ones(8, 8)
        steps.step()  # without a forward in between
        torch.testing.assert_close(masked(x), expected())
    with torch.inference_mode():
        torch.testing.assert_close(masked(x), expected())


def test_evaluation_lets_gradients_through_to_weights_in_training() -> None:
    net = nn.Linear(8, 8)
    masked = MaskedModel(net, train_weights=True).eval()
    for _ in range(2):
        masked(torch.randn(4, 8)).sum().backward()
    assert net.weight.grad is not None
