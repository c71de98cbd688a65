"""The backends that serve the convolutions of experts here."""

from __future__ import annotations

import torch

import fastmod.ops  # noqa: F401 - defines the ops

#: Plain PyTorch, and the compiled kernels where the extension has them.
BACKENDS = ["reference"]
if torch._C._dispatch_has_kernel_for_dispatch_key("fastmod::norm_conv_forward", "CPU"):
    BACKENDS.append("native")
