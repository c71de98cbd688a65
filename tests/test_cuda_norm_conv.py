"""The CUDA kernels of norm_conv, executed on the host: values against fp64, then the same under sanitizers."""

from __future__ import annotations

import pytest
import torch

from fastmod.ops._checks import FLOAT_DTYPES
from tests.cuda_host import Harness, checks
from tests.cuda_host.checks import F64
from tests.cuda_host.norm_conv import Conv, check_conv, inputs_of, run

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


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_no_image(plain: Harness, dtype: torch.dtype) -> None:
    """Nothing is launched and nothing written: what the sums of nothing are is the binding's business."""
    case = Conv((0, 2, 5, 7, 9, 6), dtype, gate=True, bias=True)
    grads = [torch.empty(0, 2, 7, 9, 6, dtype=dtype), *(torch.zeros(2, 7, dtype=case.wide) for _ in range(2))]
    found = run(plain, case, inputs_of(case, 0), grads)
    assert all(value.isnan().all() for value in found.values())
