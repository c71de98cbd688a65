"""Bad input: an error that names the argument, never a crash, never garbage. Also straight at torch.ops."""

from __future__ import annotations

import random

import pytest
import torch

import fastmod
from fastmod import ops

ERRORS = (ValueError, TypeError, RuntimeError)
X, W = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
ROUTE = [torch.zeros(7, 12), torch.zeros(7), torch.zeros(6, 7), torch.zeros(6)]
UPDATE = [torch.zeros(7, 20), torch.zeros(7), torch.zeros(10, 7), torch.zeros(10)]


@pytest.fixture(params=["native", "reference"], autouse=True)
def backend(request):
    with fastmod.use_backend(request.param):
        yield request.param


def replaced(params: list[torch.Tensor], index: int, value: object) -> list[object]:
    return [value if i == index else p for i, p in enumerate(params)]


CASES = {
    "rank": (lambda: ops.multiplex(torch.zeros(3), W), ValueError, r"blocks.*\[\.\.\., M, D\].*\[3\]"),
    "no blocks": (lambda: ops.multiplex(torch.zeros(2, 0, 4), torch.zeros(2, 0, 5)), ValueError, "blocks.*M >= 1"),
    "sizes": (lambda: ops.multiplex(X, torch.zeros(2, 4, 5)), ValueError, r"logits.*\[2, 3\].*\[2, 4, 5\]"),
    "batch": (lambda: ops.multiplex(X, torch.zeros(1, 3, 5)), ValueError, "logits"),
    "dtype": (lambda: ops.multiplex(X, W.double()), TypeError, "logits.*float32.*float64"),
    "integers": (lambda: ops.multiplex(X.long(), W), TypeError, "blocks.*int64"),
    "complex": (lambda: ops.multiplex(X.to(torch.complex64), W), TypeError, "blocks.*complex64"),
    "not a tensor": (lambda: ops.multiplex([1.0], W), TypeError, "blocks.*list"),
    "sparse": (lambda: ops.multiplex(X.to_sparse(), W), TypeError, "blocks.*dense"),
    "device": (lambda: ops.multiplex(X, W.to("meta")), RuntimeError, "logits.*cpu.*meta"),
    "mode": (lambda: ops.multiplex(X, W, mode="hard"), ValueError, "mode.*softmax.*hard"),
    "tau shape": (lambda: ops.multiplex(X, W, tau=torch.ones(2)), TypeError, r"tau.*0-d.*\[2\]"),
    "tau type": (lambda: ops.multiplex(X, W, tau="1"), TypeError, "tau.*str"),
    "tau integer tensor": (lambda: ops.multiplex(X, W, tau=torch.tensor(1)), TypeError, "tau.*int64"),
    "gate shape": (lambda: ops.gated_residual(X, X, torch.zeros(2, 4)), ValueError, r"gate.*\[2, 3\].*\[2, 4\]"),
    "new shape": (lambda: ops.gated_residual(X, X[:1], X[..., 0]), ValueError, "new"),
    "gate rank": (lambda: ops.gated_residual(X, X, torch.tensor(1.0)), ValueError, "gate"),
    "nothing": (lambda: ops.range_penalty(), ValueError, "logits.*at least one"),
    "threshold": (lambda: ops.range_penalty(X, threshold=-1.0), ValueError, "threshold.*-1"),
    "threshold nan": (lambda: ops.range_penalty(X, threshold=float("nan")), ValueError, "threshold"),
    "penalty integers": (lambda: ops.range_penalty(X, X.int()), TypeError, r"logits\[1\].*int32"),
    "x rank": (lambda: ops.mfnnr(torch.zeros(4), ROUTE, UPDATE), ValueError, r"x.*\[\.\.\., M, D\]"),
    "odd list": (lambda: ops.mfnnr(X, ROUTE[:3], UPDATE), ValueError, "route.*pairs.*3"),
    "empty list": (lambda: ops.mfnnr(X, [], UPDATE), ValueError, "route.*pairs.*0"),
    "tensor as list": (lambda: ops.mfnnr(X, ROUTE[0], UPDATE), TypeError, "route.*Tensor"),
    "weight": (lambda: ops.mfnnr(X, replaced(ROUTE, 0, torch.zeros(7, 11)), UPDATE), ValueError, r"route\[0\].*12"),
    "bias": (lambda: ops.mfnnr(X, replaced(ROUTE, 1, torch.zeros(6)), UPDATE), ValueError, r"route\[1\].*\[7\]"),
    "outputs": (
        lambda: ops.mfnnr(X, [*ROUTE[:2], torch.zeros(5, 7), torch.zeros(5)], UPDATE),
        ValueError,
        r"route\[2\].*multiple of M = 3",
    ),
    "update": (
        lambda: ops.mfnnr(X, ROUTE, [*UPDATE[:2], torch.zeros(9, 7), torch.zeros(9)]),
        ValueError,
        r"update\[2\].*10",
    ),
    "no context": (lambda: ops.mfnnr(X, ROUTE, UPDATE, context=False), ValueError, r"update\[0\].*in = 8"),
    "param dtype": (
        lambda: ops.mfnnr(X, replaced(ROUTE, 0, ROUTE[0].double()), UPDATE),
        TypeError,
        r"route\[0\].*float32.*float64",
    ),
    "backend": (lambda: fastmod.use_backend("gpu"), ValueError, "backend.*native.*gpu"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, error, pattern = CASES[case]
    with pytest.raises(error, match=pattern):
        call()


ROUTE2 = [torch.zeros(7, 8), torch.zeros(7), torch.zeros(4, 7), torch.zeros(4)]
UPDATE2 = [torch.zeros(7, 16), torch.zeros(7), torch.zeros(10, 7), torch.zeros(10)]
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


class Unknown:
    def __repr__(self) -> str:
        return "Unknown()"


def smfr(**changed: object) -> object:
    layers = [(ROUTE, UPDATE), (ROUTE2, UPDATE2)]
    return ops.smfr(**{"x": X, "layers": layers, "mode": "gumbel", "taus": [ONE, ONE], "seeds": [1, 2], **changed})


def mfnnr(**changed: object) -> object:
    return ops.mfnnr(**{"x": X, "route": ROUTE, "update": UPDATE, "mode": "gumbel", "seed": 1, **changed})


# What no argument can be; a tensor is right for x, None and numbers for some, so these stand apart below.
WRONG_ANYWHERE = ["a", b"a", Unknown(), {1: 2}, {1}, len, [None], ["a", "a"], (1, 2, 3), torch.nn.Identity()]
NUMBERS = [0.5, -1, True, float("nan"), 2**70]
TENSORS = [X.long(), X.bool(), X.to(torch.complex64), X.to_sparse(), torch.zeros(2), torch.zeros(3, 0, 4)]
FNN = [None, *NUMBERS, *TENSORS, [], ROUTE[:3], ROUTE2[:2], UPDATE2, *[replaced(ROUTE, i, X) for i in range(4)]]
FNN += [replaced(ROUTE, 2, wrong) for wrong in (None, 1.0, ROUTE[2].double(), ROUTE[2].to("meta"), ROUTE[2][:5])]
FLAGS = [None, 0, 1, 0.5, ONE]
MODE = [None, *NUMBERS, ONE, "hard", ["softmax"]]
THRESHOLD = [-1, True, float("nan"), float("inf"), ONE, [1.0]]
SEED = [0.5, True, 2**70, ONE, torch.tensor([1]), torch.tensor(True), [1], torch.tensor(1, device="meta")]
TAU = [None, -1, 0, True, float("nan"), ZERO, -ONE, torch.ones(2), torch.tensor(1), ONE.to("meta"), [1.0]]
LAYERS = [
    *[None, X, 3, [], [ROUTE, UPDATE], [(ROUTE, UPDATE), (ROUTE2,)], [(ROUTE, UPDATE), None]],
    *[[(ROUTE, UPDATE), (ROUTE2, UPDATE2, UPDATE2)], [(ROUTE, UPDATE), (ROUTE2, None)], [(ROUTE, UPDATE), (X, X)]],
    *[[(ROUTE, UPDATE), (ROUTE, UPDATE)], [(ROUTE, UPDATE), (ROUTE2[2:], UPDATE2)], [(ROUTE, UPDATE), ("ab", "cd")]],
    *[[(fnn, UPDATE), (ROUTE2, UPDATE2)] for fnn in FNN],
    *[[(ROUTE, UPDATE), (ROUTE2, fnn)] for fnn in FNN if fnn is not UPDATE2],
]
LISTS = [0.5, True, ONE, torch.ones(2), [], [1], [1, 2, 3]]
BAD_ARGUMENTS = {
    (smfr, "x"): [None, *NUMBERS, *TENSORS, [X], X.double()],
    (smfr, "layers"): LAYERS,
    (smfr, "context"): FLAGS,
    (smfr, "mode"): MODE,
    (smfr, "threshold"): THRESHOLD,
    (smfr, "taus"): [*LISTS, *[[ONE, tau] for tau in [0.5, *TAU]]],
    (smfr, "seeds"): [*LISTS, *[[1, seed] for seed in [*SEED, "1"]]],
    (mfnnr, "x"): [None, *NUMBERS, *TENSORS, [X], X.double()],
    (mfnnr, "route"): FNN,
    (mfnnr, "update"): [fnn for fnn in FNN if fnn is not UPDATE2],
    (mfnnr, "context"): FLAGS,
    (mfnnr, "mode"): MODE,
    (mfnnr, "threshold"): THRESHOLD,
    (mfnnr, "tau"): TAU,
    (mfnnr, "seed"): SEED,
}


@pytest.mark.parametrize(("op", "name"), BAD_ARGUMENTS, ids=lambda v: getattr(v, "__name__", v))
def test_every_bad_argument_is_named(op, name: str) -> None:
    op()
    for value in [*BAD_ARGUMENTS[op, name], *WRONG_ANYWHERE]:
        with pytest.raises(ERRORS) as caught:
            op(**{name: value})
        message = str(caught.value)
        # x of another size or kind shows in what must fit it.
        fits = ("x", "route", "update", "layers") if name == "x" else (name,)
        assert message.startswith(fits) and "expected" in message, f"{name}={value!r}: {message}"


def test_triton_on_cpu_tensors_without_the_interpreter() -> None:
    with fastmod.use_backend("triton"), pytest.raises(RuntimeError, match=r"backend.*triton.*multiplex"):
        ops.multiplex(X, W)


def random_tensor(choose: random.Random) -> torch.Tensor | None:
    if choose.random() < 0.05:
        return None
    shape = [choose.choice([0, 1, 2, 3, 4, 5, 6, 7]) for _ in range(choose.choice([0, 1, 2, 2, 3, 3, 3, 4]))]
    dtype = choose.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.int64, torch.bool])
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("seed", range(20))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    choose = random.Random(seed)
    t = lambda: random_tensor(choose)  # noqa: E731
    many = lambda: [x for x in (t() for _ in range(choose.randint(0, 4))) if x is not None]  # noqa: E731
    raw = torch.ops.fastmod
    routing = lambda: (t(), choose.choice([1.0, 0.0, -1.0]), t(), choose.choice([0, 1, 2, 7, -1]))  # noqa: E731
    calls = [
        lambda: raw.multiplex_forward(t(), t(), *routing()),
        lambda: raw.multiplex_backward(t(), t(), t(), *routing()),
        lambda: raw.gated_residual_forward(t(), t(), t()),
        lambda: raw.gated_residual_backward(t(), t(), t(), t()),
        lambda: raw.range_penalty_forward(many(), choose.choice([20.0, -1.0])),
        lambda: raw.range_penalty_backward(t(), many(), 20.0),
        lambda: raw.mfnnr_forward(t(), many(), many(), *routing(), choose.random() < 0.5, 20.0, True),
        lambda: raw.mfnnr_backward(
            t(), t(), t(), many(), many(), *routing(), True, 20.0, t(), choose.random() < 0.5, choose.random() < 0.5
        ),
    ]
    for _ in range(400):
        try:
            choose.choice(calls)()
        except (*ERRORS, NotImplementedError, IndexError):
            continue


def test_fuzzed_near_misses_of_mfnnr() -> None:
    """One argument of a right call made wrong: always an error, never a result."""
    raw = torch.ops.fastmod
    good = [X, ROUTE, UPDATE, None, 1.0, None, 0, True, 20.0]
    raw.mfnnr_forward(*good, True)
    for which in (1, 2):
        for index in range(4):
            original = good[which][index]
            for wrong in (original[:-1], original.double(), original.unsqueeze(0), original.new_zeros(0)):
                with pytest.raises(ERRORS):
                    raw.mfnnr_forward(
                        *[replaced(a, index, wrong) if i == which else a for i, a in enumerate(good)], True
                    )
    saved = raw.mfnnr_forward(*good, True)[4]
    grad = torch.zeros(2, 2, 4)
    raw.mfnnr_backward(grad, None, *good, saved, True, True)
    for wrong_saved in (saved[:-1], saved.double(), saved[:0]):
        with pytest.raises(ERRORS):
            raw.mfnnr_backward(grad, None, *good, wrong_saved, True, True)
    with pytest.raises(ERRORS):
        raw.mfnnr_backward(grad[:1], None, *good, saved, True, True)
