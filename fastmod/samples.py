"""The samples of every op, for ``fastmod doctor`` and for tests: ``SAMPLES`` of the files in ``fastmod/ops``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from fastmod import backend
from fastmod.ops._samples import Sample


def declared(what: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each op, in the order of their names, and the tuple that its file has of this name."""
    for op in backend.OPS:
        yield op, getattr(import_module(f"fastmod.ops.{op}"), what, ())


SAMPLES: tuple[Sample, ...] = tuple(sample for _, samples in declared("SAMPLES") for sample in samples)
