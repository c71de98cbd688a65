"""Tells torch.compile about our functions when it is first used: importing it takes a second."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeVar

import torch

_COMPILER = "torch._dynamo"
_waiting: list[Callable[..., object]] = []
_Function = TypeVar("_Function", bound=Callable[..., object])


def in_graph(function: _Function) -> _Function:
    """Calls ``torch.compiler.allow_in_graph``, which imports the compiler, once something else has imported it."""
    if _COMPILER in sys.modules:
        torch.compiler.allow_in_graph(function)
    else:
        _waiting.append(function)
    return function


class _Loader(importlib.abc.Loader):
    """Loads the compiler, then tells it about the functions."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        while _waiting:
            torch.compiler.allow_in_graph(_waiting.pop())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of the compiler; leaves everything else alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if _COMPILER not in sys.modules:
    sys.meta_path.insert(0, _Finder())
