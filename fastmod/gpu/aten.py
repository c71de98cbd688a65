"""Which kernels PyTorch's own ops would launch on a GPU, found while they run on the CPU.

Replaces the profiler of a GPU: ops run on the CPU and are counted by rules. Views and allocations launch nothing, an op
that is made of others counts as those, every other op as one launch. What cuBLAS and cuDNN split into several kernels
counts as one; a product added to a matrix, which is copied first, as two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler_legacy

from fastmod._private import has_code, has_kernel

#: Ops that read a value of the device on the host, and so wait for it: a CUDA graph refuses them.
WAITING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"})
_NOTHING = (
    "aten::empty",
    "aten::new_empty",
    "aten::resize_",
    "aten::set_",
    "aten::detach",
    "aten::lift",
    "aten::_unsafe_view",
    "aten::sum_to_size",  # of the right size already; otherwise it calls a sum, which counts
)
#: Made of other ops on the CPU, but not on a GPU.
_WHOLE = {"aten::copy_": 1, "aten::_foreach_copy_": 1, "aten::convolution": 1, "aten::convolution_backward": 2}


def launches(run: Callable[[], Any]) -> list[str]:
    """The names of the ops that ``run`` launches, in order; a name that occurs twice is two launches.

    Includes those of :data:`WAITING`.
    """
    with profiler_legacy.profile(record_shapes=True) as profile:
        run()
    found: list[str] = []
    tops = [event for event in profile.function_events if event.cpu_parent is None]
    for event in sorted(tops, key=lambda event: event.time_range.start):
        _walk(event, found)
    return found


def of_step(call: Callable[[Sequence[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[str]:
    """The launches of a call and its backward, the second time."""
    outputs = call(tensors)
    grads = [torch.ones_like(out) for out in outputs]
    return launches(lambda: torch.autograd.grad(call(tensors), tensors, grads, allow_unused=True))


def _walk(event: Any, found: list[str]) -> None:
    count = _launches_of(event)
    if count is None:
        for child in event.cpu_children:
            _walk(child, found)
    else:
        found += [event.name] * count


def _launches_of(event: Any) -> int | None:
    """None if the ops that it calls are to be counted instead."""
    name: str = event.name
    if name in WAITING:
        return 1
    if not name.startswith("aten::"):
        return None  # nodes of autograd, ops of ours
    if event.cpu_children and name not in _WHOLE and not _computes(name):
        return None
    if name.startswith(_NOTHING) or _is_view(name):
        return 0
    shapes = event.input_shapes
    if shapes and 0 in shapes[0]:
        return 0
    return 2 if name == "aten::addmm" and len(shapes[0]) == 2 else _WHOLE.get(name, 1)


@functools.cache
def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads()]


@functools.cache
def _is_view(name: str) -> bool:
    """Whether a result is an input under another name, and nothing is written."""
    schemas = [each._schema for each in _overloads(name)]
    aliases = [r.alias_info for schema in schemas for r in schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@functools.cache
def _computes(name: str) -> bool:
    """Whether an op has its own code, rather than calling others."""
    own = [each for each in _overloads(name) if has_code(each.name())]
    return any(has_kernel(each.name(), "cpu") for each in own)
