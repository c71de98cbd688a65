"""Data sets as tensors, read from local files; nothing is downloaded."""

from fastmod.data.cifar import CIFAR10, load_cifar10
from fastmod.data.idx import DataError, read_idx
from fastmod.data.mathematics import load_mathematics
from fastmod.data.mnist import MNIST, mnist
from fastmod.data.scan import SCAN, load_scan

__all__ = [
    "CIFAR10",
    "MNIST",
    "SCAN",
    "DataError",
    "load_cifar10",
    "load_mathematics",
    "load_scan",
    "mnist",
    "read_idx",
]
