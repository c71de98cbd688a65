"""Compositional: signatures, shares, adding and removing tasks and templates."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fastmod
from fastmod.nn import Compositional, logit_groups, make_signature
from tests.helpers.compositional import BLOCKS, Dense, close, make, noise
from tests.helpers.compositional import quiet as quiet

# ------------------------------------------------------------------- signatures


def test_signatures() -> None:
    assert make_signature("sequential", 2, 4) == [0, 0, 1, 1]
    assert make_signature("sequential", 3, 7) == [0, 0, 0, 1, 1, 2, 2]
    assert make_signature("cyclic", 2, 5) == [0, 1, 0, 1, 0]
    assert make_signature("progressive", 4, 12) == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]  # the paper's example
    assert make_signature("progressive", 1, 3) == [0, 0, 0]
    assert make_signature("progressive", 3, 3) == [0, 1, 2]
    for templates in range(1, 9):
        for layers in range(templates, 33):
            repeats = make_signature("progressive", templates, layers)
            assert len(repeats) == layers and repeats == sorted(repeats) and set(repeats) == set(range(templates))
    drawn = make_signature("random", 4, 16, torch.Generator().manual_seed(0))
    assert sorted(drawn) == make_signature("sequential", 4, 16) and drawn != sorted(drawn)
    assert make_signature([1, 1, 0], 2, 3) == [1, 1, 0]


@pytest.mark.parametrize("fused", [True, False])
def test_harden(fused: bool) -> None:
    block = BLOCKS["se"] if fused else Dense
    net = make(block, 3, 5, 2)
    with torch.no_grad():
        net.logits.mul_(500)  # shares of 0 and 1
    hard = net.harden()
    x = noise(4, 4, 5, 5) if fused else noise(4, 4)
    close(hard(x, task=1), net(x, task=1))
    stacked = torch.stack([x, x])
    close(hard(stacked, task=None), net(stacked, task=None))
    assert hard.logits is None and [hard.signature(t) for t in range(2)] == [net.signature(t) for t in range(2)]
    assert torch.equal(hard.mixture().argmax(-1), net.mixture().argmax(-1))
    place = hard.bank.weight.untyped_storage().data_ptr()
    assert all(w.untyped_storage().data_ptr() == place for w in hard.weights(2, 1).values())
    hard(x, task=1).sum().backward()
    used = set(hard.signature(1))
    assert [k for k in range(3) if hard.bank.weight.grad[k].abs().sum() > 0] == sorted(used)


def test_diag() -> None:
    for mixing in ("softmax", "tanh", "none"):
        net = Compositional(Dense, 4, 4, 3, init="diag", mixing=mixing)
        xi = net.mixture()
        torch.testing.assert_close(xi.diagonal(dim1=1, dim2=2), torch.full((3, 4), 0.99))
        assert float((xi.sum(-1) - xi.amax(-1)).abs().max()) < 0.011
    assert Compositional(Dense, 2, 4, init="diag").signature() == [0, 0, 1, 1]
    assert Compositional(Dense, 6, 4, init="diag").signature() == [0, 1, 2, 3]


def test_uniform() -> None:
    one, many = Compositional(Dense, 5, 40), Compositional(Dense, 5, 40, 2)
    assert 0 <= one.logits.min() < 0.1 and 0.9 < one.logits.max() <= 1
    assert 0.9 < many.logits.max() <= 1 and -1 <= many.logits.min() < -0.9  # sqrt(6 / 6)


def test_order() -> None:
    net = make(Dense, 2, 3).eval()
    x = noise(3, 4)
    by_hand = x
    for layer in (2, 0, 1):
        by_hand = net(by_hand, order=[layer])
    close(net(x, order=[2, 0, 1]), by_hand)
    with pytest.raises(ValueError, match=r"order: expected layers 0 .. 2, got 3"):
        net(x, order=[3])
    with pytest.raises(ValueError, match="None in training"):
        net.train()(x, order=[0])


# -------------------------------------------------------------------- changing


def test_sharing() -> None:
    net = make(Dense, 3, 4, 2, share_layers=[1])
    a, b = net.mixture()
    close(net.sharing(0, 1), torch.minimum(a, b).sum(-1))
    close(net.sharing(0, 1)[1], torch.ones((), dtype=torch.float64))


def test_share_layers() -> None:
    net = make(Dense, 3, 4, 3, share_layers=2)
    xi = net.mixture()
    assert torch.equal(xi[:1, :2].expand(3, -1, -1), xi[:, :2]) and not torch.equal(xi[0, 2:], xi[1, 2:])
    net(noise(3, 4), task=2).sum().backward()
    moved = net.logits.grad.abs().sum(-1) > 0
    assert moved.tolist() == [[True, True, False, False], [False] * 4, [False, False, True, True]]


@pytest.mark.parametrize("norm", ["mixed", "per_task"])
@pytest.mark.parametrize("fused", [True, False])
def test_add_task(fused: bool, norm: str) -> None:
    net = make(BLOCKS["se"] if fused else Dense, 3, 4, 2, norm=norm)
    x = noise(4, 4, 5, 5) if fused else noise(4, 4)
    net(x, task=1)
    net.eval()
    before = [net(x, task=t) for t in range(2)]
    assert net.add_task(1) == 2
    for t, expected in ((0, before[0]), (1, before[1]), (2, before[1])):
        close(net(x, task=t), expected)
    assert net.add_task("accuracy", accuracies=[1, 0, 3]) == 3
    xi = net.mixture()
    close(xi[3], (xi[0] + 3 * xi[2]) / 4)
    close(net.logits[3], xi[3].log())
    assert net.add_task([0.5, 0.5, 0, 0]) == 4 and net.add_task() == 5
    close(net.mixture()[4], (xi[0] + xi[1]) / 2)
    assert net(torch.stack([x] * 6), task=None).shape[0] == 6


def test_add_task_learned() -> None:
    """Learned coefficients find the task that made the data; nothing else changes."""
    net = make(Dense, 3, 4, 3)
    x = noise(20, 4)
    target = net(x, task=1).detach()
    before = copy.deepcopy(net.state_dict())
    new = net.add_task("learned", loss=lambda: (net(x, task=3) - target).square().mean(), steps=150, lr=0.2)
    for name in ("bank.weight", "logits"):
        assert torch.equal(net.state_dict()[name][:3], before[name])
    assert net.bank.weight.grad is None and net._trial is None
    far = [float((net.mixture(new) - net.mixture(t)).abs().max()) for t in range(3)]
    assert far[1] < 0.02 < min(far[0], far[2]), far


def test_templates_come_and_go() -> None:
    net = make(Dense, 3, 4, 2)
    x = noise(4, 4)
    before = net(x, task=1)
    xi = net.mixture()
    assert net.add_template(1, share=0.25) == 3
    close(net.mixture()[..., 3], torch.full((2, 4), 0.25, dtype=torch.float64))
    assert net.add_template(Dense().double()) == 4 and net.add_template(Dense) == 5
    assert net.logits.shape == (2, 4, 6) and net.bank.weight.shape[0] == 6
    for _ in range(3):
        net.remove_template(3)
    close(net.mixture(), xi)
    close(net(x, task=1), before)
    fixed = make(Dense, 3, 3, signature=[0, 2, 2])
    before = fixed(x)
    fixed.remove_template(1)
    close(fixed(x), before)
    with pytest.raises(ValueError, match="no signature uses, got 0"):
        fixed.remove_template(0)


def test_logit_groups() -> None:
    net = nn.Sequential(Compositional(Dense, 2, 3), nn.Linear(4, 4), nn.Linear(4, 4))
    fastmod.compose_(net, 2, lambda name, m: type(m) is nn.Linear)
    groups = logit_groups(net, 0.1, 5)
    assert [g["lr"] for g in groups] == [0.1, 0.5]
    assert {id(p) for p in groups[1]["params"]} == {id(net[0].logits), id(net.composition.logits)}
    assert sum(len(g["params"]) for g in groups) == len(list(net.parameters()))
    torch.optim.RMSprop(groups, momentum=0.9)


def test_penalties() -> None:
    net = make(Dense, 3, 4, 2)
    xi = net.logits.softmax(-1)
    rows = xi.flatten(0, 1) @ net.bank.weight
    far = (rows[:, None] - net.bank.weight).norm(dim=-1)
    torch.testing.assert_close(net.cluster_penalty(), (xi.flatten(0, 1) * far).sum(), rtol=1e-8, atol=0)
    torch.testing.assert_close(net.cluster_penalty(True), (xi.flatten(0, 1) * far**2).sum(), rtol=1e-8, atol=0)
    close(net.entropy_penalty(), -(xi * xi.log()).sum())
    with pytest.raises(ValueError, match="cluster_penalty: expected learned shares by softmax, got a fixed signature"):
        net.harden().cluster_penalty()
