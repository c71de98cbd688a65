"""The backends that the tests of ops run over: see the fixture ``backend`` in tests/conftest.py."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fastmod
from tests.helpers.cuda_host import build_bindings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: `make test DEVICE=cuda`
DEVICE = os.environ.get("FASTMOD_TEST_DEVICE", "cpu")
#: The CUDA kernels are run once for each: the order in which a block's threads run must not change a bit.
THREAD_ORDERS = (1, 2, 3)


class Backend(NamedTuple):
    name: str
    choice: str  # what use_backend is told
    device: str = "cpu"
    draws: int = 8  # of a comparison with fp64: fewer where a kernel takes long


def isas() -> list[str]:
    """Instruction sets whose CPU kernels this machine can run."""
    module = fastmod._extension.MODULE
    assert module is not None, "the tests need the extension: `make test` builds it"
    names = ["baseline", "avx2", "avx512"]
    return names[: names.index(module.best_cpu_isa()) + 1]


NATIVE = [Backend(f"native-{isa}", "native") for isa in isas()]
TRITON = Backend("triton", "triton", draws=2)
CUDA_HOST = Backend("cuda_host", "native", draws=4)
GPU = [Backend("cuda", "native", "cuda"), Backend("cuda-triton", "triton", "cuda")]


def parameters(*left_out: str) -> list[Any]:
    """For the fixture ``backend``; without those whose names begin so, for ``parametrize(..., indirect=True)``."""
    found = [*NATIVE, TRITON, CUDA_HOST, *(GPU if DEVICE == "cuda" else [])]
    # `make test-fast` leaves out what has to be interpreted or compiled first, and older instruction sets.
    marks = {b: [pytest.mark.slow] for b in [*NATIVE[:-1], CUDA_HOST]}
    marks[TRITON] = [pytest.mark.interpreted, pytest.mark.slow]
    return [pytest.param(b, id=b.name, marks=marks.get(b, ())) for b in found if not b.name.startswith(left_out)]


_current: Backend | None = None


def current() -> Backend | None:
    """The backend of the running test, if it has one."""
    return _current


def missing(backend: Backend) -> str | None:
    """Why a backend cannot be tested here, or None."""
    if backend.device != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False"
    if backend.choice == "native" and "cuda" not in fastmod._extension.native_devices():
        return f"no CUDA kernels in the extension: {fastmod._extension.STATUS}"
    return None


@contextlib.contextmanager
def chosen(backend: Backend) -> Iterator[None]:
    """Ops are served by ``backend``, new tensors live on its device, and torch.empty is filled with NaN, so that a
    value which a kernel never writes shows."""
    global _current
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_tf32())
        if backend.choice == "triton":
            fastmod._extension.triton_ops()  # registers the kernels, which else the first call of an op does
        if backend.name.startswith("native-"):
            module = fastmod._extension.MODULE
            assert module is not None, fastmod._extension.STATUS
            module.set_cpu_isa(backend.name.removeprefix("native-"))
            stack.callback(module.set_cpu_isa, module.best_cpu_isa())
        if backend is CUDA_HOST:
            stack.enter_context(_cuda_host())
        if backend.device != "cpu":
            stack.enter_context(torch.device(backend.device))
        stack.enter_context(filled_memory())
        stack.enter_context(fastmod.use_backend(backend.choice))
        _current = backend
        try:
            yield
        finally:
            _current = None


def kernel(name: str) -> Callable[..., Any]:
    """The kernel of the test's backend under a schema of ``fastmod/ops``, without the checks of the public function."""
    assert _current is not None
    found = getattr(torch.ops.fastmod_triton if _current.choice == "triton" else torch.ops.fastmod, name)
    return found.default


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# ------------------------------------------------------------------------------------------ CUDA C++ on the host

NAMESPACE = "fastmod_cuda_host"


@cache
def host_bindings() -> dict[str, Callable[..., Any]]:
    """Op -> the function that csrc/cuda binds to it, over kernels that g++ compiled."""
    torch.ops.load_library(str(build_bindings()))
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)]
    return {name: getattr(getattr(torch.ops, NAMESPACE), name) for name in names}


@contextlib.contextmanager
def _cuda_host(direct: bool = False) -> Iterator[None]:
    """The CUDA kernels take the place of the CPU's: the whole path of an op leads to them, autograd and all.

    ``direct``: each call once and nothing compared, for whoever counts what is called."""
    library = torch.library.Library("fastmod", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):  # of the override, which is the point
            for name, function in host_bindings().items():
                if name not in ("set_order", "forbidden"):
                    run = with_defaults if direct else in_each_order
                    library.impl(name, partial(run, name, function), "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def no_tf32() -> Iterator[None]:
    """It is on by default for convolutions, as torch has it; here fp32 is meant."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def with_defaults(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments, *left_out(name, len(arguments)))


def left_out(name: str, given: int) -> tuple[Any, ...]:
    """The dispatcher leaves out arguments that are as the schema has them by default."""
    schema = getattr(torch.ops.fastmod, name).default._schema.arguments
    return tuple(argument.default_value for argument in schema[given:])


def in_each_order(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    schema = getattr(torch.ops.fastmod, name).default._schema.arguments
    arguments += left_out(name, len(arguments))
    # What the schema says is written, as running statistics are, begins anew for every order.
    pairs = list(zip(schema, arguments, strict=True))
    written = [t for a, t in pairs if a.alias_info is not None and a.alias_info.is_write]
    state = [t for t in pytree.tree_leaves(written) if isinstance(t, Tensor)]
    begin = [t.clone() for t in state]
    inputs = [
        t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor) and not any(t is other for other in state)
    ]
    before = [t.clone() for t in inputs]
    found = []
    for order in THREAD_ORDERS:
        host_bindings()["set_order"](order)
        for now, then in zip(state, begin, strict=True):
            now.copy_(then)
        found.append((function(*arguments), [t.clone() for t in state]))
        for i, (now, then) in enumerate(zip(inputs, before, strict=True)):
            assert same_bits(now, then), f"{name}: tensor {i} is an input and was written"
    for other in found[1:]:
        for i, (a, b) in enumerate(zip(pytree.tree_leaves(found[0]), pytree.tree_leaves(other), strict=True)):
            assert same_bits(a, b), f"{name}: result {i} depends on the order of threads"
    return found[0][0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Every bit but those of a NaN."""
    known = ~a.isnan()
    return torch.equal(known, ~b.isnan()) and torch.equal(a[known], b[known])


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, *kernels: str) -> list[str]:
    """A list that the launches of these Triton kernels of ``module`` enter their names into."""
    launched: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(self.name)
            return self.kernel[grid]

    for name in kernels:
        monkeypatch.setattr(module, name, Watched(name))
    return launched
