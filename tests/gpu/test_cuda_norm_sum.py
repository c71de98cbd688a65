"""The CUDA kernels of norm_sum and batch_affine, executed on the host: values against fp64, also under sanitizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers.agreement import assert_close
from tests.helpers.cuda_host import Harness, InOut, Out, checks
from tests.helpers.cuda_host.checks import F32, F64, random
from tests.helpers.cuda_host.norm_sum import Sum, check_sum

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module

SUMS = [
    Sum((2, 3, 5, 4, 7)),
    Sum((2, 3, 8, 9, 9), scaled=True, gate=True),  # channels by fours
    Sum((2, 3, 8, 4, 7), residual="shared", gate=True),
    Sum((2, 3, 37, 4, 7), residual="shared", scaled=True),
    Sum((2, 2, 36, 4, 7), residual="none", relu=False),
    Sum((1, 1, 1, 1, 1), gate=True),
    Sum((1, 19, 36, 3, 5), residual="shared", scaled=True, gate=True),  # more experts than are kept at a time
    Sum((0, 2, 3, 4, 4)),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", SUMS[:-1], ids=Sum.id)
def test_norm_sum(plain: Harness, case: Sum, dtype: torch.dtype) -> None:
    check_sum(plain, case._replace(dtype=dtype), draws=2)


def test_norm_sum_of_many_blocks(plain: Harness) -> None:
    """Partial results are added up in two steps."""
    check_sum(plain, Sum((3, 2, 3, 40, 41), residual="shared", scaled=True, gate=True))


# ---- batch_affine


def affine(*tensors: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    mean, var, weight, bias = tensors
    assert mean is not None and var is not None
    scale = (var + eps).rsqrt() if weight is None else weight / (var + eps).sqrt()
    return scale, (-mean * scale if bias is None else bias - mean * scale)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("count", [1, 130])
@pytest.mark.parametrize("learned", [True, False])
def test_batch_affine(plain: Harness, count: int, learned: bool, dtype: torch.dtype) -> None:
    check_batch_affine(plain, count, learned, dtype)


def check_batch_affine(harness: Harness, count: int, learned: bool, dtype: torch.dtype) -> None:
    mean, var = random(count, dtype=dtype), random(count, dtype=dtype, seed=1).abs() * 3
    weight, bias = (random(count, dtype=dtype, seed=seed) if learned else None for seed in (2, 3))
    running = [random(count, dtype=dtype, seed=4), random(count, dtype=dtype, seed=5).abs()]
    grads = [random(count, dtype=dtype, seed=seed) for seed in (6, 7)]
    values, momentum, eps = 12, 0.3, 1e-3

    def expected(kind: torch.dtype) -> list[Tensor]:
        leaves = [None if t is None else t.to(kind).requires_grad_() for t in (mean, var, weight, bias)]
        found = affine(*leaves, eps=eps)
        given = [t for t in leaves if t is not None]
        derived = torch.autograd.grad(found, given, [g.to(kind) for g in grads])
        moved = [r.to(kind) + momentum * (s - r.to(kind)) for r, s in zip(
            running, (mean.to(kind), var.to(kind) * values / (values - 1)), strict=True)]  # fmt: skip
        return [*moved, *(t.detach() for t in found), *derived]

    outs = [Out(count, dtype=dtype) for _ in range(4)]
    got = harness.call(
        "batch_affine_forward", mean, var, weight, bias, *map(InOut, running), *outs[:2],
        ints=[count], floats=[values / (values - 1), momentum, eps], dtype=dtype,
    )  # fmt: skip
    got += harness.call(
        "batch_affine_backward", *grads, mean, var, weight, *outs, ints=[count], floats=[eps], dtype=dtype
    )
    got = got if learned else got[:6]
    names = ["running_mean", "running_var", "scale", "shift", "grad_mean", "grad_var", "grad_weight", "grad_bias"]
    for name, *three in zip(names, got, expected(F64), expected(dtype), strict=False):
        assert_close(name, [three])


def test_batch_affine_leaves_running_statistics_alone(plain: Harness) -> None:
    mean, var = random(5), random(5).abs()
    got = plain.call(
        "batch_affine_forward", mean, var, None, None, None, None, Out(5, dtype=F32), Out(5, dtype=F32),
        ints=[5], floats=[1.5, 0.1, 1e-5],
    )  # fmt: skip
    for value, want in zip(got, affine(mean, var, None, None, eps=1e-5), strict=True):
        torch.testing.assert_close(value, want)


# ---- sanitizers


def test_address_and_undefined_behaviour_sanitizer(asan: Harness) -> None:
    for case in SUMS[:-1]:
        for dtype in FLOAT_DTYPES:
            check_sum(asan, case._replace(dtype=dtype))
    check_batch_affine(asan, 130, True, F32)


def test_thread_sanitizer(tsan: Harness) -> None:
    for case in SUMS[:4]:
        check_sum(tsan, case)
    check_batch_affine(tsan, 130, True, F32)
