"""Small nets of every kind that ``fastmod.masks`` serves, and the slow, plain way to mask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.masks import MaskedModel
from fastmod.ops import sample_mask


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.rnn = kind(8, 6, num_layers=2, batch_first=batch_first, bidirectional=True)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Reader(nn.Module):
    """Embedding, Transformer encoder, output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(0))


class Own(nn.Module):
    """Uses a parameter of its own beside a layer: no masked form knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x @ self.matrix))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(8), torch.randn(8)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] + self.scales[1]


class Flattening(nn.Module):
    """Lays the steps of all sequences end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).view(*x.shape[:2], 3)


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@dataclass(frozen=True)
class Net:
    label: str
    make: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    batch_dim: int = 0
    slow: bool = False  # goes through torch.func
    compiles: bool = True  # torch.compile does not trace recurrent layers


NETS = (
    Net("mlp", lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lambda: torch.randn(12, 8)),
    Net("steps", lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), lambda: torch.randn(12, 5, 8)),
    Net("steps first", lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), lambda: torch.randn(5, 12, 8), 1),
    Net("flattened", Flattening, lambda: torch.randn(8, 5, 8)),
    Net(
        "cnn",
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.Flatten(), nn.Linear(54, 3),
        ),
        lambda: torch.randn(8, 3, 8, 8),
    ),
    Net(
        "conv1d",
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, padding="same", dilation=2), nn.BatchNorm1d(4),
            nn.Conv1d(4, 5, 4, padding="same"), nn.Conv1d(5, 5, 3, padding=1, padding_mode="circular"),
        ),
        lambda: torch.randn(8, 3, 9),
    ),
    Net("lstm", lambda: Recurrent(nn.LSTM, True), lambda: torch.randn(8, 5, 8), compiles=False),
    Net("gru, steps first", lambda: Recurrent(nn.GRU, False), lambda: torch.randn(5, 8, 8), 1, compiles=False),
    Net("encoder", Reader, lambda: torch.randint(11, (8, 6))),
    Net("decoder, steps first", Decoder, lambda: torch.randn(6, 8, 8), 1),
    Net("own parameter", lambda: nn.Sequential(Own(), nn.Linear(8, 2)), lambda: torch.randn(8, 8), slow=True),
    Net("parameter list", lambda: nn.Sequential(Listed()), lambda: torch.randn(8, 8), slow=True),
    Net("norms", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU()), lambda: torch.randn(8, 4, 3, 3), slow=True),
)  # fmt: skip


def by_hand(masked: MaskedModel, seeds: Sequence[Tensor], x: Tensor, samples: int, batch_dim: int) -> Tensor:
    """Every part of the batch by itself, through the model with that sample of every mask."""
    model, parts = masked.model, []
    for s, part in enumerate(x.chunk(samples, batch_dim)):
        weights: dict[str, Any] = {name: value.detach() for name, value in model.named_parameters()}
        for (name, logits), seed in zip(masked.named_logits(), seeds, strict=True):
            weights[name] = weights[name] * sample_mask(logits, samples, seed)[s]
        parts.append(torch.func.functional_call(model, weights, (part,)))
    return torch.cat(parts, batch_dim)
