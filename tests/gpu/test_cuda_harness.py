"""The host harness itself: it must catch what the CUDA kernels must not do, and compute as CUDA and torch do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.cuda_host import CrashError, Harness, InOut, LaunchError, Out, checks
from tests.helpers.cuda_host.checks import F32, INF, NAN, random

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module


def probe(harness: Harness, name: str, blocks: int = 1) -> Tensor:
    values = torch.arange(1.0, 64.0 * blocks + 1)
    (got,) = harness.call(f"probe_{name}", values, InOut(torch.zeros(64 * blocks)), ints=[blocks])
    return got


def test_harness_runs_correct_kernels(plain: Harness, asan: Harness, tsan: Harness) -> None:
    for harness in (plain, asan, tsan):
        values = torch.arange(1.0, 129).view(2, 64)
        assert torch.equal(probe(harness, "reverse", 2).view(2, 64), values.flip(1))
        lanes = torch.arange(1.0, 65).view(2, 32).roll(-1, 1)
        lanes = lanes + lanes[:, 3:4]
        lanes = lanes + torch.cat([lanes[:, :2], lanes[:, :-2]], dim=1)
        assert torch.equal(probe(harness, "warp"), lanes.flatten())


def test_missing_barrier_is_caught(plain: Harness, tsan: Harness) -> None:
    with pytest.raises(AssertionError, match="depends on the order of threads"):
        probe(plain, "missing_barrier")
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "missing_barrier")


def test_race_between_blocks_is_caught(tsan: Harness) -> None:
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "block_race", 2)


@pytest.mark.parametrize("name", ["shared_out_of_bounds", "global_out_of_bounds"])
def test_out_of_bounds_is_caught(asan: Harness, name: str) -> None:
    with pytest.raises(CrashError, match="heap-buffer-overflow"):
        probe(asan, name)


def test_undefined_behaviour_is_caught(asan: Harness) -> None:
    with pytest.raises(CrashError, match="undefined behaviour"):
        probe(asan, "overflow")


def test_uninitialised_shared_memory_is_nan(plain: Harness) -> None:
    got = probe(plain, "uninitialised", 2)
    assert (got[::2] == 0).all()
    assert got[1::2].isnan().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exited_thread", "barrier never reached by 1 exited threads"),
        ("divergent_barrier", "divergent barrier"),
        ("missing_lane", "missing from a warp operation"),
        ("too_much_shared", "more than 48 KB of shared memory"),
    ],
)
def test_wrong_synchronisation_is_caught(plain: Harness, name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        probe(plain, name)
    assert torch.equal(probe(plain, "reverse"), torch.arange(64.0, 0, -1))  # a failed launch does no harm


def test_reduced_precision_rounds_as_torch(plain: Harness) -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = torch.tensor([0.0, INF, NAN, 65504, 65519.9, 65520, 2**-24, 2**-25, 1.5 * 2**-25, 6.1e-5, 3.4e38])
    near = random(3000, scale=1e-4)
    ties = (torch.arange(2000) * 2 + 1).float() * 2**-25
    values = torch.cat([bits.view(F32), special, -special, near, ties, 1 + torch.arange(3000) * 2.0**-13])
    half, from_half, brain, from_brain = plain.call(
        "probe_round", values, *(Out(len(values), dtype=t) for t in (torch.float16, F32, torch.bfloat16, F32)),
        ints=[len(values)],
    )  # fmt: skip
    for got, widened, dtype in ((half, from_half, torch.float16), (brain, from_brain, torch.bfloat16)):
        torch.testing.assert_close(got, values.to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(widened, values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_launch_limits(plain: Harness) -> None:
    with pytest.raises(LaunchError) as raised:
        probe(plain, "reverse", 0)
    assert raised.value.code == 9  # cudaErrorInvalidConfiguration
