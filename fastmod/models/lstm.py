"""An LSTM with an output layer."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """``[B, T, inputs]`` -> what the output layer says at every step, ``[B, T, outputs]``."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units, batch_first=True)
        self.output = nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x)[0])
