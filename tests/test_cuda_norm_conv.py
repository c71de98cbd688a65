"""The CUDA kernels of norm_conv, executed on the host: values against fp64, then the same under sanitizers."""

from __future__ import annotations

import pytest
import torch

from fastmod.ops._checks import FLOAT_DTYPES
from tests.cuda_host import Harness, checks
from tests.cuda_host.checks import F64
from tests.cuda_host.norm_conv import Conv, check_conv

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


def depthwise(case: Conv) -> Conv:
    return case._replace(sizes=(*case.sizes[:2], 37, 37, *case.sizes[4:]), depthwise=True)


@pytest.mark.parametrize("case", [case._replace(dtype=F64) for case in KINDS], ids=Conv.id)
def test_in_double_precision(plain: Harness, case: Conv) -> None:
    check_conv(plain, case)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=Conv.id)
def test_depthwise(plain: Harness, case: Conv, dtype: torch.dtype) -> None:
    check_conv(plain, depthwise(case)._replace(dtype=dtype), draws=2)
