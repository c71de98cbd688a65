"""The samples of every op, for ``fastmod doctor`` and for tests: ``SAMPLES`` of the files in ``fastmod/ops``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from fastmod import backend
from fastmod.ops._samples import Sample

#: The first in every table; the others follow.
_FIRST = [
    *("smfr", "mfnnr", "multiplex", "gated_residual", "range_penalty", "sample_mask", "masked_linear"),
    *("masked_conv2d", "norm_conv", "norm_sum", "batch_affine", "template_mix"),
]


def declared(what: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each op, and the tuple that its file has of this name."""
    for op in sorted(backend.OPS, key=lambda op: (_FIRST.index(op) if op in _FIRST else len(_FIRST), op)):
        yield op, getattr(import_module(f"fastmod.ops.{op}"), what, ())


SAMPLES: tuple[Sample, ...] = tuple(sample for _, samples in declared("SAMPLES") for sample in samples)
