"""``torchrun``: two processes do what one does with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastmod.runs import parallel
from fastmod.runs.config import StudyError
from fastmod.runs.folder import RunFolder
from tests.helpers.study_commands import ROOT, fastmod
from tests.helpers.study_hooks import kill, ticks
from tests.helpers.study_runs import states

SIZES = ("batch=8", "chunk=5", "fnn_width=6", "fnn_depth=1", "evaluate_every=10", "checkpoint_seconds=0", "lr=0.01")
SMALL = ["doubleadd", "--model", "FNN", "--seeds", "0", "--steps", "40", *(f"--set={size}" for size in SIZES)]
#: Tells which threads a process of the team still has when it ends.
THREADS_LEFT = """
import atexit, os, pathlib
def tell():
    names = {(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()}
    os.write(2, f"threads left: {sorted(names)}\\n".encode())
if "RANK" in os.environ:
    atexit.register(tell)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks and signals")
def test_two_processes_go_on_as_one_would(tmp_path: Path) -> None:
    """A run that was killed as one process, gone on with by two, beside the same run by one alone."""
    assert fastmod("study", *SMALL, "--out", tmp_path / "one", hooks=(ticks(),)).code == 0
    assert fastmod("study", *SMALL, "--out", tmp_path / "two", hooks=(ticks(), kill("told FNN-s0 15"))).killed
    begun = states(tmp_path / "two")["FNN-s0"]
    assert begun["step"] == 10
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    rest = ["-m", "fastmod", "study", "--resume", str(tmp_path / "two")]
    (tmp_path / "sitecustomize.py").write_text(THREADS_LEFT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, *rest], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("threads left: ") == 2 and "gloo" not in done.stderr, done.stderr
    assert done.stdout.count("report: ") == 1, "the first process alone talks"
    one, two = (states(tmp_path / name)["FNN-s0"] for name in ("one", "two"))
    assert one["step"] == two["step"] == 40
    moved = max(float((one["model"][name] - begun["model"][name]).abs().max()) for name in one["model"])
    apart = max(float((one["model"][name] - two["model"][name]).abs().max()) for name in one["model"])
    assert moved > 0.1 and apart < 1e-5, (moved, apart)
    lines = zip(RunFolder(tmp_path / "one").metrics(), RunFolder(tmp_path / "two").metrics(), strict=True)
    for expected, got in lines:
        assert got["step"] == expected["step"] and got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    halves = [line["loss"] for line in RunFolder(tmp_path / "two").metrics()]
    assert len(halves) == 4


def team(rank: int, size: int) -> parallel.Team:
    made = parallel.Team.__new__(parallel.Team)
    made.rank, made.size = rank, size
    return made


def test_parts_are_the_batch() -> None:
    batch, forced = torch.arange(12).view(6, 2), torch.tensor(1.0)
    parts = [team(rank, 3).part((batch, batch[:, 0], forced)) for rank in range(3)]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch)
    assert torch.equal(torch.cat([part[1] for part in parts]), batch[:, 0])
    assert all(part[2] is forced for part in parts), "a number for the whole step"


@pytest.mark.parametrize("shapes", [[(5, 2)], [(6,), (3,)], [()]])
def test_batches_that_cannot_be_shared_out(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(StudyError, match="batch: expected a multiple of the 2 processes"):
        team(0, 2).part(tuple(torch.zeros(shape) for shape in shapes))


def test_gradients_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has gradients of zero."""
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda tensor: None)
    one = torch.nn.Parameter(torch.zeros(2, 3))
    two = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.zeros(1))
    one.grad, two.grad = torch.full((3, 2), 3.0).t(), torch.arange(4.0, dtype=torch.float64)
    team(0, 2).average(torch.optim.SGD([{"params": [one]}, {"params": [two, unused]}], lr=1.0))
    assert torch.equal(one.grad, torch.full((2, 3), 1.5)) and unused.grad is None
    assert torch.equal(two.grad, torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64))


def test_noise_is_each_process_own_and_the_generator_common() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(3)
        with team(rank, 2).noise():
            drawn.append(torch.rand(4))
        after.append(torch.rand(4))
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(after[0], after[1])


def test_alone_without_torchrun() -> None:
    with parallel.joined() as found:
        assert type(found) is parallel.Alone and found.size == 1
