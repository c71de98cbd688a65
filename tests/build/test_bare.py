"""With torch and the declared dependencies alone: no numpy, no matplotlib, no tensorboard, no triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.study_commands import ROOT

MISSING = ("numpy", "matplotlib", "tensorboard", "triton", "scipy")
# Python reads a file of this name first of all. Not found, rather than refused: find_spec must say so too.
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {MISSING} else find(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""
SMALL = ["--steps", "20", *(f"--set={s}" for s in ("batch=4", "chunk=10", "width=2", "depth=1", "hidden=4"))]


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process without them."""
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "blocker"), "PYTHONWARNINGS": "error::RuntimeWarning"}


def run(bare: dict[str, str], *args: object) -> str:
    command = [sys.executable, "-m", "fastmod", *map(str, args)]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_blocker_blocks(bare: dict[str, str]) -> None:
    program = f"from importlib.util import find_spec; print([find_spec(name) for name in {MISSING}])"
    done = subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True, text=True)
    assert done.stdout.strip() == str([None] * len(MISSING)), done.stdout + done.stderr


@pytest.mark.slow
def test_doctor(bare: dict[str, str]) -> None:
    report = json.loads(run(bare, "doctor", "--json"))
    assert report["healthy"]
    assert {line["detail"] for line in report["lines"] if line["backend"] == "triton" and line["device"] == "cpu"} == {
        "triton is not installed"
    }


@pytest.mark.slow
def test_study_resume_and_inspect(bare: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run(bare, "study", "algo", "--quick", "--model", "SMFR", *SMALL, "--out", folder)
    assert 'no figures and no TensorBoard events: pip install "fastmod[study]" adds them' in said
    assert f"report: {folder / 'report.html'}" in said
    assert "<img" not in (folder / "report.html").read_text()
    assert json.loads((folder / "result.json").read_text())["trials"][0]["steps"] == 20
    before = {file.name: file.read_bytes() for file in folder.glob("checkpoints/*")}
    assert "report: " in run(bare, "study", "--resume", folder)
    assert {file.name: file.read_bytes() for file in folder.glob("checkpoints/*")} == before and before
    shown = run(bare, "inspect", folder)
    assert shown.count(":= ") == 10 and 'no heat maps: pip install "fastmod[study]" adds them' in shown


@pytest.mark.slow
def test_jobs(bare: dict[str, str], tmp_path: Path) -> None:
    args = ("study", "algo", "--model", "FNN", "--seeds", "0-1", "--set=fnn_width=8", *SMALL, "--jobs", "2")
    assert "report: " in run(bare, *args, "--out", tmp_path / "run")
