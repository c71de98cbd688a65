"""Finds the kernels to compile: those of Triton in ``fastmod.kernels``, those of CUDA C++ in csrc/cuda."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import fastmod

#: In a checkout; a wheel has no sources.
CUDA_SOURCES = Path(fastmod.__file__).resolve().parent.parent / "csrc" / "cuda"


@functools.cache
def specialisations() -> dict[str, Any]:
    """``<op>.<kernel>.<dtype>[-<case>]`` -> Specialisation."""
    from fastmod.gpu.specialisation import DTYPES

    found: dict[str, Any] = {}
    for stem, module in kernel_modules().items():
        for dtype in DTYPES.values():
            for each in module.specialisations(dtype):
                name = f"{stem}.{each.kernel.__name__}.{dtype.name}" + (f"-{each.case}" if each.case else "")
                assert name not in found, f"{name}: two specialisations of that name"
                found[name] = each
    return found


def kernel_modules() -> dict[str, Any]:
    """The modules of the ops by their stems; one with an underscore holds what others share."""
    package = importlib.import_module("fastmod.kernels")
    stems = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    modules = {stem: importlib.import_module(f"{package.__name__}.{stem}") for stem in sorted(stems)}
    return {stem: module for stem, module in modules.items() if hasattr(module, "specialisations")}


def cuda_files() -> dict[str, Path]:
    """Stem -> file; empty where there are no sources."""
    return {path.stem: path for path in sorted(CUDA_SOURCES.glob("*.cu"))}
