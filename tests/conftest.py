"""Fixtures that every test file shares."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import fastmod
from tests.agreement import isas

settings.register_profile("fastmod", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.load_profile("fastmod")

# A shell starts what runs in its background with Ctrl-C ignored, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    module = fastmod._extension.MODULE
    module.set_cpu_isa(request.param)
    yield request.param
    module.set_cpu_isa(module.best_cpu_isa())


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch.empty filled with NaN, so that a value never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
