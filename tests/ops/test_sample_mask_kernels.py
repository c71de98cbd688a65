"""The kernels of sample_mask, bit for bit."""

from __future__ import annotations

import pytest
import torch

import fastmod
from fastmod import noise, ops
from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers import backends
from tests.helpers.agreement import LAYOUTS, assert_close, laid_out
from tests.helpers.cuda_host.checks import INF, SEED, Mask, assert_same_masks, mask_gradients, mask_logits
from tests.helpers.cuda_host.checks import random as random_values
from tests.ops.test_sample_mask import by_reference, logits_of, module

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
