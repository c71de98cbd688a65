"""Batch norm without passes of its own in ordinary nets: ``fuse_batch_norm_``."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastmod.nn._fused_graph import Program, Rewriter
from fastmod.nn._fused_trace import hooked, required


@dataclass(frozen=True, repr=False)
class Fusion:
    """What :func:`fuse_batch_norm_` did."""

    fused: list[str]  # "layer1.0.conv1 > layer1.0.bn1 > ReLU"
    left: dict[str, str]  # name of a Conv2d or batch norm -> why it is not fused

    def __str__(self) -> str:
        lines = [f"{sum(' > ' in line for line in self.fused)} batch norms fused"]
        lines += [f"  {line}" for line in self.fused]
        lines += [f"left: {name} {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)

    __repr__ = __str__


def fuse_batch_norm_(model: nn.Module) -> Fusion:
    """Let the convolutions of a net apply its batch norms and ReLUs while they read; in place, returns what was done.

    >>> print(fastmod.nn.fuse_batch_norm_(model))

    Every ``Conv2d`` (3x3 or 1x1, padded by k // 2 zeros, stride 1 or 2, groups 1 or depthwise) whose output only a
    ``BatchNorm2d`` reads returns the statistics of its result. Normalisation and the ReLU after it are applied by the
    next convolution as it reads, or where a residual is added; only what other layers read is written out. Modules,
    parameters, the state_dict, train and eval mode and all results stay the same, also gradients and running
    statistics.

    The forward is traced by torch.fx: decisions based on Python values are fixed, except for modes, hooks and modules,
    which are checked in every call. A call that passes an argument with a default runs as before. A model that cannot
    be traced, or whose forward does something that a trace would leave out, is refused and not changed. Copies and
    pickles are fused as well; :func:`unfuse_batch_norm_` undoes it. ``nn.DataParallel`` does not work with it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    unfuse_batch_norm_(model)
    with _mode(model, True):
        rewriter = Rewriter(model)
        any_fused = rewriter.rewrite()
        report = Fusion(rewriter.fused, rewriter.report_left())
    if any_fused:
        forward = FusedForward(model)
        for training in (True, False):
            with _mode(model, training):
                forward.by_mode[training] = forward._program()
        model.forward = forward
    return report


def unfuse_batch_norm_(model: nn.Module) -> None:
    """Undo :func:`fuse_batch_norm_`."""
    if isinstance(model.__dict__.get("forward"), FusedForward):
        del model.forward


class FusedForward:
    """Replaces the forward of a model: checks what may have changed, then runs the program that fits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: For torch.compile, under which torch.fx cannot trace: used when all modules have the mode of the model.
        self.by_mode: dict[bool, Program] = {}
        self._known: list[tuple[list[Any], Program]] = []
        self._required = len(required(type(model).forward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.model).forward
        if kwargs or len(args) != self._required:
            bound = inspect.signature(plain).bind(self.model, *args, **kwargs)
            args = tuple(bound.arguments.values())[1 : 1 + self._required]
            if len(bound.arguments) != 1 + self._required:
                return plain(*bound.args, **bound.kwargs)  # the trace is of a call with required arguments only
        return self._program()(self.model, *args)

    def _program(self) -> Program:
        if torch.compiler.is_compiling():
            if not self.by_mode:
                raise RuntimeError("fuse_batch_norm_: call it again on a model from a pickle before torch.compile")
            return self.by_mode[self.model.training]
        state = _state(self.model)
        for known, program in self._known:
            if known == state:
                return program
        self._known = [*self._known[-3:], (state, self.build())]
        return self._known[-1][1]

    def build(self) -> Program:
        rewriter = Rewriter(self.model)
        rewriter.rewrite()
        return rewriter.program()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        """The programs do not refer to the model: a copy runs the same ones."""
        copied = FusedForward(copy.deepcopy(self.model, memo))
        copied.by_mode = dict(self.by_mode)
        return copied


def _state(model: nn.Module) -> list[Any]:
    """Everything the trace depends on: which modules there are, their modes, and whether they have hooks."""
    state: list[Any] = []
    _append_state(model, state)
    return state


def _append_state(module: nn.Module, state: list[Any]) -> None:
    """Through dictionaries, several times as fast as ``modules()`` and attributes: this runs in every forward."""
    own = module.__dict__
    state += (module, own["training"], hooked(module))
    for child in own["_modules"].values():
        if child is not None:
            _append_state(child, state)


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, was in before:
            module.training = was
