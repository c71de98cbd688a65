"""``MaskedModel`` over layers as others write them: which row meets which mask, in every kind of layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastmod
from fastmod.masks import MaskedModel
from tests.helpers.masked_nets import SAMPLES, Conv1D, assert_parts, masked_and_seeds, weights_of

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


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.detach().mul_(2),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 2)),
        lambda layer: layer.load_state_dict({key: 2 * value for key, value in layer.state_dict().items()}),
        lambda layer: layer.double(),
    ],
    ids=["in place", "another", "loaded", "converted"],
)
def test_a_frozen_conv1d_is_followed_when_it_changes(change: Callable[[nn.Module], Any]) -> None:
    """Its transposed copy is kept from one forward to the next."""
    net, x = Conv1D(8, 6), torch.randn(8, 5, 8)
    masked = MaskedModel(net, SAMPLES)
    before = masked(x)
    change(net)
    x = x.to(net.weight.dtype)
    torch.manual_seed(0)
    found = masked(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, MaskedModel(net, SAMPLES)(x), rtol=0, atol=0)
    assert found.shape == before.shape


def test_logits_of_a_conv1d_and_their_gradient_lie_as_the_fused_op_reads_them() -> None:
    masked = MaskedModel(Conv1D(8, 6), SAMPLES)
    logits = next(masked.parameters())
    assert logits.shape == (8, 6) and logits.t().is_contiguous()
    masked(torch.randn(8, 5, 8)).sum().backward()
    assert logits.grad is not None and logits.grad.t().is_contiguous()


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
