"""Many calls of multiplex as one: copies, torch.vmap."""

from __future__ import annotations

import pytest
import torch

from fastmod import ops
from fastmod.gpu import aten
from fastmod.ops.multiplex import MODES
from tests.helpers import backends, triton_launches
from tests.helpers.cuda_host import recorder


def gradients_of(mode: str):
    """Gradients of blocks, logits and tau, and the output."""

    def gradients(blocks, logits, tau, seed):
        def loss(blocks, logits, tau):
            seeded = {"seed": seed} if mode == "gumbel" else {}
            out = ops.multiplex(blocks, logits, mode=mode, tau=tau, **seeded)
            return out.square().sum(), out

        return torch.func.grad(loss, (0, 1, 2), has_aux=True)(blocks, logits, tau)

    return gradients


# Logits that are no fours, several pieces of a batch, blocks that have no place in shared memory.
COPIED = [(2, 3, 4, 5), (1, 3, 5, 4), (70, 2, 3, 2), (1, 3, 2, 9000)]


def assert_copies_are_as_alone(mode: str, shape: tuple[int, ...], shared: bool, copies: int = 3) -> None:
    """Copies with seeds and temperatures of their own, or shared: each finds the noise that it finds alone."""
    batch, m, n, d = shape
    blocks, logits = torch.randn(copies, batch, m, d), torch.randn(copies, batch, m, n)
    taus, seeds = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3, -4, 5])
    gradients = gradients_of(mode)
    tau, seed = (taus[0], seeds[0]) if shared else (taus, seeds)
    dim = None if shared else 0
    found, out = torch.vmap(gradients, (0, 0, dim, dim))(blocks, logits, tau, seed)
    for i in range(copies):
        own = (tau, seed) if shared else (taus[i], seeds[i])
        expected, alone = gradients(blocks[i], logits[i], *own)
        assert torch.equal(out[i], alone)
        assert all(torch.equal(a[i], b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("mode", ["gumbel", "softmax"])
@pytest.mark.parametrize("shape", COPIED, ids=str)
def test_copies_are_as_alone(backend: backends.Backend, shape: tuple[int, ...], mode: str) -> None:
    assert_copies_are_as_alone(mode, shape, shared=False)


@pytest.mark.parametrize("mode", ["gumbel", "softmax"])
def test_vmap_is_one_call_on_the_cpu(mode: str) -> None:
    def called(copies: int) -> list[str]:
        blocks, logits, seeds = torch.randn(copies, 2, 3, 5), torch.randn(copies, 2, 3, 4), torch.arange(copies)
        with torch.profiler.profile() as profile:
            torch.vmap(gradients_of(mode), (0, 0, None, 0))(blocks, logits, torch.tensor(0.5), seeds)
        return [event.name for event in profile.events() if event.name.startswith("fastmod::multiplex")]

    assert called(1) == called(5) != []  # each transform that a call passes is told once more


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["gumbel", "softmax"])
@pytest.mark.parametrize("tiled", [True, False], ids=["tiles", "rows"])
def test_vmap_is_one_launch_in_triton(mode: str, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastmod.kernels import multiplex

    forward, backward = ("tiled_forward_kernel", "tiled_backward_kernel") if tiled else ("forward_kernel", None)
    names = (forward, backward) if backward else (forward, "backward_logits_kernel", "backward_blocks_kernel")
    if not tiled:
        monkeypatch.setattr(multiplex, "tile_of", lambda *sizes: None)
    launched = backends.watched(monkeypatch, multiplex, *names)
    with backends.chosen(backends.TRITON):
        for shared in (True, False):
            launched.clear()
            assert_copies_are_as_alone(mode, (2, 3, 4, 5), shared)
            assert launched == [*names] * 4  # of all at once, then of each alone


@pytest.mark.interpreted
@pytest.mark.parametrize("copies", [None, 3, 70_000])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
@pytest.mark.parametrize("mode", ["argmax", "gumbel"])
@pytest.mark.parametrize("tiled", [True, False], ids=["tiles", "rows"])
def test_launches_in_triton(
    tiled: bool, mode: str, learned: bool, copies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 + 1, or 1 + 2 by rows, torch's included, with and without a gradient of a temperature. More copies than fit on
    any axis of a grid but the first are no more launches."""
    from fastmod.kernels import multiplex

    if not tiled:
        monkeypatch.setattr(multiplex, "tile_of", lambda *sizes: None)
    numbers = [] if copies is None else [copies]
    blocks, logits = torch.randn(*numbers, 2, 3, 5), torch.randn(*numbers, 2, 3, 4)
    tau = torch.rand(numbers) if learned else None
    seed = torch.zeros(numbers, dtype=torch.int64) if mode == "gumbel" else None
    routing = tau, 1.0, seed, MODES[mode]
    grad = torch.randn(*numbers, 2, 4, 5)
    own = copies if copies and (learned or seed is not None) else 1
    launches = triton_launches.left_out(monkeypatch)
    with backends.chosen(backends.TRITON):
        backends.kernel("multiplex_backward")(grad, blocks, logits, *routing)  # the tickets, which are kept
        for name, tensors, expected in (
            ("multiplex_forward", (blocks, logits), 1),
            ("multiplex_backward", (grad, blocks, logits), 1 if tiled else 2),
        ):
            launches.clear()
            others = aten.launches(lambda name=name, tensors=tensors: backends.kernel(name)(*tensors, *routing))
            # filled memory is the tests' doing
            assert [each for each in others if each != "aten::fill_"] == []
            assert len(launches) == expected
            assert all(len(each.grid) == 1 or each.grid[1:] == (1, 1) for each in launches)
            assert launches[0].grid[0] % own == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("copies", [None, 2])
def test_triton_leaves_no_ticket_behind(copies: int | None) -> None:
    """The last of many programs adds up the gradient of a temperature, at every call, to the same bits."""
    from fastmod.kernels import _common, multiplex

    numbers = [] if copies is None else [copies]
    blocks, logits = torch.randn(*numbers, 300, 2, 3), torch.randn(*numbers, 300, 2, 2)
    grad, tau = torch.randn(*numbers, 300, 2, 3), torch.rand(numbers)
    assert multiplex.tile_of(300, 2, 2, 3, multiplex.compute_type(blocks))["BLOCK_B"] < 300
    with backends.chosen(backends.TRITON):
        step = backends.kernel("multiplex_backward")
        first, second = (step(grad, blocks, logits, tau, 1.0, None, 0)[2] for _ in range(2))
    assert torch.equal(first, second) and not first.isnan().any()
    assert not any(tickets.any() for tickets in _common._tickets.values())


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("mode", ["gumbel", "softmax"])
def test_vmap_is_one_launch_in_cuda(mode: str, shared: bool) -> None:
    blocks, logits = torch.randn(3, 2, 3, 5), torch.randn(3, 2, 3, 4)
    tau, seed, dim = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3, -4, 5]), 0
    if shared:
        tau, seed, dim = tau[0], seed[0], None
    step = torch.vmap(gradients_of(mode), (0, 0, dim, dim))
    with recorder.on_the_harness("multiplex"):
        recorder.capture(lambda: step(blocks, logits, tau, seed))  # what is made once
        launched = recorder.capture(lambda: step(blocks, logits, tau, seed))
    own = [each for each in launched if not each.name.startswith("aten::")]
    assert [each.name.partition("<")[0] for each in own] == [
        "multiplex.forward_kernel",
        "multiplex_backward.backward_kernel",
    ]
    assert [each.grid[1] for each in own] == [1 if mode == "softmax" and shared else 3, 3]  # 1: more of the batch
