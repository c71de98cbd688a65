"""masked_conv2d: the native kernels against the reference, and the contract of the op."""

from __future__ import annotations

import itertools
import random
from functools import partial
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import conv2d

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import TRITON, Backend, chosen, parameters, watched
from tests.helpers.mask_cases import (
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
from tests.helpers.masked_linear import NAMES
from tests.ops.test_sample_mask import by_reference, module
from tests.ops.test_smfr import Casts

# What torch.nn.functional.conv2d takes, in the form it takes it.
OPTIONS = {
    "plain": {},
    "stride": {"stride": 2},
    "strides": {"stride": (1, 3)},
    "padding": {"padding": 1},
    "paddings": {"padding": (0, 2)},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": (2, 3)},
    "valid": {"padding": "valid", "stride": 2},
    "dilation": {"dilation": (2, 1)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "all": {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "groups": 2},
}
# In fp16 and bf16 torch's own convolutions serve the reference and the kernels alike, but in other pieces.
HALF_ROUNDINGS = 2.0


def draw(
    samples: int = 3,
    images: int = 2,
    channels: int = 4,
    outputs: int = 8,
    size: tuple[int, int] = (7, 9),
    kernel: tuple[int, int] = (3, 3),
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> list[torch.Tensor]:
    """x, weight, logits, bias, bias_logits."""
    weight = (outputs, channels // groups, *kernel)
    shapes = [(samples * images, channels, *size), weight, weight, (outputs,), (outputs,)]
    return [(torch.randn(shape) * scale).to(dtype) for shape in shapes]


def layer(samples: int = 3, *, seed: int = 11, tau: float = 1.0, **options):
    """masked_conv2d of three to five tensors."""

    def function(x, weight, logits, bias=None, bias_logits=None):
        return ops.masked_conv2d(
            x, weight, logits, samples, bias=bias, bias_logits=bias_logits, seed=seed, tau=tau, **options
        )

    return function


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("tensors", [3, 4, 5], ids=["no bias", "bias", "masked bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_fp64(name: str, tensors: int) -> None:
    options = OPTIONS[name]
    tau = TAUS[tensors - 3]
    assert_agrees(layer(tau=tau, **options), lambda: draw(groups=options.get("groups", 1))[:tensors], draws=3)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["strides", "same, dilated", "all"])
def test_backends(name: str) -> None:
    options = OPTIONS[name]
    assert_agrees(layer(tau=0.5, **options), lambda: draw(groups=options.get("groups", 1)))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_on_every_backend(dtype: torch.dtype, tau: float, groups: int) -> None:
    function = layer(2, seed=-7, tau=tau, stride=(1, 2), padding=1, groups=groups)
    for sizes, tensors in (((1, 2, 4, (4, 4), (2, 3)), 5), ((2, 4, 6, (5, 6), (3, 3)), 3)):
        assert_agrees(
            function,
            lambda sizes=sizes, tensors=tensors: draw(2, *sizes, groups=groups, dtype=dtype)[:tensors],
            half_roundings=HALF_ROUNDINGS,
        )


#: Sizes that the kernels of GPUs deal to several blocks or chunks, with ends that do not fill them.
LARGER = {
    "many channels": ({"channels": 35, "outputs": 70, "size": (6, 6), "kernel": (2, 1), "images": 1}, {"padding": 1}),
    "many pixels": ({"channels": 3, "outputs": 5, "size": (19, 17), "images": 2}, {"padding": 1, "stride": (2, 1)}),
    "7 x 7": ({"channels": 2, "outputs": 3, "size": (9, 8), "kernel": (7, 7)}, {"padding": 3}),
    "8 x 1, sample by sample": ({"kernel": (8, 1)}, {"padding": 1}),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", LARGER)
def test_larger_sizes(name: str) -> None:
    sizes, options = LARGER[name]
    assert_agrees(layer(2, **options), lambda: draw(2, **sizes))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [*LAYOUTS, "channels last"])
def test_layouts_of_images_on_every_backend(kind: str) -> None:
    """Kernels read and write images where they lie: x and the gradient of the result."""

    def placed(images: torch.Tensor) -> torch.Tensor:
        return images.to(memory_format=torch.channels_last) if kind == "channels last" else laid_out(images, kind)

    run = layer(2, stride=(1, 2), padding=1)
    grad = placed(torch.randn(4, 8, 7, 5))
    assert_agrees(lambda *t: (run(*t) * grad).sum(), lambda: [placed(t) if t.dim() == 4 else t for t in draw(2)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("channels", [4, 5])
def test_masks_are_those_of_sample_mask_bit_for_bit(channels: int) -> None:
    """An image of which one number is 1 reads one weight out."""
    samples, outputs, seed = 3, 40, -5
    logits, weight = torch.randn(outputs, channels, 1, 2), torch.randn(outputs, channels, 1, 2)
    images = torch.eye(2 * channels).view(2 * channels, channels, 1, 2)
    found = ops.masked_conv2d(images.repeat(samples, 1, 1, 1), weight, logits, samples, seed=seed)
    with fastmod.use_backend("reference"):
        expected = ops.masked_weight(weight, logits, samples, seed=seed).flatten(2)
    read = found.view(samples, 2 * channels, outputs).transpose(1, 2)
    assert torch.equal(read != 0, expected != 0)
    torch.testing.assert_close(read, expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("where", range(5), ids=NAMES)
def test_nan_on_every_backend(where: int) -> None:
    """In the same places as without kernels, in the result and all gradients; but that a NaN weight may meet the zeros
    beyond an image's border, which the gradient of x has around the result's."""
    inputs = draw(2, 1)
    inputs[where].view(-1)[3] = float("nan")
    leaves = [t.requires_grad_() for t in inputs]
    out = layer(2)(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    with fastmod.use_backend("reference"):
        out = layer(2)(*leaves)
        expected = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    for found_own, expected_own in zip(found, expected, strict=True):
        pair = [t[..., 2:-2, 2:-2] if t.shape == inputs[0].shape else t for t in (found_own, expected_own)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("backend")
def test_empty_batch_on_every_backend() -> None:
    inputs = [t.requires_grad_() for t in draw(images=0)]
    out = layer(padding=1)(*inputs)
    assert out.shape == (0, 8, 7, 9)
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


@pytest.mark.usefixtures("backend")
def test_equal_repeats_on_every_backend() -> None:
    inputs = [t.requires_grad_() for t in draw(2, 1)]
    results = []
    for _ in range(3):
        out = layer(2, tau=0.5, padding=1)(*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", parameters("native"), indirect=True)
def test_gradients_only_where_they_are_required_by_kernels(backend: Backend) -> None:
    values = draw(2, 1)
    everything = [t.clone().requires_grad_() for t in values]
    out = layer(2)(*everything)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, everything, grad)
    for wanted in ([0], [1], [2], [3], [4], [0, 3], [2, 4]):
        inputs = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(values)]
        found = torch.autograd.grad(layer(2)(*inputs), [inputs[i] for i in wanted], grad)
        assert all(torch.equal(a, expected[i]) for a, i in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", parameters("native", "triton", "cuda-triton"), indirect=True)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_schemas_and_fakes(backend: Backend, layout: torch.memory_format) -> None:
    x, *filters = draw(2, 1)
    images = x.to(memory_format=layout)
    options = torch.tensor(3), 2, [1, 2], [1, 0], [1, 1]
    opchecked("masked_conv2d_forward", images, *filters, *options, 0)
    opchecked("masked_conv2d_backward", torch.randn(2, 8, 7, 4), images, *filters, *options, 0.5, [True] * 5, 0)


@pytest.mark.parametrize("backend", parameters("native"), indirect=True)
def test_kernels_compile_fullgraph(backend: Backend) -> None:
    torch._dynamo.reset()
    run = layer(2, tau=0.5, padding=1)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = [t.requires_grad_() for t in draw(2, 1)]
    eager, found = run(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, eager)
    torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in (found, eager)])


@pytest.mark.interpreted
def test_launches_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, products; gradients of the weights in parts with masks beside them, gradient of x, the parts finished. 16
    samples are three bytes of masks."""
    from fastmod.kernels import masked_conv2d as triton_kernels

    names = "draw_kernel", "product_kernel", "weight_kernel", "finish_kernel"
    launched = watched(monkeypatch, triton_kernels, *names)
    inputs = draw(16, 1, 2, 3, (2, 2), (1, 2))
    with chosen(TRITON):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = layer(16)(*leaves)
        assert launched == ["draw_kernel", "product_kernel"]
        found = torch.autograd.grad(out.sum(), leaves)
    assert launched[2:] == ["weight_kernel", "product_kernel", "finish_kernel"]
    expected = by_reference(lambda *t: torch.autograd.grad(layer(16)(*t).sum(), t), *leaves)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


SERVED = {
    "plain": ({}, {}, True),
    "stride, padding, dilation": ({}, {"stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)}, True),
    "7 x 7": ({"kernel": (7, 7)}, {}, True),
    "8 rows": ({"kernel": (8, 1)}, {"padding": 1}, False),
    "groups": ({"groups": 2}, {"groups": 2}, False),
    "depthwise": ({"groups": 4}, {"groups": 4}, False),
    "no images": ({"images": 0}, {}, False),
    "fp64": ({"dtype": torch.float64}, {}, False),
}


@pytest.mark.parametrize("backend", parameters(), indirect=True)
@pytest.mark.parametrize("name", SERVED)
def test_what_kernels_serve(name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest, and the CPU, goes sample by sample."""
    sizes, options, served = SERVED[name]
    op = import_module("fastmod.ops.masked_conv2d")
    calls: list[str] = []
    monkeypatch.setattr(op, "FORWARD", [lambda *arguments: calls.append("kernel") or torch.zeros(1)] * 2)
    with torch.no_grad():
        layer(**options)(*draw(**sizes))
    assert (calls == ["kernel"]) == (served and not backend.name.startswith("native"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    assert_agrees(layer(4, tau=0.5, padding=1), lambda: draw(4, dtype=dtype), half_roundings=HALF_ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_samples_are_summed_in_fp32(dtype: torch.dtype) -> None:
    assert_agrees(layer(256, padding=1), lambda: draw(256, 1, dtype=dtype), draws=3, half_roundings=HALF_ROUNDINGS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula(name: str, seed: int) -> None:
    """Written out with the masks of the contract: images s * B / S and on meet mask s."""
    options = OPTIONS[name]
    x, weight, logits, bias, bias_logits = draw(groups=options.get("groups", 1), dtype=torch.float64)
    masks = drawn(3, logits.numel(), seed).view(3, *logits.shape) >= module.words_off(logits)
    kept = drawn(3, 8, seed, stream=2) >= module.words_off(bias_logits)
    parts = [conv2d(x[2 * s : 2 * s + 2], weight * masks[s], bias * kept[s], **options) for s in range(3)]
    found = layer(seed=seed, **options)(x, weight, logits, bias, bias_logits)
    torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("name", ["padding", "all"])
def test_logits_get_the_gradient_of_the_relaxed_sample(name: str, tau: float) -> None:
    options = OPTIONS[name]
    inputs = [t.requires_grad_() for t in draw(groups=options.get("groups", 1), dtype=torch.float64)]
    x, weight, logits, bias, bias_logits = inputs
    out = layer(seed=-6, tau=tau, **options)(*inputs)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (logits, bias_logits), grad)
    weights, biases = weight * relaxed(logits, 3, -6, tau), bias * relaxed(bias_logits, 3, -6, tau, stream=2)
    soft = torch.cat([conv2d(x[2 * s : 2 * s + 2], weights[s], biases[s], **options) for s in range(3)])
    torch.testing.assert_close(found, torch.autograd.grad(soft, (logits, bias_logits), grad), rtol=1e-10, atol=1e-11)


@given(
    sizes=st.fixed_dictionaries(
        {
            "samples": st.sampled_from([1, 2, 3]),
            "images": st.sampled_from([0, 1, 2]),
            "channels": st.sampled_from([2, 6]),
            "outputs": st.sampled_from([2, 4]),
            "size": st.sampled_from([(3, 3), (5, 4), (1, 7)]),
            "kernel": st.sampled_from([(1, 1), (1, 3), (2, 1)]),
            "groups": st.sampled_from([1, 2]),
            "scale": st.sampled_from([1.0, 1e4]),
        }
    ),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 6),
    tensors=st.integers(3, 5),
    tau=st.sampled_from(TAUS),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_layout_and_range(sizes, layouts, tensors, tau, seed) -> None:
    torch.manual_seed(abs(seed) % 1000)
    run = layer(sizes["samples"], seed=seed, tau=tau, padding=1, groups=sizes["groups"])
    grad = laid_out(torch.randn(by_reference(run, *draw(**sizes)).shape), layouts[5])

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(**sizes)[:tensors], layouts, strict=False)]

    # The gradient of a logit passes |x| * |weight| * pixels.
    assert_agrees(lambda *t: (run(*t) * grad).sum(), inputs, draws=3, scale=sizes["scale"] ** 2 * 100)


def test_channels_last() -> None:
    def inputs():
        x, *rest = draw()
        return [x.to(memory_format=torch.channels_last), *rest]

    assert_agrees(layer(padding=1), inputs, draws=3, memory_format=torch.channels_last)


def test_empty_batch() -> None:
    inputs = [t.requires_grad_() for t in draw(images=0)]
    out = layer(padding=1)(*inputs)
    assert out.shape == (0, 8, 7, 9)
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


def test_gradients_only_where_they_are_required() -> None:
    values = draw()
    everything = [t.clone().requires_grad_() for t in values]
    out = layer()(*everything)
    grad = torch.randn_like(out)
    out.backward(grad)
    for wanted in itertools.product([False, True], repeat=5):
        inputs = [t.clone().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        out = layer()(*inputs)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(grad)
        for tensor, other, want in zip(inputs, everything, wanted, strict=True):
            assert (tensor.grad is None) != want
            assert not want or torch.equal(tensor.grad, other.grad)


@pytest.mark.parametrize("name", ["padding", "all"])
def test_gradcheck(name: str) -> None:
    """Of what the output depends on smoothly: x, weight, bias; for logits see the relaxed sample."""
    options = OPTIONS[name]
    x, weight, logits, bias, bias_logits = draw(
        2, 1, 2, 2, size=(4, 5), groups=options.get("groups", 1), dtype=torch.float64
    )
    smooth = tuple(t.requires_grad_() for t in (x, weight, bias))
    run = layer(2, **options)
    assert torch.autograd.gradcheck(lambda a, w, b: run(a, w, logits, b, bias_logits), smooth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", range(5), ids=NAMES)
def test_nan_and_inf_travel_as_in_torch(where: int, value: float) -> None:
    inputs = draw(2, 2)
    inputs[where].view(-1)[2:4] = value
    leaves = [t.requires_grad_() for t in inputs]
    results = []
    for backend in ("native", "reference"):
        with fastmod.use_backend(backend):
            out = layer(2, padding=1)(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
    # As in test_masked_linear.py: not finite in the same places.
    for found, expected in zip(*results, strict=True):
        pair = [torch.nan_to_num(t, 1e30, 1e30, 1e30) for t in (found, expected)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("value", [1e4, float("inf")])
def test_sure_masks(value: float, tau: float) -> None:
    x, weight, _, bias, _ = draw()
    for sign in (1, -1):
        logits = [torch.full_like(t, sign * value).requires_grad_() for t in (weight, bias)]
        out = layer(tau=tau)(x, weight, logits[0], bias, logits[1])
        expected = conv2d(x, weight, bias)
        torch.testing.assert_close(out, expected if sign > 0 else torch.zeros_like(expected))
        for found in torch.autograd.grad(out.sum(), logits):
            assert torch.equal(found, torch.zeros_like(found))


def test_masks_do_not_depend_on_threads() -> None:
    inputs = draw(4, 3)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(layer(4)(*inputs))
    torch.testing.assert_close(*results)


# ---------------------------------------------------------------------------------------------------- torch's machinery


def test_seed_rules() -> None:
    inputs = draw()[:3]
    torch.manual_seed(4)
    first, second = (ops.masked_conv2d(*inputs, 3) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.masked_conv2d(*inputs, 3), first)
    assert not torch.equal(first, second)
    assert torch.equal(*(ops.masked_conv2d(*inputs, 3, seed=s) for s in (-9, torch.tensor(-9))))


def test_two_backwards_and_untouched_inputs() -> None:
    inputs = [t.requires_grad_() for t in draw()]
    copies = [t.detach().clone() for t in inputs]
    out = layer()(*inputs)
    grad = torch.randn_like(out)
    kept = grad.clone()
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(grad, kept) and all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_fifty_equal_repeats() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 2)]
    results = []
    for _ in range(50):
        out = layer(4, tau=0.5, padding=1)(*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_compile_fullgraph(padding: int | str, backend: str) -> None:
    torch._dynamo.reset()
    run = layer(tau=0.5, padding=padding)
    with fastmod.use_backend(backend):
        compiled = torch.compile(run, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")
        for images in (1, 3):  # the second makes the batch dynamic
            inputs = [t.requires_grad_() for t in draw(images=images)]
            eager, found = run(*inputs), compiled(*inputs)
            torch.testing.assert_close(found, eager)
            torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in (found, eager)])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast(backend: str) -> None:
    inputs = [t.requires_grad_() for t in draw()]
    with fastmod.use_backend(backend):
        expected = layer()(*[t.bfloat16() for t in inputs])
        with torch.autocast("cpu", torch.bfloat16):
            out = layer()(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


@pytest.mark.interpreted
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", ["all", "parameters", "x"])
def test_autocast_casts_nothing_in_triton(low: torch.dtype, wide: str) -> None:
    """Kernels round what they read: results are those of casts, and so are gradients before they were rounded."""
    x, *parameters = draw(2, 1, 3, 5, (4, 3), (3, 2))
    tensors = [x.to(low) if wide == "parameters" else x, *[t.to(low) if wide == "x" else t for t in parameters]]
    found = []
    with chosen(TRITON):
        for own in (tensors, [t.to(low) for t in tensors]):
            leaves = [t.detach().clone().requires_grad_() for t in own]
            with torch.autocast("cpu", low), Casts() as casts:
                out = layer(2, tau=0.7, padding=1)(*leaves)
            with casts:
                grads = torch.autograd.grad(out, leaves, out.detach() + 1)
            assert casts.seen == []
            assert [g.dtype for g in grads] == [t.dtype for t in own]
            found.append([out, *[g.to(low) for g in grads]])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == low and torch.equal(ours, theirs)


# --------------------------------------------------------------------------------------------------------- bad input

X, W, B = torch.zeros(6, 4, 5, 7), torch.zeros(8, 4, 3, 3), torch.zeros(8)


def wrong(samples: object = 2, **changes: object):
    """A call with some arguments of a right one changed."""
    arguments = {"x": X, "weight": W, "logits": W, "samples": samples, **changes}
    return lambda: ops.masked_conv2d(**arguments)


CASES = {
    "batch": (wrong(4), ValueError, r"x.*multiple of 4 samples.*\[6, 4, 5, 7\]"),
    "x rank": (wrong(x=X[0]), ValueError, r"x.*\[B, in, H, W\].*\[4, 5, 7\]"),
    "x rank 5": (wrong(x=X[None]), ValueError, r"x.*\[B, in, H, W\].*\[1, 6, 4, 5, 7\]"),
    "x integers": (wrong(x=X.long()), TypeError, "x.*int64"),
    "x list": (wrong(x=[1.0]), TypeError, "x.*list"),
    "channels": (
        wrong(weight=W[:, :3], logits=W[:, :3]),
        ValueError,
        r"weight.*4 channels in 1 groups.*\[8, 3, 3, 3\]",
    ),
    "weight rank": (wrong(weight=W[0], logits=W[0]), ValueError, r"weight.*\[out, in / groups, h, w\].*\[4, 3, 3\]"),
    "weight dtype": (wrong(weight=W.double()), TypeError, "weight.*float32.*float64"),
    "weight device": (wrong(weight=W.to("meta")), RuntimeError, "weight.*cpu.*meta"),
    "logits shape": (wrong(logits=W[:4]), ValueError, r"logits.*\[8, 4, 3, 3\].*\[4, 4, 3, 3\]"),
    "logits dtype": (wrong(logits=W.half()), TypeError, "logits.*float32.*float16"),
    "logits integers": (wrong(logits=W.int()), TypeError, "logits.*int32"),
    "logits device": (wrong(logits=W.to("meta")), RuntimeError, "logits.*cpu.*meta"),
    "bias shape": (wrong(bias=B[:4]), ValueError, r"bias.*\[8\].*\[4\]"),
    "bias dtype": (wrong(bias=B.double()), TypeError, "bias.*float32.*float64"),
    "no bias": (wrong(bias_logits=B), ValueError, "bias_logits.*without a bias"),
    "bias_logits shape": (wrong(bias=B, bias_logits=B[:1]), ValueError, r"bias_logits.*\[8\].*\[1\]"),
    "bias_logits device": (wrong(bias=B, bias_logits=B.to("meta")), RuntimeError, "bias_logits.*cpu.*meta"),
    "groups": (wrong(groups=3), ValueError, "weight.*4 channels in 3 groups"),
    "groups of outputs": (wrong(weight=W[:7, :2], logits=W[:7, :2], groups=2), ValueError, "weight.*2 groups"),
    "groups zero": (wrong(groups=0), ValueError, "groups.*>= 1.*0"),
    "groups float": (wrong(groups=1.0), ValueError, "groups.*int.*1.0"),
    "groups bool": (wrong(groups=True), ValueError, "groups.*int.*True"),
    "same, stride": (wrong(padding="same", stride=2), ValueError, "padding.*'same' with stride 1.*stride"),
    "same, even kernel": (
        wrong(weight=W[..., :2], logits=W[..., :2], padding="same"),
        ValueError,
        "padding.*even total",
    ),
    "padding word": (wrong(padding="full"), ValueError, "padding.*'valid'.*'full'"),
    **{
        f"{name} {value!r}": (wrong(**{name: value}), ValueError, f"{name}.*expected an int")
        for name in ("stride", "padding", "dilation")
        for value in (-1, 1.5, (1, 2, 3), (1, 1.0), (), True, None, torch.tensor(1))
    },
    "stride zero": (wrong(stride=0), ValueError, "stride.*>= 1.*0"),
    "dilation zero": (wrong(dilation=(1, 0)), ValueError, r"dilation.*>= 1.*\(1, 0\)"),
    "kernel too large": (wrong(dilation=4), RuntimeError, "[Kk]ernel size.*input size"),
    **wrong_numbers(partial(ops.masked_conv2d, X, W, W)),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, backend: str) -> None:
    assert_message(CASES[case], backend)


def fuzz(seed: int) -> None:
    choose = random.Random(seed)

    def t(*shapes: tuple[int, ...]) -> torch.Tensor | None:
        """Mostly right: of five tensors at least one is wrong soon enough."""
        return random_tensor(choose, *shapes) if choose.random() < 0.2 else torch.zeros(choose.choice(shapes))

    pair = lambda *usual: choose.choice([*usual] * 5 + [[-1, 1], [1], [], [1, 2, 3], [0, 0], [9, 9]])  # noqa: E731

    def arguments():
        out, kernel = choose.choice([0, 2, 4, 4, 4]), choose.choice([0, 1, 3, 3])
        groups = choose.choice([1, 1, 1, 2, 0, -1, 3])
        weight = (out, 4 // max(groups, 1), kernel, kernel)
        tensors = (
            t((6, 4, 5, 5), (6, 4, 5, 5), (0, 4, 5, 5), (6, 4, 0, 5)),
            t(weight),
            t(weight),
            t((out,)),
            t((out,)),
        )
        geometry = pair([1, 1], [2, 1]), pair([0, 0], [1, 1]), pair([1, 1], [1, 2]), groups
        return (*tensors, random_seed(choose), choose.choice([1, 2, 2, 3, 0, -1, 4]), *geometry)

    def backward(right: bool):
        *tensors, seed, samples, stride, padding, dilation, groups = arguments()
        leaves = [None if t is None or not t.is_floating_point() else t.requires_grad_() for t in tensors]
        run = import_module("fastmod.ops.masked_conv2d")._run
        geometry = stride, padding, dilation, groups
        out = run(*leaves, seed, samples, *geometry, random_tau(choose), choose.choice([0] * 8 + [1, -1]), False, None)
        size = choose.choice([1, 3, 5])
        if choose.random() < 0.7:
            return
        out.backward(torch.zeros_like(out) if right else t((6, 4, size, size), (6, 2, 5, 5), (0, 4, 5, 5)))

    calls = [partial(backward, True), partial(backward, False)]
    fuzzed(choose, calls)


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_calls_of_the_raw_ops_end_in_a_result_or_an_error(seed: int) -> None:
    in_a_process(f"from tests.ops.test_masked_conv2d import fuzz; fuzz({seed})")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    samples, out = 48, 20
    shapes = ((samples * 2, 3, 4, 4), (out, 3, 1, 1), (out, 3, 1, 1), (out,), (out,))
    x, weight, logits, bias, bias_logits = (torch.randn(shape).to(dtype) for shape in shapes)
    grad = torch.randn(samples * 2, out, 4, 4).to(dtype)

    def grads(backend: str, wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(wide).requires_grad_() for t in (bias, bias_logits)]
        with fastmod.use_backend(backend):
            found = fastmod.ops.masked_conv2d(
                x.to(wide), weight.to(wide), logits.to(wide), samples, bias=leaves[0], bias_logits=leaves[1], seed=1
            )
        return list(torch.autograd.grad(found, leaves, grad.to(wide)))

    for ours, exact in zip(grads("native", dtype), grads("reference", torch.float64), strict=True):
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((ours.double() - exact).abs() <= 1.01 * rounding + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_part_of_the_samples(first: int, backend: str) -> None:
    """Private: sample ``first`` alone gets the masks that it has among all."""
    x, weight, logits, bias, bias_logits = draw()
    options = {"bias": bias, "bias_logits": bias_logits, "seed": 9, "padding": 1}
    each = x.shape[0] // 3
    rows = slice(each * first, each * (first + 1))
    private = import_module("fastmod.ops.masked_conv2d")._masked_conv2d
    with fastmod.use_backend(backend):
        leaf, other = (logits.clone().requires_grad_() for _ in range(2))
        whole = ops.masked_conv2d(x, weight, leaf, 3, **options)
        part = private(x[rows], weight, other, 1, first=first, **options)
        torch.testing.assert_close(part, whole[rows])
        expected = torch.autograd.grad(whole[rows].square().sum(), leaf)
        torch.testing.assert_close(torch.autograd.grad(part.square().sum(), other), expected)
    with pytest.raises(ValueError, match="first: expected an int"):
        private(x, weight, logits, 3, first=-1)
