"""The small net that weights experts: ``Gater``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn._pending import Pending, finish
from fastmod.nn.expert_layers import (
    ExpertNorm,
    Step,
    chained,
    check_images,
    check_stride,
    count_batches,
    in_training,
    side_by_side,
    step,
)
from fastmod.ops import _conv_chain as chain
from fastmod.ops import _pool_linear as pool_linear


class Gater(nn.Module):
    """Weights of E experts for each image: 3x3 convolutions with ReLU, average pooling, a linear layer, a softmax.

    Args:
        in_channels: of the images.
        experts: E.
        channels, strides: of the convolutions. The defaults, with biases and pooled to 2 x 2, reproduce the parameter
            counts printed in the ResMixNet paper.
        norm: batch norm in place of the biases.
        pooled: average over pooled x pooled regions; 1 averages over the whole image, as in the text of the paper.

    Shapes: ``[B, C, H, W]`` -> ``[B, E]``, each row of sum 1. Parameters: ``convs.{i}.{weight,bias}`` and
    ``head.{weight,bias}`` as Conv2d and Linear have them, with ``norm`` also ``norms.{i}.*`` [1, channels].
    Convolutions are initialised as by He et al. for nets without batch norm, normal with variance 2 / (9 * inputs),
    their biases 0. They hold parameters only: hooks on them do not run. The next layer applies a ReLU while it reads.
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
        for name, values in (("channels", channels), ("strides", strides)):
            if not isinstance(values, (list, tuple)):
                raise TypeError(f"{name}: expected a list, one entry per convolution, got {values!r}")
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
        self.enter(x)
        if chain.served(x) and not (self.norms is not None and in_training(self.norms)):
            layers = []
            for i, conv in enumerate(self._convolutions()):
                bias = None if conv.bias is None else conv.bias.unsqueeze(0)
                layers.append(chained(conv.weight.unsqueeze(0), bias, conv.stride[0], self._norm(i), i, relu=True))
            return self.leave(Pending(chain.conv_chain(x, layers)))
        y: Tensor | Pending = x
        for i in range(len(self.convs)):
            (y,) = side_by_side([self.step(i, y)])
        assert isinstance(y, Pending)
        return self.leave(y)

    def enter(self, x: Tensor) -> None:
        """Checks and counts images, before the first step."""
        check_images(x, self.in_channels)
        if self.norms is not None:
            count_batches(x, self.norms)

    def step(self, i: int, x: Tensor | Pending) -> Step:
        """The i-th convolution, for callers that compute it together with others."""
        conv = self._convolutions()[i]
        bias = None if conv.bias is None else conv.bias.unsqueeze(0)
        return step(x, conv.weight.unsqueeze(0), bias, conv.stride[0], self._norm(i), relu=True)

    def _norm(self, i: int) -> ExpertNorm | None:
        return None if self.norms is None else cast("ExpertNorm", self.norms[i])

    def leave(self, x: Pending) -> Tensor:
        """The result of the last convolution -> weights ``[B, E]``."""
        if pool_linear.served(x.images, self.head):
            affine = {} if x.scale is None or x.shift is None else {"scale": x.scale[0], "shift": x.shift[0]}
            weight, bias, images = self.head.weight, self.head.bias, x.images.squeeze(1)
            return pool_linear.pool_linear(images, weight, bias, **affine, relu=True, pooled=self.pooled, softmax=True)
        if x.scale is None:
            y = F.relu(x.images.squeeze(1)) if x.relu else x.images.squeeze(1)
        else:
            y = finish(x).squeeze(1)
        return self.head(self._pool(y).flatten(1)).softmax(-1)

    def _convolutions(self) -> list[nn.Conv2d]:
        return cast("list[nn.Conv2d]", list(self.convs._modules.values()))

    def _pool(self, y: Tensor) -> Tensor:
        return y.mean((2, 3)) if self.pooled == 1 else F.adaptive_avg_pool2d(y, self.pooled)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, experts={self.experts}, pooled={self.pooled}"
