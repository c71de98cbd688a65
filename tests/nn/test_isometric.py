"""IsometricNet: the paper's parameter counts, equality with its plain twin, copies, compile, DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastmod
from fastmod.models import IsometricNet, PlainIsometricNet, load_plain_isometric
from tests.helpers.conv_backends import conv_backend as conv_backend
from tests.helpers.processes import as_one_of_two


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("channels", "se", "enter", "block", "leave"),
    [
        (24, True, 1200, 19560, 36608),  # Table 7 prints 1200, 20000, 9000, 37000
        (24, False, 1200, 8832, 36608),
        (40, True, 2000, 51800, 1271680),  # and 2000, 52000, 22000, 1.27 million
        (40, False, 2000, 22400, 1271680),
    ],
)
def test_counts(channels: int, se: bool, enter: int, block: int, leave: int) -> None:
    with torch.device("meta"):
        net = IsometricNet(channels, 16, 4, 100, se=se)
    assert count(net.input_adapter) == enter and count(net.output_adapter) == leave
    assert net.body.bank.weight.shape == (4, block) and net.body.logits.shape == (1, 16, 4)
    assert count(net.head) == (256 if channels == 24 else 1280) * 100 + 100
    assert count(net) == enter + 4 * block + 64 + leave + count(net.head)


def test_count_of_the_adaptation_net() -> None:
    with torch.device("meta"):
        net = IsometricNet(
            40, 16, 4, 10, 5, se=False, bias=True, patch=2, output=(128, 256), output_norm=False, shared_head=True
        )
    assert count(net) - net.body.logits.numel() == 133122
    assert net.body.logits[0].numel() == 64
    statistics = sum(b[0].numel() for n, b in net.input_adapter.named_buffers() if "running" in n)
    assert count(net.input_adapter) + statistics == 680  # as the paper counts it


SIZES: dict[str, Any] = {"channels": 4, "layers": 3, "templates": 2, "classes": 5, "output": (6, 7), "dropout": 0.0}


def make(**options: Any) -> IsometricNet:
    torch.manual_seed(0)
    net = IsometricNet(**{**SIZES, **options}).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name or "bias" in name or "logits" in name:
                p.add_(torch.rand_like(p))
    return net


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


TWINS: dict[str, dict[str, Any]] = {
    "one task": {},
    "two tasks": {"tasks": 2},
    "patches": {"tasks": 2, "norm": "per_task", "adapter_into_blocks": True},
    "adaptation": {"tasks": 2, "se": False, "bias": True, "patch": 2, "output_norm": False, "shared_head": True},
    "classes differ": {"tasks": 2, "norm": "per_layer", "classes": [3, 4]},
    "signature": {"tasks": 2, "signature": [[0, 1, 0], [1, 1, 0]]},
    "half shared": {"tasks": 2, "share_layers": 2, "se": False, "mixing": "tanh", "in_channels": 1},
}


@pytest.mark.parametrize("name", TWINS)
def test_equals_the_plain_twin(conv_backend: str, name: str) -> None:
    """Scores, gradients and statistics in training and eval, for single tasks and all at once."""
    net = make(**TWINS[name])
    plain = PlainIsometricNet(net)
    x = images(net.tasks, 5, net.in_channels, 18, 17)  # no multiple of a patch
    for task, training in ((net.tasks - 1, True), (None, True), (0, False), (None, False)):
        scores, enters = [], []
        for model in (net, plain):
            model.train(training).zero_grad()
            own = (x if task is None else x[task]).clone().requires_grad_()
            found = model(own, task)
            scores.append(list(found) if task is None else [found])
            sum(s.square().sum() for s in scores[-1]).backward()
            enters.append(own.grad)
        torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(*enters, rtol=1e-10, atol=1e-10 * float(enters[1].abs().max()))
        for what, ours, theirs in pairs(net, plain, gradients=True):
            atol = 1e-10 * max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=atol, msg=lambda m, w=what: f"{w}: {m}")
        for what, ours, theirs in pairs(net, plain, gradients=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m, w=what: f"{w}: {m}")


def pairs(net: IsometricNet, plain: PlainIsometricNet, gradients: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, ours and theirs for all gradients of parameters, or for all statistics."""
    if not gradients:
        theirs = dict(plain.state.named_buffers())
        yield from ((n, b, theirs[n]) for n, b in net.body.state.named_buffers())
        norms = [net.input_adapter.norm, net.output_adapter.norm1, net.output_adapter.norm2]
        for i, (ours, other) in enumerate(
            zip([n for n in norms if n], [plain.enter_norm, *plain.leave_norms], strict=True)
        ):
            yield from ((f"{i}.{n}", b, other.get_buffer(n)) for n, b in ours.named_buffers())
        return
    bank = net.body.bank
    for n, grad in bank.split(bank.weight.grad).items():
        yield n, grad.flatten(1), plain.templates[n.replace(".", "/")].grad
    if net.body.logits is not None:
        yield "logits", net.body.logits.grad, plain.shares["logits"].grad
    if net.body.norm_weight is not None:
        flat = torch.cat([p.grad.flatten(-1) for p in plain.norms.values()], -1)
        yield "norm_weight", net.body.norm_weight.grad, flat
    for ours, theirs in ((net.input_adapter, plain.enter), (net.output_adapter, plain.leave), (net.head, plain.head)):
        yield from ((n, p.grad, theirs[n].grad) for n, p in ours.named_parameters(recurse=False))


@pytest.mark.parametrize("options", TWINS.values(), ids=list(TWINS))
def test_load_plain(options: dict[str, Any]) -> None:
    first = make(**options)
    first(images(4, first.in_channels, 16, 16))  # statistics move
    torch.manual_seed(5)
    second = load_plain_isometric(IsometricNet(**{**SIZES, **options}).double(), PlainIsometricNet(first))
    for (n, p), q in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(p, q), n


@pytest.mark.parametrize("name", ["two tasks", "classes differ", "patches"])
def test_tasks_side_by_side(name: str) -> None:
    """All tasks in one call equal one call per task."""
    together = make(**TWINS[name])
    apart = copy.deepcopy(together)
    x = images(2, 5, 3, 16, 16)
    ours = list(together(x, None))
    theirs = [apart(x[t], t) for t in range(2)]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    sum(s.square().sum() for s in ours).backward()
    sum(s.square().sum() for s in theirs).backward()
    for (n, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=n)
    for (n, p), q in zip(together.named_buffers(), apart.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=n)


def test_learns() -> None:
    torch.manual_seed(0)
    net = IsometricNet(8, 4, 2, 3, output=(16, 16), dropout=0.1)
    x, y = torch.randn(24, 3, 16, 16), torch.arange(24) % 3
    optimizer = torch.optim.RMSprop(fastmod.nn.logit_groups(net, 2e-3, 5), momentum=0.9)
    first = None
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y) + 1e-3 * net.cluster_penalty() + 1e-3 * net.entropy_penalty()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    assert loss.item() < 0.5 * first


def test_harden_and_add_task() -> None:
    net = make(tasks=2, norm="per_task").train()
    x = images(6, 3, 16, 16)
    net(x, 1)
    net.eval()
    before = [net(x, t) for t in range(2)]
    assert net.add_task(1) == 2
    for t in range(2):
        torch.testing.assert_close(net(x, t), before[t])
    torch.testing.assert_close(net.features(x, 2), net.features(x, 1))
    assert net.head.classes == [5, 5, 5] and net(torch.stack([x] * 3), None).shape == (3, 6, 5)
    target = net.features(x, 0).detach()
    new = net.add_task("learned", classes=2, loss=lambda: (net.features(x, 3) - target).square().mean(), steps=3)
    assert net(x, new).shape == (6, 2) and [s.shape[1] for s in net(torch.stack([x] * 4), None)] == [5, 5, 5, 2]
    with torch.no_grad():
        net.body.logits.mul_(1000)
    hard = net.harden()
    torch.testing.assert_close(hard(x, 1), net(x, 1), rtol=1e-9, atol=1e-9)
    assert hard.signature(1) == net.signature(1) and hard.mixture(1).shape == (3, 2)


def test_statistics_of_another_task() -> None:
    net = make(tasks=2)
    x = images(6, 3, 16, 16)
    net(x, 0)
    with torch.no_grad():
        net.body.logits[1] = net.body.logits[0]
        net.head.weight[5:], net.head.bias[5:] = net.head.weight[:5], net.head.bias[:5]
    net.eval()
    assert not torch.allclose(net(x, 1), net(x, 0))
    net.copy_statistics(0, 1)
    torch.testing.assert_close(net(x, 1), net(x, 0))


def test_on_meta() -> None:
    """The meta device has no values, so nothing may be drawn or read."""
    with torch.device("meta"):
        for options in ({"init": "diag", "share_layers": 4}, {"signature": "random"}, {"mixing": "tanh"}):
            net = IsometricNet(tasks=2, **options)
            assert all(t.is_meta for t in [*net.parameters(), *net.buffers()])


def test_copies() -> None:
    net = make(tasks=2)
    x = images(4, 3, 16, 16)
    net(x, 1)
    other = IsometricNet(**SIZES, tasks=2).double()
    other.load_state_dict(net.state_dict())
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), other):
        assert torch.equal(twin.eval()(x, 1), copy.deepcopy(net).eval()(x, 1))
    average = torch.optim.swa_utils.AveragedModel(net.eval(), use_buffers=True)
    average.update_parameters(net)
    assert torch.equal(average(x, 1), net(x, 1))


@pytest.mark.parametrize("options", TWINS.values(), ids=list(TWINS))
def test_dense_gradients(options: dict[str, Any]) -> None:
    net = make(**options)
    net(images(4, net.in_channels, 16, 16), 0).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_reduced_precision() -> None:
    wide = make(tasks=2).eval()
    x = images(4, 3, 16, 16)
    expected = wide(x, 1)
    low = copy.deepcopy(wide).to(torch.bfloat16)(x.bfloat16(), 1)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), expected, rtol=0.1, atol=0.1)
    net = copy.deepcopy(wide).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        scores = net(x.float(), 1)
    scores.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("task", [1, None])
def test_compile(task: int | None) -> None:
    torch._dynamo.reset()
    net = make(tasks=2, layers=2)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = images(2, 4, 3, 16, 16)
    x = x if task is None else x[task]
    for run in (net, compiled):
        run(x, task).square().sum().backward()
    for (n, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=n)
    for (n, p), q in zip(net.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=n)


def step(net: IsometricNet, run: nn.Module, x: Tensor, task: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run(x, task).square().mean().backward()
    optimizer.step()


def worker(rank: int, folder: str) -> None:
    net = make(tasks=2).eval()
    run = DistributedDataParallel(net, broadcast_buffers=False)
    for task in (rank, 1 - rank):  # the processes are at different tasks
        step(net, run, images(4, 3, 16, 16), task)
    torch.save(net.state_dict(), f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    mp.spawn(as_one_of_two, (str(tmp_path), worker), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    before = make(tasks=2).state_dict()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name])
    assert not torch.equal(first["body.logits"][0], before["body.logits"][0])
    assert not torch.equal(first["body.logits"][1], before["body.logits"][1])


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: make(classes=[3, 4]), ValueError, "classes: expected a number or one for each of 1 tasks, got 2"),
    (lambda: make(classes=0), ValueError, "classes: expected an int >= 1, got 0"),
    (lambda: make(tasks=2, classes=[3, 4], shared_head=True), ValueError, "where tasks share a head"),
    (lambda: make(patch=0), ValueError, "patch: expected an int >= 1, got 0"),
    (lambda: make()(images(2, 4, 16, 16)), ValueError, "with C = 3"),
    (lambda: make()(images(2, 3, 3, 16)), ValueError, "at least 4 pixels a side"),
    (lambda: make()(images(2, 3, 16, 16), 1), ValueError, "task: expected 0 .. 0, got 1"),
    (lambda: make(tasks=2)(images(2, 3, 16, 16), None), ValueError, r"\[T, B, C, H, W\] with T = 2"),
    (lambda: make(tasks=2)(images(2, 3, 16, 16), torch.tensor([0, 1])), TypeError, "a batch belongs to one task"),
    (lambda: make()(images(1, 3, 16, 16)), ValueError, "more than 1 value per channel when training"),
    (lambda: make(shared_head=True).add_task(0, classes=3), ValueError, "classes: expected 5 as of the shared head"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
