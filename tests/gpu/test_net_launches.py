"""Whole nets over the host harness: how many launches they take, and that they compute what they do elsewhere."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastmod
from fastmod.gpu import aten
from fastmod.models import IsometricNet, ResMixNet, load_plain
from fastmod.models.plain_resmixnet import PlainResMixNet
from fastmod.nn import ExpertMixture
from tests.helpers import backends, triton_launches
from tests.helpers.cuda_host import recorder


def launches(net: nn.Module, x: Tensor, captured: bool = False, **how: Any) -> tuple[list[str], list[str]]:
    """Of the second training step: forward, backward to all parameters."""
    with backends.no_tf32(), backends._cuda_host(direct=True), fastmod.use_backend("native"):
        found: list[Any] = []
        for _ in range(2):
            net.zero_grad(set_to_none=True)
            forward = recorder.capture(lambda: found.append(net(x, **how)), captured=captured)
            grad = torch.ones_like(found[-1])
            backward = recorder.capture(
                lambda grad=grad: torch.autograd.backward([found[-1]], [grad]), captured=captured
            )
    return [each.name for each in forward], [each.name for each in backward]


#: experts, depth -> forward, backward; the same for any number of experts.
RESMIXNETS = {(2, 2): (24, 44), (5, 2): (24, 44), (4, 1): (19, 34), (1, 1): (19, 34)}


@pytest.mark.parametrize(("experts", "depth"), RESMIXNETS)
def test_resmixnet(experts: int, depth: int) -> None:
    """Issue E: (2, 2) in at most 25 and 50. One of the 24 brings the images' channels innermost."""
    forward, backward = launches(ResMixNet(experts, depth), torch.randn(4, 3, 16, 16))
    assert (len(forward), len(backward)) == RESMIXNETS[experts, depth], (forward, backward)
    assert not any("batch_affine" in name for name in forward + backward)


#: The same in Triton, where convolutions do not share launches, and torch's own ops make the gates.
IN_TRITON = {(2, 2): (43, 78), (5, 2): (43, 78), (4, 1): (34, 60)}


@pytest.fixture
def launches_in_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], list[str]]]:
    """Of the second training step in the interpreter, where our kernels are left out: names, forward and backward."""
    ours = triton_launches.left_out(monkeypatch)

    def found_of(run: Callable[[], Any]) -> list[str]:
        ours.clear()
        return [*aten.launches(run), *(each.kernel for each in ours)]

    def count(net: nn.Module, x: Tensor) -> tuple[list[str], list[str]]:
        with fastmod.use_backend("triton"):
            for _ in range(2):
                net.zero_grad(set_to_none=True)
                scores: list[Tensor] = []
                forward = found_of(lambda scores=scores: scores.append(net(x)))
                grads = [torch.ones_like(scores[0])]
                backward = found_of(lambda s=scores, g=grads: torch.autograd.backward(s, g))
        return forward, backward

    return count


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize(("experts", "depth"), IN_TRITON)
def test_resmixnet_in_triton(experts: int, depth: int, launches_in_triton: Any) -> None:
    """Batch norm and sums take no launch of their own."""
    forward, backward = launches_in_triton(ResMixNet(experts, depth), torch.randn(4, 3, 16, 16))
    assert (len(forward), len(backward)) == IN_TRITON[experts, depth]


@pytest.mark.slow
@pytest.mark.interpreted
def test_isometric_net_in_triton(launches_in_triton: Any) -> None:
    """A layer: three convolutions, a squeeze-excite, and the sum, which in CUDA C++ the next layer does."""
    found = [launches_in_triton(IsometricNet(24, layers, 2, 5), torch.randn(4, 3, 16, 16)) for layers in (2, 3)]
    forward, backward = (Counter(found[1][i]) - Counter(found[0][i]) for i in (0, 1))
    kernels = {"_norm_conv": 3, "squeeze_excite": 1, "norm_sum": 1}
    assert forward == {f"{stem}.forward_kernel": count for stem, count in kernels.items()}
    assert backward.total() == 14


def test_resmixnet_can_be_captured() -> None:
    forward, _ = launches(ResMixNet(2, 2), torch.randn(4, 3, 16, 16), captured=True)
    ours = [name for name in forward if not name.startswith("aten::")]
    assert len(ours) == 23


@pytest.mark.parametrize("tasks", [1, 3])
def test_isometric_net(tasks: int) -> None:
    """Issue F: at most four launches a layer, for all tasks together; all of them ours."""
    x = torch.randn(4, 3, 16, 16) if tasks == 1 else torch.randn(tasks, 4, 3, 16, 16)
    how = {} if tasks == 1 else {"task": None}
    found = [launches(IsometricNet(24, layers, 2, 5, tasks), x, **how) for layers in (2, 3)]
    assert len(found[1][0]) - len(found[0][0]) == 4
    more = list(found[1][0])
    for name in found[0][0]:
        more.remove(name)
    kinds = ["norm_conv.forward_kernel<float>"] * 2
    assert sorted(more) == [*kinds, "norm_conv_depthwise.forward_kernel<float>", "squeeze_excite.forward_kernel<float>"]


@pytest.fixture
def on_harness() -> Iterator[None]:
    with backends.chosen(backends.CUDA_HOST):
        yield


def step(net: nn.Module, x: Tensor, **how: Any) -> dict[str, Tensor]:
    """Scores, gradients and buffers after a step."""
    net.zero_grad(set_to_none=True)
    scores = net(x, **how)
    scores.square().sum().backward()
    found = {f"grad of {n}": p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"scores": scores.detach(), **found, **{n: b.clone() for n, b in net.named_buffers()}}


def shaken(net: nn.Module) -> nn.Module:
    """Batch norms and biases away from their 1 and 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.rand_like(p))
    return net


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not value.is_floating_point():
            assert torch.equal(ours[name], value), name
        else:
            limit = tolerance * max(1.0, float(value.abs().max()))
            assert float((ours[name] - value).abs().max()) <= limit, name


@pytest.mark.parametrize(("experts", "depth"), [(2, 2), (3, 1)])
def test_resmixnet_computes_the_same(on_harness: None, experts: int, depth: int) -> None:
    """Gater and experts side by side in fp64, against the plain twin: scores, gradients, statistics, counters."""
    plain = shaken(PlainResMixNet(experts, depth)).double()
    net = load_plain(ResMixNet(experts, depth).double(), plain)
    twin, x = copy.deepcopy(net), torch.randn(3, 3, 8, 10, dtype=torch.float64)
    ours = step(net, x)
    with fastmod.use_backend("reference"):
        theirs = step(twin, x)
    same(ours, theirs, 1e-10)
    torch.testing.assert_close(ours["scores"], plain(x), rtol=1e-10, atol=1e-10)
    net.eval(), twin.eval()
    with fastmod.use_backend("reference"):
        expected = twin(x)
    torch.testing.assert_close(net(x), expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected, rtol=1e-10, atol=1e-10)


def test_mixtures_in_fp32(on_harness: None) -> None:
    """On tensor cores, with batch norm in the gater and without."""
    for norm in (False, True):
        how: dict[str, Any] = {"gate_norm": norm, "gate_channels": (4, 17), "gate_strides": (2, 1)}
        no_worse(lambda how=how: ExpertMixture(5, 18, 3, 2, stride=2, **how), (3, 5, 9, 7))


def no_worse(make: Callable[[], nn.Module], shape: tuple[int, ...], **how: Any) -> None:
    """Errors against fp64, relative to the largest value of each result, add up to at most twice those of plain
    PyTorch; counters are equal."""
    ours_off = usual_off = 0.0
    for draw in range(3):
        torch.manual_seed(draw)
        net = shaken(make())
        x = torch.randn(shape)
        ours = step(copy.deepcopy(net), x, **how)
        with fastmod.use_backend("reference"):
            usual, exact = step(copy.deepcopy(net), x, **how), step(copy.deepcopy(net).double(), x.double(), **how)
        for name, value in exact.items():
            if not value.is_floating_point():
                assert torch.equal(ours[name], value), name
                continue
            size = max(float(value.abs().max()), 1e-30)
            ours_off += float((ours[name].double() - value).abs().max()) / size
            usual_off += float((usual[name].double() - value).abs().max()) / size
    assert ours_off <= 2 * usual_off, (ours_off, usual_off)


def test_hooks_are_not_passed_by(on_harness: None) -> None:
    """Who watches the gater or an expert's block sees it run; values stay."""
    net, x = ExpertMixture(4, 4, 2, 1).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    expected = net(x)
    for module in (net.gate, net.experts, net.experts.blocks[0]):
        seen: list[int] = []
        handle = module.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
        handle.remove()
        assert seen == [1]


NETS: dict[str, Callable[[], IsometricNet]] = {
    "one task": lambda: IsometricNet(4, 3, 2, 5, output=(6, 7), dropout=0.0),
    "tasks": lambda: IsometricNet(4, 2, 2, 5, 2, output=(6, 7), dropout=0.0, norm="per_task"),
    "no squeeze": lambda: IsometricNet(4, 2, 2, 5, 2, se=False, output=(6, 7), dropout=0.0, bias=True),
    "second input": lambda: IsometricNet(4, 2, 2, 5, output=(6, 7), dropout=0.0, adapter_into_blocks=True),
}


@pytest.mark.parametrize("name", NETS)
def test_isometric_net_computes_the_same(on_harness: None, name: str) -> None:
    """Chained blocks in fp64, against plain PyTorch: scores, gradients, statistics; in eval too."""
    net = shaken(NETS[name]()).double()
    many = net.tasks > 1
    x = torch.randn(*([net.tasks] if many else []), 4, 3, 8, 12, dtype=torch.float64)
    how = {"task": None} if many else {}
    twin = copy.deepcopy(net)
    ours = step(net, x, **how)
    with fastmod.use_backend("reference"):
        theirs = step(twin, x, **how)
    same(ours, theirs, 1e-10)
    net.eval(), twin.eval()
    with fastmod.use_backend("reference"):
        expected = twin(x, **how)
    torch.testing.assert_close(net(x, **how), expected, rtol=1e-10, atol=1e-10)


def test_isometric_net_in_fp32(on_harness: None) -> None:
    no_worse(lambda: IsometricNet(8, 2, 2, 5, 2, output=(16, 16), dropout=0.0), (2, 6, 3, 12, 12), task=None)
