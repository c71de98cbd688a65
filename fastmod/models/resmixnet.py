"""The Residual Mixture Network, and the residual nets and the VGG of its paper, built from the same layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastmod.nn import ExpertMixture, ExpertStack
from fastmod.nn._parts import positive_sizes
from fastmod.nn._pending import Pending, finish
from fastmod.nn.expert_layers import (
    ExpertBottleneck,
    ExpertConv,
    ExpertNorm,
    chained,
    check_images,
    count_batches,
)
from fastmod.ops import _conv_chain as chain
from fastmod.ops import _pool_linear as pool_linear


class _Net(nn.Module):
    """A 3x3 convolution with batch norm and ReLU in front, ``stem`` and ``stem_norm``, and a linear layer, ``head``."""

    def __init__(self, in_channels: int, classes: int, stem_stride: int, features: int) -> None:
        super().__init__()
        positive_sizes(in_channels=in_channels, classes=classes)
        self.in_channels = in_channels
        self.stem = ExpertConv(in_channels, 16, 1, 3, stem_stride)
        self.stem_norm = ExpertNorm(16, 1)
        self.head = nn.Linear(features, classes)

    def enter(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` -> ``[B, 16, H', W']``, written out, as shortcuts add them."""
        check_images(x, self.in_channels)
        count_batches(x, self)
        if chain.served(x) and not self.stem_norm.training:
            layer = chained(self.stem.weight, self.stem.bias, self.stem.stride, self.stem_norm, 0, relu=True)
            return chain.conv_chain(x, [layer]).squeeze(1)
        return finish(self.stem_norm.after(self.stem, x, relu=True)).squeeze(1)

    def leave(self, x: Tensor) -> Tensor:
        """``[B, 1, C, H, W]`` -> scores ``[B, classes]``."""
        if pool_linear.served(x, self.head):
            return pool_linear.pool_linear(x.squeeze(1), self.head.weight, self.head.bias)
        return self.head(x.mean((-2, -1)).squeeze(1))


class ResMixNet(_Net):
    """Images ``[B, C, H, W]`` -> scores ``[B, classes]``: two mixtures of E experts, then residual blocks.

    Args:
        experts: E.
        depth: D, residual blocks of an expert, and of the last stage.
        classes, in_channels: of the data.
        stem_stride: of the first convolution: 2 for the paper's 64-pixel tasks, 1 for CIFAR and SVHN.

    ``stem`` to 16 channels, ``mixtures.0`` of 16, ``mixtures.1`` of 32 (stride 2), ``tail`` of 64 (stride 2), the mean
    over all pixels, ``head``. The paper's (2, 2) has 273750 parameters, (4, 1) 192730; what it prints as (5, 3) for
    CIFAR is E = 3, D = 5. Convolutions are initialised as by He et al., each expert independently; batch norm 1 and 0.
    """

    def __init__(self, experts: int, depth: int, classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> None:
        super().__init__(in_channels, classes, stem_stride, 64)
        self.mixtures = nn.ModuleList(
            [ExpertMixture(16, 16, experts, depth), ExpertMixture(16, 32, experts, depth, stride=2)]
        )
        self.tail = ExpertStack(32, 64, 1, depth, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for mixture in self.mixtures:
            x = mixture(x)
        return self.leave(self.tail(x))

    def gates(self, x: Tensor) -> list[Tensor]:
        """The weights that the gaters give to the experts for these images, ``[B, E]`` per mixture.

        In training mode batch norm uses the batch, and running statistics are updated as in a forward.
        """
        x = self.enter(x)
        found = []
        for mixture in cast("Iterable[ExpertMixture]", self.mixtures):
            found.append(mixture.gate(x))
            if len(found) < len(self.mixtures):
                x = mixture.experts(x, found[-1])
        return found


class FusedResNet(_Net):
    """Images ``[B, C, H, W]`` -> scores ``[B, classes]``: ``stages`` of 16, 32, 64 ... channels, E = 1.

    Basic blocks, or bottlenecks of these widths with four times as many channels. Every stage but the first
    halves the image.
    """

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
        stages: list[nn.Module] = []
        before = 16
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            stage = BottleneckStack if bottleneck else ExpertStack
            stages.append(stage(before, width, 1, depth, 1 if i == 0 else 2))
            before = width * (4 if bottleneck else 1)
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for stage in self.stages:
            x = stage(x)
        return self.leave(x)


class BottleneckStack(nn.Module):
    """``depth`` bottlenecks, the first with the stride: ``[B, (E,) C, H, W]`` -> ``[B, E, 4 * width, H', W']``."""

    def __init__(self, in_channels: int, width: int, experts: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        first = ExpertBottleneck(in_channels, width, experts, stride)
        self.blocks = nn.ModuleList([first, *(ExpertBottleneck(4 * width, width, experts) for _ in range(depth - 1))])

    def forward(self, x: Tensor) -> Tensor:
        count_batches(x, *self.blocks)
        for block in self.blocks:
            x = block(x)
        return x


#: Channels of the convolutions of a VGG19 between its five pools.
VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


class FusedVGG(nn.Module):
    """Images ``[B, C, H, W]`` -> scores ``[B, classes]``: 3x3 convolutions with biases and batch norm, and five pools.

    ``convs.{i}``, ``norms.{i}``, ``head``: one linear layer on 512 features. The first convolution has ``stem_stride``.
    """

    def __init__(self, classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> None:
        super().__init__()
        positive_sizes(in_channels=in_channels, classes=classes)
        self.in_channels, self.stem_stride = in_channels, stem_stride
        convs: list[ExpertConv] = []
        before = in_channels
        for width in (width for group in VGG19 for width in group):
            convs.append(ExpertConv(before, width, 1, 3, 1 if convs else stem_stride, bias=True))
            before = width
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(ExpertNorm(conv.weight.shape[1], 1) for conv in convs)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.in_channels)
        least = 2 ** len(VGG19) * self.stem_stride - self.stem_stride + 1
        if min(x.shape[-2:]) < least:
            raise ValueError(f"x: expected images of at least {least} pixels a side, got shape {list(x.shape)}")
        count_batches(x, self.norms)
        layers = zip(cast("Iterable[ExpertConv]", self.convs), cast("Iterable[ExpertNorm]", self.norms), strict=True)
        for group in VGG19:
            read: Tensor | Pending = x
            for _ in group:
                conv, norm = next(layers)
                read = norm.after(conv, read, relu=True)
            x = F.max_pool2d(finish(cast("Pending", read)).squeeze(1), 2)
        return self.head(x.mean((-2, -1)))


def resnet26(classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> FusedResNet:
    """369170 parameters: three stages of four basic blocks, a ResMixNet(1, 4) without gaters."""
    return FusedResNet((4, 4, 4), False, classes, in_channels, stem_stride)


def resnet50(classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> FusedResNet:
    """758034 parameters: three stages of eight basic blocks."""
    return FusedResNet((8, 8, 8), False, classes, in_channels, stem_stride)


def resnet152_bottleneck(classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> FusedResNet:
    """3663250 parameters: 3, 8, 36 and 3 bottlenecks of widths 16, 32, 64 and 128."""
    return FusedResNet((3, 8, 36, 3), True, classes, in_channels, stem_stride)


def vgg19_bn(classes: int = 2, in_channels: int = 3, stem_stride: int = 2) -> FusedVGG:
    """20036418 parameters."""
    return FusedVGG(classes, in_channels, stem_stride)


def load_plain(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Give ``model`` the weights and statistics of its plain twin (``fastmod.models.plain_resmixnet``); returns it."""
    theirs = plain.state_dict()
    stacked = {}
    used = set()
    for name, value in model.state_dict().items():
        if name in theirs:
            used.add(name)
            other = theirs[name]
            stacked[name] = other if other.shape == value.shape else other.unsqueeze(0)
        else:  # mixtures.0.experts.blocks.0... is mixtures.0.experts.{e}.blocks.0... of each expert
            names = [name.replace(".experts.", f".experts.{e}.", 1) for e in range(_experts_at(model, name))]
            values = [theirs[n] for n in names if n in theirs]
            if len(values) != len(names):
                raise ValueError(f"plain: expected {names[len(values)]}, which {name} is made of, got no such entry")
            used.update(names)
            stacked[name] = values[0] if name.endswith("num_batches_tracked") else torch.stack(values)
    unused = [name for name in theirs if name not in used]
    if unused:
        raise ValueError(f"plain: expected the twin of this net, got entries that it lacks, such as {unused[0]}")
    model.load_state_dict(stacked)
    return model


def _experts_at(model: nn.Module, name: str) -> int:
    part = model.get_submodule(name.partition(".experts.")[0] + ".experts") if ".experts." in name else None
    return part.experts if isinstance(part, ExpertStack) else 1
