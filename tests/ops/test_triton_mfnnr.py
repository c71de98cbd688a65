"""The Triton launchers of mfnnr in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from fastmod.ops._checks import compute_dtype
from tests.helpers.interpreter import (
    ARGMAX,
    DTYPES,
    GUMBEL,
    INTERPRETED,
    QUIET,
    SOFTMAX,
    Gradient,
    awkward,
    close,
    draws_close,
    gradients,
    interpreted,
    normal,
    run_of,
)

if INTERPRETED:
    from fastmod.kernels.mfnnr import sections

    from fastmod import kernels

pytestmark = QUIET
mfnnr_op = import_module("fastmod.ops.mfnnr")
test_in_the_interpreter = run_of(__file__)


# For the gradient of tau behind the route FNN: one number per draw, and the FNN multiplies the error of one draw far
# beyond that of the others, so that luck decides how plain PyTorch fares in just that one.
TAU_FACTOR = 3.0


def fnn_params(sizes: Sequence[int], dtype: torch.dtype, seed: int, scale: float) -> list[Tensor]:
    params = []
    for i in range(len(sizes) - 1):
        params.append(normal((sizes[i + 1], sizes[i]), dtype, seed + 2 * i, scale / sizes[i] ** 0.5))
        params.append(normal((sizes[i + 1],), dtype, seed + 2 * i + 1, scale))
    return params


class Case:
    """An MFNNR with random parameters."""

    def __init__(
        self,
        lead: Sequence[int] = (5,),
        m: int = 3,
        n: int = 4,
        d: int = 5,
        hidden: Sequence[int] = (12,),
        context: bool = True,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.5,
        seed: int = 0,
    ) -> None:
        self.context, self.dtype = context, dtype
        self.x = normal((*lead, m, d), dtype, 1000 * seed)
        self.grad = normal((*lead, n, d), dtype, 1000 * seed + 1)
        self.route = fnn_params([m * d, *hidden, m * n], dtype, 1000 * seed + 100, scale)
        widths = [n * d + (m * d if context else 0), *hidden, n * d + n]
        self.update = fnn_params(widths, dtype, 1000 * seed + 200, scale)

    def check(
        self,
        mode: int = SOFTMAX,
        tau: Tensor | None = None,
        threshold: float = 0.5,
        need_x: bool = True,
        need_params: bool = True,
        use_out: bool = True,
        use_penalty: bool = True,
    ) -> Gradient:
        """Returns the gradient of tau, which is to be compared over several draws."""
        wide = compute_dtype(self.x)
        seed = torch.tensor(99) if mode == GUMBEL else None
        tau_value = 0.7
        params = [*self.route, *self.update]
        inputs = [self.x, *params] + ([] if tau is None else [tau])

        def reference(x: Tensor, *rest: Tensor) -> tuple[Any, Tensor]:
            route, update = rest[: len(self.route)], rest[len(self.route) : len(params)]
            temperature = None if tau is None else rest[-1]
            result = mfnnr_op.reference(x, route, update, temperature, tau_value, seed, mode, self.context, threshold)
            loss = 0.0 * result.out.to(compute_dtype(x)).nan_to_num().sum()
            if use_out:
                loss = loss + (result.out.to(compute_dtype(x)) * self.grad.to(compute_dtype(x))).sum()
            if use_penalty:
                loss = loss + 0.3 * result.penalty
            return result, loss

        result, grads = gradients(reference, inputs)
        result64, grads64 = gradients(reference, [t.double() for t in inputs])
        arguments = (self.x, self.route, self.update, tau, tau_value, seed, mode, self.context, threshold)
        out, penalty, logits, gate, saved = kernels.mfnnr_forward(*arguments, True)
        for name, got in zip(("out", "penalty", "logits", "gate"), (out, penalty, logits, gate), strict=True):
            close(name, got, getattr(result, name).detach(), getattr(result64, name).detach())
        fake = mfnnr_op.fake_forward(*arguments, True)
        for got, shape in zip((out, penalty, logits, gate, saved), fake, strict=True):
            assert (got.shape, got.dtype) == (shape.shape, shape.dtype)
        again = kernels.mfnnr_forward(*arguments, False)
        assert torch.equal(again[0], out)
        assert again[4].numel() == 0
        before = [t.clone() for t in (self.x, saved, self.grad, *params)]
        got_grads = kernels.mfnnr_backward(
            self.grad if use_out else None,
            torch.tensor(0.3, dtype=wide) if use_penalty else None,
            *arguments,
            saved,
            need_x,
            need_params,
        )
        for old, new in zip(before, (self.x, saved, self.grad, *params), strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)  # inputs are never written
        assert len(got_grads) == 2 + (len(params) if need_params else 0)
        if need_x:
            close("dx", got_grads[0], grads[0], grads64[0])
        else:
            assert got_grads[0].shape == (0,)
        for i, got in enumerate(got_grads[2:]):
            close(f"dparams[{i}]", got, grads[1 + i], grads64[1 + i])
        dtau = got_grads[1]
        if tau is None:
            assert dtau.item() == 0
            return dtau, dtau, dtau
        return dtau, grads[-1].to(wide), grads64[-1]


@interpreted
@pytest.mark.parametrize("mode", [SOFTMAX, GUMBEL, ARGMAX])
@pytest.mark.parametrize("context", [True, False])
def test_mfnnr(mode: int, context: bool) -> None:
    Case(context=context).check(mode)
    draws_close("dtau", lambda seed: Case(context=context, seed=seed).check(mode, tau=torch.tensor(0.6)), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"hidden": ()},
        {"hidden": (7, 9, 5)},
        {"hidden": (6, 5, 4, 3)},
        {"hidden": (100,)},
        {"hidden": (128,)},
        {"hidden": (130,)},
        {"hidden": (140, 7)},
        {"hidden": (150, 130), "context": False},
        {"m": 1, "n": 1, "d": 1, "hidden": (1,), "lead": (1,)},
        {"m": 5, "n": 3, "d": 40, "lead": (2,)},
        {"lead": (2, 3, 3)},
        {"lead": ()},
        {"lead": (0,)},
        {"lead": (0,), "hidden": (130,)},
    ],
    ids=str,
)
def test_mfnnr_shapes(case: dict[str, Any]) -> None:
    Case(**case).check()


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mfnnr_dtypes(dtype: torch.dtype, hidden: tuple[int, ...]) -> None:
    tau = torch.tensor(0.6, dtype=compute_dtype(torch.empty(0, dtype=dtype)))
    draws_close("dtau", lambda seed: Case(dtype=dtype, hidden=hidden, seed=seed).check(GUMBEL, tau=tau), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
@pytest.mark.parametrize(
    "what",
    [
        {"need_x": False},
        {"need_params": False},
        {"need_x": False, "need_params": False},
        {"use_out": False},
        {"use_penalty": False},
        {"use_out": False, "use_penalty": False},
        {"threshold": -1.0},
        {"threshold": 0.0},
    ],
    ids=str,
)
def test_mfnnr_partial(what: dict[str, Any], hidden: tuple[int, ...]) -> None:
    draws_close("dtau", lambda seed: Case(hidden=hidden, seed=seed).check(tau=torch.tensor(0.6), **what), TAU_FACTOR)


@interpreted
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_large_values(hidden: tuple[int, ...]) -> None:
    case = Case(hidden=hidden, scale=1.0)
    case.x = case.x * 1e4
    case.check(threshold=20.0)


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_not_finite_stays_in_its_batch_element(hidden: tuple[int, ...], value: float) -> None:
    case = Case(hidden=hidden)
    case.x[1, 0, 0] = value
    arguments = (case.route, case.update, None, 1.0, None, SOFTMAX, True, 0.5)
    expected = mfnnr_op.reference(case.x, *arguments)
    out, penalty, *_ = kernels.mfnnr_forward(case.x, *arguments, False)
    assert torch.equal(out.isfinite(), expected.out.isfinite())
    assert penalty.isfinite() == expected.penalty.isfinite()
    rest = [0, 2, 3, 4]
    torch.testing.assert_close(out[rest], expected.out[rest], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("kind", ["strided", "permuted", "expanded"])
@pytest.mark.parametrize("hidden", [(9,), (130,)])
def test_mfnnr_layouts(kind: str, hidden: tuple[int, ...]) -> None:
    case = Case(hidden=hidden)
    case.x, case.grad = awkward(case.x, kind), awkward(case.grad, kind)
    if kind != "expanded":
        case.route = [awkward(p, kind) for p in case.route]
        case.update = [awkward(p, kind) for p in case.update]
    case.check()


@interpreted
def test_mfnnr_saved_sections() -> None:
    case = Case(hidden=(6, 7))
    *_, logits, gate, saved = kernels.mfnnr_forward(
        case.x, case.route, case.update, None, 1.0, None, SOFTMAX, True, 0.5, True
    )
    cut = sections(saved, case.x, case.route, case.update)
    assert [t.shape[1] for t in cut.route] == [6, 7, 12]
    assert [t.shape[1] for t in cut.update] == [6, 7, 24]
    assert torch.equal(cut.route[-1].view_as(logits), logits)
    assert torch.equal(cut.update[-1][:, 20:], gate)


@interpreted
def test_repeats_are_bit_equal() -> None:
    case = Case()
    arguments = (case.x, case.route, case.update, None, 1.0, torch.tensor(5), GUMBEL, True, 0.5)
    results = []
    for _ in range(3):
        *out, saved = kernels.mfnnr_forward(*arguments, True)
        results.append(out + kernels.mfnnr_backward(case.grad, torch.tensor(1.0), *arguments, saved, True, True))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
