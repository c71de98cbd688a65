"""The three launches of a stack of MFNNRs on the host, also under sanitizers. Their digits: tests/ops/test_smfr.py."""

from __future__ import annotations

import pytest

from tests.helpers.cuda_host import Harness, LaunchError, checks
from tests.helpers.cuda_host.smfr import STACKS, Stack, check_stack

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module


@pytest.mark.parametrize("case", STACKS, ids=Stack.id)
def test_stack(plain: Harness, case: Stack) -> None:
    check_stack(plain, case)


@pytest.mark.parametrize("case", STACKS, ids=Stack.id)
def test_address_sanitizer(asan: Harness, case: Stack) -> None:
    check_stack(asan, case)


@pytest.mark.slow
def test_thread_sanitizer(tsan: Harness) -> None:
    check_stack(tsan, Stack(17, (2, 3), 3, (5,)))


def test_wide_layers_are_refused(plain: Harness) -> None:
    with pytest.raises(LaunchError) as raised:
        check_stack(plain, Stack(3, hidden=(129,)))
    assert raised.value.code == 1
