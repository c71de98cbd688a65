"""Modules of any class whose parameters are computed: what ``compose_`` turns layers into.

A layer keeps its code, hooks and buffers. Its class is replaced by a subclass, made here, in which a weight is a
property; unlike with ``torch.nn.utils.parametrize`` the net can be pickled as a whole.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor, nn


class Source(Protocol):
    def weight(self, name: str) -> Tensor: ...


def composed(module: nn.Module, leaf: str, source: Source, name: str) -> None:
    """Make ``module.leaf`` return ``source.weight(name)``."""
    base, names = _known(module)
    # In a dict: as an attribute, the source would become a submodule of every layer.
    module.__dict__.setdefault("_composed_from", {})[leaf] = (source, name)
    module.__class__ = _with_properties(base, (*names, leaf))


def ordinary(module: nn.Module, leaf: str) -> None:
    """Make ``module.leaf`` an ordinary attribute again, still without a value."""
    base, names = _known(module)
    del module.__dict__["_composed_from"][leaf]
    left = tuple(n for n in names if n != leaf)
    module.__class__ = _with_properties(base, left)
    if not left:
        del module.__dict__["_composed_from"]


def _known(module: nn.Module) -> tuple[type, tuple[str, ...]]:
    """The original class of a module, and which of its parameters are computed."""
    kind = type(module)
    return kind.__dict__.get("_composed_base", kind), kind.__dict__.get("_composed_names", ())


@functools.cache
def _with_properties(base: type, names: tuple[str, ...]) -> type:
    if not names:
        return base

    def reduce(self: nn.Module, protocol: int) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _blank, (base, names), state

    members: dict[str, Any] = {n: property(functools.partial(_computed, leaf=n)) for n in names}
    members |= {"_composed_base": base, "_composed_names": names, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"Composed{base.__name__}", (base,), members)


def _computed(module: nn.Module, leaf: str) -> Tensor:
    source, name = module.__dict__["_composed_from"][leaf]
    return source.weight(name)


def _blank(base: type, names: tuple[str, ...]) -> Any:
    """For pickle and copies: the state follows."""
    kind = _with_properties(base, names)
    return object.__new__(kind)
