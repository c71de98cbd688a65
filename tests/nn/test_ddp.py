"""A step of DistributedDataParallel in two processes (gloo) equals one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from fastmod.nn import SMFR
from tests.helpers.processes import as_one_of_two


def make(mode: str) -> tuple[SMFR, torch.Tensor]:
    torch.manual_seed(0)
    model = SMFR(4, 2, 5, 3, 1, hidden=7, mode=mode, threshold=0.1)
    return model.train(mode == "softmax"), torch.randn(8, 4, 5)


def step(model: SMFR, run: torch.nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = run(x).square().sum() / len(x) + model.penalty() / len(x)
    loss.backward()
    optimizer.step()


def worker(rank: int, folder: str, mode: str) -> None:
    model, x = make(mode)
    step(model, DistributedDataParallel(model), x[4 * rank : 4 * rank + 4])
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
def test_step(tmp_path: Path, mode: str) -> None:
    mp.spawn(as_one_of_two, (str(tmp_path), worker, mode), nprocs=2)
    model, x = make(mode)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    step(model, model, x)
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"rank{rank}.pt").items():
            torch.testing.assert_close(value, model.state_dict()[name])
            assert not torch.equal(value, before[name]), name
