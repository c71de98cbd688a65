"""``MaskedModel`` over nets as others write them: what runs is right, what cannot be right is refused."""

from __future__ import annotations

import copy
import functools
import threading
import types
import warnings
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
from fastmod.ops import sample_mask

SAMPLES = 4
pytestmark = pytest.mark.filterwarnings()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def masked_and_seeds(
    net: nn.Module, call: Callable[[MaskedModel], Any], **options: Any
) -> tuple[Any, MaskedModel, Any]:
    """The output of a masked net, and the seeds of its masks."""
    masked = MaskedModel(net, SAMPLES, **{"init": 0.5, **options})
    for _, logits in masked.named_logits():
        nn.init.normal_(logits)
    torch.manual_seed(3)
    seeds = torch.randint(0, 2**63 - 1, (len(list(masked.named_logits())),)).unbind()
    torch.manual_seed(3)
    return call(masked), masked, seeds


def weights_of(masked: MaskedModel, seeds: Any, s: int) -> dict[str, Tensor]:
    weights = {name: value.detach() for name, value in masked.model.named_parameters()}
    for (name, logits), seed in zip(masked.named_logits(), seeds, strict=True):
        transposed = isinstance(masked.model.get_submodule(name.rpartition(".")[0]), Conv1D)  # noise lies as [out, in]
        mask = sample_mask(logits.t(), SAMPLES, seed)[s].t() if transposed else sample_mask(logits, SAMPLES, seed)[s]
        weights[name] = weights[name] * mask.to(weights[name].dtype)
    return weights


def assert_parts(
    net: nn.Module,
    x: Tensor,
    batch_dim: int = 0,
    axis: int = 0,
    again: Callable[[nn.Module], nn.Module] = lambda net: net,
    **options: Any,
) -> MaskedModel:
    """Part s of the batch is what the net gives for that part alone under sample s, and so are its gradients."""
    out, masked, seeds = masked_and_seeds(net, lambda m: m(x), batch_dim=batch_dim, **options)
    wanted = [
        torch.func.functional_call(again(net), weights_of(masked, seeds, s), (part,))
        for s, part in enumerate(x.tensor_split(SAMPLES, batch_dim))
    ]
    expected = torch.cat(wanted, axis)
    torch.testing.assert_close(out, expected)
    logits = list(masked.parameters())
    found = torch.autograd.grad(out.square().sum(), logits)
    for got, want in zip(found, torch.autograd.grad(expected.square().sum(), logits), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
        assert float(want.abs().max()) > 0
    return masked


# ------------------------------------------------------------------------------------------ which row meets which mask


class Wrapped(nn.Module):
    """A linear layer inside of what a function does with it."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], size: int = 8) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(size, size), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear, x)


def repeated(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.repeat(3, 1)).view(3, len(x), -1).sum(0)


def two_views(linear: nn.Module, x: Tensor) -> Tensor:
    first, second = linear(torch.cat([x, x.flip(1)])).chunk(2)
    return first - 2 * second


def time_major(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.transpose(0, 1).reshape(-1, x.shape[-1])).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def steps_first(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("call", [repeated, two_views])
def test_rows_are_followed(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert_parts(Wrapped(call), torch.randn(12, 8))


@pytest.mark.parametrize("call", [time_major, steps_first])
@pytest.mark.parametrize("steps", [5, 8, 2])  # as many as the batch, and as a part of it
def test_sequences_are_followed(call: Callable[[nn.Module, Tensor], Tensor], steps: int) -> None:
    assert_parts(Wrapped(call), torch.randn(8, steps, 8))


@pytest.mark.parametrize("steps", [5, 8, 2])
def test_output_with_the_batch_elsewhere(steps: int) -> None:
    assert_parts(Wrapped(lambda linear, x: linear(x).transpose(0, 1)), torch.randn(8, steps, 8), axis=1)


def test_square_output() -> None:
    assert_parts(Wrapped(lambda linear, x: linear(x)[:, :2]), torch.randn(8, 8))


def test_rows_in_an_order_that_cannot_be_told() -> None:
    masked = MaskedModel(Wrapped(lambda linear, x: linear(torch.cat([x, x.flip(1)]))), SAMPLES)
    with pytest.raises(ValueError, match=r"expected one row an example in dimension 0, got \[4, 8\] for 2 examples"):
        masked(torch.randn(8, 8))


@pytest.mark.parametrize("batch", [4, 5, 7, 3, 1])
def test_batch_that_is_no_multiple_of_the_samples(batch: int) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(batch, 8)
    out, masked, seeds = masked_and_seeds(net, lambda m: m(x))
    parts = [part for part in x.tensor_split(SAMPLES) if len(part)]
    wanted = [torch.func.functional_call(net, weights_of(masked, seeds, s), (part,)) for s, part in enumerate(parts)]
    torch.testing.assert_close(out, torch.cat(wanted))


def test_empty_batch() -> None:
    masked = MaskedModel(nn.Linear(3, 2), SAMPLES)
    out = masked(torch.randn(0, 3))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in masked.parameters() if p.grad is not None)


# ------------------------------------------------------------------------------------------------- layers of all kinds


class TakesLast(nn.Module):
    """A recurrent layer, and a linear one over its last step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return self.out(found[0] if isinstance(found, tuple) else found)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class RMSNorm(nn.Module):
    """As in T5 and Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight lies as [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], -1)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Tied(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(self.embedding(x)).relu(), self.embedding.weight)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hdk->bthk", x, self.weight)


def sequences() -> Tensor:
    return torch.randn(8, 5, 8)


def images() -> Tensor:
    return torch.randn(8, 4, 6, 6)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "nn.RNN": (lambda: TakesLast(nn.RNN(8, 8, batch_first=True)), sequences, {}),
    "LSTMCell": (Cell, sequences, {}),
    "attention, subclass": (lambda: Attention(8, 2, batch_first=True), sequences, {}),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), sequences, {}),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(8, 3)), sequences, {}),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), images, {}),
    "GroupNorm, channels last": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)),
        lambda: images().to(memory_format=torch.channels_last),
        {},
    ),
    "RMSNorm": (RMSNorm, sequences, {}),
    "nn.RMSNorm": (lambda: nn.RMSNorm(8), sequences, {}),
    "Conv1D": (lambda: nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(6, 3)), sequences, {}),
    "tied": (Tied, lambda: torch.randint(11, (8, 5)), {"exclude": ()}),
    "einsum": (Einsum, sequences, {}),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding="same"), images, {}),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), images, {}),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 8), lambda: torch.randint(11, (8, 5)), {}),
    "bilinear": (lambda: Bilinear(), sequences, {}),
    "SMFR": (lambda: fastmod.nn.SMFR(5, 3, 8, 4, 2, hidden=16), sequences, {}),
    "MFNNR": (lambda: fastmod.nn.MFNNR(5, 3, 8, hidden=16), sequences, {}),
    "FNNR": (lambda: fastmod.nn.FNNR(5, 8, hidden=16), sequences, {}),
    "Multiplexer": (lambda: fastmod.nn.Multiplexer(5, 3, 8, hidden=16), sequences, {}),
}


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(-1))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one by one"])
def test_layers(name: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, options = LAYERS[name]
    if one_by_one:
        monkeypatch.setattr("fastmod.masks.sampling.can_run_together", lambda net: False)
    assert_parts(make(), inputs(), **options)


@pytest.mark.parametrize("name", ["Conv1D", "tied", "RMSNorm", "GroupNorm", "einsum"])
def test_layers_that_run_together(name: str) -> None:
    make, inputs, options = LAYERS[name]
    assert assert_parts(make(), inputs(), **options)._together


# ------------------------------------------------------------------------------------------- ways to lead past a child


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


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


# ---------------------------------------------------------------------------------------------------------- attention


class Heads(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor | None], learned: bool = False) -> None:
        super().__init__()
        self.inner, self.out, self.mask = nn.Linear(8, 24), nn.Linear(8, 8), mask
        self.bias = nn.Parameter(torch.randn(1, 2, 5, 5)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask(x) if self.bias is None else self.bias
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("mask", "learned"),
    [
        (lambda x: None, False),
        (lambda x: torch.ones(5, 5).tril().bool(), False),
        (lambda x: torch.ones(len(x), 1, 5, 5).tril().bool(), False),
        (lambda x: x[:, None, :, :5], False),
        (lambda x: None, True),
    ],
    ids=["none", "causal", "per example", "of the input", "learned"],
)
def test_attention_of_all_parts_is_one_call(mask: Callable[[Tensor], Tensor | None], learned: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked = assert_parts(Heads(mask, learned), torch.randn(8, 5, 8), mask_bias=False)
    assert masked._together
