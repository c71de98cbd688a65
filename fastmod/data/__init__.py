"""Data sets as tensors, read from local files; nothing is downloaded."""

from fastmod.data.cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from fastmod.data.idx import DataError, read_idx
from fastmod.data.like_mnist import load_fashion_mnist, load_kmnist
from fastmod.data.mathematics import load_mathematics
from fastmod.data.mnist import MNIST, mnist
from fastmod.data.photographs import Photographs, crop_and_flip
from fastmod.data.scan import SCAN, load_scan
from fastmod.data.svhn import SVHN, load_svhn
from fastmod.data.usps import load_usps

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SCAN",
    "SVHN",
    "DataError",
    "Photographs",
    "crop_and_flip",
    "load_cifar10",
    "load_cifar100",
    "load_fashion_mnist",
    "load_kmnist",
    "load_mathematics",
    "load_scan",
    "load_svhn",
    "load_usps",
    "mnist",
    "read_idx",
]
