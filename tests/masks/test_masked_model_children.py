"""``MaskedModel`` over nets that lead past their children: masks reach them, or are named as without effect."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastmod.masks import MaskedModel
from tests.helpers.masked_nets import SAMPLES, Looped, assert_parts

# ------------------------------------------------------------------------------------------- ways to lead past a child


class ThroughList(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.table = [self.inner], {"a": (self.inner,)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.table["a"][0](x)


class ThroughLambda(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.call = lambda x: self.inner(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class ThroughBoundMethod(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.call = self.inner.forward
        self.part = functools.partial(Looped.forward, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x) + self.part(x)


class ThroughParameters(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


def with_own_forward() -> nn.Module:
    """As accelerate's hooks leave a module."""
    net = nn.Sequential(nn.Linear(8, 8))
    module = net[0]
    module._old_forward = module.forward  # type: ignore[assignment]

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs) * 2  # type: ignore[operator]

    module.forward = functools.update_wrapper(  # type: ignore[method-assign]
        functools.partial(new_forward, module), module._old_forward
    )
    return net


def with_method_of_its_own() -> nn.Module:
    net = Looped()
    net.forward = types.MethodType(lambda self, x: self.inner(x) * 3, net)  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize(
    "make",
    [ThroughList, ThroughLambda, ThroughBoundMethod, ThroughParameters, with_own_forward, with_method_of_its_own],
)
def test_masks_reach_children_on_every_way(make: Callable[[], nn.Module]) -> None:
    net, x = make(), torch.randn(8, 8)
    masked = MaskedModel(net, SAMPLES, init=-1e4)  # nothing is kept
    bias = sum(p.detach().abs().sum() for name, p in net.named_parameters() if name.endswith("bias"))
    zeroed = MaskedModel(net, SAMPLES, init=-1e4, mask_bias=True, unused="warn")
    assert bias > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert torch.equal(zeroed(x), torch.zeros(8, 8))
        zeroed.eval()
        assert torch.equal(zeroed(x), torch.zeros(8, 8))
    assert not torch.equal(net(x), masked(x))


def test_compiled_children() -> None:
    inner = torch.compile(nn.Linear(8, 8), backend="eager")
    net = nn.Sequential(inner, nn.Tanh())
    masked = MaskedModel(net, SAMPLES, init=-1e4)
    out = masked(torch.randn(8, 8))
    torch.testing.assert_close(out, torch.tanh(inner._orig_mod.bias).expand(8, 8))
    module = nn.Linear(8, 8)
    module.compile(backend="eager")
    torch.testing.assert_close(MaskedModel(module, SAMPLES, init=-1e4)(torch.randn(8, 8)), module.bias.expand(8, 8))


def test_compiled_nets_are_unwrapped_and_stay_as_they_were() -> None:
    net = nn.Linear(8, 8)
    compiled = torch.compile(net, backend="eager")

    def state() -> Any:
        return set(vars(net)), set(vars(compiled)), {k: id(v) for k, v in net._parameters.items()}, net.forward

    before = state()
    with pytest.warns(RuntimeWarning, match="Compile the MaskedModel instead"):
        masked = MaskedModel(compiled, SAMPLES)
    assert masked.model is net and [name for name, _ in masked.named_logits()] == ["weight"]
    masked(torch.randn(8, 8)).sum().backward()
    masked.eval()(torch.randn(8, 8))
    assert before == state()
    assert all(isinstance(value, nn.Parameter) for value in net._parameters.values())


def test_script_modules_are_refused() -> None:
    scripted = torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8))
    with pytest.raises(TypeError, match="ScriptModule, whose weights cannot be masked"):
        MaskedModel(scripted)
    net = nn.Sequential(nn.Linear(8, 8), scripted)
    with pytest.raises(TypeError, match="1 is a ScriptModule"):
        MaskedModel(net)
    MaskedModel(net, SAMPLES, exclude=(scripted,))(torch.randn(8, 8)).sum().backward()


def test_a_child_registered_twice_beside_a_parameter() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.first = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * self.scale)

    net = Shared()
    # functional_call leaves such a net without its Parameter: a copy for every part.
    masked = assert_parts(net, torch.randn(8, 8), again=copy.deepcopy)
    masked.eval()(torch.randn(8, 8))
    assert isinstance(net.first.weight, nn.Parameter) and net.first is net.second
    assert isinstance(net.scale, nn.Parameter)
    assert set(dict(net.named_parameters())) == {"scale", "first.weight", "first.bias"}


# --------------------------------------------------------------------------------------------- masks without an effect


class Idle(nn.Module):
    """Has a layer that it does not use, as BERT its pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_masks_without_effect_are_named() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match=r"masks without effect: pooler\.weight:"):
        MaskedModel(Idle())(x)
    masked = MaskedModel(Idle(), unused="warn")
    with pytest.warns(RuntimeWarning, match=r"masks without effect: pooler\.weight:"):
        masked(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked(x)
    net = Idle()
    MaskedModel(net, exclude=(net.pooler,))(x)
    with torch.no_grad():
        MaskedModel(Idle())(x)  # no gradient is wanted, so none is missed


def test_a_function_of_ones_own_that_masks_cannot_follow() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            return None, grad.t() @ ctx.saved_tensors[0]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.linear.weight) if self.inner else Product.apply(x, self.weight)

    net = Own()
    net.inner = False
    assert_parts(net, torch.randn(8, 8), exclude=(net.linear,))  # an ordinary tensor: right
    net.inner = True
    masked = MaskedModel(net, unused="error")
    with pytest.raises(RuntimeError):
        masked(torch.randn(8, 8))


def test_side_outputs_count() -> None:
    class Aside(Idle):
        def forward(self, x: Tensor) -> Tensor:
            self.aside = self.pooler(x)
            return self.used(x)

    MaskedModel(Aside())(torch.randn(8, 8))
