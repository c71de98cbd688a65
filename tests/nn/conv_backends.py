"""Fixtures of nets of images: the backends that serve the convolutions of experts here, in turn."""

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
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with fastmod.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Images of a few pixels: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
