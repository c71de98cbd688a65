"""Images of the compositional studies: a data set in a domain, with a given side and number of colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.data import (
    DataError,
    load_cifar10,
    load_cifar100,
    load_fashion_mnist,
    load_kmnist,
    load_svhn,
    load_usps,
    mnist,
)
from fastmod.data.cached import cached
from fastmod.tasks import Labelled
from fastmod.tasks.corruptions import corrupt

#: Data set -> reader, folder, title, number of classes.
_READERS: Mapping[str, tuple[Callable[..., Sequence[Tensor]], str, str, int]] = {
    "mnist": (mnist, "mnist", "MNIST", 10),
    "fashion": (load_fashion_mnist, "fashion_mnist", "Fashion-MNIST", 10),
    "kmnist": (load_kmnist, "kmnist", "KMNIST", 10),
    "usps": (load_usps, "usps", "USPS", 10),
    "svhn": (load_svhn, "svhn", "SVHN", 10),
    "cifar10": (load_cifar10, "cifar10", "CIFAR-10", 10),
    "cifar100": (load_cifar100, "cifar100", "CIFAR-100", 100),
}
DATASETS = tuple(_READERS)
_LUMA = (299, 587, 114)  # brightness of red, green and blue, in thousandths


class Where(NamedTuple):
    """Where data sets are."""

    data: str | None  # a folder with a folder for each data set; None: FASTMOD_DATA
    verify: bool  # check that MNIST is the official one


class Task(NamedTuple):
    """Images uint8 ``[N, C, S, S]`` and labels of a data set in a domain."""

    title: str
    classes: int
    train: Labelled
    test: Labelled


def title_of(dataset: str, domain: str = "original") -> str:
    name = _READERS[dataset][2]
    return name if domain == "original" else f"{name} {domain.replace('_', ' ')}"


def classes_of(dataset: str) -> int:
    return _READERS[dataset][3]


@cached(len(_READERS))
def read(dataset: str, place: Where) -> Sequence[Tensor]:
    """Images and labels of training and test, as in the files."""
    load, folder, _, _ = _READERS[dataset]
    root = None if place.data is None else Path(place.data, folder)
    return load(root, verify=place.verify) if dataset == "mnist" else load(root)


@cached(16)
def task(
    dataset: str,
    domain: str,
    place: Where,
    *,
    side: int,
    colours: int,
    train: int,
    test: int,
    seed: int,
    held_back: int = 0,
    margin: int = 0,
) -> Task:
    """The first ``train`` and ``test`` images (0: all) with ``side`` x ``side`` pixels and 1 or 3 colours.

    ``seed`` is that of the domain's randomness, which differs between training and test. If ``held_back`` > 0, the last
    ``held_back`` training images replace the test images and are not trained on. ``margin``: dark pixels added around
    images before they are resized.
    """
    images, labels, test_images, test_labels = read(dataset, place)
    if held_back:
        if held_back >= len(labels):
            raise DataError(f"held_back: expected fewer than the {len(labels)} images of {dataset}, got {held_back}")
        test_images, test_labels = images[-held_back:], labels[-held_back:]
        images, labels = images[:-held_back], labels[:-held_back]
    parts = []
    for number, (some, right, most) in enumerate(((images, labels, train), (test_images, test_labels, test))):
        some, right = (some[:most], right[:most]) if most else (some, right)
        if domain != "original":
            some = corrupt(some, domain, 2 * seed + number)
        parts.append(Labelled(_shaped(F.pad(some, (margin,) * 4), side, colours), right))
    return Task(title_of(dataset, domain), classes_of(dataset), *parts)


def _shaped(images: Tensor, side: int, colours: int) -> Tensor:
    """uint8 ``[N, H, W]`` or ``[N, 3, H, W]`` as ``[N, colours, side, side]``."""
    if images.dim() == 3:
        images = images[:, None]
    if images.shape[1] == 3 and colours == 1:
        weights = torch.tensor(_LUMA, dtype=torch.int32)[:, None, None]
        images = (images.int() * weights).sum(1, keepdim=True).add(500).div(1000, rounding_mode="floor").byte()
    if images.shape[-1] != side:
        parts = [
            F.interpolate(some.float(), (side, side), mode="bilinear", antialias=True).round().clamp(0, 255).byte()
            for some in images.split(4096)
        ]
        images = torch.cat(parts)
    return images.expand(-1, colours, -1, -1)
