"""Triton kernels, one file per op, registered under the schemas of the C++ extension.

``fastmod::<op>_forward.triton`` and ``..._backward.triton`` always lead here; where the extension has no CUDA kernels,
so do the plain overloads on CUDA tensors, and a GPU needs no nvcc. Importing this package needs triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from fastmod.kernels.gated_residual import gated_residual_backward, gated_residual_forward
from fastmod.kernels.masked_linear import masked_product_backward, masked_product_forward
from fastmod.kernels.mfnnr import mfnnr_backward, mfnnr_forward
from fastmod.kernels.multiplex import multiplex_backward, multiplex_forward
from fastmod.kernels.range_penalty import range_penalty_backward, range_penalty_forward
from fastmod.kernels.sample_mask import sample_mask_backward, sample_mask_forward

from fastmod import _extension

LAUNCHERS: dict[str, Callable[..., object]] = {
    "multiplex_forward": multiplex_forward,
    "multiplex_backward": multiplex_backward,
    "gated_residual_forward": gated_residual_forward,
    "gated_residual_backward": gated_residual_backward,
    "range_penalty_forward": range_penalty_forward,
    "range_penalty_backward": range_penalty_backward,
    "mfnnr_forward": mfnnr_forward,
    "mfnnr_backward": mfnnr_backward,
    "sample_mask_forward": sample_mask_forward,
    "sample_mask_backward": sample_mask_backward,
    "masked_product_forward": masked_product_forward,
    "masked_product_backward": masked_product_backward,
}

# torch drops the registrations with the object that made them.
_library: torch.library.Library | None = None


def register() -> list[str]:
    """Register every launcher, once; returns the names of the ops."""
    global _library
    if _library is None:
        library = torch.library.Library("fastmod", "IMPL")
        native = "cuda" in _extension.native_devices()
        for name, launcher in LAUNCHERS.items():
            library.impl(f"{name}.triton", launcher, "CUDA")
            if os.environ.get("TRITON_INTERPRET") == "1":
                library.impl(f"{name}.triton", launcher, "CPU")
            if not native:
                library.impl(name, launcher, "CUDA")
        _library = library
    names = {name.rsplit("_", 1)[0] for name in LAUNCHERS}
    return sorted(names - {"masked_product"} | {"masked_linear"})  # its matrix products have a name of their own
