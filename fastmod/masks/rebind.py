"""A copy of a net for one forward: the same code and attributes over other parameters.

Every forward has its own copy, so that threads do not interfere, a checkpoint that runs a layer a second time finds the
same masks, and the net itself is never written to. Modules are copied shallowly, and every reference from one to
another is redirected to the copies: children, references in attributes, lists and dicts, bound methods, functions over
``self`` and hooks.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fastmod._private import is_compiled

#: (module, name, parameter) -> its replacement in the copy; the module is None if a list or dict holds the parameter.
Substitute = Callable[[nn.Module | None, str, nn.Parameter], Tensor]

_ATOMS = frozenset(
    [type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, Tensor]
    + [types.ModuleType, types.BuiltinFunctionType, type(torch.nn.functional.linear)]
)
_CONTAINERS = frozenset([dict, OrderedDict, list, tuple, set])  # mostly empty dicts of hooks
_KEPT = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"])


def original(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``."""
    while is_compiled(module):
        inner = module._modules["_orig_mod"]
        assert inner is not None
        module = inner
    return module


class Rebinding:
    """One copy of a net, and the mapping from the original to it."""

    def __init__(self, net: nn.Module, substitute: Substitute, *, frozen_statistics: bool) -> None:
        self._substitute, self._frozen = substitute, frozen_statistics
        self._copies: dict[int, Any] = {}  # id of an original -> its copy
        self._pairs: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        self.net = self._module(net)

    def _module(self, module: nn.Module) -> nn.Module:
        module = original(module)
        known = self._copies.get(id(module))
        if known is not None:
            return known
        if isinstance(module, torch.jit.ScriptModule):
            return module  # without masks: MaskedModel refuses others
        copy = object.__new__(type(module))
        self._copies[id(module)] = copy
        own = dict(module.__dict__)
        object.__setattr__(copy, "__dict__", own)
        own["_parameters"] = {
            name: None if value is None else self._substitute(module, name, value)
            for name, value in own["_parameters"].items()
        }
        own["_buffers"] = dict(own["_buffers"])
        own["_modules"] = {
            name: None if child is None else self._module(child) for name, child in own["_modules"].items()
        }
        for name, value in own.items():
            kind = type(value)
            if kind not in _ATOMS and (value or kind not in _CONTAINERS) and name not in _KEPT:
                own[name] = self._value(value)
        own["_compiled_call_impl"] = None  # compiled for the original
        if self._frozen and isinstance(module, _NormBase) and module.track_running_stats:
            own["training"] = False  # statistics belong to the frozen net and are used unchanged
        self._pairs.append((module, copy, dict(own)))
        return copy

    def _value(self, value: Any) -> Any:
        """The value of an attribute with references redirected to the copies; the same object if it has none."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, nn.Parameter):
            return self._substitute(None, "", value)
        if kind in (list, tuple, set):
            items = [self._value(item) for item in value]
            return value if _same(items, value) else kind(items)
        if kind in (dict, OrderedDict):
            if not value:
                return value
            items = [self._value(item) for item in value.values()]
            return value if _same(items, value.values()) else kind(zip(value, items, strict=True))
        if kind is types.MethodType:
            owner = self._value(value.__self__) if isinstance(value.__self__, nn.Module) else value.__self__
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is functools.partial:
            return self._partial(value)
        if kind is types.FunctionType:
            return self._function(value)
        return value

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        function, args, keywords = self._value(value.func), self._value(value.args), self._value(value.keywords)
        if function is value.func and args is value.args and keywords is value.keywords:
            return value
        copy = functools.partial(function, *args, **keywords)
        copy.__dict__.update(value.__dict__)
        return copy

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """A function over modules, such as a lambda over ``self``, redirected to the copies."""
        known = self._copies.get(id(value))
        if known is not None:
            return known
        cells, defaults = value.__closure__ or (), value.__defaults__
        if not cells and not defaults:
            return value
        self._copies[id(value)] = value  # in case it refers to itself
        contents = [_content(cell) for cell in cells]
        found = [self._value(content) for content in contents]
        new_defaults = self._value(defaults) if defaults else defaults
        if _same(found, contents) and new_defaults is defaults:
            return value
        closure = tuple(
            cell if new is old else types.CellType(new) for cell, old, new in zip(cells, contents, found, strict=True)
        )
        copy = types.FunctionType(value.__code__, value.__globals__, value.__name__, new_defaults, closure)
        copy.__kwdefaults__ = value.__kwdefaults__
        copy.__dict__.update(value.__dict__)
        self._copies[id(value)] = copy
        return copy

    def written(self) -> list[Any]:
        """The attributes that modules have set in the copy."""
        return [
            value
            for _, copy, before in self._pairs
            for name, value in copy.__dict__.items()
            if name not in _KEPT and (name not in before or before[name] is not value)
        ]

    def write_back(self) -> None:
        """Copy to the originals what modules have set on themselves, such as their last input."""
        back = {id(copy): module for module, copy, _ in self._pairs}
        for module, copy, before in self._pairs:
            for name, value in copy.__dict__.items():
                if name not in _KEPT and (name not in before or before[name] is not value):
                    module.__dict__[name] = back.get(id(value), value)
            for name, value in copy._buffers.items():
                if module._buffers.get(name) is not value:
                    module._buffers[name] = value


def _same(found: list[Any], before: Any) -> bool:
    return all(new is old for new, old in zip(found, before, strict=True))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None
