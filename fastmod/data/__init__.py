"""Data sets as tensors, read from local files; nothing is downloaded."""

from fastmod.data.idx import DataError, read_idx
from fastmod.data.mnist import MNIST, mnist

__all__ = ["MNIST", "DataError", "mnist", "read_idx"]
