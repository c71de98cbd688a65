"""The CUDA kernels of norm_conv, executed on the host: values against fp64, then the same under sanitizers."""

from __future__ import annotations

import pytest
import torch

from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers.cuda_host import Harness, checks
from tests.helpers.cuda_host.checks import F64, INF, NAN
from tests.helpers.cuda_host.norm_conv import Conv, check_conv, inputs_of, results, run, values

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module

#: One of every kind, small: odd channels and sizes, not square, more than one tile.
KINDS = [
    Conv((2, 2, 5, 7, 9, 6)),
    Conv((2, 2, 5, 7, 9, 6), stride=2, bias=True),
    Conv((3, 2, 5, 7, 5, 6), kernel=1, gate=True),
    Conv((3, 2, 5, 7, 5, 6), kernel=1, stride=2, affine="none", relu=False),
    Conv((2, 3, 5, 7, 9, 6), shared=True, affine="one", gate=True),
    Conv((2, 3, 5, 7, 9, 6), shared=True, bias=True),
]


#: Beside those: several chunks and column blocks, whole vectors, tiles over several images, one pixel, one expert.
SHAPES = [
    Conv((1, 1, 1, 1, 1, 1)),
    Conv((1, 1, 16, 16, 1, 1), stride=2),
    Conv((5, 1, 16, 24, 8, 8), gate=True, bias=True),
    Conv((9, 1, 8, 16, 4, 3), stride=2, gate=True),
    Conv((1, 2, 24, 40, 18, 21)),
    Conv((1, 1, 40, 24, 19, 17), stride=2),
    Conv((2, 1, 36, 20, 7, 9), kernel=1, bias=True, stats=False),
    Conv((2, 2, 20, 36, 8, 9), kernel=1, stride=2, affine="one"),
    Conv((1, 2, 20, 33, 11, 5), shared=True, stride=2, gate=True),
    Conv((3, 1, 28, 40, 9, 5), stride=2, bias=True),
    Conv((2, 1, 84, 20, 7, 9), kernel=1, bias=True),
]


#: 64 columns a block, forward or in the gradient of x: more than 32 channels and 96 blocks at least.
WIDE = [
    Conv((1, 24, 3, 40, 9, 17), gate=True, bias=True),
    Conv((1, 24, 40, 3, 9, 17), gate=True),
    Conv((8, 48, 2, 36, 5, 6), stride=2),
    Conv((5, 12, 33, 2, 5, 6), stride=2, affine="one"),
    Conv((4, 24, 5, 104, 5, 6), kernel=1, stats=False),
]


def depthwise(case: Conv) -> Conv:
    return case._replace(sizes=(*case.sizes[:2], 37, 37, *case.sizes[4:]), depthwise=True)


@pytest.mark.parametrize("case", [case._replace(dtype=F64) for case in KINDS], ids=Conv.id)
def test_in_double_precision(plain: Harness, case: Conv) -> None:
    check_conv(plain, case)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=Conv.id)
def test_depthwise(plain: Harness, case: Conv, dtype: torch.dtype) -> None:
    check_conv(plain, depthwise(case)._replace(dtype=dtype), draws=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", KINDS + SHAPES, ids=Conv.id)
def test_on_tensor_cores(plain: Harness, case: Conv, dtype: torch.dtype) -> None:
    check_conv(plain, case._replace(dtype=dtype), draws=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WIDE, ids=Conv.id)
def test_64_columns_a_block(plain: Harness, case: Conv, dtype: torch.dtype) -> None:
    check_conv(plain, case._replace(dtype=dtype), draws=2)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_no_image(plain: Harness, dtype: torch.dtype) -> None:
    """Nothing is launched and nothing written: what the sums of nothing are is the binding's business."""
    case = Conv((0, 2, 5, 7, 9, 6), dtype, gate=True, bias=True)
    grads = [torch.empty(0, 2, 7, 9, 6, dtype=dtype), *(torch.zeros(2, 7, dtype=case.wide) for _ in range(2))]
    found = run(plain, case, inputs_of(case, 0), grads)
    assert all(value.isnan().all() for value in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_many_blocks(plain: Harness, dtype: torch.dtype) -> None:
    """Partial results are added up in two steps."""
    check_conv(plain, Conv((1, 1, 3, 2, 79, 90), dtype, bias=True), draws=3)
    check_conv(plain, Conv((1, 2, 8, 5, 60, 50), dtype, affine="one", gate=True), draws=3)
    check_conv(plain, depthwise(Conv((1, 1, 0, 0, 79, 33), dtype)), draws=3)
    check_conv(plain, depthwise(Conv((5, 2, 0, 0, 35, 15), dtype, gate=True, bias=True)))  # tiles of 16 rows


def test_infinities_and_nan(plain: Harness) -> None:
    """They stay where they are: no part of an infinity meets one of the other factor's that makes it a NaN."""
    case = Conv((1, 1, 8, 8, 9, 9), affine="none", relu=False, stats=False)
    tensors = inputs_of(case, 0)
    x, weight = tensors[:2]
    assert x is not None and weight is not None
    weight.abs_()
    x[0, 0, 3, 2, 2], x[0, 0, 1, 7, 7] = INF, NAN
    grads = [torch.ones(1, 1, 8, 9, 9)]
    got, want = run(plain, case, tensors, grads), values(case, torch.float32, tensors, grads)
    for name in ("y", "grad_x"):
        assert torch.equal(got[name].isnan(), want[name].isnan()), name
        assert torch.equal(got[name].isinf(), want[name].isinf()), name


def test_one_product_of_tf32(plain: Harness) -> None:
    case = Conv((1, 1, 32, 16, 8, 8), tf32=True)
    for name, (got, exact, _) in results(plain, case, 0).items():
        error, size = (got - exact).abs().max(), exact.abs().max()
        assert 2**-20 * size < error < 2**-8 * size, name


# ---- sanitizers: the same checks, on small grids


def test_address_and_undefined_behaviour_sanitizer(asan: Harness) -> None:
    for case in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            check_conv(asan, case._replace(dtype=dtype))
        check_conv(asan, case._replace(dtype=F64))
        check_conv(asan, depthwise(case))
    for case in SHAPES[:4] + SHAPES[6:8] + WIDE[:1]:
        check_conv(asan, case)
        check_conv(asan, case._replace(dtype=torch.float16))


def test_thread_sanitizer(tsan: Harness) -> None:
    for case in (KINDS[0], KINDS[1], KINDS[4], SHAPES[2]):
        check_conv(tsan, case._replace(sizes=(2, *case.sizes[1:])))
    check_conv(tsan, KINDS[2]._replace(dtype=torch.bfloat16))
    check_conv(tsan, depthwise(KINDS[0]))
    check_conv(tsan, WIDE[1]._replace(dtype=torch.bfloat16))
    check_conv(tsan, KINDS[5]._replace(dtype=F64))
