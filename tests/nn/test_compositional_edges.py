"""Compositional nets: signatures in state dicts, refused changes, odd blocks and batches."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastmod
from fastmod.models import IsometricNet
from fastmod.nn import BasicBlock, Compositional, IsometricBlock, TemplateBank


def linears(**options: Any) -> Compositional:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # not on the fused path
        return Compositional(lambda: nn.Linear(4, 4), 3, 6, **options)


def test_state_dict_holds_the_signature() -> None:
    one, other = (linears(signature=own) for own in ([0, 2, 1, 0, 1, 2], [0, 1, 0, 1, 2, 2]))
    other.load_state_dict(one.state_dict())
    assert other.signature() == one.signature() == [0, 2, 1, 0, 1, 2]
    x = torch.randn(2, 4)
    assert torch.equal(other(x), one(x))


def test_state_dict_of_a_hardened_net() -> None:
    learned = linears(tasks=2)
    hard = learned.harden()
    fresh = linears(tasks=2, signature="cyclic")
    fresh.load_state_dict(hard.state_dict())
    assert [fresh.signature(t) for t in range(2)] == [learned.signature(t) for t in range(2)]


def test_state_dict_without_a_signature_keeps_that_of_the_net() -> None:
    net = linears(signature="random", generator=torch.Generator().manual_seed(0))
    before = net.signature()
    net.load_state_dict({n: v for n, v in net.state_dict().items() if n != "templates_of"})
    assert net.signature() == before


def test_signature_out_of_range_in_a_state_dict() -> None:
    net = linears(signature="cyclic")
    state = net.state_dict() | {"templates_of": torch.full((1, 6), 3)}
    with pytest.raises(RuntimeError, match=r"expected templates 0 \.\. 2"):
        net.load_state_dict(state)


def test_shared_layers_of_signatures() -> None:
    net = linears(tasks=2, signature=[[0] * 6, [1] * 6], share_layers=2)
    assert net.signature(1) == [0, 0, 1, 1, 1, 1]


def _raises() -> Tensor:
    raise KeyError("loss")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"init": 0, "classes": -1}, ValueError),
        ({"init": 0, "classes": 2.5}, TypeError),
        ({"init": 7}, ValueError),
        ({"init": "learned", "loss": _raises}, KeyError),
        ({"init": "learned", "loss": lambda: 1.0}, TypeError),
        ({"init": "learned", "loss": lambda: torch.ones(())}, ValueError),
        ({"init": "learned", "loss": _raises, "steps": 0}, ValueError),
        ({"init": "learned", "loss": _raises, "lr": -1.0}, ValueError),
    ],
)
def test_a_refused_task_changes_nothing(options: dict[str, Any], error: type[Exception]) -> None:
    torch.manual_seed(0)
    net = IsometricNet(8, 3, 2, 4, 2, output=(8, 8)).eval()
    x = torch.randn(2, 4, 3, 16, 16)
    before, names = net(x, task=None), list(net.state_dict())
    with pytest.raises(error):
        net.add_task(**options)
    assert net.tasks == 2 and list(net.state_dict()) == names
    assert torch.equal(net(x, task=None), before)


def test_fixed_signatures_take_copies_of_tasks_only() -> None:
    net = IsometricNet(8, 3, 2, 4, 2, output=(8, 8), signature="cyclic")
    x = torch.randn(2, 4, 3, 16, 16)
    with pytest.raises(ValueError, match="fixed signatures"):
        net.add_task("uniform")
    assert net(x, task=None).shape == (2, 4, 4)
    assert net.add_task(1) == 2 and net.signature(2) == net.signature(1)
    assert net.body.templates_of.tolist() == net.body.fixed


def test_one_image_in_training_without_squeeze_excite() -> None:
    torch.manual_seed(0)
    net = Compositional(lambda: IsometricBlock(4, se=False), 2, 2).double()
    x = torch.randn(1, 4, 5, 5, dtype=torch.double)
    plain = copy.deepcopy(net)
    with fastmod.use_backend("reference"):
        expected = plain(x)
    torch.testing.assert_close(net(x), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        net(x[..., :1, :1])


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch_of_images(training: bool) -> None:
    net = IsometricNet(8, 2, 2, 4, output=(8, 8)).train(training)
    assert net(torch.empty(0, 3, 16, 16)).shape == (0, 4)


@pytest.mark.parametrize("output", [64, (1,), (0, 4), "ab"])
def test_output_channels(output: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"output|c1"):
        IsometricNet(8, 2, 2, 4, output=output)


@pytest.mark.parametrize("classes", [2.5, "10", None])
def test_classes(classes: Any) -> None:
    with pytest.raises(TypeError, match="classes"):
        IsometricNet(8, 2, 2, classes, output=(8, 8))


def test_a_compositional_net_as_block() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        net = Compositional(lambda: Compositional(lambda: BasicBlock(4, 4), 2, 2), 2, 2)
    out = net(torch.randn(2, 4, 5, 5))
    assert out.shape == (2, 4, 5, 5)
    out.sum().backward()
    assert net.bank.weight.grad is not None and bool(net.bank.weight.grad.isfinite().all())


def _conv_norm_relu() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize("task", [0, None])
def test_blocks_of_conv_norm_relu_are_fused(task: int | None) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning: it is fused
        net = Compositional(_conv_norm_relu, 3, 4, 2).double()
    plain = copy.deepcopy(net)
    fastmod.nn.unfuse_batch_norm_(plain.bank.block)
    assert "forward" in vars(net.bank.block) and "forward" not in vars(plain.bank.block)
    assert all("forward" not in vars(block) for block in net.bank.to_modules())
    x = torch.randn(2, 3, 4, 5, 6, dtype=torch.double)
    x = x if task is None else x[0]
    for one in (net, plain):
        one(x, task=task).square().sum().backward()
    for (name, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=lambda text, n=name: f"{n}: {text}")
    for own, other in zip(net.state.buffers(), plain.state.buffers(), strict=True):
        torch.testing.assert_close(own, other)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x) if other is None else self.linear(x) + other
        return x if mask is None else x * mask


def test_further_arguments_of_blocks() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        net = Compositional(Masked, 2, 3, 2)
    x, mask = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    each = torch.stack([net(x[t], None, mask=mask[t], task=t) for t in range(2)])
    torch.testing.assert_close(net(x, None, mask=mask, task=None), each)
    fused = Compositional(lambda: IsometricBlock(4), 2, 2)
    with pytest.raises(TypeError, match="mask"):
        fused(torch.randn(2, 4, 5, 5), mask=mask)


def test_templates_of_several_dtypes() -> None:
    with pytest.raises(TypeError, match=r"number 1.*float64"):
        TemplateBank.from_modules([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    with pytest.raises(ValueError, match="state_dicts"):
        TemplateBank.from_state_dicts(nn.Linear(2, 2), [])


def test_composed_layers_of_several_dtypes() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)), *(nn.Linear(3, 3).double() for _ in range(2)))
    fastmod.compose_(net, 2)
    assert net[1](torch.randn(2, 4)).dtype == torch.float32
    assert net[2](torch.randn(2, 3).double()).dtype == torch.float64


def test_shared_coefficients_by_default() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = fastmod.compose_(net, 2, coefficients="shared")
    assert torch.equal(found.mixture()["0"], torch.full((2,), 0.5))


def test_state_dicts_that_are_none() -> None:
    with pytest.raises(TypeError, match="state_dicts"):
        fastmod.compose_(nn.Linear(2, 2), state_dicts=[1])  # type: ignore[list-item]
