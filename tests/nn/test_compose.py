"""compose_: turn layers of an existing net into mixtures of templates or checkpoints, and back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastmod
from fastmod.models import ResNet
from fastmod.nn import Composition, compose_


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def chain(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(layers)]).double()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def by_hand(net: nn.Sequential, composition: Composition, x: Tensor) -> Tensor:
    """The chain with its Linear layers mixed in plain PyTorch."""
    banks = composition.banks
    xi = composition.logits.softmax(-1)
    for layer, part in enumerate(net):
        row = xi[0 if composition.shared else layer]
        weight, bias = (row @ banks[f"0.0.{n}"] for n in ("weight", "bias"))
        x = part[2](part[1](x @ weight.view(4, 4).T + bias))
    return x


@pytest.mark.parametrize("coefficients", ["per_layer", "shared"])
def test_equals_mixing_by_hand(coefficients: str) -> None:
    net = chain()
    init = "uniform" if coefficients == "shared" else "diag"
    composition = compose_(net, templates=2, coefficients=coefficients, init=init)
    assert net.composition is composition and len(net) == 4
    x = noise(3, 4)
    found, expected = net(x), by_hand(net, composition, x)
    close(found, expected)
    parameters = list(net.parameters())
    assert len(parameters) == 3 + 8  # logits, two banks; the norms stay
    ours = torch.autograd.grad(found.square().sum(), parameters)
    theirs = torch.autograd.grad(expected.square().sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_templates_start_as_means_of_neighbours() -> None:
    net = chain()
    weights = [part[0].weight.detach().clone() for part in net]
    composition = compose_(net, 2)
    bank = composition.banks["0.0.weight"].view(2, 4, 4)
    close(bank[0], (weights[0] + weights[1]) / 2)
    close(bank[1], (weights[2] + weights[3]) / 2)
    assert composition.signature() == {"0.0": 0, "1.0": 0, "2.0": 1, "3.0": 1}
    assert all(abs(float(xi.max()) - 0.99) < 1e-6 for xi in composition.mixture().values())


def test_merge_and_remove() -> None:
    net = chain()
    before = copy.deepcopy(net)
    x = noise(3, 4)
    composition = compose_(net, 2, init="uniform")
    mixed = net(x)
    assert composition.merge() is net
    close(net(x), mixed)
    assert type(net[0][0]) is nn.Linear and list(net.state_dict()) == list(before.state_dict())
    assert not hasattr(net, "composition") and all(p.requires_grad for p in net.parameters())
    with pytest.raises(RuntimeError, match="merged or removed"):
        composition.merge()
    composition = compose_(net, 2)  # once more
    close(composition.remove()(x), mixed)
    other = compose_(before, 4)
    with torch.no_grad():
        other.logits.normal_()
    restored = other.remove()
    assert all(torch.equal(p, q) for p, q in zip(restored.parameters(), chain().parameters(), strict=True))


def test_stage_of_a_resnet() -> None:
    torch.manual_seed(0)
    net = ResNet(14)
    groups = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    before = sum(p.numel() for p in net.parameters())
    x = torch.randn(2, 3, 32, 32)
    composition = compose_(net, 2, lambda name, m: isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3))
    assert sum(p.numel() for p in net.parameters()) < before
    assert len(composition.layers) < len(groups)  # a convolution with a unique shape is not composed
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters()) and composition.logits.grad.abs().sum() > 0
    net.eval()
    mixed = net(x)
    torch.testing.assert_close(composition.merge()(x), mixed)


@pytest.mark.parametrize("training", [True, False])
def test_blocks_of_a_transformer(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).double().train(training)
    for p in net.parameters():
        nn.init.normal_(p)
    x = noise(2, 3, 4)
    composition = compose_(net, 2, lambda name, m: isinstance(m, nn.TransformerEncoderLayer), init="uniform")
    assert list(composition.signature()) == [f"layers.{i}" for i in range(4)]
    mixed = net(x)
    mixed.sum().backward()
    assert composition.logits.grad.abs().sum() > 0
    with torch.no_grad():
        close(net(x), mixed.detach())  # without gradients torch takes another path
    close(composition.merge()(x), mixed)


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("coefficients", ["per_layer", "shared"])
def test_checkpoints(coefficients: str) -> None:
    net, nets = chain(), [chain() for _ in range(3)]
    for i, other in enumerate(nets):
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.1 * i)
    composition = compose_(net, state_dicts=[n.state_dict() for n in nets], coefficients=coefficients)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["composition/logits"]
    assert composition.logits.shape == (1 if coefficients == "shared" else 8, 3)
    close(net[1][0].weight, torch.stack([n[1][0].weight for n in nets]).mean(0))
    x = noise(5, 4)
    with torch.no_grad():
        composition.logits[:] = torch.tensor([0.0, 0.0, 60.0])
    close(net(x), nets[2](x))
    assert set(composition.signature().values()) == {2}
    net(x).sum().backward()
    merged = composition.merge()
    close(merged(x), nets[2](x))
    assert all(p.requires_grad for p in merged.parameters())


def test_a_net_that_is_one_layer() -> None:
    a, b, net = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    compose_(net, state_dicts=[a.state_dict(), b.state_dict()], mixing="none", train_templates=True)
    x = torch.randn(3, 2)
    torch.testing.assert_close(net(x), (a(x) + b(x)) / 2)
    assert len([p for p in net.parameters() if p.requires_grad]) == 3


# ---------------------------------------------------------------------- drop-in


def test_copies(tmp_path: Path) -> None:
    net = chain()
    composition = compose_(net, 2, init="uniform")
    x = noise(3, 4)
    expected = net(x)
    torch.save(net, tmp_path / "net.pt")
    loaded = chain()
    compose_(loaded, 2)
    loaded.load_state_dict(net.state_dict())
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(tmp_path / "net.pt", weights_only=False)]
    for twin in (*copies, loaded):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            twin.composition.logits.normal_()  # must not change the others
        assert not torch.equal(twin(x), expected) and torch.equal(net(x), expected)
        moved = twin(x)
        close(twin.composition.merge()(x), moved)
    assert repr(composition) == "Composition(layers=4, templates=2, mixing='softmax')"


def test_dtype_and_autocast() -> None:
    net = chain().float()
    compose_(net, 2)
    x = noise(3, 4)
    wide = copy.deepcopy(net).double()(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(x.float()).double(), wide, rtol=0.1, atol=0.1)
        net(x.float()).float().sum().backward()
    assert net.composition.logits.grad.dtype == torch.float32
    low = copy.deepcopy(net).bfloat16()(x.bfloat16())
    torch.testing.assert_close(low.double(), wide, rtol=0.1, atol=0.1)
    assert copy.deepcopy(net).double().composition.remove()(x).dtype == torch.float64


def test_functional_call_and_a_part_alone() -> None:
    net = chain()
    composition = compose_(net, 2, init="uniform")
    x = noise(3, 4)
    doubled = {n: 2 * p.detach() if n.startswith("composition/0") else p.detach() for n, p in net.named_parameters()}
    expected = net[1][0](x)  # a layer called directly, not through the net
    close(torch.func.functional_call(net, doubled, (x,)), chain_at(net, doubled, x))
    close(net[1][0](x), expected)
    close(expected, x @ composition.weight("1.0.weight").T + composition.weight("1.0.bias"))


def chain_at(net: nn.Sequential, values: dict[str, Tensor], x: Tensor) -> Tensor:
    twin = copy.deepcopy(net)
    twin.load_state_dict(values)
    return twin(x)


@pytest.mark.slow
def test_compile() -> None:
    torch._dynamo.reset()
    net = chain()
    compose_(net, 2, init="uniform")
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = noise(3, 4)
    for run in (net, compiled):
        run(x).square().sum().backward()
    for (n, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=n)


def test_nan_logits() -> None:
    net = chain()
    composition = compose_(net, 2)
    with torch.no_grad():
        composition.logits[1, 0] = float("nan")
    assert net[1][0].weight.isnan().all() and not net[0][0].weight.isnan().any()


# -------------------------------------------------------------------- bad input


def tied() -> nn.Module:
    net = chain()
    net[2][0].weight = net[0][0].weight
    return net


def composed() -> nn.Module:
    net = chain()
    compose_(net, 2)
    return net


def states(**changed: Tensor) -> list[dict[str, Tensor]]:
    return [chain().state_dict(), {**chain().state_dict(), **{k.replace("_", ".", 2): v for k, v in changed.items()}}]


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: compose_(3, 2), TypeError, "model: expected an nn.Module, got int"),
    (lambda: compose_(chain()), ValueError, "templates, state_dicts: expected exactly one of them"),
    (lambda: compose_(chain(), 2, state_dicts=states()), ValueError, "expected exactly one of them"),
    (lambda: compose_(chain(), 0), ValueError, "templates: expected an int >= 1, got 0"),
    (
        lambda: compose_(chain(), 5),
        ValueError,
        "at least 5 equal layers for 5 templates.*no kind there are more than 4",
    ),
    (lambda: compose_(chain(), 2, lambda n, m: False), ValueError, "filter_fn: expected to pick.*picked none of Seq"),
    (lambda: compose_(chain(), 2, lambda n, m: isinstance(m, nn.Tanh)), ValueError, "picked none"),
    (lambda: compose_(chain(), 2, "0"), TypeError, "filter_fn: expected a function of name and module, got str"),
    (lambda: compose_(chain(), 2, coefficients="all"), ValueError, "coefficients: expected 'per_layer' or 'shared'"),
    (lambda: compose_(chain(), 2, mixing="max"), ValueError, "mixing: expected one of"),
    (lambda: compose_(chain(), 2, init="zero"), ValueError, "init: expected 'diag', 'uniform' or 'equal', got 'zero'"),
    (lambda: compose_(chain(), 2, coefficients="shared", init="diag"), ValueError, "no template of its own"),
    (lambda: compose_(tied(), 2), ValueError, "tied weights, but these are one: 0.0.weight, 2.0.weight"),
    (lambda: compose_(composed(), 2), ValueError, "is it composed already"),
    (lambda: compose_(nn.LSTM(2, 2), 1, lambda n, m: True), TypeError, "expected no recurrent layers"),
    (lambda: compose_(chain(), state_dicts=[]), TypeError, "state_dicts: expected a list of state dicts"),
    (lambda: compose_(chain(), state_dicts=[{}]), ValueError, r"state_dicts\[0\]: expected an entry 0.0.weight"),
    (
        lambda: compose_(chain(), state_dicts=states(**{"1_0_weight": torch.zeros(3, 4)})),
        ValueError,
        r"state_dicts\[1\]: expected 1.0.weight of shape \[4, 4\], got \[3, 4\]",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_refused_net_is_left_as_it_was() -> None:
    net = chain()
    names = list(net.state_dict())
    with pytest.raises(ValueError, match="expected an entry 3"):
        compose_(net, state_dicts=[{n: v for n, v in net.state_dict().items() if not n.startswith("3")}])
    assert list(net.state_dict()) == names and not hasattr(net, "composition") and type(net[0][0]) is nn.Linear
    assert fastmod.compose_ is compose_
