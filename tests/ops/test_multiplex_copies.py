"""Many calls of multiplex as one: copies, torch.vmap."""

from __future__ import annotations

import pytest
import torch

from fastmod import ops
from tests.helpers import backends
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
