"""The ResMixNet and its baselines without fastmod's ops, with a loop over the experts, for races.

``fastmod.models.load_plain`` moves their weights into the fast twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.models.resmixnet import VGG19
from fastmod.nn.basic_block import Expert


def _he(model: nn.Module) -> None:
    """He's initialisation of the convolutions, as in the fast twins: those of a gater have no batch norm after them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            if ".gate." in name:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            else:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class PlainGater(nn.Module):
    """``[B, C, H, W]`` -> softmax weights ``[B, E]``."""

    def __init__(self, in_channels: int, experts: int) -> None:
        super().__init__()
        sizes = pairwise([in_channels, 16, 16, 32, 64])
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride, 1) for (i, o), stride in zip(sizes, (1, 1, 2, 1), strict=True)
        )
        self.head = nn.Linear(64 * 4, experts)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1)).softmax(-1)


class PlainMixture(nn.Module):
    """``[B, C, H, W]`` -> ``[B, C', H', W']``, computing the experts one after the other."""

    def __init__(self, in_channels: int, out_channels: int, experts: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        self.gate = PlainGater(in_channels, experts)
        self.experts = nn.ModuleList(Expert(in_channels, out_channels, depth, stride) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        total = gate[:, 0, None, None, None] * self.experts[0](x)
        for e in range(1, len(self.experts)):
            total = total + gate[:, e, None, None, None] * self.experts[e](x)
        return total


class _Net(nn.Module):
    def __init__(self, in_channels: int, classes: int, stem_stride: int, features: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 16, 3, stem_stride, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(features, classes)

    def enter(self, x: Tensor) -> Tensor:
        return F.relu(self.stem_norm(self.stem(x)))

    def leave(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)))


class PlainResMixNet(_Net):
    def __init__(self, experts: int, depth: int, classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> None:
        super().__init__(in_channels, classes, stem_stride, 64)
        self.mixtures = nn.ModuleList(
            [PlainMixture(16, 16, experts, depth), PlainMixture(16, 32, experts, depth, stride=2)]
        )
        self.tail = Expert(32, 64, depth, stride=2)
        _he(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for mixture in self.mixtures:
            x = mixture(x)
        return self.leave(self.tail(x))


class Bottleneck(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False) if changes else None
        self.shortcut_norm = nn.BatchNorm2d(out_channels) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(y + x)


class Bottlenecks(nn.Module):
    def __init__(self, in_channels: int, width: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        first = Bottleneck(in_channels, width, stride)
        self.blocks = nn.Sequential(first, *(Bottleneck(4 * width, width) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class PlainResNet(_Net):
    """The twin of ``fastmod.models.FusedResNet``."""

    def __init__(
        self,
        depths: Sequence[int],
        bottleneck: bool = False,
        classes: int = 2,
        in_channels: int = 3,
        stem_stride: int = 2,
    ) -> None:
        widths = [16 * 2**i for i in range(len(depths))]
        super().__init__(in_channels, classes, stem_stride, widths[-1] * (4 if bottleneck else 1))
        stage = Bottlenecks if bottleneck else Expert
        stages: list[nn.Module] = []
        before = 16
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            stages.append(stage(before, width, depth, 1 if i == 0 else 2))
            before = width * (4 if bottleneck else 1)
        self.stages = nn.Sequential(*stages)
        _he(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.stages(self.enter(x)))


class PlainVGG(nn.Module):
    """The twin of ``fastmod.models.FusedVGG``."""

    def __init__(self, classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> None:
        super().__init__()
        widths = [width for group in VGG19 for width in group]
        sizes = list(pairwise([in_channels, *widths]))
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, 1 if place else stem_stride, 1) for place, (i, o) in enumerate(sizes)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.head = nn.Linear(widths[-1], classes)
        _he(self)

    def forward(self, x: Tensor) -> Tensor:
        layers = zip(self.convs, self.norms, strict=True)
        for group in VGG19:
            for _ in group:
                conv, norm = next(layers)
                x = F.relu(norm(conv(x)))
            x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))
