"""Tracing by torch.fx, refused where the graph would not do the same as the forward of the model."""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from fastmod.nn.basic_block import BasicBlock


def hooked(module: nn.Module) -> bool:
    own = module.__dict__
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def has_own_ways(module: nn.Module) -> bool:
    """Whether calling it does something besides the forward of its class."""
    return hooked(module) or parametrize.is_parametrized(module) or "forward" in module.__dict__


def _is_ours(module: nn.Module) -> bool:
    """Layers built on ops, which inspect real tensors; a basic block is an ordinary module."""
    place = type(module).__module__
    return place.startswith(("fastmod.nn.", "fastmod.masks.")) and place != BasicBlock.__module__


class Proxy(fx.Proxy):
    """torch.fx records ``x += y`` as ``x + y``, which would leave other names of x unchanged."""


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(Proxy, f"__i{_name}__", _recorded(getattr(operator, f"__i{_name}__")))


class UntraceableError(Exception):
    """Something that a trace would leave out."""


class Tracer(fx.Tracer):
    """Traces into modules, but not into those that do something besides their forward."""

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return has_own_ways(m) or _is_ours(m) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Arguments with defaults are fixed to these: ``if mask is None`` is decided as in a call without a mask."""
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in required(root_fn))]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise UntraceableError("it switches gradients or autocast on or off inside")
        return super().create_node(*args, **kwargs)


def required(forward: Callable[..., Any]) -> list[str]:
    """The arguments without defaults, apart from self."""
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise UntraceableError(f"its argument {parameter.name} is given by keyword only")
            names.append(parameter.name)
    return names


def trace(model: nn.Module) -> fx.Graph:
    """The graph of ``type(model).forward`` in the current modes of the modules; the model is not changed."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    drawn = _generators()
    try:
        graph = Tracer().trace(model)
        _check_untouched(before)
        if not _same(_generators(), drawn):
            raise UntraceableError("it draws random numbers that are no result of its inputs")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        kind = "" if isinstance(error, UntraceableError) else f"{type(error).__name__}: "
        raise ValueError(
            f"model: torch.fx cannot trace the forward of {type(model).__name__} ({kind}{reason}); "
            "call fuse_batch_norm_ on parts of it that are free of that"
        ) from error
    finally:
        for module, attributes, buffers in before:
            _restore(module.__dict__, attributes)
            _restore(module._buffers, buffers)
    return graph


def _check_untouched(before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for module, attributes, buffers in before:
        for now, then in ((module.__dict__, attributes), (module._buffers, buffers)):
            for name in now.keys() | then.keys():
                if now.get(name) is not then.get(name):
                    if name.startswith("_tensor_constant"):
                        raise UntraceableError("it makes tensors that are no result of its inputs; buffers would do")
                    raise UntraceableError(f"it sets the attribute {name} of a {type(module).__name__}")


def _restore(now: dict[str, Any], then: dict[str, Any]) -> None:
    for name in now.keys() - then.keys():
        del now[name]
    for name, value in then.items():
        if now.get(name) is not value:
            now[name] = value


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()[1:3]


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    numpy = a[2] is None or b[2] is None or (a[2][1] == b[2][1] and bool((a[2][0] == b[2][0]).all()))
    return torch.equal(a[0], b[0]) and a[1] == b[1] and numpy
