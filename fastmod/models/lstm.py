"""An LSTM with an output layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """``[B, T, inputs]`` -> the output layer at every step, ``[B, T, outputs]``; ``layers`` stacked LSTMs.
    ``xavier``: initialise with :func:`xavier_lstm_` instead of torch's weights."""

    def __init__(self, inputs: int, units: int, outputs: int, layers: int = 1, *, xavier: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, layers, batch_first=True)
        self.output = nn.Linear(units, outputs)
        if xavier:
            xavier_lstm_(self.lstm)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x)[0])


@torch.no_grad()
def xavier_lstm_(lstm: nn.LSTM) -> None:
    """Xavier-normal weights with the gains of sigmoid and, for the cell's input, tanh, each over sqrt(2) since input
    and state add up; the state's part of the cell's input orthogonal; biases 0, those of the forget gate 1."""
    units, tanh = lstm.hidden_size, nn.init.calculate_gain("tanh")
    for layer in range(lstm.num_layers):
        read, state, bias, other = (
            getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        read.normal_(0, math.sqrt(1 / (read.shape[1] + units)))
        state.normal_(0, math.sqrt(1 / (2 * units)))
        cell = slice(2 * units, 3 * units)  # torch's order: input, forget, cell, output
        read[cell] *= tanh
        nn.init.orthogonal_(state[cell], gain=tanh / math.sqrt(2))
        other.zero_()
        bias.zero_()[units : 2 * units] = 1
