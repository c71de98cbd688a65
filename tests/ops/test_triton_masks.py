"""The Triton launchers of the weight masks in Triton's interpreter: masks bit for bit, gradients against fp64."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod import noise, ops
from fastmod.ops._checks import FLOAT_DTYPES
from fastmod.ops.sample_mask import reference, words_off
from tests.helpers.agreement import assert_agrees
from tests.helpers.cuda_host.checks import (
    INF,
    SEED,
    Mask,
    assert_close,
    assert_same_masks,
    mask_gradients,
    mask_logits,
    random,
)
from tests.helpers.interpreter import INTERPRETED, QUIET, drawing, interpreted, run_of, watched

pytestmark = QUIET
test_in_the_interpreter = run_of(__file__)

if INTERPRETED:
    import triton
    import triton.language as tl
    from fastmod.kernels import sample_mask as sample_mask_kernels

    from fastmod import kernels

    noise_words, triton_words_off = sample_mask_kernels.noise_words, sample_mask_kernels.words_off

    @triton.jit
    def off_kernel(logits_ptr, out_ptr, SIZE: tl.constexpr):  # noqa: N803
        i = tl.arange(0, SIZE)
        tl.store(out_ptr + i, triton_words_off(tl.load(logits_ptr + i)))

    @triton.jit
    def words_kernel(out_ptr, seed_ptr, start_ptr, stream, QUADS: tl.constexpr):  # noqa: N803
        words = noise_words(tl.load(seed_ptr), tl.load(start_ptr), stream, QUADS, 16)
        tl.store(out_ptr + tl.arange(0, 16), words.to(tl.int64))

    # Plain torch's bf16 convolutions end in an illegal instruction where a virtual machine shows AMX but forbids it.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what a kernel leaves unwritten shows


# thresholds and noise


@interpreted
def test_thresholds_are_those_of_the_formula() -> None:
    """Of every size of logit, on both sides, and next to each step of the range reduction."""
    steps = (torch.arange(-47, 48) + 0.5) * 0.6931471805599453
    near = steps.float()[:, None] * (1 + torch.arange(-16, 17) * 2.0**-23)
    wide = torch.logspace(-45, 38.5, 40000, dtype=torch.float64).float()
    special = torch.tensor([0.0, -0.0, INF, -INF, float("nan"), 32.0, -32.0, 1e4, -1e4])
    logits = torch.cat([torch.linspace(-33, 33, 2**17), near.flatten(), wide, -wide, special])
    size = 2**18
    padded = torch.cat([logits, torch.zeros(size - len(logits))])
    out = torch.empty(size, dtype=torch.int32)
    off_kernel[(1,)](padded, out, SIZE=size)
    assert torch.equal(out.long(), words_off(padded))


@interpreted
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("start", [0, 3, 2**34 - 4, 2**40 + 4])
@pytest.mark.parametrize("stream", [0, noise.STREAM_MASK, noise.STREAM_MASK_BIAS, 2**32 - 1])
def test_words_are_those_of_the_contract(seed: int, start: int, stream: int) -> None:
    key, cpu = torch.tensor(seed), torch.device("cpu")
    want = noise.words(key, torch.Size([16]), stream=stream, device=cpu, start=start)
    for quads in (False, True) if start % 4 == 0 else (False,):
        out = torch.empty(16, dtype=torch.int64)
        words_kernel[(1,)](out, key, torch.tensor(start), stream, QUADS=quads)
        assert torch.equal(out, want)


# sample_mask


def check(case: Mask, laid: Callable[[Tensor], Tensor] = torch.clone) -> None:
    dtype, count = case.dtype, case.weights
    logits = laid(mask_logits(case))
    weight = laid(random(count, dtype=dtype, seed=1)) if case.weighted else None
    base = laid(random(count, dtype=dtype, seed=2)) if case.base else None
    grad = laid(random(case.samples, count, dtype=dtype, seed=3))
    arguments = (case.first, case.samples, torch.tensor(case.seed), case.stream)
    masks = kernels.sample_mask_forward(logits, weight, *arguments)
    assert masks.is_contiguous()
    assert_same_masks(masks, reference(logits, weight, *arguments, case.tau), "reference")
    assert_same_masks(masks, torch.ops.fastmod.sample_mask_forward(logits, weight, *arguments), "native on the CPU")
    got = kernels.sample_mask_backward(grad, logits, weight, *arguments, case.tau, base)
    assert got.is_contiguous()
    assert_close("dlogits", [(got, *mask_gradients(case, grad, logits, weight, base))], truncates=True)
    sure = logits.abs() >= 1e4
    assert torch.equal(got[sure], torch.zeros(count, dtype=dtype)[sure] if base is None else base[sure])


CASES = [
    *[Mask(weights, dtype, samples=2) for weights in (1, 4, 255, 1028) for dtype in FLOAT_DTYPES],
    *[Mask(weights, dtype, samples=2, tau=0.5) for weights in (255, 256) for dtype in FLOAT_DTYPES],
    *[Mask(weights, weighted=False, base=False, tau=tau) for weights in (63, 64) for tau in (1.0, 0.3)],
    Mask(0),
    Mask(0, weighted=False, base=False),
    *[Mask(weights, samples=1, first=2**34 + 1) for weights in (63, 64)],  # the second word of the counter
    *[Mask(weights, samples=1, first=1) for weights in (63, 64)],
    *[Mask(63, first=2, stream=noise.STREAM_MASK_BIAS, seed=seed) for seed in (0, -1, -(2**63), 2**32 + 1)],
    *[Mask(64, first=17, stream=stream, seed=-SEED) for stream in (noise.STREAM_MASK, noise.STREAM_MASK_BIAS)],
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=Mask.id)
def test_sample_mask(case: Mask) -> None:
    check(case)


def strided(tensor: Tensor) -> Tensor:
    """NaN between the elements."""
    wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@interpreted
@pytest.mark.parametrize("weights", [63, 64])
def test_sample_mask_strided(weights: int) -> None:
    check(Mask(weights), strided)


@interpreted
def test_sample_mask_expanded_gradient_and_shapes() -> None:
    logits, weight, seed = random(3, 1, 5), random(3, 1, 5, seed=1), torch.tensor(SEED)
    masks = kernels.sample_mask_forward(logits, weight, 0, 4, seed, 1)
    assert_same_masks(masks, reference(logits, weight, 0, 4, seed, 1, 1.0))
    got = kernels.sample_mask_backward(torch.ones(()).expand(4, 3, 1, 5), logits, weight, 0, 4, seed, 1, 1.0, None)
    want = kernels.sample_mask_backward(torch.ones(4, 3, 1, 5), logits, weight, 0, 4, seed, 1, 1.0, None)
    assert got.shape == logits.shape
    assert torch.equal(got, want)
    scalar = torch.tensor(0.3)
    assert_same_masks(
        kernels.sample_mask_forward(scalar, None, 0, 9, seed, 1), reference(scalar, None, 0, 9, seed, 1, 1.0)
    )


@interpreted
@pytest.mark.parametrize("weights", [7, 8])
def test_sample_mask_infinite_weight(weights: int) -> None:
    """0 * inf is NaN, as in torch."""
    logits, weight, seed = random(weights), torch.full((weights,), INF), torch.tensor(3)
    masks = kernels.sample_mask_forward(logits, weight, 0, 5, seed, 1)
    assert_same_masks(masks, reference(logits, weight, 0, 5, seed, 1, 1.0))
    assert masks.isnan().any() and masks.isinf().any()


@interpreted
@pytest.mark.parametrize("weights", [63, 64])
def test_seed_by_pointer_is_seed_by_value(weights: int) -> None:
    """The launchers pass a seed of the CPU by value; on a GPU it comes by pointer."""
    logits, seed = random(weights), torch.tensor(-SEED)
    grad = random(3, weights, seed=1)
    tile = sample_mask_kernels.tile(weights, tl.float32)
    noise_args: dict[str, Any] = {"seed_ptr": seed, "seed_value": 0, "stream": 1, "first": 2, "samples": 3}
    out = torch.empty(3, weights)
    sample_mask_kernels.forward_kernel[(1,)](
        logits_ptr=logits, weight_ptr=None, out_ptr=out, P=weights, **noise_args, **tile,
        **sample_mask_kernels.EXACT_OPTIONS,
    )  # fmt: skip
    assert torch.equal(out, kernels.sample_mask_forward(logits, None, 2, 3, seed, 1))
    out = torch.empty(weights)
    sample_mask_kernels.backward_kernel[(1,)](
        grad_ptr=grad, logits_ptr=logits, weight_ptr=None, base_ptr=None, dlogits_ptr=out, tau=1.0, P=weights,
        AT_ONE=True, **noise_args, **tile, **sample_mask_kernels.OPTIONS,
    )  # fmt: skip
    assert torch.equal(out, kernels.sample_mask_backward(grad, logits, None, 2, 3, seed, 1, 1.0, None))


@interpreted
def test_repeats_are_bit_equal() -> None:
    logits, weight, grad, seed = random(300), random(300, seed=1), random(3, 300, seed=2), torch.tensor(SEED)
    results = [kernels.sample_mask_backward(grad, logits, weight, 0, 3, seed, 1, 0.5, None) for _ in range(3)]
    assert all(torch.equal(results[0], other) for other in results[1:])


# the public ops with the backend "triton"


@interpreted
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_public_masks(dtype: torch.dtype, tau: float) -> None:
    assert_agrees(
        lambda logits: ops.sample_mask(logits, 3, seed=5, tau=tau), drawing(dtype, (5, 7)), draws=2, backend="triton"
    )
    assert_agrees(
        lambda weight, logits: ops.masked_weight(weight, logits, 3, seed=-5, tau=tau),
        drawing(dtype, (4, 6), (4, 6)),
        draws=2,
        backend="triton",
    )


@interpreted
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_masked_conv2d(dtype: torch.dtype, tau: float) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, *rest: Tensor) -> Tensor:
        names = ("bias", "bias_logits")[: len(rest)]
        return ops.masked_conv2d(
            x, weight, logits, 2, stride=(1, 2), padding=1, groups=2, seed=-7, tau=tau,
            **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    shapes = [(2, 2, 4, 4), (4, 1, 2, 3), (4, 1, 2, 3), (4,), (4,)]
    assert_agrees(layer, drawing(dtype, *shapes), draws=2, backend="triton")
    if dtype == torch.float32:
        shapes = [(4, 4, 5, 6), (6, 2, 3, 3), (6, 2, 3, 3)]
        assert_agrees(layer, drawing(dtype, *shapes), draws=2, backend="triton")


@interpreted
def test_public_masks_come_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "triton" really runs these kernels."""
    launched = watched(monkeypatch, sample_mask_kernels, "forward_kernel", "backward_kernel")
    image = random(4, 2, 4, 4)
    calls: list[tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = [
        ((3,), lambda logits: ops.sample_mask(logits, 2, seed=1)),
        ((3, 2, 2, 2), lambda logits: ops.masked_conv2d(image, torch.ones(3, 2, 2, 2), logits, 2, seed=1)),
    ]
    for shape, call in calls:
        launched.clear()
        with fastmod.use_backend("triton"):
            call(torch.zeros(shape, requires_grad=True)).sum().backward()
        assert set(launched) == {"forward_kernel", "backward_kernel"}
