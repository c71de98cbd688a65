"""conv_chain: agreement with fp64, layers that use it and layers that must not, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastmod
from fastmod.models import ResMixNet
from fastmod.nn import ExpertStack, Gater
from fastmod.ops import _conv_chain as chain
from fastmod.ops._norm_convs import Conv, _alone
from fastmod.ops.norm_sum import norm_sum
from tests.helpers.agreement import LAYOUTS, assert_close, laid_out, opchecked
from tests.helpers.backends import parameters, same_bits

native = pytest.mark.parametrize("backend", parameters("triton", "cuda"), indirect=True)


def draw(
    experts: int, sizes: list[tuple[int, int, int, int]], forms: list[tuple[bool, int, int]], bare: bool = False
) -> list[chain.Layer]:
    """``sizes``: Cin, Cout, kernel, stride of every layer; ``forms``: relu, source, residual."""
    layers = []
    for (inputs, outputs, k, stride), (relu, source, residual) in zip(sizes, forms, strict=True):
        weight = torch.randn(experts, outputs, inputs, k, k) / (k * inputs**0.5)
        scale, bias = torch.rand(experts, outputs) + 0.5, torch.randn(experts, outputs)
        layer = chain.Layer(weight, scale, bias, stride, relu, source, residual)
        layers.append(layer._replace(scale=None, bias=None) if bare else layer)
    return layers


#: Two residual blocks, the first of which halves the image; a gater; a layer that two others read; one layer
CHAINS: dict[str, Callable[[int], list[chain.Layer]]] = {
    "blocks": lambda e: draw(
        e,
        [(9, 17, 3, 2), (9, 17, 1, 2), (17, 17, 3, 1), (17, 17, 3, 1), (17, 17, 3, 1)],
        [(True, 0, -1), (False, 0, -1), (True, 1, 2), (True, 3, -1), (True, 4, 3)],
    ),
    "gater": lambda e: draw(e, [(9, 8, 3, 1), (8, 33, 3, 2), (33, 5, 3, 1)], [(True, i, -1) for i in range(3)]),
    "around": lambda e: draw(
        e, [(9, 16, 3, 1), (9, 16, 1, 1), (16, 16, 3, 1)], [(True, 0, -1), (False, 0, 1), (False, 2, 1)]
    ),
    "one": lambda e: draw(e, [(9, 3, 3, 2)], [(False, 0, -1)], bare=True),
}


def reference(x: Tensor, layers: list[chain.Layer], gate: Tensor | None = None) -> Tensor:
    """Layer by layer, in plain PyTorch."""
    values = [x]
    with fastmod.use_backend("reference"):
        for weight, scale, bias, stride, relu, source, residual in layers:
            y = _alone(Conv(values[source], weight, stride=stride)).y
            ones, zeros = torch.ones_like(y[0, :, :, 0, 0]), torch.zeros_like(y[0, :, :, 0, 0])
            around = None if residual < 0 else values[residual]
            y = norm_sum(y, ones if scale is None else scale, zeros if bias is None else bias, around, relu=relu)
            values.append(y)
        return y if gate is None else (y * gate[:, :, None, None, None]).sum(1)


def doubled(layers: list[chain.Layer]) -> list[chain.Layer]:
    def wide(value: Tensor | None) -> Any:
        return None if value is None else value.double()

    return [each._replace(weight=wide(each.weight), scale=wide(each.scale), bias=wide(each.bias)) for each in layers]


def images(shared: bool, batch: int, experts: int, high: int, wide: int) -> Tensor:
    return torch.randn(batch, 9, high, wide) if shared else torch.randn(batch, experts, 9, high, wide)


@torch.no_grad()
def compared(name: str, layout: str, shared: bool, gated: bool, size: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    """Ours, in fp64, in plain PyTorch."""
    layers, x = CHAINS[name](size[1]), laid_out(images(shared, *size), layout)
    gate = torch.rand(size[:2]) if gated else None
    exact = reference(x.double(), doubled(layers), None if gate is None else gate.double())
    return chain.conv_chain(x, layers, gate), exact, reference(x, layers, gate)


@native
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (5, 2, 7, 6), (2, 3, 16, 17)], ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(name: str, size: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    for shared, gated in ((True, False), (True, True), (False, True)):
        found = [compared(name, "contiguous", shared, gated, size) for _ in range(4)]
        assert_close(f"y, {shared}, {gated}", found)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    torch.manual_seed(0)
    assert_close("y", [compared("blocks", layout, False, False, (3, 2, 6, 5)) for _ in range(4)])  # type: ignore[misc]


@torch.no_grad()
def test_fp64_and_empty() -> None:
    layers, x = doubled(CHAINS["blocks"](2)), images(True, 3, 2, 6, 5).double()
    torch.testing.assert_close(chain.conv_chain(x, layers), reference(x, layers), rtol=1e-12, atol=1e-12)
    assert chain.conv_chain(x[:0], layers).shape == (0, 2, 17, 3, 3)


@torch.no_grad()
def test_an_image_has_no_part_in_another_and_threads_none_in_bits() -> None:
    torch.manual_seed(0)
    layers = draw(1, [(9, 64, 3, 1), (64, 64, 3, 1)], [(True, 0, -1), (True, 1, 1)])  # several images a group
    x, threads = images(True, 11, 1, 8, 8), torch.get_num_threads()
    y = chain.conv_chain(x, layers)
    for i in (0, 3, 10):
        assert same_bits(chain.conv_chain(x[i : i + 1], layers), y[i : i + 1])
    try:
        torch.set_num_threads(3)
        assert same_bits(chain.conv_chain(x, layers), y)
    finally:
        torch.set_num_threads(threads)
    x[4, 0, 2, 2] = float("nan")
    found = chain.conv_chain(x, layers)
    assert found[4].isnan().any()
    found[4] = y[4]
    assert same_bits(found, y)


def test_opcheck() -> None:
    layers = CHAINS["blocks"](2)
    weights, scales, biases, *_ = zip(*layers, strict=True)
    forms = [int(n) for layer in layers for n in layer[3:]]
    x = laid_out(images(True, 3, 2, 5, 4), "permuted")
    opchecked("conv_chain", x, list(weights), list(scales), list(biases), forms, torch.rand(3, 2))


def ran(function: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """The result, and whether the op was called."""
    with torch.profiler.profile() as seen:
        found = function()
    return found, any(event.key == "fastmod::conv_chain" for event in seen.key_averages())


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "net": (lambda: ResMixNet(2, 2), (5, 3, 12, 10)),
    "stack": (lambda: ExpertStack(5, 9, 3, 2, stride=2), (4, 3, 5, 7, 6)),
    "gater": (lambda: Gater(5, 3), (4, 5, 7, 6)),
    "gater with batch norm": (lambda: Gater(5, 3, norm=True), (4, 5, 7, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_layers_give_what_they_give_with_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x = make().double(), torch.randn(shape).double()
    for _ in range(3):
        net(x)  # statistics other than the first
    net.eval()
    expected, used = ran(lambda: net(x))
    assert not used
    with torch.no_grad():
        found, used = ran(lambda: net(x))
        assert used
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    # In training batch norm sees the batch, gradients or not.
    other = copy.deepcopy(net.train())
    expected = net(x)
    with torch.no_grad():
        torch.testing.assert_close(other(x), expected, rtol=1e-10, atol=1e-10)
    for (key, ours), theirs in zip(other.named_buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=key)


def test_hooks_on_blocks_run() -> None:
    stack, seen = ExpertStack(3, 4, 2, 2).eval(), []
    stack.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        assert not ran(lambda: stack(torch.randn(2, 3, 5, 5)))[1]
    assert seen == [1]


def test_autocast_and_half_precision_go_layer_by_layer() -> None:
    stack, x = ExpertStack(3, 4, 2, 1).eval(), torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert not ran(lambda: stack(x))[1]
        assert not ran(lambda: stack.bfloat16()(x.bfloat16()))[1]


BAD = {
    "layers": (lambda a: a | {"scales": a["scales"][1:]}, "weights, scales"),
    "source": (lambda a: a | {"forms": [1, 1, 1, -1, *a["forms"][4:]]}, "forms.*layer 0"),
    "residual": (lambda a: a | {"forms": [*a["forms"][:-1], 0]}, "forms.*residual"),
    "scale": (lambda a: a | {"scales": [s[:1] for s in a["scales"]]}, "scales"),
    "gate": (lambda a: a | {"gate": torch.rand(2, 2)}, r"gate.*\[2, 2\]"),
    "channels": (lambda a: a | {"x": torch.randn(3, 8, 5, 4)}, "expected x"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_kernel_refuses(case: str) -> None:
    layers = CHAINS["blocks"](2)
    weights, scales, biases, *_ = zip(*layers, strict=True)
    forms = [int(n) for layer in layers for n in layer[3:]]
    good = {
        "x": torch.randn(3, 9, 5, 4),
        "weights": list(weights),
        "scales": list(scales),
        "biases": list(biases),
        "forms": forms,
        "gate": None,
    }
    torch.ops.fastmod.conv_chain(**good)
    change, pattern = BAD[case]
    with pytest.raises(ValueError, match=pattern):
        torch.ops.fastmod.conv_chain(**change(good))
