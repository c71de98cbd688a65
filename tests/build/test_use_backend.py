"""``use_backend`` as a call and as a context, in one thread and in two at once, eager and compiled."""

from __future__ import annotations

import sys
import threading
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fastmod
from fastmod import backend
from fastmod.backend import active, resolve, use_backend

X = torch.randn(2, 3, 4)


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    yield
    use_backend("auto")
    assert active() == elsewhere(active) == "auto"


def elsewhere(function: Callable[[], Any]) -> Any:
    """What another thread finds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_call_holds_for_the_process() -> None:
    use_backend("reference")
    assert active() == elsewhere(active) == "reference"
    elsewhere(lambda: use_backend("native") and None)
    assert active() == elsewhere(active) == "native", "the last call, whoever made it"


def test_with_holds_for_its_thread() -> None:
    with use_backend("reference"):
        assert active() == resolve("multiplex", X) == "reference"
        assert elsewhere(active) == "auto" and elsewhere(lambda: resolve("multiplex", X)) == "native"
        with use_backend("native"):
            assert active() == "native"
        assert active() == "reference"
    assert active() == "auto"


def test_with_ends_by_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert active() == "auto"


def test_call_inside_of_a_with() -> None:
    with use_backend("native"):
        use_backend("reference")
        assert active() == elsewhere(active) == "reference"
    assert active() == "reference"


def test_object_that_is_kept() -> None:
    kept = use_backend("reference")
    assert (active(), elsewhere(active)) == ("reference", "auto"), "a with may still come"
    del kept
    assert active() == elsewhere(active) == "reference"
    use_backend("auto")
    block = use_backend("reference")
    for _ in range(2):
        with block:
            assert active() == "reference"
        assert active() == "auto"
    del block
    assert active() == elsewhere(active) == "auto"


def test_refused_name_changes_nothing() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of .* got 'gpu'"):
        use_backend("gpu")
    assert active() == elsewhere(active) == "auto"


def both(one: Callable[[], None], other: Callable[[], None]) -> None:
    """Two threads at once; what either raises is raised."""
    start = threading.Barrier(2)

    def run(function: Callable[[], None]) -> None:
        start.wait()
        function()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, one), pool.submit(run, other)]:
            future.result()


def test_two_threads() -> None:
    """With a module global each would see, and keep for ever, what the other chose."""

    def blocks(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(3000):
                assert resolve("multiplex", X) == "native", "auto, between the blocks"
                with use_backend(name):
                    assert resolve("multiplex", X) == name

        return run

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        both(blocks("reference"), blocks("native"))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.slow
def test_two_threads_with_one_compiled_function() -> None:
    """Guards are looked at in the thread that calls."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def seen(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if resolve("multiplex", x) == "native" else 2)

    values = {"auto": 1, "native": 1, "reference": 2}

    def blocks(*names: str) -> Callable[[], None]:
        def run() -> None:
            for name in names * 20:
                with use_backend(name):
                    assert seen(torch.zeros(())).item() == values[name]
                assert seen(torch.zeros(())).item() == values["auto"]

        return run

    blocks("native", "reference")()  # compiled for each, before two threads come
    both(blocks("native", "reference", "auto"), blocks("reference", "reference", "native"))
    use_backend("reference")
    assert seen(torch.zeros(())).item() == elsewhere(lambda: seen(torch.zeros(())).item()) == 2


def test_with_inside_of_a_compiled_function() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        with use_backend("reference"):
            inside = 1 if resolve("multiplex", x) == "reference" else 2
        return x + inside + (10 if resolve("multiplex", x) == "native" else 20)

    assert torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(())).item() == 11
    assert active() == "auto"


@pytest.mark.parametrize("name", ["native", "reference"])
def test_backward_does_not_ask(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its threads are those of autograd, which are in no block of the user's."""
    model = fastmod.nn.SMFR(3, 2, 4, 2, 1)
    with use_backend(name):
        out = model(X)
    with monkeypatch.context() as broken:
        broken.setattr(backend, "_thread", None)  # whoever asks finds no attribute
        out.sum().backward()
        with pytest.raises(AttributeError):
            active()
    assert all(p.grad is not None for p in model.parameters())


def test_asking_costs_little() -> None:
    """A thread-local in the place of a global: 0.2 microseconds more at most, the shortest of many."""
    choice = min(timeit.repeat(active, number=2000, repeat=50)) / 2000
    nothing = min(timeit.repeat(lambda: "auto", number=2000, repeat=50)) / 2000
    assert choice - nothing < 0.2e-6
