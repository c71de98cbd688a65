"""Which kernels serve an op: ``native`` (C++ or CUDA C++), ``triton`` or ``reference`` (plain PyTorch)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from fastmod import _extension

BACKENDS = ("auto", "native", "triton", "reference")
OPS = (
    "multiplex",
    "gated_residual",
    "range_penalty",
    "mfnnr",
    "smfr",
    "sample_mask",
    "masked_linear",
    "masked_conv2d",
)

# A plain module global, not a thread-local: torch.compile guards on it, and the autograd threads never read it,
# because the choice made in the forward travels to the backward with the node.
_active = "auto"


class use_backend:  # noqa: N801 - it reads as a function and, in a `with`, as a context manager
    """Choose the backend, until changed or for the length of a ``with`` block.

    >>> fastmod.use_backend("reference")
    >>> with fastmod.use_backend("native"):
    ...     y = model(x)
    """

    def __init__(self, name: str) -> None:
        global _active
        if name not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
        self._previous = _active
        _active = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _active
        _active = self._previous


def triton_interprets() -> bool:
    """Whether Triton runs its kernels in the interpreter, the only way it serves CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.compiler.assume_constant_result
def available(op: str, device_type: str) -> dict[str, bool]:
    """Backend -> whether it can serve ``op`` on tensors of ``device_type``."""
    return {
        "native": device_type in _extension.native_devices(),
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
    device_type = tensor.device.type
    if _active == "auto":
        if device_type == "cpu":  # the common case without a search
            return "native" if _extension.LOADED else "reference"
        return automatic(op, device_type)
    if _active != "reference" and not available(op, device_type)[_active]:
        raise RuntimeError(
            f"backend: {_active!r} cannot serve {op} on {device_type} tensors; "
            f"available: {[name for name, ok in available(op, device_type).items() if ok]}; "
            "`fastmod doctor` tells why"
        )
    return _active


def checks_first(chosen: str) -> bool:
    """Whether an op checks its arguments before it runs.

    The compiled ops refuse bad arguments themselves, tersely and at no cost; the Python checks, which take longer than
    a small kernel, then say what was wrong. Plain PyTorch and a trace have nobody else to refuse.
    """
    return chosen == "reference" or torch.compiler.is_compiling()


@contextlib.contextmanager
def reference_autocast(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The autocast rule of the ops for the reference: cast to the autocast dtype, then compute without autocast."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        yield tensors
        return
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        yield tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
