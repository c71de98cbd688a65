"""masked_linear on every backend: agreement with fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out
from tests.helpers.mask_cases import SEEDS, TAUS, drawn, relaxed
from tests.helpers.masked_linear import INF, NAMES, NAN, draw, layer
from tests.helpers.masked_linear import one_row_limit as one_row_limit
from tests.ops.test_sample_mask import by_reference, module

pytestmark = pytest.mark.usefixtures("one_row_limit")


# samples, rows of each, in, out. The kernel takes 24 rows and 512 columns of the weight and 64 rows of x at a time; one
# has more of these pieces than partial sums of the gradient of x. Here more than 256 rows go sample by sample.
SHAPES = [
    (1, 1, 1, 1),
    (3, 1, 7, 5),
    (4, 5, 33, 64),
    (8, 2, 19, 65),
    (1, 9, 100, 130),
    (2, 3, 11, 1500),
    (3, 2, 3001, 47),
    (2, 131, 530, 26),
    (2, 257, 20, 26),
]


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("tensors", [3, 4, 5], ids=["no bias", "bias", "masked bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape: tuple[int, int, int, int], tensors: int) -> None:
    for tau in TAUS[: 5 - tensors + 1]:  # all three once
        assert_agrees(layer(shape[0], tau=tau), lambda: draw(*shape)[:tensors], draws=3)


@pytest.mark.parametrize("tensors", [3, 4, 5], ids=["no bias", "bias", "masked bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, tensors: int) -> None:
    assert_agrees(layer(4, tau=0.5), lambda: draw(4, 5, 13, 70, dtype)[:tensors])


# On GPUs: inputs that are no multiple of 4 lie across two groups of noise words; more than a tile of rows, inputs and
# outputs; rows of one tile of 16, of several, and of more than one warp has. Wide blocks; blocks that share the inputs.
BACKEND_SHAPES = [
    (1, 1, 1, 0), (2, 5, 7, 0), (2, 5, 7, 1), (17, 41, 37, 2), (33, 64, 33, 0), (64, 36, 70, 2), (65, 8, 5, 2),
    (130, 9, 12, 1),
    (0, 5, 7, 2), (2, 0, 7, 2), (2, 5, 0, 0),
]  # fmt: skip


# The last two, of wide blocks and of blocks that share the inputs, would take a minute in the interpreter.
MORE_SHAPES = [(33, 70, 36), (64, 66, 65), (32, 64, 64), (16, 67, 33), (3, 70, 530), (2, 260, 40)]


@pytest.mark.parametrize(("rows", "inputs", "outputs", "biases"), BACKEND_SHAPES)
def test_shapes_on_every_backend(backend: backends.Backend, rows: int, inputs: int, outputs: int, biases: int) -> None:
    draws = 1 if backend is backends.TRITON and inputs * outputs > 500 else 2
    assert_agrees(layer(3, seed=2**33 + 1), lambda: draw(3, rows, inputs, outputs)[: 3 + biases], draws=draws)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), MORE_SHAPES)
def test_more_shapes(backend: backends.Backend, rows: int, inputs: int, outputs: int) -> None:
    for tensors in (3, 4, 5):
        assert_agrees(layer(3, seed=2**33 + 1), lambda n=tensors: draw(3, rows, inputs, outputs)[:n], draws=2)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 8, 4), (2, 3, 7, 5)], ids=str)
def test_dtypes_on_every_backend(sizes: tuple[int, int, int, int], dtype: torch.dtype, tau: float) -> None:
    function = layer(sizes[0], tau=tau)
    assert_agrees(function, lambda: draw(*sizes, dtype), draws=2)
    assert_agrees(function, lambda: draw(*sizes, dtype)[:3], draws=2)


def check_layout(layout: str, dtype: torch.dtype) -> None:
    def inputs():
        x, *rest = (laid_out(t, layout) for t in draw(3, 5, 9, 6, dtype))
        return [x.unsqueeze(1), *rest]

    assert_agrees(layer(3), inputs, grad_layout=layout)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(layout: str) -> None:
    check_layout(layout, torch.float32)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts_of_other_dtypes(backend: backends.Backend, layout: str, dtype: torch.dtype) -> None:
    check_layout(layout, dtype)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("inputs", [6, 8])
def test_special_values(inputs: int) -> None:
    """NaN and infinite logits and weights do here what they do in plain PyTorch."""

    def drawn_specially():
        x, weight, logits = draw(3, 2, inputs, 12)[:3]
        logits[0, 0], logits[1, 1], logits[2, 2], logits[3, 3] = NAN, INF, -INF, 1e4
        weight[5, 5] = NAN
        return [x, weight, logits]

    assert_agrees(layer(3), drawn_specially, draws=2)
    # 0 * inf is NaN. In the gradient of the logits the samples' sum may be NaN or infinite: it depends on the order.
    x, weight, logits = drawn_specially()
    weight[4, 4] = INF

    def results() -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, logits)]
        out = layer(3)(*leaves)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    found, expected = results(), by_reference(results)
    torch.testing.assert_close(found[:3], expected[:3], equal_nan=True)
    assert torch.equal(found[3].isfinite(), expected[3].isfinite())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_samples_are_summed_in_fp32(dtype: torch.dtype) -> None:
    assert_agrees(layer(256), lambda: draw(256, 2, 13, 70, dtype), draws=3)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_formula(seed: int) -> None:
    """Written out with the masks of the contract: rows s * B / S and on meet mask s; biases have their own stream."""
    x, weight, logits, bias, bias_logits = draw(3, 4, 7, 5, torch.float64)
    masks = drawn(3, 35, seed).view(3, 5, 7) >= module.words_off(logits)
    kept = drawn(3, 5, seed, stream=2) >= module.words_off(bias_logits)
    parts = [x[4 * s : 4 * s + 4] @ (weight * masks[s]).T + bias * kept[s] for s in range(3)]
    found = layer(3, seed=seed)(x, weight, logits, bias, bias_logits)
    torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
def test_logits_get_the_gradient_of_the_relaxed_sample(tau: float) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 5, torch.float64)]
    x, weight, logits, bias, bias_logits = inputs
    out = layer(3, seed=-6, tau=tau)(*inputs)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (logits, bias_logits), grad)
    weights, biases = weight * relaxed(logits, 3, -6, tau), bias * relaxed(bias_logits, 3, -6, tau, stream=2)
    soft = torch.cat([x[4 * s : 4 * s + 4] @ weights[s].T + biases[s] for s in range(3)])
    expected = torch.autograd.grad(soft, (logits, bias_logits), grad)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("backend")
@given(
    sizes=st.tuples(
        st.sampled_from([1, 2, 3]),
        st.sampled_from([0, 1, 5, 257]),
        st.sampled_from([0, 1, 3, 19]),
        st.sampled_from([1, 7, 65]),
    ),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 6),
    tensors=st.integers(3, 5),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    tau=st.sampled_from(TAUS),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_layout_and_range(sizes, layouts, tensors, scale, tau, seed) -> None:
    torch.manual_seed(abs(seed) % 1000)

    def inputs(scale: float = scale):
        return [laid_out(t, kind) for t, kind in zip(draw(*sizes, scale=scale)[:tensors], layouts, strict=False)]

    run = layer(sizes[0], seed=seed, tau=tau)
    # The gradient of a logit passes |x| * |weight| * rows.
    scale = scale * scale * max(1, sizes[2]) * 4
    assert_agrees(run, inputs, draws=2 if backends.INTERPRETED else 4, scale=scale, grad_layout=layouts[5])


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
def test_dimensions_between_batch_and_features(backend: backends.Backend, rows: tuple[int, ...]) -> None:
    _, *rest = draw(4, 1, 7, 5)
    x = torch.randn(8, *rows, 7)
    run = layer(4)
    out = run(x, *rest)
    assert out.shape == (8, *rows, 5)
    torch.testing.assert_close(out, by_reference(run, x, *rest))
    assert torch.equal(out.flatten(0, -2), run(x.flatten(0, -2), *rest))
    grad = laid_out(torch.randn(out.shape), "permuted")
    assert_agrees(lambda *t: (run(*t) * grad).sum(), lambda: [laid_out(x, "permuted"), *rest], draws=3)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_gradients_without_masks_of_the_bias(backend: backends.Backend) -> None:
    values = draw(3, 4, 7, 5)[:4]
    for wanted in itertools.product([False, True], repeat=4):
        inputs = [t.clone().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        if any(wanted):
            layer(3)(*inputs).sum().backward()
        assert [t.grad is not None for t in inputs] == list(wanted)
        if wanted[3]:
            torch.testing.assert_close(inputs[3].grad, torch.full((5,), 12.0))


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_gradcheck(backend: backends.Backend) -> None:
    """Of what the output depends on smoothly: x, weight, bias; for logits see the relaxed sample."""
    x, weight, logits, bias, bias_logits = draw(3, 2, 4, 5, torch.float64)
    smooth = tuple(t.requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(lambda a, w, b: layer(3)(a, w, logits, b, bias_logits), smooth)
    assert torch.autograd.gradcheck(lambda a, w, b: layer(3)(a, w, logits, b), smooth)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", range(5), ids=NAMES)
def test_nan_and_inf_travel_as_in_torch(where: int, value: float) -> None:
    inputs = draw(2, 3, 5, 6)
    inputs[where].view(-1)[2:4] = value
    leaves = [t.requires_grad_() for t in inputs]
    grad = torch.randn(6, 6)

    def call() -> list[torch.Tensor]:
        out = layer(2)(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    results = [call(), by_reference(call)]
    torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
    # Gradients are summed before they meet the weight, there inf - inf is not NaN: not finite in the same places.
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(*(torch.nan_to_num(t, 1e30, 1e30, 1e30) for t in (found, expected)))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("value", [1e4, float("inf")])
def test_sure_masks(value: float, tau: float) -> None:
    x, weight, _, bias, _ = draw(3, 4, 7, 5)
    for sign, expected in ((1, torch.nn.functional.linear(x, weight, bias)), (-1, torch.zeros(12, 5))):
        logits = [torch.full_like(t, sign * value).requires_grad_() for t in (weight, bias)]
        out = layer(3, tau=tau)(x, weight, logits[0], bias, logits[1])
        torch.testing.assert_close(out, expected)
        for found in torch.autograd.grad(out.sum(), logits):
            assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gradients_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """Rounded per sample, their sum over many samples would be off by several units in the last place."""
    samples, out = 64, 40
    inputs = [torch.randn(samples * rows, 3), torch.randn(out, 3), torch.randn(out, 3), torch.randn(out)]
    x, weight, logits, bias = (t.to(dtype) for t in inputs)
    bias_logits, grad = torch.randn(out).to(dtype), torch.randn(samples * rows, out).to(dtype)

    def grads(backend: str, wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(wide).requires_grad_() for t in (bias, bias_logits)]
        with fastmod.use_backend(backend):
            found = fastmod.ops.masked_linear(
                x.to(wide), weight.to(wide), logits.to(wide), samples, bias=leaves[0], bias_logits=leaves[1], seed=1
            )
        return list(torch.autograd.grad(found, leaves, grad.to(wide)))

    for ours, exact in zip(grads("native", dtype), grads("reference", torch.float64), strict=True):
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((ours.double() - exact).abs() <= 1.01 * rounding + 1e-5 * exact.abs().max()).all()
