"""Multiplexer and FNNR: the two halves of an MFNNR as separate layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastmod
from fastmod.nn import FNNR, MFNNR, Multiplexer


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with fastmod.use_backend(request.param):
        yield request.param


def fnn(layers: nn.ModuleList, value: Tensor) -> Tensor:
    for linear in list(layers)[:-1]:
        value = F.leaky_relu(linear(value), 0.01)
    return layers[-1](value)


def test_multiplexer(backend: str) -> None:
    torch.manual_seed(0)
    layer = Multiplexer(4, 3, 5, hidden=6, layers=2).double()
    x = torch.randn(2, 7, 4, 5, dtype=torch.float64)
    weights = fnn(layer.route, x.flatten(-2)).view(2, 7, 4, 3).softmax(-2)
    torch.testing.assert_close(layer(x), torch.einsum("...mn,...md->...nd", weights, x))


def test_multiplexer_gumbel(backend: str) -> None:
    torch.manual_seed(0)
    layer = Multiplexer(4, 3, 5, hidden=6, mode="gumbel")
    x = torch.randn(8, 4, 5)
    for training in (True, False):
        out = layer.train(training)(x)
        copied = (out.unsqueeze(-3) == x.unsqueeze(-2)).all(-1)  # [B, M, N]
        assert copied.any(-2).all(), "every output is one of the inputs"
    layer.train()(x).square().sum().backward()
    assert layer.log_tau.grad.isfinite()


@pytest.mark.parametrize("context_blocks", [0, 3])
def test_fnnr(backend: str, context_blocks: int) -> None:
    torch.manual_seed(0)
    layer = FNNR(4, 5, context_blocks=context_blocks, hidden=6, layers=2).double()
    x = torch.randn(2, 7, 4, 5, dtype=torch.float64)
    context = torch.randn(2, 7, 3, 5, dtype=torch.float64) if context_blocks else None
    seen = x if context is None else torch.cat([x, context], -2)
    update = fnn(layer.update, seen.flatten(-2))
    gate = update[..., 20:].sigmoid().unsqueeze(-1)
    torch.testing.assert_close(layer(x, context), gate * update[..., :20].view(2, 7, 4, 5) + (1 - gate) * x)


def test_both_in_a_row_are_an_mfnnr(backend: str) -> None:
    torch.manual_seed(0)
    whole = MFNNR(4, 3, 5, hidden=6)
    route, rewrite = Multiplexer(4, 3, 5, hidden=6), FNNR(3, 5, context_blocks=4, hidden=6)
    route.load_state_dict({k: v for k, v in whole.state_dict().items() if k.startswith("route.")})
    rewrite.load_state_dict({k: v for k, v in whole.state_dict().items() if k.startswith("update.")})
    x = torch.randn(9, 4, 5)
    torch.testing.assert_close(rewrite(route(x), x), whole(x))


@pytest.mark.parametrize("layer", [Multiplexer(4, 3, 5, hidden=6), FNNR(4, 5, hidden=6)], ids=["Multiplexer", "FNNR"])
def test_survives(backend: str, layer: nn.Module) -> None:
    x = torch.randn(6, 4, 5)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    assert layer(x[:0]).shape == (0, *expected.shape[1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_errors() -> None:
    x = torch.zeros(2, 4, 5)
    with pytest.raises(ValueError, match=r"x: expected .*\[..., 4, 5\], got shape \[2, 5, 4\]"):
        Multiplexer(4, 3, 5)(x.transpose(1, 2))
    with pytest.raises(ValueError, match="mode"):
        Multiplexer(4, 3, 5, mode="hard")
    with pytest.raises(ValueError, match="blocks: expected an int >= 1, got 0"):
        FNNR(0, 5)
    with pytest.raises(ValueError, match="context_blocks: expected an int >= 1, got -1"):
        FNNR(4, 5, context_blocks=-1)
    with pytest.raises(ValueError, match="context: expected None"):
        FNNR(4, 5)(x, x)
    layer = FNNR(4, 5, context_blocks=4)
    with pytest.raises(ValueError, match=r"context: expected .*got None"):
        layer(x)
    with pytest.raises(ValueError, match=r"context: expected .*got shape \[2, 5, 4\]"):
        layer(x, x.transpose(1, 2))
    with pytest.raises(ValueError, match=r"context: expected the leading sizes of x \[2\], got shape \[1, 4, 5\]"):
        layer(x, x[:1])
    with pytest.raises(TypeError, match=r"context: expected a tensor .*got int"):
        layer(x, 1)
