"""Triton kernels, one file per op, registered under the schemas that ``fastmod/ops`` defines.

``fastmod_triton::<op>_forward`` and ``..._backward`` always lead here; where the extension has no CUDA kernels, so do
those of ``fastmod::`` on CUDA tensors. Neither nvcc nor the extension is needed. Importing this package needs
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
    """What each file of an op holds under the names of schemas; files without launchers help others."""
    found: dict[str, Callable[..., object]] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            own = {
                name: value
                for name, value in vars(module).items()
                if getattr(value, "__module__", "") == module.__name__
            }
            schemas = {name for name in own if hasattr(torch.ops.fastmod_triton, name)}
            for name in (f"{info.name}_forward", f"{info.name}_backward", *sorted(schemas)):
                found[name] = own[name]
    return found


LAUNCHERS = _launchers()
globals().update(LAUNCHERS)  # kernels.multiplex_forward

# torch drops the registrations with the object that made them.
_libraries: list[torch.library.Library] = []


def register() -> list[str]:
    """Register every launcher, once; returns the names of the ops."""
    if not _libraries:
        own, shared = (torch.library.Library(namespace, "IMPL") for namespace in ("fastmod_triton", "fastmod"))
        native = "cuda" in _extension.native_devices()
        for name, launcher in LAUNCHERS.items():
            own.impl(name, launcher, "CUDA")
            if os.environ.get("TRITON_INTERPRET") == "1":
                own.impl(name, launcher, "CPU")
            if not native:
                shared.impl(name, launcher, "CUDA")
        _libraries.extend((own, shared))
    return sorted({name.rsplit("_", 1)[0] for name in LAUNCHERS})
