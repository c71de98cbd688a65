"""Generated data; readers of data sets are in ``fastmod.data``."""

from fastmod.tasks.corruptions import corrupt
from fastmod.tasks.drawing import Labelled
from fastmod.tasks.parity import mnist_parity
from fastmod.tasks.sprites import pentomino

__all__ = ["Labelled", "corrupt", "mnist_parity", "pentomino"]
