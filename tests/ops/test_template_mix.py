"""template_mix: agreement with fp64, and the contract of the op."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastmod
from fastmod import ops
from fastmod.ops.template_mix import MIXINGS
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import same_bits

NAN, INF = float("nan"), float("inf")
by_mixing = pytest.mark.parametrize("mixing", MIXINGS)
SHAPES = [  # [..., K], P; rows by which the kernels choose what they keep: 16, 96, 144, more
    ((16,), 4, 2000), ((3, 5), 17, 131), ((7,), 33, 1100), ((40,), 5, 333), ((144,), 32, 130), ((150,), 32, 130),
    ((2,), 16, 64),
]  # fmt: skip
SMALL = [((), 1, 1), ((1,), 1, 5), ((3,), 5, 1), ((2, 3), 3, 67)]
EMPTY = [((0,), 3, 4), ((2, 0), 3, 4), ((2,), 3, 0)]


def draw(lead: tuple[int, ...], k: int, p: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(*lead, k) * scale).to(dtype), torch.randn(k, p).to(dtype)]


@by_mixing
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[tuple[int, ...], int, int], mixing: str) -> None:
    assert_agrees(partial(ops.template_mix, mixing=mixing), lambda: draw(*shape))


@by_mixing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.usefixtures("backend")
def test_dtypes(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, mixing: str) -> None:
    assert_agrees(partial(ops.template_mix, mixing=mixing), lambda: draw(*shape, dtype=dtype))


@given(
    rows=st.sampled_from([0, 1, 5]),
    k=st.sampled_from([1, 2, 15, 19]),
    p=st.sampled_from([0, 1, 19, 1030]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    mixing=st.sampled_from(MIXINGS),
    scale=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("backend")
def test_any_shape_layout_and_range(rows, k, p, layouts, mixing, scale, seed) -> None:
    torch.manual_seed(seed)

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw((rows,), k, p, scale=scale), layouts, strict=False)]

    function = partial(ops.template_mix, mixing=mixing)
    # Of templates that are all the same the logits' gradient is 0, and any sum may be right by luck: more draws.
    draws = 8 if layouts[1] == "expanded" else 4
    assert_agrees(function, inputs, scale=float(max(p, 1)), grad_layout=layouts[2], draws=draws)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@by_mixing
@pytest.mark.usefixtures("backend")
def test_logits_that_are_no_numbers(mixing: str, value: float) -> None:
    for place in (0, 4):  # the largest is looked for from the first on
        logits, bank = draw((3,), 5, 70)
        logits[1, place] = value
        found = ops.template_mix(logits, bank, mixing)
        with fastmod.use_backend("reference"):
            plain = ops.template_mix(logits, bank, mixing)
        torch.testing.assert_close(found, plain, equal_nan=True)
        assert found[[0, 2]].isfinite().all()
        if value != value:
            assert found[1].isnan().all()


@pytest.mark.usefixtures("backend")
def test_nan_in_the_bank_stays_in_its_column() -> None:
    logits, bank = draw((3,), 5, 70)
    bank[2, 7] = NAN
    found = ops.template_mix(logits, bank)
    assert found[:, 7].isnan().all() and found.isnan().sum() == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("backend")
def test_infinity_in_the_bank_as_in_torch(dtype: torch.dtype) -> None:
    """Where products are made of several, no infinity meets a zero that stands for a rest."""
    logits, bank = draw((3,), 5, 70, dtype)
    bank[2, 7], bank[4, 9] = INF, -INF
    logits[1] = torch.tensor([0.5, 0.25, -0.5, 1.0, 2.0])  # no rest
    found = ops.template_mix(logits, bank, "none")
    with fastmod.use_backend("reference"):
        plain = ops.template_mix(logits, bank, "none")
    odd = ~plain.isfinite()
    assert odd.sum() == 6 and torch.equal(found[odd], plain[odd])
    assert found[~odd].isfinite().all()


@by_mixing
@pytest.mark.usefixtures("backend")
def test_derivatives(mixing: str) -> None:
    inputs = [t.requires_grad_() for t in draw((2, 3), 4, 5, dtype=torch.float64)]
    function = partial(ops.template_mix, mixing=mixing)
    assert torch.autograd.gradcheck(function, inputs)
    if fastmod.backend.active() != "triton":  # it is plain PyTorch's anyway, and slow when interpreted
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("k", [4, 20])
@pytest.mark.usefixtures("backend")
def test_one_gradient_is_what_both_are(k: int) -> None:
    values = draw((7,), k, 1500)
    both = [t.clone().requires_grad_() for t in values]
    grad = torch.randn(7, 1500)
    expected = torch.autograd.grad(ops.template_mix(*both), both, grad)
    for i in range(2):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate(values)]
        (found,) = torch.autograd.grad(ops.template_mix(*leaves), leaves[i], grad)
        assert torch.equal(found, expected[i])


@pytest.mark.parametrize("k", [4, 32])
def test_bits_do_not_depend_on_threads(k: int) -> None:
    leaves = [t.requires_grad_() for t in draw((33,), k, 30_001)]
    grad = torch.randn(33, 30_001)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out = ops.template_mix(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_more_elements_than_32_bits_count() -> None:
    """Shapes alone: the memory is not to be had."""
    logits = torch.empty(3, 4, device="meta", requires_grad=True)
    bank = torch.empty(4, 2**31 + 1, device="meta", requires_grad=True)
    out = ops.template_mix(logits, bank)
    assert out.shape == (3, 2**31 + 1)
    out.sum().backward()
    assert bank.grad.shape == bank.shape and logits.grad.shape == logits.shape


def test_one_call_of_the_kernel_for_a_batch_of_logits() -> None:
    calls = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    logits, bank = draw((3, 2), 5, 7)
    with Counted():
        found = torch.vmap(ops.template_mix, (0, None))(logits, bank)
    assert sum("template_mix_forward" in name for name in calls) == 1
    assert torch.equal(found, ops.template_mix(logits, bank))


def test_opcheck() -> None:
    logits, bank = (laid_out(t, "permuted") for t in draw((3, 2), 5, 7))
    for mixing in range(3):
        opchecked("template_mix_forward", logits, bank, mixing)
        grad = laid_out(torch.randn(3, 2, 7), "permuted")
        opchecked("template_mix_backward", grad, logits, bank, mixing, [True, True])
    opchecked("template_mix_backward", grad, logits, bank, 0, [False, True])


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    inputs = [t.requires_grad_() for t in draw((3,), 4, 50)]
    expected = torch.autograd.grad(ops.template_mix(*inputs).sin().sum(), inputs)
    compiled = torch.compile(ops.template_mix, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    logits, bank = draw((3,), 4, 5)
    with fastmod.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        assert ops.template_mix(logits, bank).dtype == torch.bfloat16
        assert ops.template_mix(logits.bfloat16(), bank).dtype == torch.bfloat16
        assert ops.template_mix(logits.double(), bank.double()).dtype == torch.float64


L, B = torch.zeros(2, 3), torch.zeros(3, 5)
BAD = {
    "templates": (lambda: ops.template_mix(L, B[:2]), ValueError, r"bank.*K = 3.*\[2, 5\]"),
    "bank rank": (lambda: ops.template_mix(L, torch.zeros(3, 5, 1)), ValueError, r"bank.*\[K, P\].*\[3, 5, 1\]"),
    "bank vector": (lambda: ops.template_mix(L, torch.zeros(3)), ValueError, r"bank.*\[K, P\].*\[3\]"),
    "no templates": (lambda: ops.template_mix(L[:, :0], B[:0]), ValueError, "logits.*K >= 1"),
    "logits rank": (lambda: ops.template_mix(torch.tensor(1.0), B), ValueError, r"logits.*\[\.\.\., K\]"),
    "dtype": (lambda: ops.template_mix(L, B.double()), TypeError, "bank.*float32.*float64"),
    "integers": (lambda: ops.template_mix(L.long(), B), TypeError, "logits.*int64"),
    "not a tensor": (lambda: ops.template_mix([1.0], B), TypeError, "logits.*list"),
    "not a bank": (lambda: ops.template_mix(L, None), TypeError, "bank.*None"),
    "sparse": (lambda: ops.template_mix(L, B.to_sparse()), TypeError, "bank.*dense"),
    "device": (lambda: ops.template_mix(L, B.to("meta")), RuntimeError, "bank.*cpu.*meta"),
    "mixing": (lambda: ops.template_mix(L, B, "relu"), ValueError, "mixing.*softmax.*relu"),
    "mixing type": (lambda: ops.template_mix(L, B, 1), ValueError, "mixing.*softmax.*1"),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, backend: str) -> None:
    call, error, pattern = BAD[case]
    with fastmod.use_backend(backend), pytest.raises(error, match=pattern):
        call()


def test_the_kernels_refuse_too() -> None:
    op, back = torch.ops.fastmod.template_mix_forward, torch.ops.fastmod.template_mix_backward
    for arguments in ((L, B[:2], 0), (L, B, 3), (L, B, -1), (L.double(), B, 0), (L[:, :0], B[:0], 0), (L, B[0], 0)):
        with pytest.raises((ValueError, TypeError)):
            op(*arguments)
    for grad in (torch.zeros(2, 4), torch.zeros(3, 5), torch.zeros(10), torch.zeros(2, 5).double()):
        with pytest.raises((ValueError, TypeError)):
            back(grad, L, B, 0, [True, True])
