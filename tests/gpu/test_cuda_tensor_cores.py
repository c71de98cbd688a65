"""The harness' tensor cores, asynchronous copies and tickets: they compute as hardware does and catch misuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.cuda_host import CrashError, Harness, InOut, LaunchError, Out, checks
from tests.helpers.cuda_host.checks import F32, F64, INF, NAN, random

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module


def probe(harness: Harness, name: str, blocks: int = 1) -> Tensor:
    values = torch.arange(1.0, 64.0 * blocks + 1)
    (got,) = harness.call(f"probe_{name}", values, InOut(torch.zeros(64 * blocks)), ints=[blocks])
    return got


# ---- asynchronous copies


def test_asynchronous_copies(plain: Harness, asan: Harness, tsan: Harness) -> None:
    for harness in (plain, asan, tsan):
        values = torch.arange(1.0, 129).view(2, 64)
        assert torch.equal(probe(harness, "async", 2).view(2, 64), values.flip(1))


def test_a_missing_wait_is_caught(plain: Harness) -> None:
    assert probe(plain, "async_without_wait").isnan().all()


def test_a_missing_barrier_after_a_copy_is_caught(plain: Harness, tsan: Harness) -> None:
    with pytest.raises(AssertionError, match="depends on the order of threads"):
        probe(plain, "async_without_barrier")
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "async_without_barrier")


def test_a_copy_over_what_others_read_is_caught(plain: Harness, tsan: Harness) -> None:
    with pytest.raises(AssertionError, match="depends on the order of threads"):
        probe(plain, "async_too_early")
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "async_too_early")


def test_groups_of_copies(plain: Harness) -> None:
    got = probe(plain, "async_groups")
    assert torch.equal(got[:24], torch.arange(1.0, 25))
    assert (got[24:32] == 0).all()  # not inside
    assert got[32:].isnan().all()  # the second group is still under way


def test_a_misaligned_copy_is_caught(plain: Harness) -> None:
    with pytest.raises(LaunchError, match=r"cp\.async from a misaligned address"):
        probe(plain, "async_misaligned")


def test_dynamic_shared_memory(plain: Harness, asan: Harness) -> None:
    values = torch.arange(64.0)
    for harness in (plain, asan):
        (got,) = harness.call("probe_dynamic", values, Out(64, dtype=F32), ints=[64 * 1024])
        assert torch.equal(got, values.flip(0))
    with pytest.raises(LaunchError, match="more than 64 KB"):
        plain.call("probe_dynamic", values, Out(64, dtype=F32), ints=[64 * 1024 + 4])
    with pytest.raises(CrashError, match="heap-buffer-overflow"):
        asan.call("probe_dynamic", values, Out(64, dtype=F32), ints=[252])


# ---- tickets


def test_the_last_block_adds_up(plain: Harness, tsan: Harness) -> None:
    for harness in (plain, tsan):
        got = probe(harness, "last_block", 4)
        assert got[5] == 10
        assert got[0].view(torch.int32) == 4  # the ticket


def test_a_missing_fence_is_caught(tsan: Harness) -> None:
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "missing_fence", 4)


# ---- products


def fragments(matrix: Tensor) -> Tensor:
    """[16 or 8, K] -> words of each lane [32, 4 or 2] int32: rows as in the comment of csrc/cuda/mma.cuh."""
    half = matrix.shape[1] // 2
    numbers = half // 4  # a word
    words = []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for k in (t * numbers, half + t * numbers):
            for row in range(g, matrix.shape[0], 8):
                word = matrix[row, k : k + numbers].contiguous()
                words.append(word.view(torch.int32))
    return torch.cat(words).view(32, -1)


def product(harness: Harness, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a [16, K], b [K, 8], c [16, 8] -> c + a b by one instruction."""
    rows = [(lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2) for lane in range(32) for j in range(4)]
    at = tuple(torch.tensor(rows).T)
    words = [fragments(a), fragments(b.T.contiguous())]
    (got,) = harness.call("probe_mma", *(w.repeat(2, 1) for w in words), InOut(c[at].repeat(2)), dtype=a.dtype)
    assert torch.equal(got[:128].view(torch.int32), got[128:].view(torch.int32))
    result = torch.empty(16, 8)
    result[at] = got[:128]
    return result


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
def test_product(plain: Harness, dtype: torch.dtype) -> None:
    depth = 8 if dtype == F32 else 16
    a, b, c = random(16, depth, dtype=dtype), random(depth, 8, dtype=dtype, seed=1), random(16, 8, seed=2)
    got = product(plain, a, b, c).double()
    if dtype == F32:  # operands are cut off after 10 bits
        a, b = ((t.view(torch.int32) & -(2**13)).view(F32) for t in (a, b))
    exact = c.double() + a.double() @ b.double()
    assert ((got - exact).abs() <= 2**-23 * exact.abs()).all()
    assert (got.abs() <= exact.abs()).all()  # towards zero
    assert (got.abs() < exact.abs()).any()


def test_product_of_special_values(plain: Harness) -> None:
    a, b = torch.zeros(16, 8), torch.ones(8, 8)
    a[1, 3], a[2, 5], a[3, 0] = INF, NAN, 3e38
    b[0, 1] = 4.0
    got = product(plain, a, b, torch.zeros(16, 8))
    want = a @ b
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_a_missing_lane_is_caught(plain: Harness) -> None:
    with pytest.raises(LaunchError, match="missing from a warp operation"):
        probe(plain, "mma_missing_lane")


def test_transposed_matrices(plain: Harness, tsan: Harness) -> None:
    rows = torch.arange(32 * 8, dtype=torch.int16).view(4, 8, 8)
    for harness in (plain, tsan):
        (got,) = harness.call("probe_ldmatrix", rows, InOut(torch.zeros(32, 8, dtype=torch.int16)))
        for lane in range(32):
            g, t = lane // 4, lane % 4
            assert torch.equal(got[lane].view(4, 2), rows[:, 2 * t : 2 * t + 2, g])


def test_two_tf32_numbers_make_one_of_fp32(plain: Harness) -> None:
    values = torch.cat([random(4000), torch.tensor([0.0, INF, -INF, 1 + 2**-11, -1 - 2**-11, 1e-38])])
    high, low = plain.call(
        "probe_split", values, Out(len(values), dtype=F32), Out(len(values), dtype=F32), ints=[len(values)]
    )
    for part in (high, low):
        assert (part.view(torch.int32) & 0x1FFF == 0).all()  # nothing that tensor cores do not look at
    assert high[-3] == 1 + 2**-10 and high[-2] == -1 - 2**-10  # ties away from zero
    assert (high[4001:4003] == 0).all()  # what is not finite is a low part alone
    assert torch.equal(low[4001:4003], values[4001:4003])
    finite = values[:4001].to(F64)
    assert ((high[:4001].to(F64) + low[:4001]) - finite).abs().max() <= 2**-22 * 2
    (nan_high, nan_low) = plain.call("probe_split", torch.tensor([NAN]), Out(1, dtype=F32), Out(1, dtype=F32), ints=[1])
    assert nan_high == 0 and nan_low.isnan().all()
