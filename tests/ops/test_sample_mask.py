"""sample_mask, masked_weight on every backend: masks bit by bit those of the contract, gradients of relaxed samples."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import noise, ops
from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers import backends
from tests.helpers.agreement import LAYOUTS, assert_agrees, laid_out
from tests.helpers.mask_cases import (
    DTYPES,
    SEEDS,
    TAUS,
    drawn,
    relaxed,
    threads,
)

module = importlib.import_module("fastmod.ops.sample_mask")  # the package's attribute of this name is the function
WORDS = module.WORDS
# Around the kernel's chunks of 1024 and pieces of 4096 weights; with odd sizes samples start amid four words.
SIZES = [(), (0,), (1,), (3, 0, 2), (5, 7), (1023,), (1025,), (4095,), (3, 2731), (4, 2049)]


def by_reference(function, *inputs, **options):
    with fastmod.use_backend("reference"):
        return function(*inputs, **options)


def logits_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 2.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


# ------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_masks_are_those_of_the_reference(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = logits_of(shape, dtype)
    for samples in (1, 3, 4, 8):
        expected = by_reference(ops.sample_mask, logits, samples, seed=samples)
        for count in (1, 2):
            with threads(count):
                masks = ops.sample_mask(logits, samples, seed=samples)
            assert masks.dtype == dtype and masks.shape == (samples, *shape)
            assert ((masks == 0) | (masks == 1)).all() and not masks.signbit().any()
            assert torch.equal(masks, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_masks_are_those_of_the_contract(samples: int, seed: int) -> None:
    logits = logits_of((11, 7))
    expected = drawn(samples, 77, seed).view(samples, 11, 7) >= module.words_off(logits)
    assert torch.equal(ops.sample_mask(logits, samples, seed=seed), expected.float())
    assert torch.equal(by_reference(ops.sample_mask, logits, samples, seed=seed), expected.float())


def test_logits_on_the_edge(isa: str) -> None:
    """Every logit such that its weight is just on or just off: one threshold that is off by one would show."""
    words = noise.words(torch.tensor(9), torch.Size([300_007]), stream=1, device=torch.device("cpu")) >> 9
    edge = ((WORDS - words).double() / (words.double() + 0.5)).clamp(min=1e-9).log().float()
    steps = torch.randint(-2, 3, edge.shape)  # some floats up or down
    logits = (edge.view(torch.int32) + steps.int()).view(torch.float32)
    masks = ops.sample_mask(logits, 1, seed=9)
    distance = (words - module.words_off(logits)).abs()
    assert (distance <= 1).float().mean() > 0.5, "the logits miss the edge"
    assert 0.2 < masks.mean() < 0.8
    assert torch.equal(masks, by_reference(ops.sample_mask, logits, 1, seed=9))


def test_any_bits_as_logits(isa: str) -> None:
    """Denormals, huge values, infinities, NaNs."""
    logits = torch.randint(-(2**31), 2**31, (300_001,), dtype=torch.int64).int().view(torch.float32)
    masks, expected = ops.sample_mask(logits, 2, seed=4), by_reference(ops.sample_mask, logits, 2, seed=4)
    assert torch.equal(masks.isnan(), logits.isnan().expand_as(masks))
    assert torch.equal(masks.nan_to_num(5.0), expected.nan_to_num(5.0))


def test_thresholds_are_the_sigmoid_to_the_resolution_of_the_noise() -> None:
    logits = torch.cat([torch.linspace(-40, 40, 400_001), torch.randn(100_000) * 1e-3])
    exact = torch.sigmoid(-logits.double()) * WORDS
    assert (module.words_off(logits) - exact).abs().max() <= 1.0
    assert module.words_off(torch.zeros(1)).item() == WORDS // 2


@pytest.mark.parametrize("logit", [-3.0, -1.0, 0.0, 0.5, 2.0])
def test_frequencies_follow_the_sigmoid(logit: float) -> None:
    p = torch.sigmoid(torch.tensor(logit, dtype=torch.float64)).item()
    bound = 5 * (p * (1 - p) / (16 * 2**20)) ** 0.5
    assert bound < 0.01 * min(p, 1 - p), "an error of one per cent would pass"
    masks = ops.sample_mask(torch.full((2**20,), logit), 16, seed=21)
    assert abs(masks.double().mean().item() - p) < bound


def test_samples_streams_and_weights_are_independent() -> None:
    masks = ops.sample_mask(torch.zeros(100_000), 4, seed=2) * 2 - 1
    other = module._sample(torch.zeros(100_000), None, 0, 4, 2, noise.STREAM_MASK_BIAS, 1.0) * 2 - 1
    correlations = torch.corrcoef(torch.cat([masks, other, masks[:1].roll(1)]))
    assert (correlations - torch.eye(9)).abs().max() < 5 / 100_000**0.5


# A group index just below 2**32 that is passed within the draw, one beyond it, one near the end of 64 bits.
# Not in Triton's interpreter, which forgets that arguments are declared as 64 bits; KERNEL_CASES has others for it.
@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize(("numel", "start"), [(1001, 2**34), (37, 3 * 2**34), (1001, 2**50), (515, 2**62)])
def test_far_out_in_the_index_space(backend: backends.Backend, numel: int, start: int) -> None:
    logits = logits_of((numel,)).requires_grad_()
    first = start // numel
    call = lambda: module._sample(logits, None, first, 3, 5, noise.STREAM_MASK, 1.0)  # noqa: E731
    masks, expected = call(), by_reference(call)
    assert torch.equal(masks, expected)
    assert torch.equal(masks.detach(), (drawn(3, numel, 5, first=first) >= module.words_off(logits)).float())
    grad = torch.randn(3, numel)
    found = [torch.autograd.grad(m, logits, grad)[0] for m in (masks, expected)]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("backend")
def test_first_skips_samples() -> None:
    logits = logits_of((13, 3))
    whole = ops.sample_mask(logits, 5, seed=8)
    assert torch.equal(module._sample(logits, None, 2, 3, 8, noise.STREAM_MASK, 1.0), whole[2:])


def test_noise_does_not_depend_on_threads_tau_or_dtype() -> None:
    logits = logits_of((57, 401), torch.bfloat16)
    whole = ops.sample_mask(logits, 3, seed=2)
    for count in (1, 2):
        with threads(count):
            for tau in TAUS:
                assert torch.equal(ops.sample_mask(logits, 3, seed=2, tau=tau), whole)
    for dtype in DTYPES:
        assert torch.equal(ops.sample_mask(logits.to(dtype), 3, seed=2), whole.to(dtype))


@pytest.mark.usefixtures("backend")
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 5, 17]), min_size=1, max_size=3).map(tuple),
    samples=st.sampled_from([1, 2, 3, 4, 8]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    tau=st.sampled_from(TAUS),
    seed=st.integers(-(2**63), 2**63 - 1),
    weighted=st.booleans(),
)
def test_any_shape_layout_and_range(shape, samples, layouts, scale, tau, seed, weighted) -> None:
    torch.manual_seed(abs(seed) % 1000)

    def inputs():
        values = [torch.randn(shape) * scale for _ in range(1 + weighted)]
        return [laid_out(value, kind) for value, kind in zip(values, layouts, strict=False)]

    def function(logits, *weight):
        if weight:
            return ops.masked_weight(*weight, logits, samples, seed, tau)
        return ops.sample_mask(logits, samples, seed, tau)

    masks = ops.masked_weight if weighted else ops.sample_mask
    values = inputs()[::-1]
    assert torch.equal(masks(*values, samples, seed), by_reference(masks, *values, samples, seed))
    assert_agrees(function, inputs, draws=2, scale=scale * max(1, len(shape)) * samples, grad_layout=layouts[2])


@pytest.mark.usefixtures("backend")
def test_seed_rules() -> None:
    logits = logits_of((64, 6))
    torch.manual_seed(4)
    first, second = (ops.sample_mask(logits, 2) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.sample_mask(logits, 2), first)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(by_reference(ops.sample_mask, logits, 2), first)
    assert torch.equal(*(ops.sample_mask(logits, 2, seed=s) for s in (-9, torch.tensor(-9))))


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("shape", [(), (5, 7), (1025,)], ids=str)
def test_gradient_is_that_of_the_relaxed_sample(shape: tuple[int, ...], tau: float) -> None:
    logits = logits_of(shape, torch.float64).requires_grad_()
    masks, soft = ops.sample_mask(logits, 3, seed=-6, tau=tau), relaxed(logits, 3, -6, tau)
    grad = torch.randn_like(masks)
    found, expected = (torch.autograd.grad(out, logits, grad)[0] for out in (masks, soft))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    reference = torch.autograd.grad(by_reference(ops.sample_mask, logits, 3, seed=-6, tau=tau), logits, grad)[0]
    torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("shape", [(1,), (33, 7), (2, 1031)], ids=str)
def test_matches_fp64(shape: tuple[int, ...], tau: float) -> None:
    assert_agrees(lambda t: ops.sample_mask(t, 3, 11, tau), lambda: [logits_of(shape)])
    assert_agrees(lambda w, t: ops.masked_weight(w, t, 3, 11, tau), lambda: [torch.randn(shape), logits_of(shape)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, tau: float) -> None:
    assert_agrees(
        lambda w, t: ops.masked_weight(w, t, 4, 3, tau), lambda: [logits_of((9, 13), dtype), logits_of((9, 13), dtype)]
    )


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)  # hundreds of calls
def test_gradcheck_of_the_weight(backend: backends.Backend) -> None:
    weight, logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), logits_of((4, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda w: ops.masked_weight(w, logits, 3, seed=1), (weight,))


@pytest.mark.usefixtures("backend")
def test_only_what_requires_a_gradient_gets_one() -> None:
    weight, logits = torch.randn(4, 5), logits_of((4, 5)).requires_grad_()
    ops.masked_weight(weight, logits, 3, seed=1).sum().backward()
    assert weight.grad is None and logits.grad is not None
    weight, logits = torch.randn(4, 5, requires_grad=True), logits_of((4, 5))
    ops.masked_weight(weight, logits, 3, seed=1).sum().backward()
    assert logits.grad is None
    torch.testing.assert_close(weight.grad, ops.sample_mask(logits, 3, seed=1).sum(0))
    assert not ops.sample_mask(logits, 3, seed=1).requires_grad


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [1e4, float("inf")])
def test_sure_masks(value: float, dtype: torch.dtype, tau: float) -> None:
    logits = torch.tensor([value, -value] * 20, dtype=dtype, requires_grad=True)
    masks = ops.sample_mask(logits, 3, seed=1, tau=tau)
    assert torch.equal(masks, torch.tensor([1.0, 0.0] * 20, dtype=dtype).expand(3, 40))
    assert torch.equal(torch.autograd.grad(masks.sum(), logits)[0], torch.zeros_like(logits))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan(dtype: torch.dtype, tau: float) -> None:
    logits = logits_of((50,), dtype)
    logits[7] = float("nan")
    logits.requires_grad_()
    weight = torch.ones(50, dtype=dtype, requires_grad=True)
    for out in (ops.sample_mask(logits, 3, 1, tau), ops.masked_weight(weight, logits, 3, 1, tau)):
        others = torch.arange(50) != 7
        assert out[:, 7].isnan().all() and out[:, others].isfinite().all()
        grad = torch.autograd.grad(out.sum(), logits, retain_graph=True)[0]
        assert grad[7].isnan() and grad[others].isfinite().all()
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0].isnan(), ~others)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_weights_travel_as_in_torch(value: float) -> None:
    weight, logits = torch.randn(40), logits_of((40,))
    weight[3:23] = value
    call = lambda: ops.masked_weight(weight, logits, 4, seed=1)  # noqa: E731
    torch.testing.assert_close(call(), by_reference(call), rtol=0, atol=0, equal_nan=True)
