"""The small net that weights experts: ``Gater``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn._pending import Pending, convolve, finish
from fastmod.nn.expert_layers import ExpertNorm, check_images, check_stride, count_batches, normalised


class Gater(nn.Module):
    """Weights of E experts for each image: 3x3 convolutions with ReLU, an average pool, a linear layer, a softmax.

    Args:
        in_channels: of the images.
        experts: E.
        channels, strides: of the convolutions. The defaults, with biases and pooled to 2 x 2, reproduce the parameter
            counts printed in the ResMixNet paper.
        norm: batch norm in place of the biases.
        pooled: average over pooled x pooled regions; 1 averages over the whole image, as the paper's text says.

    Shapes: ``[B, C, H, W]`` -> ``[B, E]``, each row of sum 1. Parameters: ``convs.{i}.{weight,bias}`` and
    ``head.{weight,bias}`` as Conv2d and Linear have them, with ``norm`` also ``norms.{i}.*`` [1, channels].
    Convolutions start as He et al. start a net without batch norm, normal with variance 2 / (9 * inputs), their biases
    at 0. The convolutions hold parameters only: hooks on them do not run. A ReLU is applied while the next one reads.
    """

    def __init__(
        self,
        in_channels: int,
        experts: int,
        channels: Sequence[int] = (16, 16, 32, 64),
        strides: Sequence[int] = (1, 1, 2, 1),
        norm: bool = False,
        pooled: int = 2,
    ) -> None:
        super().__init__()
        _parts.positive_sizes(in_channels=in_channels, experts=experts, pooled=pooled)
        if len(channels) == 0 or len(channels) != len(strides):
            raise ValueError(
                f"channels, strides: expected one stride per convolution, got {list(channels)}, {list(strides)}"
            )
        for i, (width, stride) in enumerate(zip(channels, strides, strict=True)):
            _parts.positive_sizes(**{f"channels[{i}]": width})
            check_stride(f"strides[{i}]", stride)
        self.in_channels, self.experts, self.pooled = in_channels, experts, pooled
        sizes = pairwise([in_channels, *channels])
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride, 1, bias=not norm) for (i, o), stride in zip(sizes, strides, strict=True)
        )
        self.norms = nn.ModuleList(ExpertNorm(width, 1) for width in channels) if norm else None
        self.head = nn.Linear(channels[-1] * pooled * pooled, experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for conv in self._convolutions():
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.in_channels)
        y = self._pool(self._by_norms(x) if self.norms is not None else self._by_biases(x))
        return self.head(y.flatten(1)).softmax(-1)

    def _by_biases(self, x: Tensor | Pending) -> Tensor:
        for conv in self._convolutions():
            bias = None if conv.bias is None else conv.bias.unsqueeze(0)
            y = convolve(x, conv.weight.unsqueeze(0), bias, stride=conv.stride[0], stats=False).y
            x = Pending(y, relu=True)
        return F.relu(y.squeeze(1))

    def _by_norms(self, x: Tensor | Pending) -> Tensor:
        assert self.norms is not None
        count_batches(self.norms)
        for conv, norm in zip(self._convolutions(), cast("Iterable[ExpertNorm]", self.norms), strict=True):
            x = normalised(x, conv.weight.unsqueeze(0), None, conv.stride[0], norm, relu=True)
        assert isinstance(x, Pending)
        return finish(x).squeeze(1)

    def _convolutions(self) -> list[nn.Conv2d]:
        return cast("list[nn.Conv2d]", list(self.convs._modules.values()))

    def _pool(self, y: Tensor) -> Tensor:
        return y.mean((2, 3)) if self.pooled == 1 else F.adaptive_avg_pool2d(y, self.pooled)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, experts={self.experts}, pooled={self.pooled}"
