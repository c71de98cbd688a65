"""The CUDA kernels of masked_conv2d, executed on the host: values against fp64, then the same under sanitizers."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.cuda_host import Harness, checks
from tests.helpers.cuda_host.masked_conv2d import MaskedConv, check_masked_conv, results

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module

HALVES = (torch.bfloat16, torch.float16)

#: One of every kind, small: odd channels and sizes, not square, noise that begins within a group of four.
KINDS = [
    MaskedConv((2, 5, 7, 6, 5), pointer=True),
    MaskedConv((1, 4, 8, 4, 8), last=True, samples=3, tau=0.5),
    MaskedConv((2, 3, 5, 7, 9), kernel=(5, 2), stride=(2, 3), padding=(2, 0), biases=1),
    MaskedConv((1, 18, 3, 8, 7), kernel=(2, 3), padding=(0, 2), dilation=(3, 2), biases=0, first=3),
    MaskedConv((1, 4, 6, 5, 5), kernel=(1, 1), stride=(2, 2), padding=(0, 0)),
    MaskedConv((1, 2, 3, 2, 3), kernel=(1, 2), stride=(4, 5), padding=(1, 1)),
    MaskedConv((1, 3, 4, 7, 8), kernel=(7, 7), padding=(3, 3), stride=(1, 2)),
]
#: Beside those: several chunks of channels, several blocks of channels and pixels, splits, whole vectors.
SHAPES = [
    MaskedConv((1, 1, 1, 1, 1), samples=1, kernel=(1, 1), padding=(0, 0)),
    MaskedConv((3, 33, 70, 8, 8), tau=0.5),
    MaskedConv((4, 8, 33, 16, 12), kernel=(1, 3), padding=(0, 1), first=2**31),
    MaskedConv((9, 3, 4, 16, 16), samples=1),
    MaskedConv((2, 20, 20, 9, 9), stride=(2, 2), last=True),
    MaskedConv((1, 17, 40, 6, 6), kernel=(7, 7), padding=(3, 3), samples=1),
]


@pytest.mark.parametrize("case", KINDS + SHAPES, ids=MaskedConv.id)
def test_in_single_precision(plain: Harness, case: MaskedConv) -> None:
    check_masked_conv(plain, case, draws=3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", KINDS + SHAPES[:3], ids=MaskedConv.id)
def test_in_half_precision(plain: Harness, case: MaskedConv, dtype: torch.dtype) -> None:
    check_masked_conv(plain, case._replace(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_64_channels(plain: Harness, dtype: torch.dtype) -> None:
    """Taken where there are enough of them to fill a GPU."""
    check_masked_conv(plain, MaskedConv((1, 40, 33, 4, 4), dtype, 128, kernel=(1, 3), padding=(0, 1), biases=1))


@pytest.mark.parametrize("inputs", [4, 5])
def test_logits_that_are_no_numbers(plain: Harness, inputs: int) -> None:
    """Without borders: whether a NaN weight meets the zeros beyond them is not said."""
    check_masked_conv(plain, MaskedConv((1, inputs, 6, 4, 4), special=True, kernel=(1, 1), padding=(0, 0)))


def test_one_product_of_tf32(plain: Harness) -> None:
    for name, (got, exact, _) in results(plain, MaskedConv((1, 32, 16, 8, 8), tf32=True, biases=0), 0).items():
        error, size = (got - exact).abs().max(), exact.abs().max()
        assert 2**-20 * size < error < 2**-8 * size, name


# ---- sanitizers: the same checks, on small grids


def test_address_and_undefined_behaviour_sanitizer(asan: Harness) -> None:
    for case in [*KINDS, SHAPES[0], SHAPES[2]]:
        for dtype in (torch.float32, torch.bfloat16):
            check_masked_conv(asan, case._replace(dtype=dtype))


def test_thread_sanitizer(tsan: Harness) -> None:
    for case in (KINDS[0], KINDS[2], KINDS[3]):
        check_masked_conv(tsan, case)
    check_masked_conv(tsan, KINDS[1]._replace(dtype=torch.bfloat16))
