"""The launch functions of the CUDA C++ kernels on the host: what ops do not ask of them, and all under sanitizers.

No GPU, no nvcc: ``tests/helpers/cuda_host`` compiles the .cu files with g++ and runs every CUDA thread as a fiber. The
ops' own tests (``tests/ops``) run over the same kernels, behind their bindings, with the backend ``cuda_host``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fastmod import noise
from fastmod.ops._checks import FLOAT_DTYPES
from fastmod.ops.mfnnr import reference as mfnnr_reference
from tests.helpers.cuda_host import Harness, Out, checks
from tests.helpers.cuda_host.checks import (
    ARGMAX,
    F32,
    F64,
    GUMBEL,
    INF,
    NAN,
    SEED,
    SOFTMAX,
    Gate,
    Mask,
    Multiplex,
    check_gate,
    check_mask,
    check_multiplex,
    check_penalty,
    linears,
    random,
)
from tests.helpers.cuda_host.masked_linear import MaskedLinear, check_masked_linear
from tests.helpers.cuda_host.mfnnr import SMALL_MFNNR, Mfnnr, check_mfnnr, launched_forward
from tests.helpers.cuda_host.mixtures import check_entropy, check_mix, check_mixtures

plain, asan, tsan = checks.plain, checks.asan, checks.tsan  # fixtures of this module


DRAWS = 4

# ---- multiplex

EMPTY = [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)]
#: tau and seed in device memory, as on a GPU; tests/ops has all others.
MULTIPLEX = [
    *[Multiplex((3, 5, 7, 3), dtype, mode, pointers=True) for dtype in FLOAT_DTYPES for mode in (SOFTMAX, GUMBEL)],
    Multiplex((2, 33, 3, 5), mode=GUMBEL, pointers=True),
]


@pytest.mark.parametrize("case", MULTIPLEX, ids=Multiplex.id)
def test_multiplex(plain: Harness, case: Multiplex) -> None:
    check_multiplex(plain, case, DRAWS)


def test_noise_bits(plain: Harness) -> None:
    """u equals fastmod.noise bit for bit, also where the counter needs more than 32 bits."""
    for seed in (0, 1, SEED, -1, -(2**63)):
        single, double = plain.call("probe_uniform", Out(1001, dtype=F32), Out(1001, dtype=F64), ints=[seed, 0, 1001])
        for got, dtype in ((single, F32), (double, F64)):
            want = noise.uniform(
                torch.tensor(seed), torch.Size([1001]), stream=0, dtype=dtype, device=torch.device("cpu")
            )
            assert torch.equal(got, want)
    first = 2**34 + 3  # group 2**32: the second counter word
    _, got = plain.call("probe_uniform", Out(8, dtype=F32), Out(8, dtype=F64), ints=[SEED, first, 8])
    group = torch.arange(first, first + 8) // 4
    counter = (group & 0xFFFFFFFF, group >> 32, torch.zeros_like(group), torch.zeros_like(group))
    key = torch.tensor(SEED)
    words = torch.stack(noise.philox4x32(counter, (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)), dim=-1)
    picked = words.gather(1, (torch.arange(first, first + 8) % 4).unsqueeze(1)).flatten()
    assert torch.equal(got, ((picked >> 9).double() + 0.5) * 2.0**-23)


# ---- range_penalty


def test_range_penalty_of_nothing(plain: Harness) -> None:
    (total,) = plain.call("range_penalty_finish", torch.empty(0), Out(1, dtype=F32), ints=[0])
    assert total.item() == 0.0


# ---- sample_mask

#: The seed in device memory, as on a GPU.
MASKS = [
    Mask(weights, dtype, weighted=False, base=False, pointer=True) for weights in (63, 64) for dtype in FLOAT_DTYPES
]


@pytest.mark.parametrize("case", MASKS, ids=Mask.id)
def test_sample_mask(plain: Harness, case: Mask) -> None:
    check_mask(plain, case)


# ---- masked_linear

#: The seed in device memory, as on a GPU; later samples of the noise; many rows, whose tiles warps share.
MASKED_LINEAR = [
    *[MaskedLinear((100, 40, 36), dtype, samples=3, first=5) for dtype in FLOAT_DTYPES],
    MaskedLinear((33, 70, 37), first=2**31),
    *[MaskedLinear((5, 9, 8), dtype, samples=3, tau=0.5, biased=False, pointer=True) for dtype in FLOAT_DTYPES],
    *[MaskedLinear((33, 70, 36), dtype) for dtype in FLOAT_DTYPES],
    *[MaskedLinear((4, 6, 8), needs=needs) for needs in [(True, False), (False, True)]],
    *[MaskedLinear((4, 6, inputs), special=True) for inputs in (5, 8)],
]


#: So many weights that blocks have larger tiles of their gradients, the last of which are not whole.
LARGE = [MaskedLinear((2, 1000, 508), dtype, samples=1) for dtype in (F32, torch.bfloat16)]


@pytest.mark.parametrize("case", LARGE, ids=MaskedLinear.id)
def test_masked_linear_with_many_weights(plain: Harness, case: MaskedLinear) -> None:
    check_masked_linear(plain, case)


@pytest.mark.parametrize("case", MASKED_LINEAR, ids=MaskedLinear.id)
def test_masked_linear(plain: Harness, case: MaskedLinear) -> None:
    check_masked_linear(plain, case, DRAWS)


# ---- mfnnr

#: Logits far apart; layers of several tiles, of widths that take 16 bytes at once and of others.
MFNNR = [
    SMALL_MFNNR,
    SMALL_MFNNR._replace(scale=1e4),
    SMALL_MFNNR._replace(scale=1e4, mode=GUMBEL, dtype=F64),
    Mfnnr((33, 3, 2, 8), (132, 40), (72,)),
    Mfnnr((5, 3, 2, 8), (136,), (72, 16), torch.bfloat16),
    Mfnnr((0, 3, 2, 8), (9,), (6,)),
]


@pytest.mark.parametrize("case", MFNNR, ids=Mfnnr.id)
def test_mfnnr(plain: Harness, case: Mfnnr) -> None:
    check_mfnnr(plain, case, draws=DRAWS)


@pytest.mark.parametrize("grad_of", ["out", "penalty"])
def test_mfnnr_with_one_gradient(plain: Harness, grad_of: str) -> None:
    check_mfnnr(plain, SMALL_MFNNR, grad_of, DRAWS)


def test_mfnnr_nan_row_stays_in_its_row(plain: Harness) -> None:
    x, tau = random(17, 3, 5), 1.0
    route, update = linears(15, [9, 12], F32, 1), linears(35, [6, 7, 24], F32, 2)
    clean = launched_forward(plain, SMALL_MFNNR, x, route, update, tau)
    x[4, 1, 2] = NAN
    x[9, 0, 0] = INF
    got = launched_forward(plain, SMALL_MFNNR, x, route, update, tau)
    assert got.out[4].isnan().all()
    assert got.penalty.isnan()
    rest = [i for i in range(17) if i not in (4, 9)]
    assert torch.equal(got.out[rest], clean.out[rest])
    want = mfnnr_reference(x, route, update, None, tau, None, SOFTMAX, True, 1.0)
    assert torch.equal(got.out.isnan(), want.out.flatten(1).isnan())


# ---- norm_pool, template_mix and its penalties


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_mixtures(plain: Harness, dtype: torch.dtype) -> None:
    check_mixtures(plain, dtype)


@pytest.mark.parametrize("sizes", [(215, 32, 40), (3, 700, 40), (4, 1030, 20)], ids=str)
def test_template_mix_beyond_the_shared_memory(plain: Harness, sizes: tuple[int, int, int]) -> None:
    """Weights of all rows, the gradient of all rows, weights of sixteen rows."""
    check_mix(plain, sizes, F32, 0)


def test_entropy_of_many_rows(plain: Harness) -> None:
    """Partial results are added up in two steps."""
    check_entropy(plain, 16 * 33, 2, F32)


# ---- sanitizers: the same checks, on small grids


def check_everything(harness: Harness, dtypes: Sequence[torch.dtype], mixings: Sequence[int] = (0, 1, 2)) -> None:
    for dtype in dtypes:
        check_multiplex(harness, Multiplex((5, 6, 7, 3), dtype, GUMBEL, pointers=True))
        check_multiplex(harness, Multiplex((3, 35, 2, 5), dtype))
        check_gate(harness, Gate((5, 7, 10), dtype))
        check_penalty(harness, [1, 0, 2049], dtype, 1.0)
        check_mask(harness, Mask(259, dtype, pointer=True))
        check_mask(harness, Mask(1028, dtype, samples=2, tau=0.5))
        check_masked_linear(harness, MaskedLinear((34, 66, 37), dtype, pointer=True))
        check_masked_linear(harness, MaskedLinear((5, 9, 68), dtype, tau=0.5, biased=False))
        check_mixtures(harness, dtype, mixings)
        check_mfnnr(harness, SMALL_MFNNR._replace(dtype=dtype))
    check_mfnnr(harness, Mfnnr((3, 5, 13, 11), (128,), (), mode=ARGMAX, context=False))
    check_mfnnr(harness, Mfnnr((35, 2, 2, 4), (36,), (8,)))


def test_address_and_undefined_behaviour_sanitizer(asan: Harness) -> None:
    check_everything(asan, FLOAT_DTYPES)
    for sizes in [(1, 1, 1, 1), *EMPTY]:
        check_multiplex(asan, Multiplex(sizes))
        check_gate(asan, Gate(sizes[:1] + sizes[2:]))
    check_mfnnr(asan, Mfnnr((1, 1, 1, 1)))
    for weights in (0, 1, 4):
        check_mask(asan, Mask(weights))
        check_mask(asan, Mask(weights, weighted=False, base=False))
    for shape in [(1, 1, 1), (64, 64, 64), (0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        check_masked_linear(asan, MaskedLinear(shape))


def test_thread_sanitizer(tsan: Harness) -> None:
    check_everything(tsan, (F32,), mixings=(0,))  # threads meet in the same places whichever it is
