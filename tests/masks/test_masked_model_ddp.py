"""Two processes, gloo: a MaskedModel under DistributedDataParallel steps by the mean of what the processes drew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastmod.masks import MaskedModel
from tests.helpers.processes import as_one_of_two


def make() -> tuple[MaskedModel, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))
    return MaskedModel(net, samples=2, mask_bias=True), torch.randn(8, 5)


def backward(run: nn.Module, x: Tensor, rank: int) -> None:
    torch.manual_seed(100 + rank)  # each process draws masks of its own
    run(x[4 * rank : 4 * rank + 4]).square().sum().backward()


def worker(rank: int, folder: str) -> None:
    masked, x = make()
    run = DistributedDataParallel(masked)
    for _ in range(2):  # the second finds fault with parameters that the first left out
        masked.zero_grad()
        backward(run, x, rank)
    torch.save({name: p.grad for name, p in masked.named_parameters()}, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_gradients(tmp_path: Path) -> None:
    mp.spawn(as_one_of_two, (str(tmp_path), worker), nprocs=2)
    each = []
    for rank in range(2):
        masked, x = make()
        backward(masked, x, rank)
        each.append({name: p.grad for name, p in masked.named_parameters()})
    assert any(not torch.equal(each[0][name], each[1][name]) for name in each[0])
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found.keys() == each[0].keys()
        for name, value in found.items():
            torch.testing.assert_close(value, (each[0][name] + each[1][name]) / 2)
