"""The kernels of masked_conv2d on every backend: values, layouts, masks bit for bit, launches, what they serve."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import fastmod
from fastmod import ops
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out, opchecked
from tests.helpers.backends import TRITON, Backend, chosen, parameters, watched
from tests.helpers.casts import assert_casts_nothing
from tests.helpers.masked_conv2d import HALF_ROUNDINGS, OPTIONS, draw, layer
from tests.helpers.masked_linear import NAMES
from tests.ops.test_sample_mask import by_reference


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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", parameters("native"), indirect=True)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [(0, 1, 2, 3, 4), (1, 2, 3, 4), (0,)], ids=str)
@pytest.mark.parametrize("size", [(4, 3), (4, 4)], ids=str)
def test_autocast_casts_nothing(low: torch.dtype, wide: tuple[int, ...], size: tuple[int, int]) -> None:
    """Kernels round what they read. Of 4 x 4 pixels eight are written at once."""
    assert_casts_nothing(layer(2, tau=0.7, padding=1), draw(2, 1, 3, 5, size, (3, 3)), low, wide)
