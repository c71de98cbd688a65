"""The Triton kernels of ``masked_linear`` in Triton's interpreter, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod import ops
from fastmod.ops._checks import FLOAT_DTYPES
from tests.helpers.agreement import assert_agrees, laid_out
from tests.helpers.cuda_host.checks import INF, NAN, SEED, random
from tests.helpers.interpreter import INTERPRETED, QUIET, drawing, interpreted, run_of, watched

pytestmark = QUIET
test_in_the_interpreter = run_of(__file__)

if INTERPRETED:
    from fastmod.kernels import masked_linear as kernels

    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what a kernel leaves unwritten shows

KERNELS = ("thresholds_kernel", "forward_kernel", "backward_x_kernel", "backward_weight_kernel")
SAMPLES = 3


def layer(x: Tensor, weight: Tensor, logits: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    named = dict(zip(("bias", "bias_logits"), rest, strict=False))
    return ops.masked_linear(x, weight, logits, SAMPLES, **{"seed": 2**33 + 1, **options}, **named)


def shapes_of(rows: int, inputs: int, outputs: int, biases: int = 2) -> list[tuple[int, ...]]:
    return [(SAMPLES * rows, inputs), (outputs, inputs), (outputs, inputs), *[(outputs,)] * biases]


@interpreted
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, tau: float) -> None:
    draw = drawing(dtype, (3, 2, 8), (4, 8), (4, 8), (4,), (4,))
    assert_agrees(lambda *inputs: layer(*inputs, tau=tau), draw, draws=2, backend="triton")


@interpreted
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "biases"),
    [
        (1, 1, 1, 0),
        (2, 5, 7, 0),  # inputs that are no multiple of 4: a word a weight
        (2, 5, 7, 1),
        (17, 41, 37, 2),  # more than a tile of rows, inputs and outputs
        (33, 64, 33, 0),
        (64, 36, 70, 2),  # the last number of rows that a program holds
        (65, 8, 5, 2),  # too many: sample by sample
        (0, 5, 7, 2),
        (2, 0, 7, 2),
        (2, 5, 0, 0),
    ],
)
def test_shapes(rows: int, inputs: int, outputs: int, biases: int) -> None:
    assert_agrees(layer, drawing(torch.float32, *shapes_of(rows, inputs, outputs, biases)), draws=2, backend="triton")


@interpreted
@pytest.mark.parametrize("layout", ["strided", "permuted", "expanded"])
def test_layouts(layout: str) -> None:
    def draw() -> list[Tensor]:
        return [laid_out(torch.randn(shape), layout) for shape in shapes_of(5, 9, 6)]

    assert_agrees(layer, draw, draws=2, backend="triton")


@interpreted
@pytest.mark.parametrize("inputs", [6, 8])
def test_special_values(inputs: int) -> None:
    """NaN and infinite logits and weights do here what they do in plain PyTorch."""

    def draw() -> list[Tensor]:
        x, weight, logits = (torch.randn(shape) for shape in shapes_of(2, inputs, 12, 0))
        logits[0, 0], logits[1, 1], logits[2, 2], logits[3, 3] = NAN, INF, -INF, 1e4
        weight[5, 5] = NAN
        return [x, weight, logits]

    assert_agrees(layer, draw, draws=2, backend="triton")
    # 0 * inf is NaN. In the gradient of the logits the samples' sum may be NaN or infinite: it depends on the order.
    x, weight, logits = draw()
    weight[4, 4] = INF
    found = []
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, weight, logits)]
        with fastmod.use_backend(backend):
            out = layer(*leaves)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(found[0][:3], found[1][:3], equal_nan=True)
    assert torch.equal(found[0][3].isfinite(), found[1][3].isfinite())


@interpreted
@pytest.mark.parametrize("seed", [0, -SEED, 2**62 + 5])
def test_masks_are_those_of_sample_mask(seed: int) -> None:
    """Unit inputs show the masked weights: the masks are the same, bit for bit."""
    inputs, outputs = 12, 9
    weight, logits = random(outputs, inputs, seed=1), random(outputs, inputs, scale=3.0, seed=2)
    x = torch.eye(inputs).repeat(SAMPLES, 1)
    with fastmod.use_backend("triton"):
        got = ops.masked_linear(x, weight, logits, SAMPLES, seed=seed).view(SAMPLES, inputs, outputs)
    with fastmod.use_backend("native"):
        want = ops.masked_weight(weight, logits, SAMPLES, seed=seed).transpose(1, 2)
    assert torch.equal(got, want)


@interpreted
@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_only_what_is_needed(needs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = watched(monkeypatch, kernels, *KERNELS)
    x, weight, logits = (random(*shape, seed=i) for i, shape in enumerate(shapes_of(3, 6, 5, 0)))
    arguments = (random(9, 5, seed=9), x, weight, logits, torch.tensor(SEED), SAMPLES, 1.0)
    every = kernels.masked_linear_backward(*arguments, (True,) * 3)
    launched.clear()
    found = kernels.masked_linear_backward(*arguments, needs)
    for needed, got, want in zip(needs, found, every, strict=True):
        assert torch.equal(got, want) if needed else got.numel() == 0
    assert ("backward_x_kernel" in launched) == bool(needs[0])
    assert ("backward_weight_kernel" in launched) == bool(needs[1] or needs[2])


@interpreted
def test_seed_by_pointer_is_seed_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers pass a seed of the CPU by value; on a GPU it comes by pointer."""
    x, weight, logits = (random(*shape, seed=i) for i, shape in enumerate(shapes_of(3, 6, 5, 0)))
    grad, seed = random(9, 5, seed=9), torch.tensor(-SEED)

    def results() -> list[Tensor]:
        out = kernels.masked_linear_forward(x, weight, logits, None, seed, SAMPLES)
        return [out, *kernels.masked_linear_backward(grad, x, weight, logits, seed, SAMPLES, 0.7, (True,) * 3)]

    by_value = results()
    monkeypatch.setattr(kernels, "seed_args", lambda seed: {"seed_ptr": seed, "seed_value": 0})
    assert all(map(torch.equal, results(), by_value))


@interpreted
def test_public_op_comes_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "triton" really runs these kernels, and none of them for many rows."""
    launched = watched(monkeypatch, kernels, *KERNELS)
    for rows, expected in ((64, set(KERNELS)), (65, set())):
        launched.clear()
        leaves = [torch.randn(shape).requires_grad_() for shape in shapes_of(rows, 5, 4)]
        with fastmod.use_backend("triton"):
            layer(*leaves).sum().backward()
        assert set(launched) == expected


@interpreted
def test_too_many_rows_are_refused() -> None:
    x, weight, logits = (torch.zeros(shape) for shape in shapes_of(65, 4, 2, 0))
    with pytest.raises(ValueError, match="x: expected at most 64 rows a sample, got 65"):
        kernels.masked_linear_forward(x, weight, logits, None, torch.tensor(0), SAMPLES)


@interpreted
def test_repeats_are_bit_equal() -> None:
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes_of(5, 9, 6)]
    results = []
    for _ in range(3):
        with fastmod.use_backend("triton"):
            results.append(torch.autograd.grad(layer(*leaves).square().sum(), leaves))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
