"""The layers inside ``torch.compile(fullgraph=True)``, forward and backward, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

import fastmod
from fastmod.nn import SMFR


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    torch._dynamo.reset()
    with fastmod.use_backend(request.param):
        yield request.param


def compiled_by(backend: str, model: SMFR) -> Callable[[torch.Tensor], torch.Tensor]:
    """Inductor for the kernels; only the graph for plain PyTorch, as generating its code would take long."""
    return torch.compile(model, fullgraph=True, backend="inductor" if backend == "native" else "aot_eager")


def model_and_input(mode: str) -> tuple[SMFR, torch.Tensor]:
    torch.manual_seed(0)
    return SMFR(4, 2, 5, 3, 1, hidden=7, mode=mode, threshold=0.1), torch.randn(6, 4, 5)


def step(model: SMFR, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = run(x)
    penalty = model.penalty()
    (out.square().sum() + penalty).backward()
    return [out.detach(), penalty.detach(), model.routing()[0].weights, *[p.grad for p in model.parameters()]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_equals_eager(backend: str, mode: str) -> None:
    model, x = model_and_input(mode)
    model.eval()  # makes Gumbel deterministic; penalty and gradients exist as in training
    twin = copy.deepcopy(model)
    compiled = compiled_by(backend, twin)
    for size in (6, 3, 6):  # the second size makes the batch dynamic
        torch.testing.assert_close(step(twin, compiled, x[:size]), step(model, model, x[:size]))


@pytest.mark.slow
def test_gumbel_training_draws_from_torchs_generator(backend: str) -> None:
    model, x = model_and_input("gumbel")
    compiled = compiled_by(backend, model)
    torch.manual_seed(1)
    first = step(model, compiled, x)
    second = step(model, compiled, x)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(step(model, compiled, x), first, strict=True))
    assert not torch.equal(first[0], second[0])


@pytest.mark.slow
def test_a_change_of_backend_is_seen() -> None:
    torch._dynamo.reset()
    model, x = model_and_input("softmax")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(x)
    for name in ("native", "reference", "auto"):
        with fastmod.use_backend(name):
            torch.testing.assert_close(compiled(x), expected)
