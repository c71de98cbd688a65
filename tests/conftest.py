"""Fixtures that every test file shares."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastmod
from tests.helpers import backends, interpreter_process

settings.register_profile(
    "fastmod",
    deadline=None,
    max_examples=5 if backends.INTERPRETED else 60,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a backend stays chosen for all examples
)
settings.load_profile("fastmod")

# A shell starts what runs in its background with Ctrl-C ignored, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that everybody reaches, unlike those of pytest, and nobody may write to."""
    folder = Path(tempfile.mkdtemp(prefix="fastmod-shared-"))
    folder.chmod(0o555)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=backends.parameters())
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    """Each backend in turn serves the ops of the test: native at every instruction set, Triton interpreted, CUDA C++ on
    the host, and a GPU with `make test DEVICE=cuda`. Plain PyTorch is what they are compared with."""
    reason = backends.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    if request.param is backends.TRITON and not backends.INTERPRETED:  # chosen where the test runs: see below
        yield request.param
        return
    with backends.chosen(request.param):
        yield request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not interpreter_process.needed(pyfuncitem):
        return None
    interpreter_process.run(pyfuncitem)
    return True


@pytest.fixture(params=backends.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    module = fastmod._extension.MODULE
    module.set_cpu_isa(request.param)
    yield request.param
    module.set_cpu_isa(module.best_cpu_isa())


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch.empty filled with NaN, so that a value never written shows."""
    with backends.filled_memory():
        yield


#: Files of tests that have a compiler run over all kernels first, or over each.
COMPILED = ("gpu/test_cuda_", "gpu/test_triton_", "gpu/test_launches.py", "gpu/test_net_launches.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(COMPILED):
            item.add_marker(pytest.mark.slow)
