"""The fixture ``backend`` itself: the kernels that it names are those that run, and only while a test has it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.backends import Backend


def call() -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 4), (2, 3, 4), (2, 3))]
    ops.gated_residual(*leaves).sum().backward()


def test_its_kernels_run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    if backend is backends.CUDA_HOST:
        orders = backends.THREAD_ORDERS
        monkeypatch.setitem(backends.host_bindings(), "set_order", lambda order: ran.append(f"order {order}"))
        call()
        assert ran == [f"order {order}" for order in orders] * 2  # forward, backward
    elif backend.choice == "triton":
        kernels = import_module("fastmod.kernels.gated_residual")
        ran = backends.watched(monkeypatch, kernels, "forward_kernel", "backward_kernel")
        call()
        assert ran == ["forward_kernel", "backward_kernel"]
    elif backend.device == "cpu":
        assert f"native-{fastmod._extension.MODULE.cpu_isa()}" == backend.name
        call()
    assert torch.empty(3).isnan().all()


@pytest.mark.slow
def test_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with backends.chosen(backends.CUDA_HOST):
        pass
    ran: list[int] = []
    monkeypatch.setitem(backends.host_bindings(), "set_order", ran.append)
    call()
    assert not ran
    assert fastmod.backend.active() == "auto"
    assert fastmod._extension.MODULE.cpu_isa() == backends.isas()[-1]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_an_input_that_is_written_is_found() -> None:
    with pytest.raises(AssertionError, match="an input and was written"):
        backends.in_each_order("gated_residual_forward", lambda x, *_: x.add_(1), *torch.zeros(3, 2))


@pytest.mark.slow
def test_a_dependence_on_the_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setitem(backends.host_bindings(), "set_order", seen.append)
    with pytest.raises(AssertionError, match="depends on the order"):
        backends.in_each_order("gated_residual_forward", lambda x, *_: x + seen[-1], *torch.zeros(3, 2))


@pytest.mark.interpreted
def test_triton_interprets() -> None:
    import triton

    assert backends.INTERPRETED and triton.knobs.runtime.interpret


@pytest.mark.interpreted
def test_launchers_are_registered_under_the_schemas() -> None:
    from fastmod import kernels

    assert fastmod._extension.LOADED, fastmod._extension.STATUS
    missing = frozenset(fastmod.backend.OPS) - fastmod._extension.triton_ops()
    assert missing == {"inverted_residual"}
    for name in kernels.LAUNCHERS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod_triton::{name}", "CPU"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod_triton::{name}", "CUDA"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmod::{name}", "CUDA"), name
    blocks, logits = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    with fastmod.use_backend("triton"):
        out = ops.multiplex(blocks, logits, mode="gumbel", seed=3)
    assert torch.equal(out, kernels.multiplex_forward(blocks, logits, None, 1.0, torch.tensor(3), 1))


@pytest.mark.interpreted
@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="fails over there, and so it must here")
def test_failure_in_the_interpreter() -> None:
    if backends.INTERPRETED:
        pytest.fail("as it should")
