"""Data that are made rather than read; readers of data sets are in ``fastmod.data``."""

from fastmod.tasks.drawing import Labelled
from fastmod.tasks.parity import mnist_parity
from fastmod.tasks.sprites import pentomino

__all__ = ["Labelled", "mnist_parity", "pentomino"]
