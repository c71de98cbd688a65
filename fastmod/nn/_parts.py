"""What the layers share: argument checks, the FNN and the routing mode with its learned temperature."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from fastmod.ops.multiplex import mode_code


def positive_sizes(*, least: int = 1, **sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int >= {least}, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected an int >= {least}, got {value}")


def check_blocks(name: str, value: Tensor, blocks: int, block_size: int, form: str) -> None:
    """``value`` is ``[..., blocks, block_size]``; ``form`` names the two sizes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor [..., {form}], got {type(value).__name__}")
    if value.shape[-2:] != (blocks, block_size):
        raise ValueError(
            f"{name}: expected [..., {form}] = [..., {blocks}, {block_size}], got shape {list(value.shape)}"
        )


def make_fnn(inputs: int, outputs: int, hidden: int, layers: int) -> nn.ModuleList:
    """``layers`` hidden linear layers and the output layer; the LeakyReLU between them is part of the op."""
    sizes = [inputs, *[hidden] * layers, outputs]
    return nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))


def fnn_tensors(fnn: nn.ModuleList) -> list[Tensor]:
    """An FNN as ``[weight, bias, weight, bias, ...]``, the form that the ops take."""
    tensors: list[Tensor] = []
    for layer in cast("Iterable[nn.Linear]", fnn._modules.values()):
        own = layer._parameters  # twice as fast as attributes, which only a pruned or parametrised layer needs
        weight, bias = own.get("weight"), own.get("bias")
        tensors.append(layer.weight if weight is None else weight)
        tensors.append(layer.bias if bias is None else bias)
    return tensors


class RoutedLayer(nn.Module):
    """Base of the layers with a routing FNN ``[..., M, D] -> [M, N]`` logits."""

    def __init__(
        self, in_blocks: int, out_blocks: int, block_size: int, *, hidden: int, layers: int, mode: str
    ) -> None:
        super().__init__()
        positive_sizes(in_blocks=in_blocks, out_blocks=out_blocks, block_size=block_size, hidden=hidden, layers=layers)
        if mode not in ("softmax", "gumbel"):
            mode_code(mode)  # an unknown mode fails here
            raise ValueError(f"mode: expected 'softmax' or 'gumbel' (which takes the arg max in eval), got {mode!r}")
        self.in_blocks, self.out_blocks, self.block_size = in_blocks, out_blocks, block_size
        self.hidden, self.layers, self.mode = hidden, layers, mode
        self.route = make_fnn(in_blocks * block_size, in_blocks * out_blocks, hidden, layers)
        if mode == "gumbel":
            self.log_tau = nn.Parameter(torch.zeros(()))

    def current_routing(self) -> tuple[str, float | Tensor]:
        """Mode and temperature for a call now: Gumbel samples in training and takes the arg max in eval."""
        if self.mode == "softmax":
            return "softmax", 1.0
        return ("gumbel" if self.training else "argmax"), self.log_tau.exp()

    def extra_repr(self) -> str:
        return f"{self.in_blocks}, {self.out_blocks}, {self.block_size}, mode={self.mode!r}"
