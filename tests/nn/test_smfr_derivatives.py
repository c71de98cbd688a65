"""``nn.SMFR`` with torch.func and second derivatives, compared with the layer in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev

import fastmod
from fastmod.nn import SMFR

MODES = ["softmax", "gumbel"]


def layer(mode: str) -> SMFR:
    """Some logits exceed the threshold, so that the penalty has gradients."""
    torch.manual_seed(1)
    return SMFR(3, 2, 2, 2, 1, hidden=3, mode=mode, threshold=0.05).double()


def loss_of(model: SMFR) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(2)  # the same noise in every call
        out = functional_call(model, params, (x,))
        return out.square().sum() + model.penalty()

    return loss


def by_both(run: Callable[[], Any]) -> tuple[Any, Any]:
    with fastmod.use_backend("reference"):
        expected = run()
    return run(), expected


@pytest.mark.parametrize("mode", MODES)
def test_func_grad(mode: str) -> None:
    model = layer(mode)
    params, x = dict(model.named_parameters()), torch.randn(4, 3, 2, dtype=torch.float64)
    found, expected = by_both(lambda: grad(loss_of(model), argnums=(0, 1))(params, x))
    torch.testing.assert_close(found, expected)
    # Autograd must find the same.
    ordinary = torch.autograd.grad(loss_of(model)(params, x.requires_grad_()), [*params.values(), x])
    torch.testing.assert_close((*found[0].values(), found[1]), ordinary)
    assert all(value.abs().max() > 0 for value in ordinary)


@pytest.mark.parametrize("mode", MODES)
def test_jacrev_of_grad(mode: str) -> None:
    model = layer(mode)
    params, x = dict(model.named_parameters()), torch.randn(2, 3, 2, dtype=torch.float64)
    hessian = jacrev(grad(loss_of(model), argnums=1), argnums=(0, 1))
    (of_params, of_x), expected = by_both(lambda: hessian(params, x))
    torch.testing.assert_close((of_params, of_x), expected)
    assert of_x.shape == (2, 3, 2, 2, 3, 2)
    torch.testing.assert_close(of_x, of_x.permute(3, 4, 5, 0, 1, 2))  # second derivatives are symmetric
    assert of_x[0, :, :, 1].abs().max() == 0, "examples do not meet"
    assert any(value.abs().max() > 0 for value in of_params.values())


@pytest.mark.parametrize("mode", MODES)
def test_double_backward(mode: str) -> None:
    model = layer(mode)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def second() -> tuple[Tensor, ...]:
        loss = loss_of(model)(dict(model.named_parameters()), x)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum((g * v).sum() for g, v in zip(first, directions, strict=True)), leaves)

    found, expected = by_both(second)
    torch.testing.assert_close(found, expected)
    assert all(value.isfinite().all() for value in found) and found[0].abs().max() > 0
