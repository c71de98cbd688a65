"""Triton's launches in the interpreter, told and left out: for tests that count them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest


class Launch(NamedTuple):
    kernel: str  # file and name, such as ``norm_sum.forward_kernel``
    grid: tuple[int, ...]


def left_out(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """From now on launches join this list and compute nothing."""
    from triton.runtime import interpreter

    found: list[Launch] = []

    def note(executor: Any, *_: Any, **__: Any) -> None:
        stem = executor.fn.__module__.rpartition(".")[2]
        found.append(Launch(f"{stem}.{executor.fn.__name__}", tuple(executor.grid)))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    return found
