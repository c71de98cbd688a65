"""One way in which a Triton kernel is compiled for a layer. Each ``kernels/<op>.py`` lists its own, by dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton.language as tl


class Dtype(NamedTuple):
    """A dtype of tensors, in the form of kernel arguments."""

    name: str
    element: tl.dtype
    compute: tl.dtype  # what the kernels compute in: fp64 for fp64, else fp32

    @property
    def pointer(self) -> str:
        return f"*{self.name}"

    @property
    def wide_pointer(self) -> str:
        return "*fp64" if self.compute == tl.float64 else "*fp32"

    @property
    def is_wide(self) -> bool:
        return self.pointer == self.wide_pointer


DTYPES = {
    "fp32": Dtype("fp32", tl.float32, tl.float32),
    "bf16": Dtype("bf16", tl.bfloat16, tl.float32),
    "fp16": Dtype("fp16", tl.float16, tl.float32),
    "fp64": Dtype("fp64", tl.float64, tl.float64),
}


class Specialisation(NamedTuple):
    """``values``: for each argument a pointer type such as ``*fp32``, a tuple of them, or the value of a constexpr
    (None: an optional pointer that is not given). Numbers that are no constexpr have the types of their annotations."""

    kernel: Any
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    case: str = ""  # distinguishes it from others of the same kernel and dtype
    on_amd: Mapping[str, Any] = {}  # values and options that differ there
