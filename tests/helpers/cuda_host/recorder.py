"""Launches of an op, recorded over the host harness, and refused where a CUDA graph would refuse them.

The bindings run as they do on a GPU; kernels are told of and left out, so that the papers' shapes cost nothing. What
torch's own ops would launch comes from :mod:`fastmod.gpu.aten`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import fastmod
from fastmod.gpu import aten, cuda_part
from fastmod.gpu.launch_table import Geometry
from fastmod.samples import Sample
from tests.helpers import backends
from tests.helpers.cuda_host import build_bindings

STREAM = 64  # cuda_host::current_stream
RUN, LEAVE_OUT, REFUSE = range(3)


class GraphError(AssertionError):
    """A captured CUDA graph would have refused this."""


class _Dim(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def sizes(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Request(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("kernel", ctypes.c_void_p),
        ("grid", _Dim),
        ("block", _Dim),
        ("dynamic", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    ]


_Hook = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Request))


class Launch(NamedTuple):
    """One of ours, or, with an empty grid, one of torch's."""

    name: str  # <file>.<kernel><template arguments>, or aten::<op>
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    dynamic: int = 0  # bytes of shared memory
    arguments: tuple[bytes, ...] = ()


class Recording(NamedTuple):
    forward: list[Launch]
    backward: list[Launch]

    def geometry(self, op: str, shape: str, dtype: str) -> list[Geometry]:
        """Our launches, those of one size together, in the order of the first."""
        sizes = [(launch.name, math.prod(launch.grid), math.prod(launch.block), launch.dynamic)
                 for half in self for launch in half if not launch.name.startswith("aten::")]  # fmt: skip
        return [Geometry(op, shape, dtype, each[0], count, *each[1:]) for each, count in Counter(sizes).items()]


#: Told of a launch while its memory is alive.
Listener = Callable[[Launch], None]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_bindings()))


@cache
def _symbols() -> tuple[list[int], list[str]]:
    """Addresses and mangled names of all functions of the library; those of kernels are local to their files."""
    told = subprocess.run(["nm", str(build_bindings())], capture_output=True, text=True, check=True).stdout
    rows = sorted((int(address, 16), name) for address, name in re.findall(r"^(\w+) [tTwW] (\S+)$", told, re.MULTILINE))
    return [address for address, _ in rows], [name for _, name in rows]


@cache
def kernel_name(address: int) -> str:
    """``<kernel><template arguments>`` of a function of the library."""
    base = address_of("cuda_host_set_hook") - dict(zip(*reversed(_symbols()), strict=True))["cuda_host_set_hook"]
    addresses, names = _symbols()
    name, arguments = cuda_part.readable(names[addresses.index(address - base)])
    return f"{name}<{','.join(map(str, arguments))}>"


def address_of(function: str) -> int:
    value = ctypes.cast(getattr(_library(), function), ctypes.c_void_p).value
    assert value is not None
    return value


@contextlib.contextmanager
def hooked(launches: list[Launch], listener: Listener | None, refused: list[str], captured: bool) -> Iterator[None]:
    """Enters the launches of the harness into a list instead of running them.

    ``captured``: the bindings are told that a graph is made of them, for which some take memory of their own."""

    def told(request: Any) -> int:
        asked = request.contents
        file = asked.file.decode()
        if asked.kernel is None:
            refused.append(file)
            return REFUSE
        if asked.stream != STREAM:
            refused.append(f"{Path(file).name}: a launch on the default stream")
            return REFUSE
        values = tuple(ctypes.string_at(asked.values[i], asked.sizes[i]) for i in range(asked.arguments))
        name = f"{Path(file).stem}.{kernel_name(asked.kernel)}"
        launch = Launch(name, asked.grid.sizes(), asked.block.sizes(), asked.dynamic, values)
        launches.append(launch)
        if listener is not None:
            listener(launch)
        return LEAVE_OUT

    hook = _Hook(told)
    _library().cuda_host_set_hook(hook, int(captured))
    try:
        yield
    finally:
        _library().cuda_host_set_hook(_Hook(), 0)


def capture(run: Callable[[], Any], listener: Listener | None = None, captured: bool = False) -> list[Launch]:
    """What ``run`` launches, ours before torch's; :class:`GraphError` if a graph could not be made of it."""
    ours: list[Launch] = []
    refused: list[str] = []
    names: list[str] = []
    try:
        with hooked(ours, listener, refused, captured):
            names = aten.launches(run)
    except RuntimeError as error:
        if refused:
            raise GraphError(refused[0]) from error
        raise
    refused += [name for name in names if name in aten.WAITING]
    if refused:
        raise GraphError(refused[0])
    return ours + [Launch(name) for name in names]


def served(op: str) -> bool:
    """Whether csrc/cuda has kernels for an op, rather than a GPU running it in plain PyTorch."""
    return op == "smfr" or f"{op}_forward" in backends.host_bindings()


@contextlib.contextmanager
def on_the_harness(op: str) -> Iterator[None]:
    """An op goes the way that it goes on a GPU."""
    linear = import_module("fastmod.ops.masked_linear")
    with contextlib.ExitStack() as stack:
        stack.enter_context(backends.no_tf32())
        stack.enter_context(backends._cuda_host(direct=True))
        stack.enter_context(mock.patch.object(linear, "row_limit", return_value=None))
        stack.enter_context(fastmod.use_backend("native" if served(op) else "reference"))
        yield


def record(sample: Sample, dtype: torch.dtype = torch.float32, captured: bool = False) -> Recording:
    """Of one call and its backward, every tensor with a gradient; of the second call, as what is kept is there then."""
    tensors = sample.tensors(dtype=dtype)
    found: list[Sequence[torch.Tensor]] = []
    with on_the_harness(sample.op):
        capture(lambda: found.append(sample.call(tensors)))
        grads = [torch.ones_like(out) for out in found[0]]
        capture(lambda: torch.autograd.grad(found[0], tensors, grads))
        forward = capture(lambda: found.append(sample.call(tensors)), captured=captured)
        backward = capture(lambda: torch.autograd.grad(found[1], tensors, grads), captured=captured)
    return Recording(forward, backward)


def results(sample: Sample, tensors: Sequence[torch.Tensor], listener: Listener) -> list[torch.Tensor]:
    """Outputs and gradients (of their sum) as ``listener`` leaves them, which computes what each launch would."""
    found: list[torch.Tensor] = []

    def run() -> None:
        outputs = sample.call(tensors)
        grads = [torch.ones_like(out) for out in outputs]
        found.extend([*outputs, *torch.autograd.grad(outputs, tensors, grads)])

    with on_the_harness(sample.op):
        capture(run, listener)
    return found
