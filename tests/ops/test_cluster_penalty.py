"""cluster_penalty: agreement with the plain formula in fp64, near one-hot rows and near templates too."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked

NAN, INF = float("nan"), float("inf")
everywhere = pytest.mark.parametrize("name", ["native", "reference"])
by_power = pytest.mark.parametrize("squared", [False, True])
SHAPES = [((16,), 4, 2000), ((3, 5), 17, 131), ((7,), 33, 1100), ((), 1, 5), ((3,), 2, 1), ((2, 3), 7, 67)]
EMPTY = [((0,), 3, 4), ((2,), 3, 0)]


def plain(logits: Tensor, bank: Tensor, squared: bool = False) -> Tensor:
    """As it is written, in fp64."""
    xi, bank = logits.double().softmax(-1), bank.double()  # [..., K], [K, P]
    apart = (xi @ bank).unsqueeze(-2) - bank  # [..., K, P]
    square = apart.square().sum(-1)
    return (xi * (square if squared else square.sqrt())).sum()


def draw(lead: tuple[int, ...], k: int, p: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*lead, k).to(dtype), torch.randn(k, p).to(dtype)]


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def near(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        error, size = (a.double() - b.double()).abs().max().item(), b.abs().max().item()
        assert error <= relative * size, f"result {i}: error {error:.3g}, largest {size:.3g}"


@by_power
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[tuple[int, ...], int, int], squared: bool) -> None:
    assert_agrees(partial(ops.cluster_penalty, squared=squared), lambda: draw(*shape), draws=4)


@by_power
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("backend")
def test_dtypes(dtype: torch.dtype, squared: bool) -> None:
    assert_agrees(partial(ops.cluster_penalty, squared=squared), lambda: draw((3,), 5, 37, dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert ops.cluster_penalty(*draw((3,), 5, 37, dtype)).dtype == expected


@given(
    rows=st.sampled_from([0, 1, 5]),
    k=st.sampled_from([1, 2, 5, 9]),
    p=st.sampled_from([0, 1, 19, 530]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS[:3])] * 2),
    squared=st.booleans(),
    seed=st.integers(0, 1000),
)
@pytest.mark.usefixtures("backend")
def test_any_shape_and_layout(rows, k, p, layouts, squared, seed) -> None:
    torch.manual_seed(seed)

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw((rows,), k, p), layouts, strict=True)]

    assert_agrees(partial(ops.cluster_penalty, squared=squared), inputs, draws=4, scale=1.0)


@everywhere
@by_power
@pytest.mark.parametrize("shape", [((3, 2), 5, 37), ((16,), 32, 520), ((4,), 2, 3)], ids=str)
def test_the_table_is_the_plain_formula(shape: tuple[tuple[int, ...], int, int], squared: bool, name: str) -> None:
    with fastmod.use_backend(name):
        inputs = draw(*shape)
        found = with_gradients(partial(ops.cluster_penalty, squared=squared), *inputs)
        near(found, with_gradients(partial(plain, squared=squared), *inputs), 2e-6)
        exact = [t.double() for t in inputs]
        found = with_gradients(partial(ops.cluster_penalty, squared=squared), *exact)
        near(found, with_gradients(partial(plain, squared=squared), *exact), 1e-13)


def near_one_hot(rows: int, k: int, left: float) -> Tensor:
    """Rows whose largest share is 1 - left, the others of different sizes."""
    shares = torch.rand(rows, k, dtype=torch.float64) + 0.1
    shares[torch.arange(rows), torch.arange(rows) % k] = 0
    shares *= left / shares.sum(-1, keepdim=True)
    shares[torch.arange(rows), torch.arange(rows) % k] = 1 - left
    return shares.log().float()


def by_differences(logits: Tensor, bank: Tensor, squared: bool = False) -> Tensor:
    """The plain formula in fp64 with mixture - template k = sum_j xi_j (template j - template k), which keeps
    its digits where the mixture is almost template k."""
    xi, bank = logits.double().softmax(-1), bank.double()  # [R, K], [K, P]
    others = xi[:, None] * (
        1 - torch.eye(xi.shape[-1])
    )  # [R, K, K]: j = k would add, and take away again, what is large
    apart = torch.einsum("rkj,jkp->rkp", others, bank[:, None] - bank)
    square = apart.square().sum(-1)
    return (xi * (square if squared else square.sqrt())).sum()


@everywhere
@by_power
@pytest.mark.parametrize("left", [1e-2, 1e-4, 1e-7, 1e-12])
def test_near_one_hot(left: float, squared: bool, name: str) -> None:
    logits, bank = near_one_hot(12, 8, left), torch.randn(8, 300)
    expected = with_gradients(partial(by_differences, squared=squared), logits, bank)
    with fastmod.use_backend(name):
        found = with_gradients(partial(ops.cluster_penalty, squared=squared), logits, bank)
    near(found, expected, 1e-6)


@everywhere
@by_power
@pytest.mark.parametrize("far", [1e4, INF])
def test_one_hot(far: float, squared: bool, name: str) -> None:
    logits, bank = torch.full((4, 5), -far), torch.randn(5, 30)
    logits[torch.arange(4), torch.arange(4)] = 0.0
    with fastmod.use_backend(name):
        value, of_logits, of_bank = with_gradients(partial(ops.cluster_penalty, squared=squared), logits, bank)
    assert value == 0
    assert torch.equal(of_logits, torch.zeros(4, 5)) and torch.equal(of_bank, torch.zeros(5, 30))


@everywhere
@by_power
def test_equal_templates(squared: bool, name: str) -> None:
    logits, bank = torch.randn(4, 5), torch.randn(1, 30).repeat(5, 1)
    penalty = partial(ops.cluster_penalty, squared=squared)
    with fastmod.use_backend(name):
        value, of_logits, of_bank = with_gradients(penalty, logits, bank)
        assert value == 0
        assert torch.equal(of_logits, torch.zeros(4, 5)) and torch.equal(of_bank, torch.zeros(5, 30))
        bank[3:] = torch.randn(2, 30)  # three equal ones among five
        found = with_gradients(penalty, logits, bank)
    near(found, with_gradients(partial(plain, squared=squared), logits, bank), 2e-6)


@everywhere
@by_power
def test_twice_differentiable_at_zero(squared: bool, name: str) -> None:
    """Second derivatives at distance 0 are finite."""
    logits = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(1, 4, dtype=torch.float64).repeat(3, 1).requires_grad_()
    with fastmod.use_backend(name):
        first = torch.autograd.grad(ops.cluster_penalty(logits, bank, squared), (logits, bank), create_graph=True)
        total = sum((g * torch.randn_like(g)).sum() for g in first)
        second = torch.autograd.grad(total, (logits, bank))
    assert all(g.isfinite().all() for g in (*first, *second))


@everywhere
@by_power
def test_near_templates_far_from_zero(squared: bool, name: str) -> None:
    """Norms minus products would have no digit left."""
    bank = 100 + 1e-3 * torch.randn(6, 200)
    logits = torch.randn(5, 6)
    with fastmod.use_backend(name):
        found = with_gradients(partial(ops.cluster_penalty, squared=squared), logits, bank)
    near(found, with_gradients(partial(plain, squared=squared), logits, bank), 1e-5)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any op makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *[t.numel() for t in tree_leaves(found) if isinstance(t, Tensor)]])
        return found


@everywhere
@by_power
def test_nothing_is_larger_than_the_bank(squared: bool, name: str) -> None:
    leaves = [t.requires_grad_() for t in draw((40,), 6, 500)]
    with fastmod.use_backend(name), Largest() as largest:
        ops.cluster_penalty(*leaves, squared).backward()
    assert largest.numel == 6 * 500  # and the rows' [40, 6, 6] are less


@by_power
@pytest.mark.usefixtures("backend")
def test_derivatives(squared: bool) -> None:
    inputs = [t.requires_grad_() for t in draw((2, 3), 4, 5, dtype=torch.float64)]
    function = partial(ops.cluster_penalty, squared=squared)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.usefixtures("backend")
def test_nan() -> None:
    for squared in (False, True):
        logits, bank = draw((3,), 5, 70)
        logits[1, 2] = NAN
        assert ops.cluster_penalty(logits, bank, squared).isnan()
        logits, bank = draw((3,), 5, 70)
        bank[1, 69] = NAN
        assert ops.cluster_penalty(logits, bank, squared).isnan()


def test_bits_do_not_depend_on_threads() -> None:
    inputs = draw((5,), 9, 40_001)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            table = torch.ops.fastmod.cluster_penalty_forward(inputs[1])
            results.append([table, torch.ops.fastmod.cluster_penalty_backward(table.sin(), inputs[1])])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_value_by_hand() -> None:
    """Two templates at distance 5: each is (1 - xi) * 5 from the mixture."""
    bank = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    for share in (0.5, 0.9):
        logits = torch.tensor([math.log(share / (1 - share)), 0.0])
        assert ops.cluster_penalty(logits, bank).item() == pytest.approx(2 * share * (1 - share) * 5)
        assert ops.cluster_penalty(logits, bank, True).item() == pytest.approx(share * (1 - share) * 25)


def test_opcheck() -> None:
    bank = laid_out(torch.randn(5, 7), "permuted")
    opchecked("cluster_penalty_forward", bank)
    opchecked("cluster_penalty_backward", laid_out(torch.randn(5, 5).double(), "permuted"), bank)


@pytest.mark.slow
def test_compile_fullgraph() -> None:
    inputs = [t.requires_grad_() for t in draw((3,), 4, 50)]
    expected = torch.autograd.grad(ops.cluster_penalty(*inputs).sin(), inputs)
    compiled = torch.compile(ops.cluster_penalty, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sin(), inputs), expected)


@everywhere
def test_autocast(name: str) -> None:
    logits, bank = draw((3,), 4, 50)
    expected = ops.cluster_penalty(logits, bank)
    with fastmod.use_backend(name), torch.autocast("cpu", torch.bfloat16):
        found = ops.cluster_penalty(logits, bank)
        ops.cluster_penalty(logits.bfloat16(), bank)
    assert found.dtype == torch.float32  # a penalty is a loss
    torch.testing.assert_close(found, expected)


L, B = torch.zeros(2, 3), torch.zeros(3, 5)
BAD = {
    "templates": (lambda: ops.cluster_penalty(L, B[:2]), ValueError, r"bank.*K = 3.*\[2, 5\]"),
    "bank rank": (lambda: ops.cluster_penalty(L, torch.zeros(3, 5, 1)), ValueError, r"bank.*\[K, P\].*\[3, 5, 1\]"),
    "no templates": (lambda: ops.cluster_penalty(L[:, :0], B[:0]), ValueError, "logits.*K >= 1"),
    "dtype": (lambda: ops.cluster_penalty(L, B.double()), TypeError, "bank.*float32.*float64"),
    "integers": (lambda: ops.cluster_penalty(L.long(), B), TypeError, "logits.*int64"),
    "not a tensor": (lambda: ops.cluster_penalty(L, [1.0]), TypeError, "bank.*list"),
    "device": (lambda: ops.cluster_penalty(L, B.to("meta")), RuntimeError, "bank.*cpu.*meta"),
    "squared": (lambda: ops.cluster_penalty(L, B, 2), TypeError, "squared.*int"),
}


@everywhere
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, name: str) -> None:
    call, error, pattern = BAD[case]
    with fastmod.use_backend(name), pytest.raises(error, match=pattern):
        call()


def test_the_kernels_refuse_too() -> None:
    for bank in (B[0], B[:0], B.long()):
        with pytest.raises((ValueError, TypeError)):
            torch.ops.fastmod.cluster_penalty_forward(bank)
    for grad in (torch.zeros(3, 3), torch.zeros(3, 2).double(), torch.zeros(9).double()):
        with pytest.raises((ValueError, TypeError)):
            torch.ops.fastmod.cluster_penalty_backward(grad, B)
