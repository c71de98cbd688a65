"""Which kernels serve an op: ``native`` (C++ or CUDA C++), ``triton`` or ``reference`` (plain PyTorch)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastmod import _extension
from fastmod._private import constant, forward_ad, has_kernel, transformed

BACKENDS = ("auto", "native", "triton", "reference")
#: Every file of an op in ``fastmod/ops``; nothing is imported for it.
OPS = tuple(sorted(path.stem for path in (Path(__file__).parent / "ops").glob("[a-z]*.py")))


class _Thread(threading.local):
    """The choice of the running thread, None outside of every ``with``.

    ``__init__``, which runs in every thread, sets the attribute, so that torch.compile guards on its value in the
    calling thread; a default of the class would be taken for a constant.
    """

    def __init__(self) -> None:
        self.choice: str | None = None


# The autograd threads read neither: the choice made in the forward travels to the backward with the node.
_thread = _Thread()
_process = "auto"


def active() -> str:
    """The choice in force here and now."""
    choice = _thread.choice
    return _process if choice is None else choice


class use_backend:  # noqa: N801 - it reads as a function and, in a `with`, as a context manager
    """Choose the backend: a call for the process, a ``with`` for its block, in this thread.

    >>> fastmod.use_backend("reference")
    >>> with fastmod.use_backend("native"):
    ...     y = model(x)

    A ``with`` affects its own thread only, not threads that are started inside it. A call affects every thread that is
    not inside a ``with``: its own at once, the others when the object it returns is deleted, which is at the end of the
    statement unless that is kept; only then is it certain that no ``with`` follows. A call inside a ``with`` takes
    effect at once and lasts beyond it. Inside a function that torch.compile compiles, use ``with``: a call would last
    until the end of that function.
    """

    _waits = False  # for a `with`, or for its deletion; the default is for an object whose name was refused

    def __init__(self, name: str) -> None:
        if name not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
        self._name, self._outer = name, _thread.choice
        self._waits = True
        _thread.choice = name

    def __enter__(self) -> None:
        self._waits = False
        _thread.choice = self._name  # again, as one object may serve several blocks

    def __del__(self) -> None:
        global _process
        if self._waits:  # no `with` followed: it was a call
            _process = self._name
            if self._outer is None and _thread.choice == self._name:
                _thread.choice = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.choice = self._outer


def triton_interprets() -> bool:
    """Whether Triton runs its kernels in the interpreter, the only way it serves CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@constant
def available(op: str, device_type: str) -> dict[str, bool]:
    """Backend -> whether it can serve ``op`` on tensors of ``device_type``."""
    return {
        "native": _extension.native_serves(op, device_type),
        "triton": op in _extension.triton_ops()
        and (device_type == "cuda" or (device_type == "cpu" and triton_interprets())),
        "reference": True,
    }


def automatic(op: str, device_type: str) -> str:
    """What ``auto`` picks: native kernels, else Triton (on a GPU only: the interpreter is for checks), else PyTorch."""
    found = available(op, device_type)
    if found["native"]:
        return "native"
    return "triton" if found["triton"] and device_type == "cuda" else "reference"


def backends() -> dict[str, dict[str, dict[str, bool | str]]]:
    """Per op and device: what is available and what ``auto`` picks.

    >>> fastmod.backends()["multiplex"]["cpu"]
    {'native': True, 'triton': False, 'reference': True, 'auto': 'native'}
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return {op: {dev: {**available(op, dev), "auto": automatic(op, dev)} for dev in devices} for op in OPS}


def resolve(op: str, tensor: Tensor) -> str:
    """The backend that serves ``op`` for ``tensor`` now; an explicit choice that cannot serve it is an error."""
    if not isinstance(tensor, Tensor):
        return "reference"  # it checks its arguments first
    if forward_ad._current_level >= 0:
        return "reference"  # torch.func.jvp and dual numbers: the kernels have no forward-mode derivative
    choice = _thread.choice  # active() without the cost of a call
    if choice is None:
        choice = _process
    if choice == "auto" and tensor.is_cpu:  # the common case, without a lookup
        return "native" if _extension.LOADED else "reference"
    device_type = tensor.device.type
    if choice == "auto":
        return automatic(op, device_type)
    if choice != "reference" and not available(op, device_type)[choice]:
        raise RuntimeError(
            f"backend: {choice!r} cannot serve {op} on {device_type} tensors; "
            f"available: {[name for name, ok in available(op, device_type).items() if ok]}; "
            "`fastmod doctor` tells why"
        )
    return choice


def on_gpu(kernel: str, op: str, tensor: Tensor) -> str | None:
    """The backend that serves ``op`` if it has ``kernel`` too, which the CPU's C++ does without; else None."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return None
    native = has_kernel(f"fastmod::{kernel}", tensor.device.type)
    if not native and tensor.is_cpu and not triton_interprets():
        return None
    chosen = resolve(op, tensor)
    return chosen if chosen == "triton" or (native and chosen == "native") else None


def checks_first(chosen: str) -> bool:
    """Whether an op checks its arguments before it runs.

    The compiled ops refuse bad arguments themselves, tersely and at no cost; the Python checks, which take longer than
    a small kernel, then say what was wrong. Plain PyTorch and a trace have no other checks.
    """
    return chosen == "reference" or torch.compiler.is_compiling()


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of ``tensor``; for meta tensors, where torch raises an error, it is not."""
    if tensor.is_cpu:  # saves the half microsecond of asking a tensor for the name of its device
        return torch.is_autocast_enabled("cpu")
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def lowered(first: Tensor, *tensors: Any) -> tuple[Any, ...]:
    """The autocast rule of the ops: tensors in the autocast dtype, as for a matmul; fp64 and None stay as they are."""
    dtype = torch.get_autocast_dtype(first.device.type)
    found = [first, *tensors]
    places = [i for i, t in enumerate(found) if t is not None and t.dtype not in (torch.float64, dtype)]
    if len(places) > 1 and _casts_together(first.device.type):
        made = CastTogether.apply(dtype, *[found[i] for i in places])
    else:
        made = tuple(found[i].to(dtype) for i in places)
    for i, tensor in zip(places, made, strict=True):
        found[i] = tensor
    return tuple(found)


def rounded_by_kernel(first: Tensor, *tensors: Tensor, alike: bool = True) -> torch.dtype | None:
    """The autocast dtype, if kernels can round to it as they read, so that nothing has to be cast: ``first`` and
    ``tensors`` have it or fp32, the latter all the same if ``alike``. None where ``lowered`` has to cast."""
    dtype = torch.get_autocast_dtype(first.device.type)
    kinds = {t.dtype for t in tensors}
    both = {first.dtype, *kinds}
    served = dtype in (torch.bfloat16, torch.float16) and both <= {torch.float32, dtype}
    if alike and len(kinds) > 1:
        return None
    return dtype if served and torch.float32 in both and not transformed() else None


#: Where a launch takes longer than its work: on a GPU one launch casts all parameters of an op.
CAST_TOGETHER = {"cuda"}


def _casts_together(device_type: str) -> bool:
    # A compiler fuses single casts, and torch.func maps them.
    return device_type in CAST_TOGETHER and not transformed() and forward_ad._current_level < 0


class CastTogether(torch.autograd.Function):
    """Casts tensors in one launch, and their gradients back in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [t.dtype for t in tensors]
        ctx.set_materialize_grads(False)
        made = [torch.empty_like(t, dtype=dtype) for t in tensors]
        torch._foreach_copy_(made, tensors)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(ctx.dtypes):
            places = [i for i, grad in enumerate(grads) if grad is not None and ctx.dtypes[i] == dtype]
            made = CastTogether.apply(dtype, *[grads[i] for i in places]) if places else ()
            for i, grad in zip(places, made, strict=True):
                found[i] = grad
        return None, *found


@contextlib.contextmanager
def reference_autocast(first: Tensor, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """The same rule for plain PyTorch, which then computes without autocast."""
    if not autocasts(first):
        yield first, *tensors
        return
    with torch.autocast(first.device.type, enabled=False):
        yield lowered(first, *tensors)
