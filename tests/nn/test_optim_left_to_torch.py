"""Cases that ``fastmod.optim.Adam`` leaves to torch, after clipping."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmod.optim import Adam

MAX_NORM = 0.1


def pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return model, copy.deepcopy(model)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Gradients have norms above and below MAX_NORM: Adam would ignore a factor common to all steps."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).square().sum() * 0.01 ** (step % 3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """Clip by hand for optimisers that do not."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if not isinstance(optimizer, Adam):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"amsgrad": True},
        {"maximize": True},
        {"foreach": True},
        {"fused": False},
        {"fused": True},
        {"lr": torch.tensor(1e-2)},
        {"lr": 1},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    ours, theirs = pair()
    options = {"lr": 1e-2, **options}
    train(ours, Adam(ours.parameters(), max_norm=MAX_NORM, **copy.deepcopy(options)))
    train(theirs, torch.optim.Adam(theirs.parameters(), **options))
    assert_same(ours, theirs)


def test_capturable_is_refused_as_torch_does() -> None:
    """The CPU has no graphs to capture."""
    outcomes = []
    for kind in (Adam, torch.optim.Adam):
        model, _ = pair()
        try:
            train(model, kind(model.parameters(), 1e-2, capturable=True, fused=False))
            outcomes.append("trained")
        except AssertionError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_differentiable() -> None:
    slopes = []
    for kind in (Adam, torch.optim.Adam):
        start = torch.full((3,), 2.0, requires_grad=True)
        p = start.clone()
        p.grad = start * start
        kind([p], 0.1, eps=1.0, differentiable=True).step()
        (slope,) = torch.autograd.grad(p.sum(), start)
        slopes.append(slope)
    torch.testing.assert_close(*slopes)
    assert not torch.equal(slopes[0], torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    train(ours, Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM))
    train(theirs, torch.optim.Adam(theirs.parameters(), 1e-2, fused=True))
    assert_same(ours, theirs)


def test_complex_parameters() -> None:
    results = []
    for kind in (Adam, torch.optim.Adam):
        p = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        optimizer = kind([p], 0.1, **({"max_norm": MAX_NORM} if kind is Adam else {}))
        for _ in range(3):
            p.grad = p.detach() * 1j
            if kind is not Adam:
                nn.utils.clip_grad_norm_([p], MAX_NORM)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Adam(table.parameters(), max_norm=MAX_NORM)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()


@pytest.mark.slow
def test_compiled_steps() -> None:
    ours, theirs = pair()
    optimizer = Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM)
    other = torch.optim.Adam(theirs.parameters(), 1e-2)

    @torch.compile(backend="eager")
    def step(x: Tensor, weight: float) -> Tensor:
        optimizer.zero_grad()
        loss = ours(x).square().sum() * weight
        loss.backward()
        optimizer.step()
        return loss

    for number in range(3):
        step(torch.randn(6, 4, generator=torch.Generator().manual_seed(number)), 0.01**number)
    train(theirs, other, 3)
    assert_same(ours, theirs)
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_distributed_tensors(tmp_path: Path) -> None:
    """FSDP2 on a mesh of one process, plain and with scaled gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    ours, theirs = pair()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(ours, mesh=init_device_mesh("cpu", (1,)))
        optimizer = Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM)
        train(ours, optimizer, 3)
        scaled(ours, optimizer, range(3, 6))
        assert all(isinstance(p, DTensor) for p in ours.parameters())
        whole = [p.full_tensor().detach() for p in ours.parameters()]
    finally:
        dist.destroy_process_group()
    other = torch.optim.Adam(theirs.parameters(), 1e-2)
    train(theirs, other, 3)
    scaled(theirs, other, range(3, 6))
    torch.testing.assert_close(whole, [p.detach() for p in theirs.parameters()])


# ---- GradScaler


def scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, unscale: bool = False, infinite: int = -1
) -> float:
    """Train with a scaler as torch documents it for optimisers without clipping; returns the final scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    clips = isinstance(optimizer, Adam)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == infinite:
            next(model.parameters()).grad[0, 0] = float("inf")
        if unscale or not clips:
            scaler.unscale_(optimizer)
        if not clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("infinite", [-1, 0, 3])
@pytest.mark.parametrize("unscale", [False, True], ids=["left", "unscaled"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": True}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scaler(dtype: torch.dtype, options: dict[str, Any], unscale: bool, infinite: int) -> None:
    ours, theirs = pair(dtype)
    optimizer = Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM, **options)
    other = torch.optim.Adam(theirs.parameters(), 1e-2, weight_decay=options.get("weight_decay", 0.0))
    one = scaled(ours, optimizer, range(6), unscale, infinite)
    two = scaled(theirs, other, range(6), infinite=infinite)
    assert one == two
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-6)
    made = {float(state["step"]) for state in optimizer.state.values()}
    assert made == {float(state["step"]) for state in other.state.values()}


def test_grad_scaler_between_plain_steps() -> None:
    """Attributes the scaler sets on the optimiser must not affect plain steps."""
    ours, theirs = pair()
    optimizer, other = Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM), torch.optim.Adam(theirs.parameters(), 1e-2)
    for model, which in ((ours, optimizer), (theirs, other)):
        train(model, which)
        scaled(model, which, range(2))
        train(model, which)
    assert_same(ours, theirs)


def test_grad_scaler_after_torch_state() -> None:
    """Loading state of an unfused optimiser must leave ours fused: the scaler relies on what it saw first."""
    ours, theirs = pair()
    optimizer, other = Adam(ours.parameters(), 1e-2, max_norm=MAX_NORM), torch.optim.Adam(theirs.parameters(), 1e-2)
    train(theirs, other)
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    scaled(ours, optimizer, range(3))
    scaled(theirs, other, range(3))
    assert_same(ours, theirs)


def test_grad_scaler_refuses_narrow_gradients() -> None:
    model, _ = pair(torch.float16)
    optimizer = Adam(model.parameters(), 1e-2, max_norm=MAX_NORM)
    with pytest.raises(ValueError, match="max_norm: expected None for float16 gradients"):
        scaled(model, optimizer, range(1))
