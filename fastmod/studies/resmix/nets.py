"""The nets of the ResMixNet paper, by their names for ``--model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fastmod import models

#: Name -> name in the paper.
TITLES = {
    "ResNet26": "ResNet26",
    "ResNet50": "ResNet50",
    "ResNet152": "ResNet152-Bottleneck",
    "VGG19_BN": "VGG19-BN",
    "ResMixNet_2_2": "ResMixNet(2,2)",
    "ResMixNet_4_1": "ResMixNet(4,1)",
    "ResMixNet_3_5": "ResMixNet(3,5)",
}
_PLAIN: Mapping[str, Callable[..., nn.Module]] = {
    "ResNet26": models.resnet26,
    "ResNet50": models.resnet50,
    "ResNet152": models.resnet152_bottleneck,
    "VGG19_BN": models.vgg19_bn,
}


def modular(name: str) -> bool:
    """Whether the net has experts and gates."""
    return name.startswith("ResMixNet_")


def build(name: str, classes: int, stem_stride: int) -> nn.Module:
    """Images ``[B, 3, H, W]`` -> scores ``[B, classes]``."""
    if modular(name):
        experts, depth = map(int, name.split("_")[1:])
        return models.ResMixNet(experts, depth, classes, stem_stride=stem_stride)
    return _PLAIN[name](classes=classes, stem_stride=stem_stride)
