"""An LSTM with an output layer."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """``[B, T, inputs]`` -> what the output layer says at every step, ``[B, T, outputs]``; ``layers`` on top of each
    other."""

    def __init__(self, inputs: int, units: int, outputs: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, layers, batch_first=True)
        self.output = nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x)[0])
