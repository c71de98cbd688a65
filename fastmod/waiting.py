"""How the threads of OpenMP wait for work: spinning, or asleep. Imported before torch, so without it.

Where cores are shared, a thread that spins keeps the one it waits for from running: a step of ALGO on two cores took 4
to 28 times as long with others at work. On a calm machine sleeping costs about a tenth. OpenMP reads the environment,
once, when torch loads it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

# If one of these is set, the user has decided; the last one is for the OpenMP of Intel and of LLVM.
_DECIDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
#: Commands that train for minutes or days, in which other load may come at any time. Not those that measure.
_LONG = ("study", "sweep", "live")


def decided() -> bool:
    return any(name in os.environ for name in _DECIDED)


def trains(command: Sequence[str]) -> bool:
    """Whether a command line, from the interpreter on, is one of these."""
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] != "-c":
        del words[: 2 if words[0] in ("-X", "-W") else 1]  # the options of Python, -m too
    return len(words) > 1 and os.path.basename(words[0]) in ("fastmod", "fastmod.exe") and words[1] in _LONG


def choose() -> None:
    """Let threads sleep in this process and those it starts, if it is a long command and OpenMP is not loaded yet.

    Studies always sleep, without looking first whether the machine is calm, which may change after a second. Programs
    that import fastmod are not changed.
    """
    if trains(sys.orig_argv) and not decided() and "torch" not in sys.modules:
        os.environ.update(_PASSIVE)


@contextlib.contextmanager
def passively() -> Iterator[None]:
    """Threads of processes started inside sleep, unless the user has decided."""
    if decided():
        yield
        return
    os.environ.update(_PASSIVE)
    try:
        yield
    finally:
        for name in _PASSIVE:
            del os.environ[name]
