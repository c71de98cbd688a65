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
from tests.data.test_domains import usps_folder
from tests.helpers.study_commands import ROOT, fastmod
from tests.helpers.study_hooks import kill, ticks
from tests.helpers.study_runs import digits, states

SIZES = ("batch=8", "chunk=5", "fnn_width=6", "fnn_depth=1", "evaluate_every=10", "checkpoint_seconds=0", "lr=0.01")
SMALL = ["doubleadd", "--model", "FNN", "--seeds", "0", "--steps", "40", *(f"--set={size}" for size in SIZES)]
#: Tells which threads a process of the group still has when it ends.
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


def member(rank: int, size: int) -> parallel.Group:
    made = parallel.Group.__new__(parallel.Group)
    made.rank, made.size = rank, size
    return made


def test_parts_are_the_batch() -> None:
    batch, forced = torch.arange(12).view(6, 2), torch.tensor(1.0)
    parts = [member(rank, 3).part((batch, batch[:, 0], forced)) for rank in range(3)]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch)
    assert torch.equal(torch.cat([part[1] for part in parts]), batch[:, 0])
    assert all(part[2] is forced for part in parts), "a number for the whole step"


def test_parts_where_the_batch_is_not_first() -> None:
    index, tasks = torch.arange(12).view(6, 2), torch.arange(24).view(2, 6, 2)
    parts = [member(rank, 3).part((index, tasks, index), (0, 1)) for rank in range(3)]
    assert all(part[0] is not index and torch.equal(part[0], part[2]) for part in parts)
    assert torch.equal(torch.cat([part[1] for part in parts], 1), tasks)
    with pytest.raises(StudyError, match="batch: expected a multiple of the 2 processes"):
        member(0, 2).part((index, tasks))


FAMILIES: dict[str, tuple[str, ...]] = {
    "algo": ("SMFR", "hidden=4", "width=2", "depth=1", "batch=8", "chunk=5"),
    "mask-addmul": ("FNN", "hidden=6", "mask_steps=5", "batch=8", "chunk=5"),
    "resmix-pentomino": ("ResNet26", "images=32", "valid_images=8", "test_images=8", "batch=8", "epochs=1", "chunk=2"),
    "comp-adapt": ("compositional", "channels=4", "layers=2", "templates=2", "batch=4", "train_images=20",
                   "test_images=20", "adapt_steps=4", "chunk=2", "domains=original,shear", "verify=false", "svhn=no"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as the test above")
@pytest.mark.parametrize("study", FAMILIES)
def test_every_family_is_shared_out(study: str, tmp_path: Path) -> None:
    """Two processes train each of the kinds of study to its end; ALGO's, which draws no noise, as one would."""
    model, *settings = FAMILIES[study]
    if study == "comp-adapt":
        (tmp_path / "data").mkdir()
        digits(tmp_path / "data" / "mnist")
        usps_folder(tmp_path / "data" / "usps")
        settings.append(f"data={tmp_path / 'data'}")
    steps = [] if study.startswith("resmix") else ["--steps", "10"]
    every = 4 if study.startswith("resmix") else 10
    args = [study, "--model", model, "--seeds", "0", *steps, f"--set=evaluate_every={every}"]
    args += [f"--set={setting}" for setting in settings]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    rest = ["-m", "fastmod", "study", *args, "--out", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *rest], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("report: ") == 1, done.stderr
    two = states(tmp_path / "two")[f"{model}-s0"]
    assert two["step"] == {"algo": 10, "mask-addmul": 20, "resmix-pentomino": 4, "comp-adapt": 22}[study]
    if study == "algo":
        assert fastmod("study", *args, "--out", tmp_path / "one", hooks=(ticks(),)).code == 0
        one = states(tmp_path / "one")[f"{model}-s0"]
        assert max(float((one["model"][key] - two["model"][key]).abs().max()) for key in one["model"]) < 1e-5


@pytest.mark.parametrize("shapes", [[(5, 2)], [(6,), (3,)], [()]])
def test_batches_that_cannot_be_shared_out(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(StudyError, match="batch: expected a multiple of the 2 processes"):
        member(0, 2).part(tuple(torch.zeros(shape) for shape in shapes))


def test_gradients_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has gradients of zero."""
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda tensor: None)
    one = torch.nn.Parameter(torch.zeros(2, 3))
    two = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.zeros(1))
    one.grad, two.grad = torch.full((3, 2), 3.0).t(), torch.arange(4.0, dtype=torch.float64)
    member(0, 2).average(torch.optim.SGD([{"params": [one]}, {"params": [two, unused]}], lr=1.0))
    assert torch.equal(one.grad, torch.full((2, 3), 1.5)) and unused.grad is None
    assert torch.equal(two.grad, torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64))


def test_noise_is_each_process_own_and_the_generator_common() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(3)
        with member(rank, 2).noise():
            drawn.append(torch.rand(4))
        after.append(torch.rand(4))
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(after[0], after[1])


def test_alone_without_torchrun() -> None:
    with parallel.joined() as found:
        assert type(found) is parallel.Alone and found.size == 1
