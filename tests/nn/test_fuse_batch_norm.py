"""``fuse_batch_norm_`` does not change what a net computes."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.models import PlainResMixNet
from fastmod.models.resnet import ResNet
from fastmod.nn import ExpertStack, fuse_batch_norm_, unfuse_batch_norm_
from tests.helpers.conv_backends import conv_backend as conv_backend
from tests.helpers.surroundings import one_thread as one_thread


class Block(nn.Module):
    """As torchvision writes it: one ReLU in place for all, += for the residual."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3, momentum=None)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Torchvision(nn.Module):
    """A 7x7 convolution that stays, a dropout in forward that depends on the mode, a view after the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(F.relu(self.bn1(self.conv1(x)))))
        x = F.adaptive_avg_pool2d(x, 2)
        x = F.dropout(x.view(x.size(0), -1), 0.5, training=self.training)
        return self.fc(x)


class PreActivation(nn.Module):
    """Batch norm first: only the middle one has a convolution before it and one after it without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(self.bn2(y).relu())


class Mobile(nn.Module):
    """Expand, depthwise, project; ReLU6 instead of ReLU; a linear bottleneck before the next convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.BatchNorm2d(8)
        self.project, self.norm3 = nn.Conv2d(8, 3, 1, bias=False), nn.BatchNorm2d(3, affine=False)
        self.next, self.norm4 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)
        self.grouped, self.norm5 = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.expand(x)))
        x = F.relu6(self.norm2(self.depthwise(x)))
        x = self.norm4(self.next(self.norm3(self.project(x))))
        return self.norm5(self.grouped(x))


class Odd(nn.Module):
    """Intermediates with other readers, unusual additions, shared modules."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(8))
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.one = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        k = x * 1.0
        alias = k[:]
        conv, norm = self.convs, self.norms
        seen = conv[0](x)
        a = norm[0](seen)  # its convolution is returned too
        b = norm[1](conv[1](a))
        c = self.relu(b)  # in place on b, which is read again
        d = norm[2](conv[2](c))
        e = d + self.scale  # broadcasts
        f = norm[3](conv[3](e)) + 1.0
        g = torch.add(f, norm[4](conv[4](f)), alpha=2)
        k += norm[5](conv[5](g))  # written into what alias reads
        h = norm[6](conv[6](alias))
        h = h + h
        y = F.relu(norm[7](conv[7](h)))  # read by two convolutions, one without batch norm
        z = norm[7](conv[7](h)).add(self.one(y))
        w = norm[0](conv[0](y)) + norm[1](conv[1](y))
        return seen, b, c, g, alias, self.one(y), z, w


class Twice(nn.Module):
    """One batch norm for two convolutions, and a chain with an unused output but moving statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(3))
        self.norm, self.unread = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.unread(self.c(x))
        return F.relu(x + self.norm(self.a(F.relu(self.norm(self.b(x))))))


NETS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # net, input channels, batch norms fused
    "resnet": (lambda: ResNet(8, (4, 5, 6)), 3, 9),
    "torchvision": (Torchvision, 3, 7),
    "preactivation": (PreActivation, 3, 1),
    "mobile": (Mobile, 3, 4),
    "odd": (Odd, 4, 9),
    "twice": (Twice, 3, 3),
    "sequential": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()), 3, 1),
    "mixture": (lambda: PlainResMixNet(2, 1), 3, 14),
}


def make(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A net, its twin to be fused, and images."""
    torch.manual_seed(0)
    net, channels, _ = NETS[name]
    plain = net().double()
    for p in plain.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, -1.0, 1.5)  # also negative scales
    return plain, copy.deepcopy(plain), torch.randn(3, channels, 9, 11, dtype=torch.float64)


def results(net: Callable[[Tensor], Tensor | tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Output and the input's gradient; the parameters keep their gradients."""
    torch.manual_seed(3)  # for a dropout
    x = x.clone().requires_grad_()
    outs = net(x)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum((o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape)).mean() for o in outs).backward()
    return [*(o.detach() for o in outs), x.grad]


def assert_same(plain: nn.Module, fused: nn.Module, x: Tensor) -> None:
    for net in (plain, fused):
        net.zero_grad()
    torch.testing.assert_close(results(fused, x), results(plain, x), rtol=1e-9, atol=1e-11)
    theirs = dict(plain.named_parameters())
    for name, p in fused.named_parameters():
        expected = theirs[name].grad
        assert (p.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert fused.state_dict().keys() == plain.state_dict().keys()
    state = plain.state_dict()
    for name, value in fused.state_dict().items():
        expected = state[name]
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", NETS)
def test_the_same_net(conv_backend: str, name: str) -> None:
    plain, fused, x = make(name)
    keys = list(fused.state_dict())
    report = fuse_batch_norm_(fused)
    assert sum(" > " in line for line in report.fused) == NETS[name][2], report
    assert list(fused.state_dict()) == keys
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in (plain, fused)]
    for step in range(3):
        assert_same(plain, fused, x + step)
        for optimizer in optimizers:
            optimizer.step()
    plain.eval()
    fused.eval()
    assert_same(plain, fused, x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETS)
def test_it_is_fused(conv_backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms listed as fused are never called as modules."""
    _, net, x = make(name)
    fused = {part for line in fuse_batch_norm_(net).fused if " > " in line for part in line.split(" > ")[1:2]}
    names = {module: key for key, module in net.named_modules()}
    called: set[str] = set()
    forward = nn.BatchNorm2d.forward

    def watched(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
        called.add(names[self])
        return forward(self, x)

    monkeypatch.setattr(nn.BatchNorm2d, "forward", watched)
    for mode in (True, False):
        net.train(mode)(x)
    unfused = {key for module, key in names.items() if isinstance(module, nn.BatchNorm2d)} - fused
    assert called == unfused


def test_report() -> None:
    report = fuse_batch_norm_(Torchvision())
    assert report.fused[:2] == ["layers.0.conv1 > layers.0.bn1 > ReLU", "layers.0.conv2 > layers.0.bn2"]
    assert report.left == {
        "conv1": "has a kernel of 7 x 7",
        "bn1": "conv1, which it reads, has a kernel of 7 x 7",
    }
    assert str(report).startswith("7 batch norms fused\n  layers.0.conv1 > layers.0.bn1 > ReLU\n")
    assert "left: bn1 conv1, which it reads, has a kernel of 7 x 7" in str(report)
    report = fuse_batch_norm_(PreActivation())
    assert set(report.fused) == {"conv1 > bn2 > ReLU", "conv2, which no batch norm follows, reads one"}
    assert report.left["bn1"] == "stem, which it reads, is also read elsewhere"
    assert fuse_batch_norm_(Mobile()).left == {
        "grouped": "has 2 groups",
        "norm5": "grouped, which it reads, has 2 groups",
    }


# --- what may change afterwards


def test_hooks_modes_and_modules_are_looked_at_in_every_call(conv_backend: str) -> None:
    plain, fused, x = make("torchvision")
    fuse_batch_norm_(fused)
    fused(x)
    plain(x)
    for net in (plain, fused):  # one batch norm frozen
        net.layers[1].bn1.eval()
    assert_same(plain, fused, x)
    for net in (plain, fused):  # one keeps its statistics from now on, even in training
        net.layers[0].bn1.track_running_stats = False
    assert_same(plain, fused, x)
    seen: dict[nn.Module, list[Tensor]] = {}
    for net in (plain, fused):  # hooks on a traced block and on fused layers
        layers = net.layers
        for module in (layers[0], layers[1].conv1, layers[2].bn2, layers[2].relu):
            module.register_forward_hook(lambda m, i, o, net=net: seen.setdefault(net, []).append(o.detach().clone()))
    assert_same(plain, fused, x)
    assert len(seen[fused]) == len(seen[plain]) == 5
    torch.testing.assert_close(seen[fused], seen[plain], rtol=1e-9, atol=1e-9)
    torch.manual_seed(5)
    other = nn.Conv2d(6, 6, 3, padding=2, dilation=2).double()  # not supported by norm_conv
    for net in (plain, fused):
        net.layers[2].conv2 = copy.deepcopy(other)
    assert_same(plain, fused, x)


def test_copies(conv_backend: str) -> None:
    plain, fused, x = make("torchvision")
    fuse_batch_norm_(fused)
    before = copy.deepcopy(fused)  # before a first call
    fused(x)
    plain(x)
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    whole = torch.load(buffer, weights_only=False)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), whole):
        assert copied.forward.model is copied
        expected = copy.deepcopy(plain)
        assert_same(expected, copied, x)
        assert int(copied.layers[0].bn1.num_batches_tracked) == 2
        assert int(fused.layers[0].bn1.num_batches_tracked) == 1
    before.load_state_dict(plain.state_dict())
    assert_same(copy.deepcopy(plain), before, x)


def test_undone_and_done_again(conv_backend: str) -> None:
    plain, fused, x = make("resnet")
    first = fuse_batch_norm_(fused)
    assert fuse_batch_norm_(fused) == first
    assert_same(plain, fused, x)
    unfuse_batch_norm_(fused)
    assert "forward" not in fused.__dict__
    assert_same(plain, fused, x)
    unfuse_batch_norm_(fused)


def test_parts(conv_backend: str) -> None:
    """A part that was fused before stays separate when the whole net is fused."""
    plain, fused, x = make("torchvision")
    fuse_batch_norm_(fused.layers[1])
    report = fuse_batch_norm_(fused)
    assert report.left["layers.1.conv1"] == "is inside of layers.1, which has hooks or runs by itself"
    assert_same(plain, fused, x)


def test_layers_of_ours_run_by_themselves(conv_backend: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), ExpertStack(4, 4, 2, 1)).double()
    twin = copy.deepcopy(net)
    assert len(fuse_batch_norm_(net).fused) == 1
    assert_same(twin, net, torch.randn(2, 3, 5, 5, dtype=torch.float64))


def test_functional_call_and_new_parameters(conv_backend: str) -> None:
    plain, fused, x = make("resnet")
    fuse_batch_norm_(fused)
    fused(x)
    fused.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()}, assign=True)
    fused.conv.weight = nn.Parameter(fused.conv.weight.detach().clone())
    assert_same(plain, fused, x)
    doubled = {name: 2 * p.detach() for name, p in plain.named_parameters()}
    outs = [torch.func.functional_call(net, doubled, (x,)) for net in (plain, fused)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


# --- dtypes and sizes


def test_autocast_and_bfloat16(conv_backend: str) -> None:
    plain, fused, x = make("torchvision")
    plain, fused, x = plain.float().eval(), fused.float().eval(), x.float()
    fuse_batch_norm_(fused)
    expected = plain(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fused(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(fused.bfloat16()(x.bfloat16()).float(), expected, rtol=0.1, atol=0.1)


def test_sizes(conv_backend: str) -> None:
    plain, fused, _ = make("resnet")
    fuse_batch_norm_(fused)
    for size in ((1, 5), (7, 3), (2, 2)):
        assert_same(plain, fused, torch.randn(3, 3, *size, dtype=torch.float64))
    for net in (plain, fused):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            net(torch.zeros(1, 3, 1, 1, dtype=torch.float64))
    for net in (plain.eval(), fused.eval()):
        assert net(torch.zeros(1, 3, 1, 1, dtype=torch.float64)).shape == (1, 10)
    assert fused(torch.zeros(0, 3, 4, 4, dtype=torch.float64)).shape == (0, 10)


# --- what is refused


class ByValue(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class MakesATensor(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(2.0)


class Keeps(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class WithoutGradients(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class InFullPrecision(nn.Sequential):
    @torch.autocast("cpu", enabled=True, dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class SometimesSkips(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()).item() < 0.5 else super().forward(x)


class SometimesSkipsByPython(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


class ByKeyword(nn.Sequential):
    def forward(self, *, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByValue, "symbolically traced variables cannot be used as inputs to control flow"),
        (MakesATensor, "it makes tensors that are no result of its inputs"),
        (Keeps, "it sets the attribute kept of a Keeps"),
        (WithoutGradients, "it switches gradients or autocast on or off inside"),
        (InFullPrecision, "it switches gradients or autocast on or off inside"),
        (SometimesSkips, "it draws random numbers"),
        (SometimesSkipsByPython, "it draws random numbers"),
        (ByKeyword, "its argument x is given by keyword only"),
    ],
)
def test_untraceable(kind: type[nn.Sequential], reason: str) -> None:
    """Models that a trace would change are refused in one sentence and left unchanged."""
    net = kind(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
    before = dict(net.__dict__)
    with pytest.raises(ValueError, match=f"model: torch.fx cannot trace the forward of {kind.__name__} .*{reason}"):
        fuse_batch_norm_(net)
    assert net.__dict__ == before and net.training


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *rest: Tensor, negate: bool = False) -> Tensor:
        y = self.norm(self.conv(x))
        y = y + 1 if mask is None else y * mask
        for other in rest:
            y = y + other
        return -y if negate else y


def test_arguments_with_defaults(conv_backend: str) -> None:
    plain = Optional().double()
    fused = copy.deepcopy(plain)
    fuse_batch_norm_(fused)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    calls: list[tuple[tuple[Tensor | None, ...], dict[str, object]]] = [
        ((x,), {}),
        ((), {"x": x}),
        ((x, x), {}),
        ((x,), {"mask": x, "negate": True}),
        ((x, None), {"negate": True}),
        ((x, x, x, x), {}),
    ]
    for args, kwargs in calls:
        torch.testing.assert_close(fused(*args, **kwargs), plain(*args, **kwargs), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(fused.norm.running_var, plain.norm.running_var)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        fused()


def test_not_a_model() -> None:
    with pytest.raises(TypeError, match="model: expected a module, got int"):
        fuse_batch_norm_(1)


def test_what_is_left() -> None:
    def reason(conv: nn.Module, norm: nn.Module | None = None) -> str:
        net = nn.Sequential(conv, nn.BatchNorm2d(4) if norm is None else norm)
        report = fuse_batch_norm_(net)
        assert not report.fused and "forward" not in net.__dict__
        return report.left["1"]

    def conv(**options: object) -> nn.Conv2d:
        return nn.Conv2d(4, 4, **({"kernel_size": 3, "padding": 1} | options))

    assert reason(conv(kernel_size=5)) == "0, which it reads, has a kernel of 5 x 5"
    assert reason(conv(kernel_size=(1, 3))) == "0, which it reads, has a kernel of 1 x 3"
    assert reason(conv(stride=3)) == "0, which it reads, has stride (3, 3)"
    assert reason(conv(stride=(1, 2))) == "0, which it reads, has stride (1, 2)"
    assert reason(conv(padding=0)) == "0, which it reads, is padded by (0, 0), not by 1"
    assert "dilated or not padded with zeros" in reason(conv(dilation=2, padding=1))
    assert "dilated or not padded with zeros" in reason(conv(padding_mode="reflect"))
    assert reason(conv(groups=2)) == "0, which it reads, has 2 groups"
    assert "hooks or parametrisations" in reason(nn.utils.parametrizations.weight_norm(conv()))
    assert reason(nn.Conv2d(2, 4, 3, padding=1, groups=2)) == "0, which it reads, has 2 groups"
    assert reason(nn.ReLU()) == "reads something else than a convolution"
    assert reason(conv(), nn.SyncBatchNorm(4)) == "is a SyncBatchNorm, not a BatchNorm2d"
    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda *_: None)
    assert reason(conv(), hooked) == "has hooks or parametrisations"


@pytest.mark.slow
def test_compile_fullgraph(conv_backend: str) -> None:
    torch._dynamo.reset()
    _, fused, x = make("resnet")
    fused, x = fused.float(), x.float()
    fuse_batch_norm_(fused)
    twin = copy.deepcopy(fused)
    compiled = torch.compile(twin, fullgraph=True, backend="inductor" if conv_backend == "native" else "aot_eager")
    for mode in (True, False):
        fused.train(mode)
        twin.train(mode)
        for run in (fused, compiled):
            run(x).square().sum().backward()
        found = [[p.grad for p in net.parameters()] + list(net.buffers()) for net in (fused, twin)]
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
