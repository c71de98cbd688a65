"""TemplateBank and Compositional: equal to ordinary blocks with mixed weights; copies, dtypes, bad input."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from fastmod.nn import BasicBlock, Compositional, IsometricBlock, TemplateBank, logit_groups
from tests.helpers.compositional import BLOCKS, Dense, Wrapped, close, make, mixed_by_hand, noise
from tests.helpers.compositional import quiet as quiet
from tests.helpers.conv_backends import conv_backend as conv_backend

# ------------------------------------------------------------------ the fused path


@pytest.mark.parametrize("norm", ["mixed", "per_layer", "per_task"])
@pytest.mark.parametrize("block", BLOCKS)
def test_fused_equals_ordinary(conv_backend: str, block: str, norm: str) -> None:
    """Outputs, gradients and running statistics, for one task and for all, in training and in eval."""
    fast = make(BLOCKS[block], 3, 4, 2, norm=norm)
    slow = make(lambda: Wrapped(BLOCKS[block]()), 3, 4, 2, norm=norm)
    assert fast.fused and not slow.fused
    channels = next(iter(fast.bank.shapes.values()))[1]
    x = noise(2, 5, channels, 5, 4)
    for task, training in ((1, True), (None, True), (0, False), (None, False)):
        outs, grads = [], []
        for net in (fast, slow):
            net.train(training).zero_grad()
            own = (x if task is None else x[task]).clone().requires_grad_()
            outs.append(net(own, task=task))
            (outs[-1] * noise(*outs[-1].shape)).sum().backward()
            grads.append([own.grad, *[p.grad for p in net.parameters()]])
        close(outs[0], outs[1])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))
        for ours, theirs in zip(fast.buffers(), slow.buffers(), strict=True):
            close(ours, theirs)
    counts = [b for n, b in fast.state.named_buffers() if n.endswith("num_batches_tracked")]
    assert all(b.tolist() == [[1, 2]] * 4 for b in counts) and counts


@pytest.mark.parametrize("fused", [True, False])
def test_equals_separate_modules(fused: bool) -> None:
    """Each layer equals an ordinary block with its mixed weights and its own statistics."""
    inner = BLOCKS["se"]
    net = make(inner if fused else lambda: Wrapped(inner()), 3, 4, 2)
    modules = []
    for layer in range(4):
        module = inner().double()
        values = {n.removeprefix("block."): v for n, v in mixed_by_hand(net, 1, layer).items()}
        module.load_state_dict(values, strict=False)
        modules.append(module)
    x = expected = noise(5, 4, 6, 5)
    for module in modules:
        expected = module(expected)
    close(net(x, task=1), expected)
    name = "depthwise_norm/running_var" if fused else "block/depthwise_norm/running_var"
    close(net.state.get_buffer(name)[:, 1], torch.stack([m.depthwise_norm.running_var for m in modules]))
    close(net.state.get_buffer(name)[:, 0], torch.ones_like(net.state.get_buffer(name)[:, 0]))


def test_second_input(conv_backend: str) -> None:
    fast = make(lambda: IsometricBlock(3, second_input=True), 2, 3)
    slow = make(lambda: Wrapped(IsometricBlock(3, second_input=True)), 2, 3)
    x = noise(4, 3, 4, 4)
    close(fast(x, x), slow(x, x))
    with pytest.raises(ValueError, match="other: expected a second input"):
        fast(x)


def test_mean_over_all_batches() -> None:
    """With momentum None each layer and task updates at its own rate, so the block runs unfused."""

    def block() -> nn.Module:
        found = BasicBlock(3, 3)
        found.norm1.momentum = None
        return found

    net = make(block, 2, 2, 2)
    assert not net.fused
    net(noise(4, 3, 5, 5), task=1)
    ones, before = net.state.get_buffer("norm1/running_var"), torch.ones(3, dtype=torch.float64)
    assert torch.equal(ones[0, 0], before) and not torch.equal(ones[0, 1], before)


def test_warned_once() -> None:
    class Unknown(Wrapped):
        pass

    with pytest.warns(RuntimeWarning, match="Unknown is not on the fused path"):
        Compositional(lambda: Unknown(nn.Linear(2, 2)), 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Compositional(lambda: Unknown(nn.Linear(2, 2)), 2, 2)
        Compositional(lambda: IsometricBlock(2), 2, 2)


# ---------------------------------------------------------------------- any block


@pytest.mark.parametrize("mixing", ["softmax", "tanh", "none"])
@pytest.mark.parametrize("norm", ["mixed", "per_layer", "per_task"])
def test_any_block(norm: str, mixing: str) -> None:
    net = make(Dense, 3, 4, 2, norm=norm, mixing=mixing)
    shares = {"softmax": lambda v: v.softmax(-1), "tanh": torch.tanh, "none": lambda v: v}[mixing](net.logits)
    x = noise(2, 5, 4)
    expected = []
    for t in range(2):
        y = x[t]
        for layer in range(4):
            w = net.bank.split(shares[t, layer] @ net.bank.weight)
            if norm != "mixed":
                row = net.norm_weight[layer] if norm == "per_layer" else net.norm_weight[layer, t]
                w["norm.weight"], w["norm.bias"] = row[:4], row[4:]
            h = nn.functional.layer_norm(y, (4,), w["norm.weight"], w["norm.bias"])
            h = torch.tanh(h @ w["first.weight"].T + w["first.bias"])
            y = y + w["gain"] * torch.tanh(h @ w["first.weight"].T + w["second.bias"])
        expected.append(y)
    found = net(x, task=None)
    close(found, torch.stack(expected))
    close(net(x[1], task=1), expected[1])
    parameters = list(net.parameters())
    ours = torch.autograd.grad(found.square().sum(), parameters)
    theirs = torch.autograd.grad(torch.stack(expected).square().sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    assert net.state.seen.tolist() == [[1, 2]] * 4
    close(net.state.last[0], x.mean(1))


def test_transformer_block() -> None:
    net = make(lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), 2, 3)
    x = noise(2, 5, 4)
    net(x).sum().backward()
    assert net.bank.weight.grad.abs().sum() > 0 and net.logits.grad.abs().sum() > 0
    one = make(lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), 2, 3, signature=[1, 0, 1])
    expected = x
    for module in [one.bank.to_modules()[k] for k in (1, 0, 1)]:
        expected = module(expected)
    close(one(x), expected)


# ------------------------------------------------------------------------- bank


def test_bank() -> None:
    torch.manual_seed(0)
    modules = [Dense() for _ in range(3)]
    bank = TemplateBank.from_modules(modules)
    assert bank.weight.shape == (3, sum(p.numel() for p in modules[0].parameters()))
    for k, module in enumerate(modules):
        views = bank.template(k)
        assert list(views) == [n for n, _ in module.named_parameters()]
        for n, p in module.named_parameters():
            assert torch.equal(views[n], p)
            assert views[n].untyped_storage().data_ptr() == bank.weight.untyped_storage().data_ptr()
    x = torch.randn(3, 4)
    for module, other in zip(modules, bank.to_modules(), strict=True):
        assert torch.equal(module(x), other(x))
    same = TemplateBank.from_state_dicts(Dense(), [m.state_dict() for m in modules])
    assert torch.equal(same.weight, bank.weight)
    assert list(bank.state_dict()) == ["weight"]


def test_bank_without_norms() -> None:
    bank = TemplateBank(Dense, 2, norm=False)
    assert set(bank.left_out) == {"norm.weight", "norm.bias"} and "norm.weight" not in bank.shapes
    with pytest.raises(ValueError, match="norm=True for norm='mixed'"):
        Compositional(bank, layers=2)
    net = Compositional(bank, layers=2, norm="per_layer")
    assert net.norm_weight.shape == (2, 8)


def test_starts_from_trained_blocks() -> None:
    """Blocks used as templates in their order give the original net, statistics included."""
    torch.manual_seed(0)
    modules = [BasicBlock(3, 3).double() for _ in range(3)]
    x = noise(4, 3, 5, 5)
    for module in modules:
        module(x)
        module.eval()
    net = Compositional(TemplateBank.from_modules(modules), layers=3, signature="sequential").eval()
    expected = x
    for module in modules:
        expected = module(expected)
    close(net(x), expected)


# ---------------------------------------------------------------------- drop-in


@pytest.mark.parametrize("norm", ["mixed", "per_task"])
@pytest.mark.parametrize("fused", [True, False])
def test_copies(fused: bool, norm: str) -> None:
    net = make(BLOCKS["se"] if fused else Dense, 3, 4, 2, norm=norm)
    x = noise(4, 4, 5, 5) if fused else noise(4, 4)
    net(x, task=1)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    other = Compositional(BLOCKS["se"] if fused else Dense, 3, 4, 2, norm=norm).double()
    other.load_state_dict(net.state_dict())
    for twin in (*twins, other):
        close(twin(x, task=1), copy.deepcopy(net)(x, task=1))
    net.eval()
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(net)
    close(averaged(x, task=1), net(x, task=1))


@pytest.mark.parametrize("fused", [True, False])
def test_dense_gradients(fused: bool) -> None:
    """Every parameter gets a gradient from any task: DistributedDataParallel waits for all of them."""
    net = make(BLOCKS["se"] if fused else Dense, 3, 4, 2, norm="per_task")
    net(noise(4, 4, 5, 5) if fused else noise(4, 4), task=1).sum().backward()
    assert all(p.grad is not None and p.grad.layout == torch.strided for p in net.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_reduced_precision(fused: bool) -> None:
    wide = make(BLOCKS["se"] if fused else Dense, 3, 2, 2).eval()
    x = noise(4, 4, 5, 5) if fused else noise(4, 4)
    expected = wide(x, task=1)
    low = copy.deepcopy(wide).to(torch.bfloat16)
    found = low(x.bfloat16(), task=1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0.1)
    single = copy.deepcopy(wide).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        out = single(x.float(), task=1)
    out.float().sum().backward()
    assert single.bank.weight.grad.dtype == torch.float32 and single.logits.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            copy.deepcopy(wide).float()(x.float(), task=1).double(), expected, rtol=0.1, atol=0.1
        )


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("task", [1, None])
def test_compile(fused: bool, task: int | None) -> None:
    torch._dynamo.reset()
    net = make(BLOCKS["se"] if fused else Dense, 3, 2, 2)
    x = noise(2, 4, 4, 5, 5) if fused else noise(2, 4, 4)
    x = x if task is None else x[task]
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for model, run in ((net, net), (twin, compiled)):
            model.zero_grad()
            run(x, task=task).square().sum().backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=name)
    for (name, p), q in zip(net.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(p, q[1], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoint(fused: bool) -> None:
    net = make(BLOCKS["se"] if fused else Dense, 3, 2).eval()
    x = noise(4, 4, 5, 5) if fused else noise(4, 4)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    again = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), list(net.parameters())), expected, strict=True):
        close(a, b)


def test_blocks_without_weights_give_nan() -> None:
    """Using a weight that was not replaced gives NaN and never reads foreign memory."""
    bank = TemplateBank(Dense, 2)
    assert all(p.isnan().all() for p in bank.block.parameters())
    assert bank.block.second.weight is bank.block.first.weight
    assert all(p.untyped_storage().nbytes() == 4 for p in bank.block.parameters())


def test_empty_batch() -> None:
    net = make(Dense, 2, 3)
    net(noise(0, 4)).sum().backward()
    assert not net.bank.weight.grad.any()
    fused = make(BLOCKS["se"], 2, 3).eval()
    assert fused(noise(0, 4, 5, 5)).shape == (0, 4, 5, 5)


def test_nan_logits() -> None:
    net = make(Dense, 2, 3)
    with torch.no_grad():
        net.logits[0, 1, 0] = float("nan")
    assert all(w.isnan().all() for w in net.weights(1).values())
    assert not any(w.isnan().any() for w in net.weights(0).values())
    assert net(noise(3, 4)).isnan().all()


# -------------------------------------------------------------------- bad input


def dense(**options: Any) -> Compositional:
    return Compositional(Dense, **{"templates": 2, "layers": 3, "tasks": 2, **options})


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dense(templates=0), ValueError, "templates: expected an int >= 1, got 0"),
    (lambda: dense(templates=None), TypeError, "templates: expected an int, got None"),
    (lambda: dense(layers=0), ValueError, "layers: expected an int >= 1, got 0"),
    (lambda: dense(tasks=True), TypeError, "tasks: expected an int >= 1, got bool"),
    (lambda: dense(norm="batch"), ValueError, "norm: expected one of 'mixed', 'per_layer', 'per_task', got 'batch'"),
    (lambda: dense(mixing="relu"), ValueError, "mixing: expected one of 'softmax', 'tanh', 'none', got 'relu'"),
    (lambda: dense(init="zero"), ValueError, "init: expected 'uniform' or 'diag', got 'zero'"),
    (lambda: dense(signature="spiral"), ValueError, "signature: expected one of 'sequential'.*got 'spiral'"),
    (lambda: dense(signature=[0, 2, 0]), ValueError, "signature: expected templates 0 .. 1, got 2"),
    (lambda: dense(signature=[0, 1]), ValueError, "a template for each of 3 layers, got 2"),
    (lambda: dense(signature=[0, 1.0, 0]), TypeError, "signature: expected ints, got float"),
    (lambda: dense(signature=[[0, 1, 0]]), ValueError, "one for each of 2 tasks, got 1"),
    (lambda: dense(templates=4, signature="cyclic"), ValueError, "a layer for each of 4 templates, got 3 layers"),
    (lambda: dense(share_layers=4), ValueError, "share_layers: expected 0 .. 3 layers, got 4"),
    (lambda: dense(share_layers=[3]), ValueError, "share_layers: expected layers 0 .. 2, got 3"),
    (lambda: Compositional(nn.Linear(2, 2), 2, 2), TypeError, "block_factory: expected a function.*got Linear"),
    (lambda: Compositional(lambda: nn.LSTM(2, 2), 2, 2), TypeError, "block_factory: expected no recurrent layers"),
    (lambda: Compositional(nn.ReLU, 2, 2), ValueError, "expected blocks with parameters, got ReLU without"),
    (lambda: Compositional(TemplateBank(Dense, 3), 2, 2), ValueError, "templates: expected the bank's 3, got 2"),
    (lambda: TemplateBank(lambda: 3, 2), TypeError, "expected modules, got int as number 0"),
    (lambda: TemplateBank.from_modules([]), ValueError, "modules: expected at least one block, got none"),
    (lambda: TemplateBank.from_modules([Dense(4), Dense(5)]), ValueError, r"number 1: expected gain|of shape \[4, 4\]"),
    (
        lambda: TemplateBank.from_modules([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]),
        ValueError,
        "number 1: expected the parameters of the first block, got no bias",
    ),
    (lambda: TemplateBank.from_state_dicts(Dense(), [{}]), ValueError, r"state_dicts\[0\]: expected the entries"),
    (lambda: TemplateBank(Dense, 2).template(2), ValueError, "template: expected 0 .. 1, got 2"),
    (lambda: TemplateBank(Dense, 1).remove_template(0), ValueError, "got the last"),
    (lambda: dense()(torch.randn(3, 4), task=2), ValueError, "task: expected 0 .. 1, got 2"),
    (lambda: dense()(torch.randn(3, 4), task=-1), ValueError, "task: expected 0 .. 1, got -1"),
    (lambda: dense()(torch.randn(2, 4), task=torch.tensor([0, 1])), TypeError, "a batch belongs to one task"),
    (lambda: dense()(torch.randn(3, 4), task="a"), TypeError, "task: expected an int, got str"),
    (lambda: dense()(torch.randn(3, 4), task=None), ValueError, r"\[T, B, ...\] with T = 2 for all tasks"),
    (lambda: dense().signature(2), ValueError, "task: expected 0 .. 1, got 2"),
    (lambda: dense().weights(3), ValueError, "layer: expected 0 .. 2, got 3"),
    (lambda: dense().add_task(2), ValueError, "task: expected 0 .. 1, got 2"),
    (lambda: dense().add_task("best"), ValueError, "init: expected a task.*got 'best'"),
    (lambda: dense().add_task("accuracy"), ValueError, "accuracies: expected a number >= 0 for each of 2 tasks"),
    (lambda: dense().add_task([1.0, -1.0]), ValueError, "init: expected a number >= 0 for each of 2 tasks"),
    (lambda: dense().add_task("learned"), TypeError, "loss: expected a function for init='learned'"),
    (lambda: dense(signature="cyclic").add_task(), ValueError, "the net has fixed signatures"),
    (lambda: dense().add_template(2), ValueError, "template: expected 0 .. 1, got 2"),
    (lambda: dense().add_template("x"), TypeError, "init: expected a template's number, a block or a function"),
    (lambda: dense().add_template(nn.Linear(2, 2)), ValueError, "init: expected the parameters of the first block"),
    (lambda: dense().add_template(0, share=1), ValueError, "share: expected a number between 0 and 1, got 1"),
    (lambda: logit_groups(nn.Linear(2, 2), 0.1), ValueError, "model: expected mixtures with logits"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
