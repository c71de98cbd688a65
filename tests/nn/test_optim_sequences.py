"""Random sequences of operations: the optimiser always steps like clip_grad_norm_ and torch.optim.Adam."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from fastmod.optim import Adam

SHAPES = [(1,), (7,), (3, 5), (0, 2), (2, 3, 4), (33,)]
DEEDS = ("step", "step", "step", "add", "clear", "rate", "reload", "swap", "freeze", "zero", "replace", "spoil")


class Twins:
    """Two copies of the parameters, one for our optimiser and one for torch's."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.max_norm = self.random.choice([None, 0.1, 10.0])
        self.dtypes = self.random.choice([[torch.float32], [torch.float64], [torch.float32, torch.float64]])
        self.frozen: set[int] = set()
        self.params: list[tuple[nn.Parameter, nn.Parameter]] = []
        first = self.fresh(self.random.randint(1, 4))
        self.ours = Adam([mine for mine, _ in first], 1e-2, max_norm=self.max_norm)
        self.theirs = torch.optim.Adam([other for _, other in first], 1e-2)

    def fresh(self, count: int) -> list[tuple[nn.Parameter, nn.Parameter]]:
        made = []
        for _ in range(count):
            shape, dtype = self.random.choice(SHAPES), self.random.choice(self.dtypes)
            value = torch.randn(shape, generator=self.noise, dtype=dtype)
            made.append((nn.Parameter(value), nn.Parameter(value.clone())))
        self.params += made
        return made

    def step(self, spoiled: float | None = None) -> None:
        for number, (mine, other) in enumerate(self.params):
            if number in self.frozen or self.random.random() < 0.25:
                mine.grad = other.grad = None
                continue
            mine.grad = torch.randn(mine.shape, generator=self.noise, dtype=mine.dtype)
            if spoiled is not None and mine.numel():
                mine.grad.view(-1)[0], spoiled = spoiled, None
            other.grad = mine.grad.clone()
        self.finish()

    def finish(self) -> None:
        if self.max_norm is not None:
            with_gradients = [other for _, other in self.params if other.grad is not None]
            nn.utils.clip_grad_norm_(with_gradients, self.max_norm)
        self.ours.step()
        self.theirs.step()

    def add(self) -> None:
        if len(self.ours.param_groups) < 4:
            more, lr = self.fresh(self.random.randint(1, 2)), self.random.choice([1e-1, 1e-3])
            self.ours.add_param_group({"params": [mine for mine, _ in more], "lr": lr})
            self.theirs.add_param_group({"params": [other for _, other in more], "lr": lr})

    def clear(self) -> None:
        self.ours.state.clear()
        self.theirs.state.clear()

    def rate(self) -> None:
        number, lr = self.random.randrange(len(self.ours.param_groups)), self.random.choice([1e-1, 1e-2, 0.0])
        for optimizer in (self.ours, self.theirs):
            optimizer.param_groups[number]["lr"] = lr

    def reload(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def swap(self) -> None:
        """Swap the states of the two optimisers."""
        mine, other = (copy.deepcopy(optimizer.state_dict()) for optimizer in (self.ours, self.theirs))
        self.ours.load_state_dict(other)
        self.theirs.load_state_dict(mine)

    def freeze(self) -> None:
        """Or unfreeze."""
        self.frozen ^= {self.random.randrange(len(self.params))}
        for number, both in enumerate(self.params):
            for p in both:
                p.requires_grad_(number not in self.frozen)

    def zero(self) -> None:
        set_to_none = self.random.random() < 0.5
        self.ours.zero_grad(set_to_none)
        self.theirs.zero_grad(set_to_none)
        self.finish()

    def replace(self) -> None:
        number = self.random.randrange(len(self.params))
        for p in self.params[number]:
            p.data = p.data.clone() * 0.5

    def spoil(self) -> None:
        if self.random.random() < 0.3:  # rarely, as most values are NaN from then on
            self.step(self.random.choice([float("nan"), float("inf"), -float("inf")]))

    def assert_same(self, deeds: list[str]) -> None:
        for mine, other in self.params:
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if mine.dtype is torch.float32 else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(mine, other, equal_nan=True, **tolerance, msg=lambda text: f"{deeds}: {text}")
        counts = [
            [float(optimizer.state[p]["step"]) if optimizer.state.get(p) else None for p in params]
            for optimizer, params in zip((self.ours, self.theirs), zip(*self.params, strict=True), strict=True)
        ]
        assert counts[0] == counts[1], deeds


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_sequences(first: int) -> None:
    for seed in range(first, first + 50):
        twins, deeds = Twins(seed), []
        for _ in range(15):
            deeds.append(twins.random.choice(DEEDS))
            getattr(twins, deeds[-1])()
            twins.assert_same([f"seed {seed}", *deeds])
