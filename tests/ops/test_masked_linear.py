"""masked_linear on every backend: agreement with fp64, and the contract of the op."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import isas
from tests.helpers.mask_cases import (
    SEEDS,
    TAUS,
    assert_message,
    drawn,
    fuzzed,
    in_a_process,
    random_needs,
    random_seed,
    random_tau,
    random_tensor,
    relaxed,
    threads,
    wrong_numbers,
)
from tests.ops.test_sample_mask import by_reference, module

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
NAN, INF, SEED = float("nan"), float("inf"), 0x1234_5678_9ABC_DEF0
NAMES = ("x", "weight", "logits", "bias", "bias_logits")
MASKED_LINEAR = import_module("fastmod.ops.masked_linear")
ROW_LIMIT = MASKED_LINEAR.row_limit


def native() -> bool:
    """Whether the CPU's own kernels serve; GPU kernels take at most 64 rows a sample."""
    chosen = backends.current()
    return chosen is None or chosen.name.startswith("native-")


@pytest.fixture(scope="module", autouse=True)
def _one_row_limit() -> Iterator[None]:
    """The same for all weights, so that small ones go both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton: 256 if native() else 64)
        yield


def draw(
    samples: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[torch.Tensor]:
    """x, weight, logits, bias, bias_logits."""
    shapes = [(samples * rows, inputs), (outputs, inputs), (outputs, inputs), (outputs,), (outputs,)]
    return [(torch.randn(shape) * scale).to(dtype) for shape in shapes]


def layer(samples: int, *, seed: int = 11, tau: float = 1.0):
    """masked_linear of three to five tensors."""

    def function(x, weight, logits, bias=None, bias_logits=None):
        return ops.masked_linear(x, weight, logits, samples, bias=bias, bias_logits=bias_logits, seed=seed, tau=tau)

    return function


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


# On GPUs: inputs that are no multiple of 4 take a word a weight; more than a tile of rows, inputs and outputs; the last
# number of rows that a program holds, and one more, which goes sample by sample.
BACKEND_SHAPES = [
    (1, 1, 1, 0), (2, 5, 7, 0), (2, 5, 7, 1), (17, 41, 37, 2), (33, 64, 33, 0), (64, 36, 70, 2), (65, 8, 5, 2),
    (0, 5, 7, 2), (2, 0, 7, 2), (2, 5, 0, 0),
]  # fmt: skip


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("rows", "inputs", "outputs", "biases"), BACKEND_SHAPES)
def test_shapes_on_every_backend(rows: int, inputs: int, outputs: int, biases: int) -> None:
    assert_agrees(layer(3, seed=2**33 + 1), lambda: draw(3, rows, inputs, outputs)[: 3 + biases], draws=2)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(33, 70, 36), (64, 66, 65), (32, 64, 64), (16, 67, 33)])
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", [0, -SEED, 2**62 + 5])
def test_masks_are_those_of_sample_mask(seed: int) -> None:
    """Unit inputs show the masked weights: the masks are the same, bit for bit."""
    _, weight, logits, *_ = draw(1, 1, 12, 9, scale=3.0)
    got = ops.masked_linear(torch.eye(12).repeat(3, 1), weight, logits, 3, seed=seed).view(3, 12, 9)
    assert torch.equal(got, by_reference(ops.masked_weight, weight, logits, 3, seed=seed).transpose(1, 2))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_kernels_compute_only_what_is_needed(needs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, logits = draw(3, 3, 6, 5)[:3]
    arguments = (torch.randn(9, 5), x, weight, logits, torch.tensor(SEED), 3, 1.0)
    backward = backends.kernel("masked_linear_backward")
    every = backward(*arguments, [True] * 3)
    launched = []
    if backends.INTERPRETED:
        launched = backends.watched(monkeypatch, import_module("fastmod.kernels.masked_linear"), *TRITON_KERNELS)
    for needed, got, want in zip(needs, backward(*arguments, needs), every, strict=True):
        assert torch.equal(got, want) if needed else got.numel() == 0
    if backends.INTERPRETED:
        assert ("backward_x_kernel" in launched) == needs[0]
        assert ("backward_weight_kernel" in launched) == (needs[1] or needs[2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0)], ids=str)
def test_kernels_of_nothing(shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    x, weight, biases, seed = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(2, outputs), SEED
    key = torch.tensor(seed)
    out = backends.kernel("masked_linear_forward")(x, weight, weight, biases, key, 2)
    assert torch.equal(out, biases.repeat_interleave(rows // 2, 0))
    found = backends.kernel("masked_linear_backward")(out, x, weight, weight, key, 2, 1.0, [True] * 3)
    assert all(torch.equal(got, torch.zeros_like(like)) for got, like in zip(found, (x, weight, weight), strict=True))


@pytest.mark.parametrize("backend", backends.parameters("native"), indirect=True)
def test_too_many_rows_are_refused(backend: backends.Backend) -> None:
    x, weight, logits = draw(3, 65, 4, 2)[:3]
    with pytest.raises(ValueError, match="x: expected at most 64 rows a sample, got 65"):
        backends.kernel("masked_linear_forward")(x, weight, logits, None, torch.tensor(0), 3)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_many_rows_without_inputs(backend: backends.Backend) -> None:
    x, weight, logits, bias, _ = draw(3, 65, 0, 5)
    assert torch.equal(layer(3)(x, weight, logits, bias), bias.expand(195, 5))


@pytest.mark.usefixtures("backend")
def test_repeats_are_bit_equal() -> None:
    leaves = [t.requires_grad_() for t in draw(3, 5, 9, 6)]
    results = [torch.autograd.grad(layer(3)(*leaves).square().sum(), leaves) for _ in range(3)]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


TRITON_KERNELS = ("thresholds_kernel", "forward_kernel", "backward_x_kernel", "backward_weight_kernel")


@pytest.mark.interpreted
def test_triton_takes_the_seed_by_pointer_as_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers pass a seed of the CPU by value; on a GPU it comes by pointer."""
    kernels = import_module("fastmod.kernels.masked_linear")
    (x, weight, logits), grad, seed = draw(3, 3, 6, 5)[:3], torch.randn(9, 5), torch.tensor(-SEED)

    def results() -> list[torch.Tensor]:
        out = kernels.masked_linear_forward(x, weight, logits, None, seed, 3)
        return [out, *kernels.masked_linear_backward(grad, x, weight, logits, seed, 3, 0.7, (True,) * 3)]

    by_value = results()
    monkeypatch.setattr(kernels, "seed_args", lambda seed: {"seed_ptr": seed, "seed_value": 0})
    assert all(map(torch.equal, results(), by_value))


@pytest.mark.interpreted
def test_triton_serves_few_rows_and_none_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "triton" really runs these kernels, and none of them for many rows."""
    launched = backends.watched(monkeypatch, import_module("fastmod.kernels.masked_linear"), *TRITON_KERNELS)
    monkeypatch.setattr(MASKED_LINEAR, "row_limit", ROW_LIMIT)
    for rows, expected in ((64, set(TRITON_KERNELS)), (65, set())):
        launched.clear()
        with fastmod.use_backend("triton"):
            layer(3)(*[t.requires_grad_() for t in draw(3, rows, 5, 4)]).sum().backward()
        assert set(launched) == expected


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
    assume(native() or sizes[2] > 0 or sizes[1] <= 64)  # see test_many_rows_without_inputs
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


def no_outputs() -> None:
    x, weight, logits, bias, bias_logits = (t.requires_grad_() for t in draw(2, 2, 3, 0))
    out = layer(2)(x, weight, logits, bias, bias_logits)
    assert out.shape == (4, 0)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x)) and weight.grad.shape == (0, 3)


def test_no_outputs() -> None:
    in_a_process("from tests.ops.test_masked_linear import no_outputs; no_outputs()")


@pytest.mark.parametrize("sizes", [(3, 0, 4, 5), (3, 2, 0, 5)], ids=["batch", "in"])
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    inputs = [t.requires_grad_() for t in draw(*sizes)]
    out = layer(3)(*inputs)
    assert out.shape == (3 * sizes[1], 5)
    out.sum().backward()
    for tensor in inputs[:3]:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
    with fastmod.use_backend("reference"):
        torch.testing.assert_close(out, layer(3)(*inputs))


def test_gradients_only_where_they_are_required() -> None:
    values = draw(3, 4, 7, 70)
    everything = [t.clone().requires_grad_() for t in values]
    grad = torch.randn(12, 70)
    layer(3)(*everything).backward(grad)
    for wanted in itertools.product([False, True], repeat=5):
        inputs = [t.clone().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        out = layer(3)(*inputs)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(grad)
        for tensor, other, want in zip(inputs, everything, wanted, strict=True):
            assert (tensor.grad is None) != want
            assert not want or torch.equal(tensor.grad, other.grad)
        # The kernel itself computes nothing that nobody asked for.
        found = torch.ops.fastmod.masked_linear_backward(grad, *values[:3], torch.tensor(11), 3, 1.0, wanted[:3])
        assert [t.numel() for t in found] == [t.numel() if w else 0 for t, w in zip(values, wanted[:3], strict=False)]


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


def test_threads_do_not_change_a_bit() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 8, 300, 700)]
    results = []
    for count in (1, 2):
        with threads(count):
            out = layer(4)(*inputs)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Not getrusage: what that tells of a process begins with the peak of the one that started it.
PEAK = """
import re, torch, fastmod
from tests.ops.test_masked_linear import draw, layer
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
torch.set_num_threads(2)
def step(inputs):
    layer(4)(*[t.requires_grad_() for t in inputs]).sum().backward()
with fastmod.use_backend({backend!r}):
    step(draw(4, 2, 70, 130))  # threads, workspaces and code are there before the count begins
    inputs = draw(4, 32, 2000, 2000)[:3]
    before = peak()
    step(inputs)
print(peak() - before)
"""


def test_peak_memory() -> None:
    """At B 128, 2000 x 2000, S 4 the four masked weights alone are 61 MB and the noise as much again."""
    ours, plain = (float(in_a_process(PEAK.format(backend=name))) for name in ("native", "reference"))
    assert plain > 300, f"plain PyTorch takes {plain:.0f} MB only: the measurement is broken"
    assert ours <= 100, f"{ours:.0f} MB"


# ---------------------------------------------------------------------------------------------------- torch's machinery


@pytest.mark.usefixtures("backend")
def test_seed_rules() -> None:
    inputs = draw(2, 3, 7, 5)
    torch.manual_seed(4)
    first, second = (ops.masked_linear(*inputs[:3], 2) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.masked_linear(*inputs[:3], 2), first)
    assert not torch.equal(first, second)
    assert torch.equal(*(ops.masked_linear(*inputs[:3], 2, seed=s) for s in (-9, torch.tensor(-9))))


def test_opcheck() -> None:
    x, weight, logits, bias, bias_logits = draw(3, 2, 4, 5)
    permuted, key = [laid_out(t, "permuted") for t in (x, weight, logits)], torch.tensor(3)
    opchecked("masked_linear_forward", *permuted, torch.randn(3, 5), key, 3)
    opchecked("masked_linear_forward", torch.randn(3, 2, 4), weight, logits, None, key, 3)
    grad = laid_out(torch.randn(6, 5), "permuted")
    for needs in ([True, True, True], [False, True, False]):
        opchecked("masked_linear_backward", grad, *permuted, key, 3, 0.5, needs)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_two_backwards_and_untouched_inputs(backend: backends.Backend) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 70)]
    copies = [t.detach().clone() for t in inputs]
    out = layer(3)(*inputs)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_fifty_equal_repeats() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 8, 100, 200)]
    results = []
    for _ in range(50):
        out = layer(4, tau=0.5)(*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("tensors", [3, 5])
def test_compile_fullgraph(tensors: int, backend: str) -> None:
    torch._dynamo.reset()
    run = layer(3, tau=0.5)
    with fastmod.use_backend(backend):
        compiled = torch.compile(run, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for rows in (2, 4):  # the second makes the batch dynamic
            inputs = [t.requires_grad_() for t in draw(3, rows, 7, 5)[:tensors]]
            eager, found = run(*inputs), compiled(*inputs)
            torch.testing.assert_close(found, eager)
            torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in (found, eager)])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 5)]
    with fastmod.use_backend(backend):
        expected = layer(3)(*[t.bfloat16() for t in inputs])
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(3)(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


# --------------------------------------------------------------------------------------------------------- bad input

X, W, L, B = torch.zeros(6, 4), torch.zeros(5, 4), torch.zeros(5, 4), torch.zeros(5)
CASES = {
    "batch": (lambda: ops.masked_linear(X, W, L, 4), ValueError, r"x.*multiple of 4 samples.*\[6, 4\]"),
    "rank of x": (lambda: ops.masked_linear(X[0], W, L, 2), ValueError, r"x.*\[B, \.\.\., in\].*\[4\]"),
    "x integers": (lambda: ops.masked_linear(X.long(), W, L, 2), TypeError, "x.*int64"),
    "x list": (lambda: ops.masked_linear([1.0], W, L, 2), TypeError, "x.*list"),
    "x sparse": (lambda: ops.masked_linear(X.to_sparse(), W, L, 2), TypeError, "x.*dense"),
    "features": (lambda: ops.masked_linear(X, W[:, :3], L[:, :3], 2), ValueError, r"weight.*in = 4.*\[5, 3\]"),
    "rank of weight": (lambda: ops.masked_linear(X, W[0], L[0], 2), ValueError, r"weight.*\[out, in\].*\[4\]"),
    "weight dtype": (lambda: ops.masked_linear(X, W.double(), L, 2), TypeError, "weight.*float32.*float64"),
    "weight integers": (lambda: ops.masked_linear(X, W.int(), L, 2), TypeError, "weight.*int32"),
    "weight device": (lambda: ops.masked_linear(X, W.to("meta"), L, 2), RuntimeError, "weight.*cpu.*meta"),
    "weight none": (lambda: ops.masked_linear(X, None, L, 2), TypeError, "weight.*NoneType"),
    "logits shape": (lambda: ops.masked_linear(X, W, L[:4], 2), ValueError, r"logits.*\[5, 4\].*\[4, 4\]"),
    "logits transposed": (lambda: ops.masked_linear(X, W, L.T, 2), ValueError, r"logits.*\[5, 4\].*\[4, 5\]"),
    "logits dtype": (lambda: ops.masked_linear(X, W, L.double(), 2), TypeError, "logits.*float32.*float64"),
    "logits integers": (lambda: ops.masked_linear(X, W, L.long(), 2), TypeError, "logits.*int64"),
    "logits device": (lambda: ops.masked_linear(X, W, L.to("meta"), 2), RuntimeError, "logits.*cpu.*meta"),
    "bias shape": (lambda: ops.masked_linear(X, W, L, 2, bias=B[:4]), ValueError, r"bias.*\[out\] = \[5\].*\[4\]"),
    "bias rank": (lambda: ops.masked_linear(X, W, L, 2, bias=W), ValueError, "bias.*out"),
    "bias dtype": (lambda: ops.masked_linear(X, W, L, 2, bias=B.double()), TypeError, "bias.*float32.*float64"),
    "bias device": (lambda: ops.masked_linear(X, W, L, 2, bias=B.to("meta")), RuntimeError, "bias.*cpu.*meta"),
    "no bias": (lambda: ops.masked_linear(X, W, L, 2, bias_logits=B), ValueError, "bias_logits.*without a bias"),
    "bias_logits": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B[:2]),
        ValueError,
        r"bias_logits.*\[5\]",
    ),
    "bias_logits integers": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B.long()),
        TypeError,
        "bias_logits.*int64",
    ),
    "bias_logits device": (
        lambda: ops.masked_linear(X, W, L, 2, bias=B, bias_logits=B.to("meta")),
        RuntimeError,
        "bias_logits.*cpu.*meta",
    ),
    **wrong_numbers(partial(ops.masked_linear, X, W, L)),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)
    raw = torch.ops.fastmod
    t = lambda *shapes: random_tensor(choose, *shapes)  # noqa: E731

    def arguments():
        out = choose.choice([0, 1, 5, 5, 5])
        matrix, vector = [(out, 4)] * 5 + [(5, 4), (5, 0)], [(out,)] * 5 + [(5,)]
        samples = choose.choice([1, 2, 2, 3, 0, -1, 4])
        tensors = (t((6, 4), (6, 4), (0, 4), (6, 0)), t(*matrix), t(*matrix), t(*vector), t(*vector))
        return (*tensors, random_seed(choose), samples), t((6, out), (6, out), (6, 5), (0, 5))

    def product():
        (x, weight, logits, *_, seed, samples), grad = arguments()
        raw.masked_linear_forward(
            x, weight, logits, t((max(samples, 0), 5), (max(samples, 0), 1), (2, 5)), seed, samples
        )
        raw.masked_linear_backward(grad, x, weight, logits, seed, samples, random_tau(choose), random_needs(choose)[:3])

    def whole():
        (*tensors, seed, samples), grad = arguments()
        leaves = [None if t is None or not t.is_floating_point() else t.requires_grad_() for t in tensors]
        wrapped = MASKED_LINEAR._run
        wrapped(*leaves, seed, samples, random_tau(choose), choose.choice([0] * 8 + [1, -1]), False).backward(grad)

    calls = [whole, product]
    fuzzed(choose, calls)


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_masked_linear import fuzz; fuzz({seed})")


def test_near_misses_of_the_raw_ops() -> None:
    """One argument of a right call made wrong: always an error, never a result."""
    raw, key = torch.ops.fastmod, torch.tensor(1)
    forward, grad, tail = [X, W, L, torch.zeros(2, 5), key, 2], torch.zeros(6, 5), (1.0, [True] * 3)
    raw.masked_linear_forward(*forward)
    raw.masked_linear_backward(grad, X, W, L, key, 2, *tail)
    wrong = {i: [t[:-1], t.double(), t.unsqueeze(0), t.new_zeros(0)] for i, t in enumerate(forward[:4])}
    wrong |= {0: [X[:5], X.double(), X[:, :3], X[0]], 4: [torch.tensor(1.0), torch.tensor([1])], 5: [0, -1, 4]}
    for index, values in wrong.items():
        for value in values:
            changed = [*forward[:index], value, *forward[index + 1 :]]
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                raw.masked_linear_forward(*changed)
            if index != 3:
                with pytest.raises((ValueError, TypeError, RuntimeError)):
                    raw.masked_linear_backward(grad, *changed[:3], *changed[4:], *tail)
    for value in (grad[:5], grad[:, :4], grad.double(), grad.view(6, 1, 5), grad.view(5, 6)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            raw.masked_linear_backward(value, X, W, L, key, 2, *tail)
    with pytest.raises(RuntimeError, match="meta"):
        raw.masked_linear_forward(X, W, L.to("meta"), None, key, 2)


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


# ------------------------------------------------------------------------------------------------ both ways, and a part


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, grad = draw(3, 5, 33, 26, dtype), torch.randn(15, 26).to(dtype)
    found = []
    for limit in (5, 4):  # at once, by samples
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = layer(3, tau=0.5)(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    torch.testing.assert_close(*found)
    # Ones through the layer count the masks: these agree bit for bit.
    ones = [torch.eye(33).repeat(3, 1), torch.ones(26, 33), inputs[2].float()]
    counts = []
    for limit in (33, 32):
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        counts.append(ops.masked_linear(*ones, 3, seed=4))
    masks = ops.sample_mask(ones[2], 3, seed=4).transpose(1, 2).reshape(99, 26)
    assert torch.equal(counts[0], masks) and torch.equal(counts[1], masks)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_part_of_the_samples(first: int, backend: str) -> None:
    """Private: sample ``first`` alone gets the masks that it has among all."""
    x, weight, logits, bias, bias_logits = draw(3, 4, 7, 5)
    options = {"bias": bias, "bias_logits": bias_logits, "seed": 9, "tau": 0.5}
    rows = slice(4 * first, 4 * first + 4)
    with fastmod.use_backend(backend):
        leaf, other = (logits.clone().requires_grad_() for _ in range(2))
        whole = ops.masked_linear(x, weight, leaf, 3, **options)
        part = MASKED_LINEAR._masked_linear(x[rows], weight, other, 1, first=first, **options)
        torch.testing.assert_close(part, whole[rows])
        expected = torch.autograd.grad(whole[rows].square().sum(), leaf)
        torch.testing.assert_close(torch.autograd.grad(part.square().sum(), other), expected)
    for wrong in (-1, 1.5, True, "1", 2**40):
        with pytest.raises(ValueError, match="first: expected an int"):
            MASKED_LINEAR._masked_linear(x, weight, logits, 3, first=wrong)


def test_row_limits() -> None:
    """What was measured: rows up to which the kernels win, fewer for large weights, fewer without wide vectors."""
    module, large, small = fastmod._extension.MODULE, torch.empty(2000, 2000), torch.empty(64, 64)
    try:
        for isa, limits in {"avx512": (200, 1054), "avx2": (150, 638), "baseline": (48, 96)}.items():
            if isa in isas():
                module.set_cpu_isa(isa)
                assert (ROW_LIMIT(large, False), ROW_LIMIT(small, False)) == limits
    finally:
        module.set_cpu_isa(module.best_cpu_isa())
    assert ROW_LIMIT(large, True) == ROW_LIMIT(large.to("meta"), False) == 64


def test_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(3, 4, 7, 5)
    expected = layer(3)(*inputs)
    for limit in (4, 3):  # at once, by samples
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        with torch.inference_mode():
            torch.testing.assert_close(layer(3)(*inputs), expected)


def test_backward_by_samples_inside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton: 0)
    inputs = [t.requires_grad_() for t in draw(3, 4, 7, 5)]
    out = layer(3)(*inputs)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
