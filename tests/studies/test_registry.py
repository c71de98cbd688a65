"""Studies of other packages: found by their entry points, run by the same command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastmod.runs.config import StudyError
from fastmod.studies import registry
from fastmod.studies.blocks.algo import Algo
from tests.helpers.study_commands import in_process, refused

MODULE = """
import torch
from fastmod.studies.blocks.doubleadd import DoubleAdd, DoubleAddTrial


class SGDTrial(DoubleAddTrial):
    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), self.config.lr, momentum=0.9)


class Elsewhere(DoubleAdd):
    name = "elsewhere"
    title = "A study of another package"

    def trial(self, config, model, seed, device):
        return SGDTrial(config, model, seed, device)


class Rival(Elsewhere):
    name = "algo"


number = int
"""
POINTS = """
[fastmod.studies]
elsewhere = somebody_elses_studies:Elsewhere
algo = somebody_elses_studies:Rival
gone = somebody_elses_studies:Gone
missing = no_such_module_of_anybody:Study
number = somebody_elses_studies:number
"""
SMALL = ["--steps", "8", "--seeds", "0", *(f"--set={s}" for s in ("batch=4", "chunk=2", "fnn_width=6", "fnn_depth=1"))]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip leaves a package: its module and the folder that describes it."""
    site = tmp_path / "site"
    described = site / "somebody_elses-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-elses\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(POINTS)
    (site / "somebody_elses_studies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("somebody_elses_studies", None)


def test_names() -> None:
    assert registry.names()[:2] == ["algo", "addmul"]
    assert registry.names()[-4:] == ["elsewhere", "gone", "missing", "number"]


def test_own_names_are_not_taken() -> None:
    assert type(registry.get("algo")) is Algo


def test_runs_and_resumes_with_its_own_optimiser(tmp_path: Path) -> None:
    done = in_process("study", "elsewhere", "--model", "FNN", *SMALL, "--out", tmp_path / "run")
    assert done.code == 0, done.text
    import torch

    state = torch.load(tmp_path / "run" / "checkpoints" / "FNN-s0.pt", weights_only=True)["state"]
    assert "momentum_buffer" in state["optimizer"]["state"][0]
    assert in_process("study", "--resume", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", "Gone"), ("missing", "no_such_module_of_anybody"), ("number", "expected a subclass of")],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        registry.get(name)
    refused(in_process("study", name, "--out", tmp_path / "run"), name, words)


def test_list_shows_the_others_all_the_same() -> None:
    done = in_process("study")
    assert done.code == 0 and "elsewhere" in done.out and "mask-math" in done.out and "gone" in done.out, done.text


def test_unknown_study() -> None:
    with pytest.raises(StudyError, match=r"known: algo, .*elsewhere"):
        registry.get("nonsense")
