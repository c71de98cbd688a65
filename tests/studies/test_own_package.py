"""The study that docs/studies.md shows, as a package that pip installed: run, resumed, swept and loaded back."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastmod.runs
from fastmod.runs.folder import RunFolder
from fastmod.studies import registry
from tests.helpers.study_commands import in_process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "studies.md"


def block(language: str, first: str) -> str:
    """The block of code of the page that begins with this line."""
    found = [
        text for text in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL) if text.startswith(first)
    ]
    assert len(found) == 1
    return found[0]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    project = block("toml", "# pyproject.toml")
    group, point = re.search(r'entry-points\."(.*?)"\]\n(.*)\n', project).groups()  # type: ignore[union-attr]
    site = tmp_path / "site"
    described = site / "majority-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: majority\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    (site / "majority.py").write_text(block("python", "# majority.py"))
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("majority", None)


def test_short_enough() -> None:
    lines = [line for line in block("python", "# majority.py").splitlines() if line.strip()]
    assert len(lines) <= 30, len(lines)


def test_it_learns_and_comes_back(tmp_path: Path) -> None:
    assert "majority" in registry.names()
    done = in_process("study", "majority", "--seeds", "0", "--steps", "200", "--out", tmp_path / "run")
    assert done.code == 0 and "MLP, accuracy" in done.out, done.text
    assert RunFolder(tmp_path / "run").metrics()[-1]["accuracy"] > 0.9, "guessing gives 0.5"
    assert in_process("study", "--resume", tmp_path / "run").code == 0
    trial = fastmod.runs.load_trial(tmp_path / "run")
    assert trial.metrics()["accuracy"] == RunFolder(tmp_path / "run").metrics()[-1]["accuracy"]
    options = ["--quick", "--steps", "50", "--grid", "lr=1e-3,3e-3", "--seeds", "0"]
    swept = in_process("sweep", "majority", *options, "--out", tmp_path / "sweep")
    assert swept.code == 0 and len((tmp_path / "sweep" / "trials.csv").read_text().splitlines()) == 3, swept.text
