"""fastmod: fast, trustworthy layers for modular neural networks."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from fastmod import waiting

waiting.choose()  # before torch is imported

from fastmod import nn, ops, optim  # noqa: E402
from fastmod.backend import backends, use_backend  # noqa: E402
from fastmod.nn import compose_  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "backends",
    "compose_",
    "data",
    "masks",
    "models",
    "nn",
    "ops",
    "optim",
    "tasks",
    "use_backend",
]

if TYPE_CHECKING:
    from fastmod import data, masks, models, tasks


def __getattr__(name: str) -> ModuleType:
    """What not everybody needs is imported when it is asked for."""
    if name in ("data", "masks", "models", "tasks"):
        return import_module(f"fastmod.{name}")
    raise AttributeError(f"module 'fastmod' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
