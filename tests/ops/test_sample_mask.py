"""sample_mask, masked_weight on every backend: masks bit by bit those of the contract, gradients of relaxed samples."""

from __future__ import annotations

import importlib
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import noise, ops
from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers import backends
from tests.helpers.agreement import LAYOUTS, assert_agrees, assert_close, laid_out, opchecked
from tests.helpers.cuda_host.checks import INF, SEED, Mask, assert_same_masks, mask_gradients, mask_logits
from tests.helpers.cuda_host.checks import random as random_values
from tests.helpers.mask_cases import (
    DTYPES,
    SEEDS,
    TAUS,
    assert_message,
    drawn,
    fuzzed,
    in_a_process,
    random_seed,
    random_tau,
    random_tensor,
    relaxed,
    threads,
    wrong_numbers,
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


# ------------------------------------------------------------------------------------------------ kernels, bit for bit

KERNEL_CASES = [
    *[Mask(weights, dtype, samples=2) for weights in (1, 4, 255, 1028) for dtype in FLOAT_DTYPES],  # alone or in fours
    *[Mask(weights, dtype, samples=2, tau=0.5) for weights in (255, 256) for dtype in FLOAT_DTYPES],
    *[Mask(weights, weighted=False, base=False, tau=tau) for weights in (63, 64) for tau in (1.0, 0.3)],
    *[Mask(weights, weighted=False, tau=0.3) for weights in (63, 64)],
    Mask(0),
    Mask(0, weighted=False, base=False),
    *[Mask(weights, samples=1, first=2**34 + 1) for weights in (63, 64)],  # the second word of the counter
    *[Mask(weights, samples=1, first=1) for weights in (63, 64)],
    *[Mask(63, first=2, stream=noise.STREAM_MASK_BIAS, seed=seed) for seed in (0, -1, -(2**63), 2**32 + 1)],
    *[Mask(64, first=17, stream=stream, seed=-SEED) for stream in (noise.STREAM_MASK, noise.STREAM_MASK_BIAS)],
]


def check_kernels(case: Mask, shape: tuple[int, ...] | None = None, layout: str = "contiguous") -> None:
    """Logits whose masks hang on one bit of the threshold; a gradient to add to (``base``), which ops do not have."""
    dtype, shape = case.dtype, (case.weights,) if shape is None else shape
    logits = laid_out(mask_logits(case).view(shape), layout)
    weight = laid_out(random_values(*shape, dtype=dtype, seed=1), layout) if case.weighted else None
    base = laid_out(random_values(*shape, dtype=dtype, seed=2), layout) if case.base else None
    grad = laid_out(random_values(case.samples, *shape, dtype=dtype, seed=3), layout)
    arguments = (case.first, case.samples, torch.tensor(case.seed), case.stream)
    masks = backends.kernel("sample_mask_forward")(logits, weight, *arguments)
    assert masks.is_contiguous()
    assert_same_masks(masks, module.reference(logits, weight, *arguments, case.tau))
    got = backends.kernel("sample_mask_backward")(grad, logits, weight, *arguments, case.tau, base)
    assert got.is_contiguous()
    expected = mask_gradients(case, grad, logits, weight, base)
    assert_close("grad_logits", [(got, *expected)], truncates=backends.INTERPRETED)
    sure = logits.abs() >= 1e4
    assert torch.equal(got[sure], torch.zeros_like(logits)[sure] if base is None else base[sure])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", KERNEL_CASES, ids=Mask.id)
def test_kernels(case: Mask) -> None:
    check_kernels(case)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_kernels_and_layouts(layout: str, dtype: torch.dtype) -> None:
    for shape in ((64,), (3, 5, 7), (4, 6, 2), (0, 3), ()):
        case = Mask(torch.Size(shape).numel(), dtype, first=2)
        check_kernels(case, shape, layout)
        check_kernels(case._replace(weighted=False, base=False, tau=0.5), shape, layout)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("weights", [20001, 20004])
def test_many_thresholds(backend: backends.Backend, weights: int) -> None:
    """Each by its last bit; of Triton's see below."""
    check_kernels(Mask(weights, samples=1))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("weights", [7, 8])
def test_infinite_weights(weights: int) -> None:
    """0 * inf is NaN, as in torch."""
    logits, weight = random_values(weights), torch.full((weights,), INF)
    masks = ops.masked_weight(weight, logits, 5, seed=3)
    assert_same_masks(masks, by_reference(ops.masked_weight, weight, logits, 5, seed=3))
    assert masks.isnan().any() and masks.isinf().any()


@pytest.mark.usefixtures("backend")
def test_repeats_are_bit_equal() -> None:
    weight, logits = torch.randn(300, requires_grad=True), logits_of((300,)).requires_grad_()
    results = []
    for _ in range(3):
        out = ops.masked_weight(weight, logits, 3, seed=1, tau=0.5)
        results.append([out, *torch.autograd.grad(out.sum(), (weight, logits))])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# ----------------------------------------------------------------------------------------------------- Triton's kernels

if backends.INTERPRETED:
    import triton
    import triton.language as tl
    from fastmod.kernels import sample_mask as triton_kernels

    noise_words, triton_words_off = triton_kernels.noise_words, triton_kernels.words_off

    @triton.jit
    def off_kernel(logits_ptr, out_ptr, SIZE: tl.constexpr):  # noqa: N803
        i = tl.arange(0, SIZE)
        tl.store(out_ptr + i, triton_words_off(tl.load(logits_ptr + i)))

    @triton.jit
    def words_kernel(out_ptr, seed_ptr, start_ptr, stream, QUADS: tl.constexpr):  # noqa: N803
        words = noise_words(tl.load(seed_ptr), tl.load(start_ptr), stream, QUADS, 16)
        tl.store(out_ptr + tl.arange(0, 16), words.to(tl.int64))


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of every overflow
def test_triton_thresholds_are_those_of_the_formula() -> None:
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
    assert torch.equal(out.long(), module.words_off(padded))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("start", [0, 3, 2**34 - 4, 2**40 + 4])
@pytest.mark.parametrize("stream", [0, noise.STREAM_MASK, noise.STREAM_MASK_BIAS, 2**32 - 1])
def test_triton_words_are_those_of_the_contract(seed: int, start: int, stream: int) -> None:
    key, cpu = torch.tensor(seed), torch.device("cpu")
    want = noise.words(key, torch.Size([16]), stream=stream, device=cpu, start=start)
    for quads in (False, True) if start % 4 == 0 else (False,):
        out = torch.empty(16, dtype=torch.int64)
        words_kernel[(1,)](out, key, torch.tensor(start), stream, QUADS=quads)
        assert torch.equal(out, want)


@pytest.mark.interpreted
@pytest.mark.parametrize("weights", [63, 64])
def test_triton_takes_the_seed_by_pointer_as_by_value(weights: int) -> None:
    """The launchers pass a seed of the CPU by value; on a GPU it comes by pointer."""
    logits, seed = random_values(weights), torch.tensor(-SEED)
    grad = random_values(3, weights, seed=1)
    tile = triton_kernels.tile(weights, tl.float32)
    noise_args = {"seed_ptr": seed, "seed_value": 0, "stream": 1, "first": 2, "samples": 3}
    out = torch.empty(3, weights)
    triton_kernels.forward_kernel[(1,)](
        logits_ptr=logits, weight_ptr=None, out_ptr=out, P=weights, **noise_args, **tile,
        **triton_kernels.EXACT_OPTIONS,
    )  # fmt: skip
    assert torch.equal(out, triton_kernels.sample_mask_forward(logits, None, 2, 3, seed, 1))
    out = torch.empty(weights)
    triton_kernels.backward_kernel[(1,)](
        grad_ptr=grad, logits_ptr=logits, weight_ptr=None, base_ptr=None, dlogits_ptr=out, tau=1.0, P=weights,
        AT_ONE=True, **noise_args, **tile, **triton_kernels.OPTIONS,
    )  # fmt: skip
    assert torch.equal(out, triton_kernels.sample_mask_backward(grad, logits, None, 2, 3, seed, 1, 1.0, None))


@pytest.mark.interpreted
def test_triton_serves_masks_and_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "triton" really runs these kernels, for convolutions those that go sample by sample."""
    launched = backends.watched(monkeypatch, triton_kernels, "forward_kernel", "backward_kernel")
    image = random_values(4, 2, 4, 4)
    calls = [
        ((3,), lambda logits: ops.sample_mask(logits, 2, seed=1)),
        ((2, 1, 2, 2), lambda logits: ops.masked_conv2d(image, torch.ones(2, 1, 2, 2), logits, 2, seed=1, groups=2)),
    ]
    for shape, call in calls:
        launched.clear()
        with fastmod.use_backend("triton"):
            call(torch.zeros(shape, requires_grad=True)).sum().backward()
        assert set(launched) == {"forward_kernel", "backward_kernel"}


# ---------------------------------------------------------------------------------------------------- torch's machinery


def test_opcheck() -> None:
    logits, weight, seed = laid_out(logits_of((4, 5, 3)), "permuted"), torch.randn(4, 5, 3), torch.tensor(3)
    opchecked("sample_mask_forward", logits, None, 0, 3, seed, 1)
    opchecked("sample_mask_forward", logits, laid_out(weight, "permuted"), 2, 3, seed, 1)
    grad = laid_out(torch.randn(3, 4, 5, 3), "permuted")
    opchecked("sample_mask_backward", grad, logits, None, 0, 3, seed, 1, 0.5, None)
    opchecked("sample_mask_backward", grad, logits, laid_out(weight, "permuted"), 2, 3, seed, 1, 1.0, weight)


@pytest.mark.usefixtures("backend")
def test_two_backwards_and_untouched_inputs() -> None:
    weight, logits = torch.randn(33, 7, requires_grad=True), logits_of((33, 7)).requires_grad_()
    copies = weight.detach().clone(), logits.detach().clone()
    out = ops.masked_weight(weight, logits, 3, seed=1)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, (weight, logits), grad, retain_graph=True)
    second = torch.autograd.grad(out, (weight, logits), grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and torch.equal(weight, copies[0]) and torch.equal(logits, copies[1])


def test_fifty_equal_repeats() -> None:
    weight, logits = torch.randn(93, 101, requires_grad=True), logits_of((93, 101)).requires_grad_()
    results = []
    for _ in range(50):
        out = ops.masked_weight(weight, logits, 4, seed=1, tau=0.5)
        results.append([out, *torch.autograd.grad(out.sum(), (weight, logits))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_compile_fullgraph(tau: float, backend: str) -> None:
    torch._dynamo.reset()

    def function(w, t):
        return ops.sample_mask(t, 3, 5, tau), ops.masked_weight(w, t, 3, 6, tau)

    with fastmod.use_backend(backend):
        compiled = torch.compile(function, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for shape in ((6, 5), (9, 5)):  # the second makes the size dynamic
            inputs = [torch.randn(shape, requires_grad=True), logits_of(shape).requires_grad_()]
            eager, found = function(*inputs), compiled(*inputs)
            assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
            grads = [torch.autograd.grad([o.sin().sum() for o in outs], inputs) for outs in (eager, found)]
            torch.testing.assert_close(*grads)


def test_compiled_layers_draw_from_torchs_generator() -> None:
    torch._dynamo.reset()
    logits = logits_of((40, 5))
    compiled = torch.compile(lambda t: ops.sample_mask(t, 2), fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(logits), compiled(logits)
    torch.manual_seed(1)
    assert torch.equal(compiled(logits), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast_leaves_masks_alone(backend: str) -> None:
    logits = logits_of((6, 5)).requires_grad_()
    expected = ops.sample_mask(logits, 3, seed=1)
    with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        masks = ops.sample_mask(logits, 3, seed=1)
    assert masks.dtype == torch.float32 and torch.equal(masks, expected)
    masks.sum().backward()
    assert logits.grad.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- bad input

L = torch.zeros(3, 4)
CASES = {
    "integers": (lambda: ops.sample_mask(L.long(), 2), TypeError, "logits.*int64"),
    "complex": (lambda: ops.sample_mask(L.to(torch.complex64), 2), TypeError, "logits.*complex64"),
    "not a tensor": (lambda: ops.sample_mask([1.0], 2), TypeError, "logits.*list"),
    "sparse": (lambda: ops.sample_mask(L.to_sparse(), 2), TypeError, "logits.*dense"),
    **wrong_numbers(partial(ops.sample_mask, L)),
    "weight shape": (lambda: ops.masked_weight(L[:2], L, 2), ValueError, r"weight.*\[3, 4\].*\[2, 4\]"),
    "weight rank": (lambda: ops.masked_weight(L[0], L, 2), ValueError, "weight.*shape of logits"),
    "weight dtype": (lambda: ops.masked_weight(L.double(), L, 2), TypeError, "weight.*float32.*float64"),
    "weight integers": (lambda: ops.masked_weight(L.int(), L, 2), TypeError, "weight.*int32"),
    "weight device": (lambda: ops.masked_weight(L.to("meta"), L, 2), RuntimeError, "weight.*cpu.*meta"),
    "weight list": (lambda: ops.masked_weight([1.0], L, 2), TypeError, "weight.*list"),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)
    raw = torch.ops.fastmod
    t = lambda: random_tensor(choose, (3, 4), (0, 4), ())  # noqa: E731
    number = lambda *odd: choose.choice([1, 2, 3, *odd])  # noqa: E731
    tail = lambda: (number(0, -1, 2**61), number(0, -1), random_seed(choose), number(0, -1, 2**33))  # noqa: E731
    grad = lambda: random_tensor(choose, (2, 3, 4), (1, 3, 4), (3, 0, 4), (2,))  # noqa: E731
    calls = [
        lambda: raw.sample_mask_forward(t(), t(), *tail()),
        lambda: raw.sample_mask_backward(grad(), t(), t(), *tail(), random_tau(choose), t()),
    ]
    fuzzed(choose, calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_sample_mask import fuzz; fuzz({seed})")


def test_near_misses_of_the_raw_ops() -> None:
    """One argument of a right call made wrong: always an error, never a result."""
    raw, key = torch.ops.fastmod, torch.tensor(1)
    forward, backward = [L, L, 0, 2, key, 1], [torch.zeros(2, 3, 4), L, L, 0, 2, key, 1, 1.0, L]
    raw.sample_mask_forward(*forward)
    raw.sample_mask_backward(*backward)
    with pytest.raises(RuntimeError, match="meta"):
        raw.sample_mask_forward(L, L.to("meta"), 0, 2, key, 1)
    wrong = {
        0: [L[:2], L.double(), L.long(), torch.zeros(3, 3, 4)],
        1: [L[0], L.double(), L.unsqueeze(0)],
        2: [-1],
        3: [0, -1],
        4: [torch.tensor(1.0), torch.tensor([1])],
        5: [-1],
    }
    for index, values in wrong.items():
        for value in values:
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.sample_mask_forward(*forward[:index], value, *forward[index + 1 :])
    shifted = {index + 1: values for index, values in wrong.items()}
    for index, values in {**shifted, 0: [L, torch.zeros(3, 3, 4)], 7: [0.0], 8: [L[:2]]}.items():
        for value in values:
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.sample_mask_backward(*backward[:index], value, *backward[index + 1 :])
