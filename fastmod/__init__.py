"""fastmod: fast, trustworthy layers for modular neural networks."""

from fastmod import masks, nn, ops, optim
from fastmod._register import register_fakes
from fastmod.backend import backends, use_backend

register_fakes()

__version__ = "0.1.0"
__all__ = ["__version__", "backends", "masks", "nn", "ops", "optim", "use_backend"]
