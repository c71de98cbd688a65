"""Triton kernels, one file per op, registered under the schemas that ``fastmod/ops`` defines.

``fastmod::<op>_forward.triton`` and ``..._backward.triton`` always lead here; where the extension has no CUDA kernels,
so do the plain overloads on CUDA tensors. Neither nvcc nor the extension is needed. Importing this package needs
triton.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable

import torch

from fastmod import _extension


def _launchers() -> dict[str, Callable[..., object]]:
    """What each file of an op holds under the names of its schemas; files without launchers help others."""
    found: dict[str, Callable[..., object]] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            for name in (f"{info.name}_forward", f"{info.name}_backward"):
                found[name] = getattr(module, name)
    return found


LAUNCHERS = _launchers()
globals().update(LAUNCHERS)  # kernels.multiplex_forward

# torch drops the registrations with the object that made them.
_library: torch.library.Library | None = None


def register() -> list[str]:
    """Register every launcher, once; returns the names of the ops."""
    global _library
    if _library is None:
        library = torch.library.Library("fastmod", "IMPL")
        native = "cuda" in _extension.native_devices()
        for name, launcher in LAUNCHERS.items():
            library.impl(f"{name}.triton", launcher, "CUDA")
            if os.environ.get("TRITON_INTERPRET") == "1":
                library.impl(f"{name}.triton", launcher, "CPU")
            if not native:
                library.impl(name, launcher, "CUDA")
        _library = library
    return sorted({name.rsplit("_", 1)[0] for name in LAUNCHERS})
