"""Ctrl-C and SIGTERM in a run: the first one asks it to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # by a terminal; by a system that shuts down, a batch queue, `timeout`


class Terminated(KeyboardInterrupt):
    """SIGTERM outside trials, in :func:`terminations_raise`."""

    number = int(signal.SIGTERM)


class Stop(threading.Event):
    number = int(signal.SIGINT)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    stop = Stop()

    def first(number: int, _: Any) -> None:
        stop.number = number
        stop.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    with _handling(first, *SIGNALS) as before:
        yield stop


@contextlib.contextmanager
def terminations_raise() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated`, as Ctrl-C raises KeyboardInterrupt."""

    def terminate(*_: Any) -> None:
        raise Terminated

    with _handling(terminate, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[dict[signal.Signals, Any]]:
    """Restores the handlers after the block; does nothing outside the main thread, which alone may set handlers."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    try:
        for number in before:
            signal.signal(number, handler)
        yield before
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Jobs inherit this: without it Ctrl-C would kill them in the seconds of importing, before they set their own."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
