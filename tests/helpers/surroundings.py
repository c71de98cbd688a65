"""Fixtures that a file of tests imports to apply to all of its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads in the last bit; for small tensors a second one would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set of this machine is found unless a test says where."""
    monkeypatch.delenv("FASTMOD_DATA", raising=False)
