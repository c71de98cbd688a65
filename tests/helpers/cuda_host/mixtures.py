"""norm_pool, template_mix and its penalties on the host harness: cases and their checks against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fastmod.ops.cluster_penalty import distances
from fastmod.ops.entropy_penalty import reference as entropy_reference
from fastmod.ops.norm_pool import reference as pool_reference
from fastmod.ops.template_mix import reference as mix_reference
from tests.helpers.agreement import assert_close
from tests.helpers.cuda_host import Harness, Out
from tests.helpers.cuda_host.checks import F32, F64, gradients, random
from tests.helpers.cuda_host.norm_conv import inner, outer


def compare(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, got: list[Tensor]) -> None:
    """``got``: the value and the gradients of all inputs."""
    exact = gradients(function, [t.to(F64) for t in inputs] + [grad], F64)
    leaves = [t.clone().requires_grad_() for t in inputs]
    value = function(*leaves)
    usual = [value.detach(), *torch.autograd.grad(value, leaves, grad.to(value.dtype))]
    for i, three in enumerate(zip(got, exact, usual, strict=True)):
        assert_close(f"result {i}", [three])


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else F32


def check_pool(harness: Harness, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, relu: bool = True) -> None:
    """sizes: B, E, C, H, W"""
    batch, experts, channels, high, wide = sizes
    x = random(*sizes, dtype=dtype)
    scale, shift = (random(experts, channels, dtype=wide_of(dtype), seed=seed) for seed in (1, 2))
    grad = random(batch, experts, channels, dtype=dtype, seed=3)
    ints = [batch, experts, channels, high * wide, int(relu)]
    given = [inner(x), scale, shift]
    got = harness.call("norm_pool_forward", *given, Out(*grad.shape, dtype=dtype), ints=ints, dtype=dtype)
    outs = [Out(*t.shape, dtype=t.dtype) for t in given]
    got += harness.call("norm_pool_backward", grad, *given, *outs, ints=ints, dtype=dtype)
    got[1] = outer(got[1])
    compare(partial(pool_reference, relu=relu), [x, scale, shift], grad, got)


def check_mix(harness: Harness, sizes: tuple[int, int, int], dtype: torch.dtype, mixing: int) -> None:
    """sizes: rows, templates, parameters of a template"""
    rows, templates, size = sizes
    logits, bank = random(rows, templates, dtype=dtype), random(templates, size, dtype=dtype, seed=1)
    grad = random(rows, size, dtype=dtype, seed=2)
    ints = [*sizes, mixing]
    got = harness.call("template_mix_forward", logits, bank, Out(rows, size, dtype=dtype), ints=ints, dtype=dtype)
    outs = [Out(*t.shape, dtype=dtype) for t in (logits, bank)]
    got += harness.call("template_mix_backward", grad, logits, bank, *outs, ints=ints, dtype=dtype)
    compare(partial(mix_reference, mixing=mixing), [logits, bank], grad, got)


def check_cluster(harness: Harness, templates: int, size: int, dtype: torch.dtype) -> None:
    bank, grad = random(templates, size, dtype=dtype), random(templates, templates, dtype=F64, seed=1)
    ints = [0, templates, size]
    got = harness.call("cluster_penalty_forward", bank, Out(templates, templates, dtype=F64), ints=ints, dtype=dtype)
    got += harness.call(
        "cluster_penalty_backward", grad, bank, Out(templates, size, dtype=dtype), ints=ints, dtype=dtype
    )
    exact = gradients(distances, [bank.to(F64), grad], F64)
    torch.testing.assert_close(got[0], exact[0], rtol=1e-12 if dtype == F64 else 1e-6, atol=0)
    assert torch.equal(got[0], got[0].T)
    compare(distances, [bank], grad, [exact[0], got[1]])


def check_entropy(harness: Harness, rows: int, count: int, dtype: torch.dtype) -> None:
    logits, grad = random(rows, count, dtype=dtype, scale=3), torch.tensor(0.7, dtype=wide_of(dtype))
    logits[0, -1] = -float("inf")
    ints = [rows, count]
    got = harness.call("entropy_penalty_forward", logits, Out(1, dtype=wide_of(dtype)), ints=ints, dtype=dtype)
    got += harness.call("entropy_penalty_backward", grad, logits, Out(rows, count, dtype=dtype), ints=ints, dtype=dtype)
    compare(entropy_reference, [logits], grad, [got[0][0], got[1]])


def check_mixtures(harness: Harness, dtype: torch.dtype, mixings: Sequence[int] = (0, 1, 2)) -> None:
    """Edges of tiles on all sides; what fits on tensor cores and what does not; sums of parts in two steps."""
    check_pool(harness, (35, 1, 5, 3, 2), dtype)
    check_pool(harness, (2, 3, 37, 11, 7), dtype, relu=False)
    for mixing in mixings:
        check_mix(harness, (17, 5, 70), dtype, mixing)
    check_mix(harness, (3, 37, 64), dtype, 0)  # more templates than a lane holds, and 16 bytes at a time
    check_cluster(harness, 35, 40, dtype)
    check_cluster(harness, 3, 530, dtype)
    check_entropy(harness, 19, 37, dtype)
