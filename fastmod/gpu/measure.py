"""The measurements of ``fastmod doctor --full``: values, launches and times of every op at the papers' shapes.

On a GPU launches are counted by torch's profiler, and a step is also captured in a CUDA graph and replayed. Without
a GPU the same runs on the CPU, where nothing is launched.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastmod import backend, ops
from fastmod.gpu.launch_table import DTYPES
from fastmod.gpu.shapes import SHAPES, Call, Shape

PLAIN = "plain"  # the contender written in PyTorch without fastmod
_SECONDS = 0.3  # per timing
_LEAST = 3  # steps, however long they take


@dataclass(frozen=True)
class Measured:
    """One step, forward and backward. Errors are relative to the largest value of fp64; times are microseconds."""

    op: str
    shape: str
    dtype: str
    device: str
    contender: str  # native, triton, reference or plain
    problem: str = ""
    error: float | None = None
    plain_error: float | None = None  # of the reference in the same dtype
    launches: int | None = None
    quartiles: tuple[float, float, float] | None = None
    graph_quartiles: tuple[float, float, float] | None = None
    graph_problem: str = ""


def measured(names: Sequence[str] = (), listener: Callable[[str], None] = lambda name: None) -> Iterator[Measured]:
    """Every shape, dtype and contender that can run here; on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in SHAPES:
        if names and shape.op not in names:
            continue
        listener(shape.name)
        for dtype in DTYPES:
            tensors = shape.tensors(dtype=DTYPES[dtype], device=device)
            truth = functools.cache(lambda shape=shape, tensors=tensors: expected(shape, tensors))
            available = backend.available(shape.op, device)
            for contender in [name for name in available if available[name]] + ([PLAIN] if shape.plain else []):
                yield _measure(shape, dtype, device, contender, tensors, truth)


#: Outputs and gradients in fp64, and the error of the reference in the dtype of the tensors.
Truth = tuple[Sequence[Tensor], float]


def _measure(
    shape: Shape, dtype: str, device: str, contender: str, tensors: Sequence[Tensor], truth: Callable[[], Truth]
) -> Measured:
    found: dict[str, Any] = {}
    try:
        call = shape.plain if contender == PLAIN else shape.call
        assert call is not None
        with backend.use_backend("reference" if contender == PLAIN else contender):
            if contender != PLAIN:  # which draws its own noise, if any
                exact, usual = truth()
                found |= judged(_largest(_step(shape.call, tensors)(), exact), usual, DTYPES[dtype])
            step = _step(call, tensors)
            found["launches"] = launches(step) if device == "cuda" else None
            found["quartiles"] = quartiles(step, device)
            if device == "cuda":
                found |= _in_a_graph(step)
    except Exception as error:  # whatever it is, it belongs in the report
        found["problem"] = _first_line(error)
    return Measured(shape.op, shape.label, dtype, device, contender, **found)


def _step(call: Call, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    grads = [torch.ones_like(out) for out in call(tensors)]

    def step() -> Sequence[Tensor]:
        outputs = call(tensors)
        return [*outputs, *torch.autograd.grad(outputs, tensors, grads, allow_unused=True)]

    return step


def expected(shape: Shape, tensors: Sequence[Tensor]) -> Truth:
    with backend.use_backend("reference"):
        exact = _step(shape.call, [t.detach().double().requires_grad_() for t in tensors])()
        return exact, _largest(_step(shape.call, tensors)(), exact)


def judged(error: float, plain: float, dtype: torch.dtype) -> dict[str, Any]:
    """The errors, and a problem if ours is more than twice that of plain PyTorch plus a few roundings."""
    limit = 2 * plain + 4 * torch.finfo(dtype).eps
    finite = {"error": error, "plain_error": plain} if math.isfinite(error + plain) else {}
    return finite if error <= limit else {**finite, "problem": f"off by {error:.1e}, expected at most {limit:.1e}"}


def _largest(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, exact, strict=True) if b.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def quartiles(step: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """Statistics of the microseconds of a step."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    lower, median, upper = statistics.quantiles(times, n=4)
    return round(lower, 1), round(median, 1), round(upper, 1)


def launches(step: Callable[[], Any]) -> int:
    """Kernels, copies and fills that a step starts on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in recorded.events())


def _in_a_graph(step: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"graph_quartiles": quartiles(captured(step).replay, "cuda")}
    except Exception as error:
        return {"graph_problem": _first_line(error)}


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what is kept from call to call is made outside the graph
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def fresh_noise() -> dict[str, bool | str]:
    """Whether a replayed graph draws new masks: with a seed of None, and with one that is advanced on the device."""
    if not torch.cuda.is_available():
        return {}
    logits, seed = torch.zeros(1000, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    found: dict[str, bool | str] = {}
    for name, own in (("seed None", None), ("advanced seed", seed)):
        masks = torch.empty(1, 1000, device="cuda")

        def draw(own: Tensor | None = own, masks: Tensor = masks) -> None:
            masks.copy_(ops.sample_mask(logits, 1, seed=own))
            seed.add_(1)

        try:
            graph = captured(draw)
            graph.replay()
            first = masks.clone()
            graph.replay()
            found[name] = not torch.equal(first, masks)
        except Exception as error:
            found[name] = _first_line(error)
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
