"""ResMixNet and its baselines: the paper's parameter counts, equality with plain twins."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod import models
from fastmod.models import FusedResNet, PlainResMixNet, PlainResNet, PlainVGG, ResMixNet, load_plain
from tests.helpers.conv_backends import conv_backend as conv_backend
from tests.helpers.surroundings import one_thread as one_thread

#: Parameter counts; tables 1 to 3 print them in thousands and millions.
COUNTS: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: ResMixNet(2, 2), 273750),
    (lambda: ResMixNet(4, 1), 192730),
    (lambda: ResMixNet(3, 5, classes=10, stem_stride=1), 748256),
    (lambda: ResMixNet(3, 5, classes=100, stem_stride=1), 754106),
    (models.resnet26, 369170),
    (models.resnet50, 758034),
    (lambda: models.resnet50(10), 758554),
    (lambda: models.resnet50(100), 764404),
    (models.resnet152_bottleneck, 3663250),
    (models.vgg19_bn, 20036418),
    (lambda: PlainResMixNet(2, 2), 273750),
    (lambda: PlainResNet((4, 4, 4)), 369170),
    (lambda: PlainResNet((3, 8, 36, 3), bottleneck=True), 3663250),
    (PlainVGG, 20036418),
]


@pytest.mark.parametrize(("make", "count"), COUNTS)
def test_parameters(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == count


TWINS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int]] = {
    "two experts": (lambda: ResMixNet(2, 2), lambda: PlainResMixNet(2, 2), 13),
    "stride 1": (lambda: ResMixNet(3, 1, 10, 1, 1), lambda: PlainResMixNet(3, 1, 10, 1, 1), 8),
    "one expert": (lambda: ResMixNet(1, 1), lambda: PlainResMixNet(1, 1), 12),
    "basic": (lambda: FusedResNet((2, 1, 1)), lambda: PlainResNet((2, 1, 1)), 13),
    "bottleneck": (lambda: FusedResNet((1, 2, 1), True), lambda: PlainResNet((1, 2, 1), True), 12),
}


@pytest.mark.parametrize("name", TWINS)
def test_equals_its_plain_twin(conv_backend: str, name: str) -> None:
    make, make_plain, size = TWINS[name]
    plain = make_plain().double()
    model = load_plain(make().double(), plain)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (plain, model)]
    channels = model.in_channels
    assert isinstance(channels, int)
    for seed in range(3):
        torch.manual_seed(seed)
        x, labels = torch.randn(6, channels, size, size + 3).double(), torch.randint(2, (6,))
        losses = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    moved = load_plain(make().double(), plain).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, moved[key], rtol=1e-8, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")
    plain.eval()
    model.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-8, atol=1e-8)


def test_vgg_equals_its_plain_twin(conv_backend: str) -> None:
    plain = PlainVGG(stem_stride=1).double()
    model = load_plain(models.vgg19_bn(stem_stride=1).double(), plain)
    x = torch.randn(3, 3, 32, 33, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.norms[15].running_var[0], plain.norms[15].running_var)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(
        ValueError, match=r"x: expected images of at least 32 pixels a side, got shape \[3, 3, 31, 33\]"
    ):
        model(x[:, :, 1:])


def test_gates(conv_backend: str) -> None:
    """``gates`` returns the gaters' outputs of a forward."""
    model = ResMixNet(3, 1).eval()
    seen: list[Tensor] = []
    for mixture in model.mixtures:
        mixture.gate.register_forward_hook(lambda *found: seen.append(found[2]))
    x = torch.randn(4, 3, 12, 12)
    model(x)
    found = model.gates(x)
    assert [g.shape for g in found] == [(4, 3), (4, 3)]
    torch.testing.assert_close(found, seen[:2])
    torch.testing.assert_close(found[1].sum(1), torch.ones(4))
    found[1][:, 0].sum().backward()
    assert model.mixtures[0].experts.blocks[0].conv1.weight.grad is not None


def test_load_plain_refuses_another_net() -> None:
    with pytest.raises(ValueError, match=r"plain: expected mixtures\.0\.experts\.2\.blocks"):
        load_plain(ResMixNet(3, 1), PlainResMixNet(2, 1))
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        load_plain(ResMixNet(2, 1, classes=3), PlainResMixNet(2, 1))


def test_survives(conv_backend: str) -> None:
    model = ResMixNet(2, 1)
    x = torch.randn(4, 3, 16, 16)
    model(x)
    expected = model.eval()(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
    other = ResMixNet(2, 1).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    assert model(x[:0]).shape == (0, 2)
    model.train()
    out = model(x[:0])
    out.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_errors(conv_backend: str) -> None:
    with pytest.raises(ValueError, match=r"x: expected \[B, C, H, W\] with C = 3, got shape \[2, 1, 8, 8\]"):
        ResMixNet(2, 1)(torch.zeros(2, 1, 8, 8))
    with pytest.raises(ValueError, match="experts: expected an int >= 1, got 0"):
        ResMixNet(0, 1)
    with pytest.raises(ValueError, match="stride: expected 1 or 2, got 4"):
        ResMixNet(2, 1, stem_stride=4)
    with pytest.raises(ValueError, match="classes: expected an int >= 1, got 0"):
        ResMixNet(2, 1, classes=0)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        ResMixNet(2, 1)(torch.zeros(1, 3, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("conv_backend", ["native"], indirect=True)  # plain PyTorch is tested on one mixture
def test_compile_fullgraph(conv_backend: str) -> None:
    torch._dynamo.reset()
    model = ResMixNet(2, 2)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    x = torch.randn(4, 3, 16, 16)
    for run in (model, compiled):
        F.cross_entropy(run(x), torch.tensor([0, 1, 0, 1])).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
