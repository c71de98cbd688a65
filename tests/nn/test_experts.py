"""ExpertStack, Gater and ExpertMixture: equal to a loop over ordinary modules; copies, dtypes, compile, DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastmod
from fastmod.models import resnet
from fastmod.models.plain_resmixnet import PlainGater
from fastmod.nn import ExpertMixture, ExpertStack, Gater
from tests.helpers.conv_backends import conv_backend as conv_backend
from tests.helpers.processes import as_one_of_two
from tests.helpers.surroundings import one_thread as one_thread


class NamedAsInTorchvision(nn.Module):
    """A basic block with other names and its shortcut in a Sequential."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.2)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, momentum=None)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


Block = Callable[[int, int, int], nn.Module]


def looped(block: Block, experts: int, inputs: int, outputs: int, depth: int, stride: int) -> nn.ModuleList:
    torch.manual_seed(0)
    found = nn.ModuleList()
    for _ in range(experts):
        blocks = [block(inputs, outputs, stride), *(block(outputs, outputs, 1) for _ in range(depth - 1))]
        found.append(nn.Sequential(*blocks))
    for p in found.parameters():
        if p.dim() == 1:  # batch norm: away from its initial values
            nn.init.uniform_(p, 0.5, 1.5)
    return found.double()


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_loop(experts: nn.ModuleList, x: Tensor, gate: Tensor | None) -> Tensor:
    outs = [expert(x if x.dim() == 4 else x[:, e]) for e, expert in enumerate(experts)]
    out = torch.stack(outs, 1)
    return out if gate is None else (out * gate[:, :, None, None, None]).sum(1)


def of_experts(loop: nn.ModuleList, name: str) -> list[nn.Module]:
    """The experts' modules for the stack's ``blocks.{d}.{part}``."""
    _, d, part = name.split(".")
    place = ["conv1", "conv2", "shortcut", "norm1", "norm2", "shortcut_norm"].index(part)
    kind = nn.Conv2d if place < 3 else nn.BatchNorm2d
    return [[m for m in expert[int(d)].modules() if isinstance(m, kind)][place % 3] for expert in loop]


def assert_same_state(stack: ExpertStack, loop: nn.ModuleList, gradients: bool) -> None:
    """Compare parameters, running statistics and, if ``gradients``, gradients to 1e-10."""
    for name, value in stack.state_dict(keep_vars=True).items():
        module, _, leaf = name.rpartition(".")
        theirs = [getattr(m, leaf) for m in of_experts(loop, module)]
        if leaf == "num_batches_tracked":
            assert [int(t) for t in theirs] == [int(value)] * len(theirs)
            continue
        say = lambda m, n=name: f"{n}: {m}"  # noqa: E731
        torch.testing.assert_close(value, torch.stack(theirs), rtol=1e-10, atol=1e-10, msg=say)
        if gradients and value.requires_grad:
            expected = torch.stack([t.grad for t in theirs])
            torch.testing.assert_close(value.grad, expected, rtol=1e-10, atol=1e-10, msg=say)


SHAPES = [  # experts, inputs, outputs, depth, stride, size
    (3, 4, 4, 2, 1, (5, 7)),
    (2, 3, 5, 2, 2, (7, 6)),
    (1, 4, 4, 1, 1, (4, 4)),
    (4, 2, 4, 1, 1, (3, 5)),
    (2, 4, 4, 1, 2, (1, 5)),
]


@pytest.mark.parametrize("block", [resnet.BasicBlock, NamedAsInTorchvision])
@pytest.mark.parametrize(("shared", "gated"), [(True, False), (False, True)])
@pytest.mark.parametrize(("experts", "inputs", "outputs", "depth", "stride", "size"), SHAPES)
def test_equals_the_loop(
    conv_backend: str,
    block: Block,
    shared: bool,
    gated: bool,
    experts: int,
    inputs: int,
    outputs: int,
    depth: int,
    stride: int,
    size: tuple[int, int],
) -> None:
    """Three steps of SGD and an evaluation: outputs, gradients and running statistics."""
    loop = looped(block, experts, inputs, outputs, depth, stride)
    stack = ExpertStack.from_experts(list(loop))
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (loop, stack)]
    for step in range(3):
        x = images(4, *(() if shared else (experts,)), inputs, *size) + 0.1 * step
        gate = images(4, experts).softmax(-1) if gated else None
        results = []
        for optimizer, run in zip(optimizers, (lambda *a: by_loop(loop, *a), stack), strict=True):
            seen = [t if t is None else t.clone().requires_grad_() for t in (x, gate)]
            out = run(*seen)
            optimizer.zero_grad()
            (out * torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
            results.append([out.detach(), *(t.grad for t in seen if t is not None)])
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
        assert_same_state(stack, loop, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(stack, loop, gradients=False)
    loop.eval()
    stack.eval()
    with torch.no_grad():
        torch.testing.assert_close(stack(x, gate), by_loop(loop, x, gate), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(stack(x, gate), by_loop(loop, x, gate), rtol=1e-10, atol=1e-10)


def test_names_and_shapes() -> None:
    shapes = {name: tuple(v.shape) for name, v in ExpertStack(3, 4, 2, 2, stride=2).state_dict().items()}
    norm = {"weight": (2, 4), "bias": (2, 4), "running_mean": (2, 4), "running_var": (2, 4), "num_batches_tracked": ()}
    expected = {
        "blocks.0.conv1.weight": (2, 4, 3, 3, 3),
        "blocks.0.conv2.weight": (2, 4, 4, 3, 3),
        "blocks.0.shortcut.weight": (2, 4, 3, 1, 1),
        "blocks.1.conv1.weight": (2, 4, 4, 3, 3),
        "blocks.1.conv2.weight": (2, 4, 4, 3, 3),
    }
    for part in ("0.norm1", "0.norm2", "0.shortcut_norm", "1.norm1", "1.norm2"):
        expected |= {f"blocks.{part}.{leaf}": shape for leaf, shape in norm.items()}
    assert shapes == expected
    mixture = ExpertMixture(16, 32, 3, 1, stride=2).state_dict()
    assert mixture["gate.convs.0.weight"].shape == (16, 16, 3, 3)
    assert mixture["gate.convs.3.bias"].shape == (64,)
    assert mixture["gate.head.weight"].shape == (3, 256)
    assert mixture["experts.blocks.0.shortcut.weight"].shape == (3, 32, 16, 1, 1)


def test_start() -> None:
    """Convolutions are drawn per expert with He's variance; batch norm starts at 1 and 0."""
    state = ExpertStack(32, 64, 2, 1).state_dict()
    weight = state["blocks.0.conv1.weight"]
    for e in range(2):
        assert weight[e].std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.03)
    assert not torch.equal(weight[0], weight[1])
    assert state["blocks.0.norm2.weight"].eq(1).all() and state["blocks.0.norm2.bias"].eq(0).all()
    gater = Gater(16, 2)
    assert gater.convs[3].weight.std().item() == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.03)
    assert gater.convs[3].bias.eq(0).all()


def test_to_experts_and_back(conv_backend: str) -> None:
    loop = looped(NamedAsInTorchvision, 3, 2, 4, 2, 2)
    loop[0][0].conv1.weight.requires_grad_(False)
    for expert in loop[1:]:
        expert[0].conv1.weight.requires_grad_(False)
    stack = ExpertStack.from_experts(loop)
    assert not stack.blocks[0].conv1.weight.requires_grad and stack.blocks[0].conv2.weight.requires_grad
    for _ in range(2):
        stack(images(4, 2, 5, 5))
    experts = nn.ModuleList(stack.to_experts())
    x = images(3, 2, 6, 5)
    torch.testing.assert_close(by_loop(experts, x, None), copy.deepcopy(stack)(x), rtol=1e-10, atol=1e-10)
    again = ExpertStack.from_experts(list(experts.eval()))
    assert again.blocks[0].norm1.eps == 1e-3 and again.blocks[1].norm2.momentum is None
    torch.testing.assert_close(by_loop(experts, x, None), again(x), rtol=1e-10, atol=1e-10)
    assert not experts[0].blocks[0].conv1.weight.requires_grad


class NoReLU(NamedAsInTorchvision):
    """The same modules in another net."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)))) + (x if self.downsample is None else self.downsample(x))


def test_from_experts_refuses() -> None:
    def stack(*blocks: nn.Module) -> ExpertStack:
        return ExpertStack.from_experts([nn.Sequential(block) for block in blocks])

    with pytest.raises(
        ValueError, match=r"experts\[0\]: its modules look like basic blocks, but it computes something"
    ):
        stack(NoReLU(3, 4, 1))
    with pytest.raises(ValueError, match=r"experts\[1\]: expected channels, depth and stride of experts\[0\]"):
        stack(NamedAsInTorchvision(3, 4, 1), NamedAsInTorchvision(3, 4, 2))
    with pytest.raises(ValueError, match="got 1 Conv2d and 0 BatchNorm2d"):
        stack(nn.Conv2d(3, 3, 3))
    block = NamedAsInTorchvision(3, 4, 1)
    block.conv2 = nn.Conv2d(4, 4, 3, padding=1)
    with pytest.raises(ValueError, match="expected bias-free"):
        stack(block)
    block = NamedAsInTorchvision(3, 4, 1)
    block.bn2 = nn.BatchNorm2d(4, affine=False)
    with pytest.raises(ValueError, match="with weights and running statistics"):
        stack(block)
    block = NamedAsInTorchvision(3, 4, 1)
    block.bn2 = nn.BatchNorm2d(4, eps=0.1)
    with pytest.raises(ValueError, match="one eps and one momentum"):
        stack(NamedAsInTorchvision(3, 4, 1), block)
    block = NamedAsInTorchvision(3, 4, 1)
    block.downsample = None
    with pytest.raises(ValueError, match="expected a 1x1 shortcut in block 0"):
        stack(block)
    with pytest.raises(ValueError, match="expected 4 -> 4 channels"):
        ExpertStack.from_experts([nn.Sequential(NamedAsInTorchvision(3, 4, 1), NamedAsInTorchvision(4, 4, 2))])
    with pytest.raises(ValueError, match="at least one module"):
        ExpertStack.from_experts([])
    with pytest.raises(TypeError, match="expected a list of modules, got BasicBlock"):
        ExpertStack.from_experts(resnet.BasicBlock(3, 3, 1))
    with pytest.raises(TypeError, match=r"experts\[0\]: expected a module, got int"):
        ExpertStack.from_experts([1])


# --- the gater and the mixture


def test_gater(conv_backend: str) -> None:
    plain, gater = PlainGater(3, 4).double(), Gater(3, 4).double()
    gater.load_state_dict(plain.state_dict())
    for size in ((9, 7), (8, 8), (1, 3)):
        x = images(3, 3, *size)
        seen = [x.clone().requires_grad_() for _ in range(2)]
        outs = [net(t) for net, t in zip((plain, gater), seen, strict=True)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(outs[1].sum(1), torch.ones(3, dtype=torch.float64))
        for net, out in zip((plain, gater), outs, strict=True):
            net.zero_grad()
            out[:, 0].square().sum().backward()
        torch.testing.assert_close(seen[0].grad, seen[1].grad)
        torch.testing.assert_close([p.grad for p in plain.parameters()], [p.grad for p in gater.parameters()])


def test_gater_with_norm(conv_backend: str) -> None:
    gater = Gater(3, 4, (5, 6), (2, 1), norm=True, pooled=1).double()
    norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (5, 6)).double()
    assert gater.convs[0].bias is None
    x = images(3, 3, 9, 7)
    for training in (True, True, False):
        gater.train(training)
        norms.train(training)
        y = x
        for conv, norm in zip(gater.convs, norms, strict=True):
            y = F.relu(norm(conv(y)))
        torch.testing.assert_close(gater(x), gater.head(y.mean((2, 3))).softmax(-1))
    torch.testing.assert_close(gater.norms[1].running_var[0], norms[1].running_var)
    assert int(gater.norms[1].num_batches_tracked) == 2


def test_mixture(conv_backend: str) -> None:
    mixture = ExpertMixture(3, 4, 3, 2, stride=2, gate_channels=(5,), gate_strides=(1,), pooled=1).double()
    x = images(4, 3, 7, 5)
    gate = mixture.gate(x)
    loop = nn.ModuleList(mixture.experts.to_experts())
    torch.testing.assert_close(mixture(x), by_loop(loop, x, gate), rtol=1e-10, atol=1e-10)
    with torch.no_grad():  # one expert takes it all
        mixture.gate.head.weight.zero_()
        mixture.gate.head.bias.copy_(torch.tensor([0.0, 0.0, 1000.0]))
    torch.testing.assert_close(mixture(x), mixture.experts(x)[:, 2], rtol=1e-10, atol=1e-10)


# --- batch norm in its modes


def test_eval_sees_every_change(conv_backend: str) -> None:
    """Scale and shift are cached between evaluations until one of their sources changes."""
    stack = ExpertStack(3, 4, 2, 1).double().eval()
    x = images(2, 3, 4, 4)

    def check() -> Tensor:
        with torch.no_grad():
            kept = stack(x)
        torch.testing.assert_close(kept, stack(x).detach())  # with gradients nothing is cached
        return kept

    outs = [check(), check()]
    assert torch.equal(*outs)
    norm = stack.blocks[0].norm1
    with torch.no_grad():
        norm.running_var.mul_(2)
        outs.append(check())
        norm.bias.add_(1)
        outs.append(check())
        norm.weight = nn.Parameter(norm.weight * 2)
        outs.append(check())
    stack.train()(x)
    stack.eval()
    outs.append(check())
    norm.weight.data.mul_(3)
    stack.eval()
    outs.append(check())
    stack.load_state_dict(ExpertStack(3, 4, 2, 1).state_dict())
    outs.append(check())
    for a, b in pairwise(outs[1:]):
        assert not torch.allclose(a, b)
    stack.float().double()
    check()
    with torch.inference_mode():
        torch.testing.assert_close(stack(x), outs[-1])


def test_a_frozen_norm_in_training(conv_backend: str) -> None:
    """One batch norm in eval mode within a stack in training, as in fine-tuning."""
    loop = looped(resnet.BasicBlock, 2, 3, 3, 1, 1)
    stack = ExpertStack.from_experts(list(loop))
    for expert in loop:
        expert[0].norm1.eval()
    stack.blocks[0].norm1.eval()
    assert ExpertStack.from_experts(list(loop)).blocks[0].norm1.training is False
    x = images(2, 3, 4, 4)
    torch.testing.assert_close(stack(x), by_loop(loop, x, None), rtol=1e-10, atol=1e-10)
    assert_same_state(stack, loop, gradients=False)


def test_deterministic(conv_backend: str) -> None:
    torch.set_num_threads(2)
    mixture = ExpertMixture(3, 4, 2, 1)
    x = torch.randn(4, 3, 9, 7)

    def gradients() -> list[Tensor]:
        mixture.zero_grad()
        mixture(x).square().sum().backward()
        return [p.grad.clone() for p in mixture.parameters()]

    first = gradients()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(gradients(), first, strict=True))


# --- what a module must survive


def test_survives(conv_backend: str) -> None:
    mixture = ExpertMixture(3, 4, 2, 2, stride=2)
    x = torch.randn(6, 3, 9, 7)
    mixture(x)
    mixture.eval()
    with torch.no_grad():
        expected = mixture(x)
        assert torch.equal(copy.deepcopy(mixture)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(mixture))(x), expected)
        other = ExpertMixture(3, 4, 2, 2, stride=2).eval()
        other.load_state_dict(mixture.state_dict())
        assert torch.equal(other(x), expected)
        assert torch.equal(torch.func.functional_call(other, mixture.state_dict(), (x,)), expected)
    assert other(x).shape == (6, 4, 5, 4)
    torch.testing.assert_close(other(x), expected)  # without gradients norms are folded into the weights
    strided = torch.randn(6, 3, 7, 18).transpose(2, 3)[:, :, ::2]
    torch.testing.assert_close(mixture(strided), mixture(strided.contiguous()))


def test_the_output_may_be_written_in_place(conv_backend: str) -> None:
    mixture = ExpertMixture(3, 4, 2, 1).double()
    x = images(2, 3, 5, 5)
    expected = torch.autograd.grad((mixture(x) * 2 + 1).square().sum(), list(mixture.parameters()))
    found = torch.autograd.grad(mixture(x).mul_(2).add_(1).square().sum(), list(mixture.parameters()))
    torch.testing.assert_close(found, expected)


def test_empty_batch(conv_backend: str) -> None:
    mixture = ExpertMixture(3, 4, 2, 1, stride=2)
    before = copy.deepcopy(mixture.experts.blocks[0].norm1.running_var)
    out = mixture(torch.zeros(0, 3, 9, 7))
    assert out.shape == (0, 4, 5, 4)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in mixture.parameters())
    assert torch.equal(mixture.experts.blocks[0].norm1.running_var, before)
    assert mixture.eval()(torch.zeros(0, 3, 9, 7)).shape == (0, 4, 5, 4)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(conv_backend: str, autocast: bool) -> None:
    mixture = ExpertMixture(4, 8, 2, 1)
    x = torch.randn(8, 4, 8, 8)
    expected = mixture(x).detach()
    twin = copy.deepcopy(mixture)
    if autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = twin(x)
    else:
        out = twin.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    out.float().square().sum().backward()
    for p in twin.parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all()


def test_errors(conv_backend: str) -> None:
    stack = ExpertStack(3, 4, 2, 1)
    x = torch.zeros(2, 3, 5, 5)
    for bad, message in (
        (x[0], r"x: expected \[B, C, H, W\] or \[B, E, C, H, W\], got shape \[3, 5, 5\]"),
        (x[:, :2], r"x: expected .* with C = 3, got shape \[2, 2, 5, 5\]"),
        (torch.zeros(2, 3, 3, 5, 5), r"x: expected .* with E = 2, got shape \[2, 3, 3, 5, 5\]"),
        (x[..., :0], r"at least one pixel"),
    ):
        with pytest.raises(ValueError, match=message):
            stack(bad)
    with pytest.raises(TypeError, match=r"x: expected a tensor .*got list"):
        stack([1])
    for gate in (torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2), torch.zeros(2, 2, 1)):
        with pytest.raises(ValueError, match=r"gate: expected \[B, E\] = \[2, 2\], got shape"):
            stack(x, gate)
    with pytest.raises(TypeError, match=r"gate: expected a tensor \[B, E\], got float"):
        stack(x, 1.0)
    one = torch.zeros(1, 3, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        stack(one)
    assert stack.eval()(one).shape == (1, 2, 4, 1, 1)
    with pytest.raises(ValueError, match="stride: expected 1 or 2, got 3"):
        ExpertStack(3, 4, 2, 1, stride=3)
    with pytest.raises(ValueError, match="experts: expected an int >= 1, got 0"):
        ExpertStack(3, 4, 0, 1)
    with pytest.raises(ValueError, match="depth: expected an int >= 1, got 0"):
        ExpertStack(3, 4, 2, 0)
    with pytest.raises(TypeError, match="in_channels: expected an int >= 1, got float"):
        ExpertStack(3.0, 4, 2, 1)
    with pytest.raises(ValueError, match=r"x: expected \[B, C, H, W\], got shape"):
        Gater(3, 2)(torch.zeros(2, 2, 3, 5, 5))
    with pytest.raises(ValueError, match="channels, strides: expected one stride per convolution"):
        Gater(3, 2, (16, 16), (1,))
    with pytest.raises(ValueError, match=r"strides\[1\]: expected 1 or 2, got 4"):
        Gater(3, 2, (16, 16), (1, 4))
    with pytest.raises(ValueError, match="pooled: expected an int >= 1, got 0"):
        Gater(3, 2, pooled=0)


# --- torch.compile and DDP


@pytest.mark.slow
def test_compile_fullgraph(conv_backend: str) -> None:
    torch._dynamo.reset()
    mixture = ExpertMixture(3, 4, 2, 1, stride=2)
    twin = copy.deepcopy(mixture)
    compiled = torch.compile(twin, fullgraph=True, backend="inductor" if conv_backend == "native" else "aot_eager")
    for size in (4, 4, 6):
        x = torch.randn(size, 3, 9, 7)
        outs = []
        for net, run in ((mixture, mixture), (twin, compiled)):
            net.zero_grad()
            out = run(x)
            out.square().sum().backward()
            outs.append([out.detach(), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())])
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    mixture.eval()
    twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), mixture(x), rtol=1e-4, atol=1e-4)


def make() -> tuple[ExpertMixture, Tensor]:
    torch.manual_seed(0)
    mixture = ExpertMixture(3, 4, 2, 1, stride=2)
    with torch.no_grad():  # an unused expert still has gradients, so DDP does not wait
        mixture.gate.head.bias.copy_(torch.tensor([0.0, -1000.0]))
    return mixture.eval(), torch.randn(8, 3, 6, 6)  # running statistics: two halves equal the whole


def step(mixture: ExpertMixture, run: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(mixture.parameters(), 0.1)
    (run(x).square().sum() / len(x)).backward()
    assert all(p.grad is not None for p in mixture.parameters())
    optimizer.step()


def worker(rank: int, folder: str, backend: str) -> None:
    with fastmod.use_backend(backend):
        mixture, x = make()
        run = DistributedDataParallel(mixture)
        step(mixture, run, x[4 * rank : 4 * rank + 4])
        torch.save(mixture.state_dict(), f"{folder}/rank{rank}.pt")
        mixture.train()
        run(x[4 * rank : 4 * rank + 4]).sum().backward()  # also with statistics of the batch


@pytest.mark.slow
def test_ddp(tmp_path: Path, conv_backend: str) -> None:
    mp.spawn(as_one_of_two, (str(tmp_path), worker, conv_backend), nprocs=2)
    mixture, x = make()
    step(mixture, mixture, x)
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"rank{rank}.pt").items():
            torch.testing.assert_close(value, mixture.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")
