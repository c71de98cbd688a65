"""The backends that serve the convolutions of experts on this machine, in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastmod.ops  # defines the ops

#: Plain PyTorch, and the compiled kernels where the extension has them.
BACKENDS = ["reference"]
if torch._C._dispatch_has_kernel_for_dispatch_key("fastmod::norm_conv_forward", "CPU"):
    BACKENDS.append("native")


@pytest.fixture(params=BACKENDS)
def conv_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with fastmod.use_backend(request.param):
        yield request.param
