"""MFNNR and SMFR: architecture, values, training, copies, bad input."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fastmod
from fastmod import ops
from fastmod.bench import baselines
from fastmod.nn import MFNNR, SMFR

# Attention type, depth, width, FNN layers, parameters: Table 6 of the block-operations paper, 5 blocks of 10 in, 1 out.
TABLE_6 = [
    ("softmax", 1, 5, 1, 36096),
    ("softmax", 1, 6, 1, 40813),
    ("softmax", 1, 7, 1, 45530),
    ("softmax", 1, 8, 1, 50247),
    ("softmax", 1, 9, 1, 54964),
    ("softmax", 1, 10, 1, 59681),
    ("softmax", 1, 6, 2, 81213),
    ("softmax", 1, 8, 2, 90647),
    ("softmax", 1, 9, 2, 95364),
    ("softmax", 1, 10, 2, 100081),
    ("softmax", 2, 10, 1, 111091),
    ("softmax", 2, 5, 2, 119976),
    ("softmax", 2, 9, 2, 160944),
    ("gumbel", 1, 6, 1, 40815),
    ("gumbel", 1, 7, 1, 45532),
    ("gumbel", 1, 8, 1, 50249),
    ("gumbel", 1, 9, 1, 54966),
    ("gumbel", 1, 10, 1, 59683),
]


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with fastmod.use_backend(request.param):
        yield request.param


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def small(mode: str = "softmax", **options: object) -> SMFR:
    torch.manual_seed(0)
    return SMFR(4, 2, 5, 3, 2, hidden=7, layers=2, mode=mode, **options)


def batch(*leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*leading, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(model: SMFR, x: Tensor) -> Tensor:
    return model(x).square().sum() + model.penalty()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# --- architecture


@pytest.mark.parametrize(("mode", "depth", "width", "layers", "parameters"), TABLE_6)
def test_table_6(mode: str, depth: int, width: int, layers: int, parameters: int) -> None:
    model = SMFR(5, 1, 10, width, depth, layers=layers, mode=mode)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_table_6_is_whole() -> None:
    assert len(set(TABLE_6)) == 18


def test_parameter_names_and_shapes() -> None:
    shapes = {name: tuple(p.shape) for name, p in SMFR(6, 5, 10, 8, 1, hidden=9, layers=2).named_parameters()}
    assert shapes == {
        "stack.0.route.0.weight": (9, 60),
        "stack.0.route.0.bias": (9,),
        "stack.0.route.1.weight": (9, 9),
        "stack.0.route.1.bias": (9,),
        "stack.0.route.2.weight": (48, 9),
        "stack.0.route.2.bias": (48,),
        "stack.0.update.0.weight": (9, 140),
        "stack.0.update.0.bias": (9,),
        "stack.0.update.1.weight": (9, 9),
        "stack.0.update.1.bias": (9,),
        "stack.0.update.2.weight": (88, 9),
        "stack.0.update.2.bias": (88,),
        "stack.1.route.0.weight": (9, 80),
        "stack.1.route.0.bias": (9,),
        "stack.1.route.1.weight": (9, 9),
        "stack.1.route.1.bias": (9,),
        "stack.1.route.2.weight": (40, 9),
        "stack.1.route.2.bias": (40,),
        "stack.1.update.0.weight": (9, 130),
        "stack.1.update.0.bias": (9,),
        "stack.1.update.1.weight": (9, 9),
        "stack.1.update.1.bias": (9,),
        "stack.1.update.2.weight": (55, 9),
        "stack.1.update.2.bias": (55,),
    }


def test_without_context_the_update_reads_the_routed_blocks_only() -> None:
    assert MFNNR(6, 5, 10, context=False).update[0].in_features == 50


def test_initialised_as_linear_layers() -> None:
    torch.manual_seed(3)
    layer = MFNNR(2, 3, 4, hidden=5)
    torch.manual_seed(3)
    expected = nn.Linear(8, 5)
    assert torch.equal(layer.route[0].weight, expected.weight)
    assert torch.equal(layer.route[0].bias, expected.bias)


def test_repr_tells_the_sizes() -> None:
    assert "6, 5, 10, mode='gumbel', context=False, threshold=20.0" in repr(
        MFNNR(6, 5, 10, mode="gumbel", context=False)
    )


# --- values


def composed(layer: MFNNR, x: Tensor) -> tuple[Tensor, Tensor]:
    """An MFNNR built from the smaller ops."""

    def fnn(layers: nn.ModuleList, value: Tensor) -> Tensor:
        for linear in list(layers)[:-1]:
            value = F.leaky_relu(linear(value), 0.01)
        return layers[-1](value)

    n, d = layer.out_blocks, layer.block_size
    logits = fnn(layer.route, x.flatten(-2)).unflatten(-1, (layer.in_blocks, n))
    tau = layer.log_tau.exp() if layer.mode == "gumbel" else 1.0
    routed = ops.multiplex(x, logits, mode="argmax" if layer.mode == "gumbel" else "softmax", tau=tau)
    seen = torch.cat([routed, x], dim=-2) if layer.context else routed
    new, gate = fnn(layer.update, seen.flatten(-2)).split([n * d, n], -1)
    out = ops.gated_residual(routed, new.unflatten(-1, (n, d)), gate)
    return out, ops.range_penalty(logits, gate, threshold=layer.threshold)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_equals_a_composition_of_the_smaller_ops(backend: str, mode: str, context: bool) -> None:
    model = small(mode, context=context, threshold=0.1).double().eval()
    if mode == "gumbel":
        for layer in model.stack:
            layer.log_tau.data.fill_(-0.3)
    other = copy.deepcopy(model)
    x = batch(6, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out = model(x)
    (out.square().sum() + model.penalty()).backward()
    value, total = y, torch.zeros((), dtype=torch.float64)
    for layer in other.stack:
        value, penalty = composed(layer, value)
        total = total + penalty
    (value.square().sum() + total).backward()
    assert total > 0
    torch.testing.assert_close(out, value)
    torch.testing.assert_close(model.penalty(), total)
    torch.testing.assert_close(x.grad, y.grad)
    assert_same(gradients(model), gradients(other))


@pytest.mark.parametrize("threshold", [None, 0.1])
def test_equals_plain_pytorch_in_fp32(backend: str, threshold: float | None) -> None:
    torch.manual_seed(0)
    sizes = (6, 5, 10, 8, 3)
    model, other = SMFR(*sizes, threshold=threshold), baselines.SMFR(*sizes, threshold=threshold)
    other.load_state_dict(model.state_dict())
    x = torch.randn(33, 6, 10)
    loss_of(model, x).backward()
    out, penalty = other(x)
    (out.square().sum() + (0 if penalty is None else penalty)).backward()
    torch.testing.assert_close(model(x), out)
    assert_same(gradients(model), gradients(other), rtol=1e-4, atol=1e-4)


def test_extra_leading_dimensions_and_none(backend: str) -> None:
    model = small().double()
    x = batch(2, 3, dtype=torch.float64)
    expected = model(x.flatten(0, 1)).view(2, 3, 2, 5)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x[1, 2]), expected[1, 2])
    torch.testing.assert_close(model(x.transpose(0, 1)), expected.transpose(0, 1))


def test_empty_batch_gives_zero_gradients(backend: str) -> None:
    model = small()
    out = model(batch(0))
    assert out.shape == (0, 2, 5)
    (out.sum() + model.penalty()).backward()
    assert model.routing()[0].weights.shape == (0, 4, 3)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, torch.zeros_like(grad)), name


def test_autocast_bf16(backend: str) -> None:
    model = small()
    x = batch(6)
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    (out.float().square().sum() + model.penalty()).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_model(backend: str, dtype: torch.dtype) -> None:
    model = small()
    expected = model(batch(6))
    model.to(dtype)
    out = model(batch(6, dtype=dtype))
    out.sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


# --- training


def test_two_backwards_with_retain_graph(backend: str) -> None:
    model = small()
    loss = loss_of(model, batch(6))
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), once, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_fifty_bit_equal_repeats(backend: str, mode: str) -> None:
    model = small(mode, threshold=0.1)
    first = None
    for _ in range(50):
        torch.manual_seed(5)
        model.zero_grad()
        loss = loss_of(model, batch(130))
        loss.backward()
        found = {"loss": loss.detach(), **gradients(model)}
        first = first or found
        assert all(torch.equal(value, first[name]) for name, value in found.items())


def test_frozen_parameters_get_no_gradient(backend: str) -> None:
    model = small()
    expected = copy.deepcopy(model)
    model.stack[1].requires_grad_(False)
    loss_of(model, batch(6)).backward()
    loss_of(expected, batch(6)).backward()
    for name, p in model.named_parameters():
        if name.startswith("stack.1."):
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, expected.get_parameter(name).grad)


def test_no_grad_and_inference_mode(backend: str) -> None:
    model = small()
    expected = model(batch(6)).detach()
    with torch.no_grad():
        assert not model(batch(6)).requires_grad
        assert not model.penalty().requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(6)), expected)


def test_it_learns(backend: str) -> None:
    """A few hundred steps suffice to learn to copy one of two blocks."""
    torch.manual_seed(0)
    model = SMFR(2, 1, 3, 2, 1, hidden=16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        x = torch.randn(64, 2, 3)
        loss = F.mse_loss(model(x), x[:, 1:]) + model.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02


# --- Gumbel


def test_gumbel_samples_in_training_and_takes_the_arg_max_in_eval(backend: str) -> None:
    model = small("gumbel")
    x = batch(16)
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x))
    for weights, _ in model.routing():
        assert torch.equal(weights.sort(dim=-2).values[..., -1, :], torch.ones_like(weights[..., 0, :]))
        assert torch.equal(weights.sum(-2), torch.ones_like(weights[..., 0, :]))


def test_gumbel_learns_one_temperature_per_multiplexer(backend: str) -> None:
    model = small("gumbel")
    temperatures = [p for name, p in model.named_parameters() if name.endswith("log_tau")]
    assert [p.shape for p in temperatures] == [()] * 3
    assert all(p.item() == 0 for p in temperatures)
    loss_of(model, batch(16)).backward()
    assert all(p.grad is not None and p.grad != 0 for p in temperatures)
    # In training, the soft weights are shown, at the temperature used.
    weights = model.routing()[0].weights
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-2), torch.ones_like(weights[..., 0, :]))


def test_gumbel_is_the_same_on_both_backends() -> None:
    model = small("gumbel").double()
    results = []
    for name in ("native", "reference"):
        torch.manual_seed(2)
        model.zero_grad()
        with fastmod.use_backend(name):
            loss = loss_of(model, batch(16, dtype=torch.float64))
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
    assert_same(*results)


def test_parametrised_and_pruned_layers(backend: str) -> None:
    model, expected = small(), small()
    with torch.no_grad():
        expected.stack[0].route[0].weight.mul_(2)
        expected.stack[0].update[0].weight[:, 0] = 0
    parametrize.register_parametrization(model.stack[0].route[0], "weight", Double())
    mask = torch.ones_like(model.stack[0].update[0].weight)
    mask[:, 0] = 0
    prune.custom_from_mask(model.stack[0].update[0], "weight", mask)
    torch.testing.assert_close(model(batch(6)), expected(batch(6)))
    loss_of(model, batch(6)).backward()
    assert model.stack[0].route[0].parametrizations.weight.original.grad is not None


# --- penalty and routing


def test_penalty_and_routing_describe_the_last_forward(backend: str) -> None:
    model = small(threshold=0.0)
    x = batch(6)
    model(x[:2])
    model(x)
    routing = model.routing()
    assert [tuple(r.weights.shape) for r in routing] == [(6, 4, 3), (6, 3, 3), (6, 3, 2)]
    assert [tuple(r.gates.shape) for r in routing] == [(6, 3), (6, 3), (6, 2)]
    for weights, gates in routing:
        assert not weights.requires_grad
        assert not gates.requires_grad
        torch.testing.assert_close(weights.sum(-2), torch.ones_like(weights[..., 0, :]))
        assert ((gates > 0) & (gates < 1)).all()
    expected, value = torch.zeros(()), x
    for layer, (weights, gates) in zip(model.stack, routing, strict=True):
        logits = ops.mfnnr(
            value,
            [t for linear in layer.route for t in (linear.weight, linear.bias)],
            [t for linear in layer.update for t in (linear.weight, linear.bias)],
        )
        torch.testing.assert_close(weights, logits.logits.softmax(-2))
        torch.testing.assert_close(gates, logits.gate.sigmoid())
        expected = expected + logits.logits.square().sum() + logits.gate.square().sum()
        value = logits.out
    torch.testing.assert_close(model.penalty(), expected)
    model.penalty().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_no_forward_yet() -> None:
    for call in (small().penalty, small().routing, copy.deepcopy(small()).penalty):
        with pytest.raises(RuntimeError, match="last forward"):
            call()


def test_without_threshold_the_penalty_is_zero(backend: str) -> None:
    model = small(threshold=None)
    loss_of(model, batch(6) * 1e3).backward()
    assert model.penalty() == 0


# --- copies and checkpoints


@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_deepcopy_pickle_and_state_dict(backend: str, mode: str) -> None:
    model = small(mode)
    loss_of(model, batch(6)).backward()  # leaves a graph that copies must not share
    model.eval()
    expected = model(batch(6))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = SMFR(4, 2, 5, 3, 2, hidden=7, layers=2, mode=mode).eval()
    assert fresh.load_state_dict(torch.load(buffer)) == ([], [])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(other(batch(6)), expected)
        with torch.no_grad():
            other.stack[0].route[0].weight.add_(1)
    assert torch.equal(model(batch(6)), expected)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((0, 1, 1, 1, 1), {}, ValueError, "in_blocks: expected an int >= 1, got 0"),
        ((1, 0, 1, 1, 1), {}, ValueError, "out_blocks"),
        ((1, 1, -1, 1, 1), {}, ValueError, "block_size"),
        ((1, 1, 1, 0, 1), {}, ValueError, "width"),
        ((1, 1, 1, 1, -1), {}, ValueError, "depth"),
        ((1, 1, 1.5, 1, 1), {}, TypeError, "block_size: expected an int >= 1, got float"),
        ((1, 1, 1, 1, 1), {"hidden": 0}, ValueError, "hidden"),
        ((1, 1, 1, 1, 1), {"layers": 0}, ValueError, "layers"),
        ((1, 1, 1, 1, 1), {"mode": "hard"}, ValueError, "mode: expected .*softmax.*got 'hard'"),
        ((1, 1, 1, 1, 1), {"mode": "argmax"}, ValueError, "mode: expected .*gumbel.*got 'argmax'"),
        ((1, 1, 1, 1, 1), {"threshold": -1.0}, ValueError, "threshold"),
        ((1, 1, 1, 1, 1), {"threshold": "20"}, TypeError, "threshold"),
    ],
)
def test_bad_constructor_arguments(arguments: tuple, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SMFR(*arguments, **options)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(3, 5, 4), ValueError, r"x: expected .*\[..., 4, 5\], got shape \[3, 5, 4\]"),
        (torch.zeros(5), ValueError, r"x: expected .*got shape \[5\]"),
        (torch.zeros(3, 4, 5, dtype=torch.int64), TypeError, "x: expected float32.*int64"),
        (torch.zeros(3, 4, 5, dtype=torch.float64), TypeError, r"route\[0\]: expected the dtype of x"),
        (torch.zeros(3, 4, 5, device="meta"), RuntimeError, r"route\[0\]: expected the device of x|backend.*meta"),
        ([[0.0]], TypeError, "x: expected a tensor .*got list"),
    ],
)
def test_bad_input(backend: str, x: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small()(x)


@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_a_layer_run_and_change_no_value(mode: str, kind: str) -> None:
    model, x = small(mode), batch(6).requires_grad_()

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        out = model(x)
        return [out, model.penalty(), *torch.autograd.grad(out.sin().sum() + model.penalty(), [x, *model.parameters()])]

    expected, shown = step(), model.routing()
    calls: list[str] = []
    getattr(model.stack[1], f"register_{kind}_hook")(lambda *_: calls.append(kind))
    for got, want in zip(step(), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert calls == [kind]
    for got, want in zip(model.routing(), shown, strict=True):
        torch.testing.assert_close(got.weights, want.weights)


def test_a_subclassed_layer_is_called() -> None:
    class Doubled(MFNNR):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, x = small(), batch(6)
    first = model.stack[0]
    model.stack[0] = Doubled(4, 3, 5, hidden=7, layers=2)
    model.stack[0].load_state_dict(first.state_dict())
    expected = 2 * first(x)
    for layer in list(model.stack)[1:]:
        expected = layer(expected)
    torch.testing.assert_close(model(x), expected)


def test_a_layer_in_eval_by_itself_takes_the_arg_max_alone() -> None:
    model, x = small("gumbel"), batch(6)
    model.stack[0].eval()
    model(x)
    first, second, _ = model.routing()
    assert ((first.weights == 0) | (first.weights == 1)).all()  # one-hot
    assert not ((second.weights == 0) | (second.weights == 1)).all()  # the soft weights of a layer in training


def test_a_layer_with_a_threshold_of_its_own_keeps_it() -> None:
    model, x = small(), batch(6)
    model(x)
    before = model.penalty()
    model.stack[1].threshold = 0.0
    model(x)
    expected = torch.zeros(())
    for layer in model.stack:
        x = layer(x)
        expected = expected + layer.penalty()
    torch.testing.assert_close(model.penalty(), expected)
    assert expected > before
    model.threshold = 1.0
    assert [layer.threshold for layer in model.stack] == [1.0] * 3


def test_a_layer_with_a_context_of_its_own_keeps_it() -> None:
    model, x = small(), batch(6)
    model.stack[1] = MFNNR(3, 3, 5, hidden=7, layers=2, context=False)
    expected = x
    for layer in model.stack:
        expected = layer(expected)
    torch.testing.assert_close(model(x), expected)
