"""How OpenMP's threads wait: asleep in studies and their jobs, unless the user has decided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastmod import waiting
from tests.helpers.study_commands import ROOT
from tests.helpers.study_runs import SMALL

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m fastmod study algo", True),
        ("python -X dev -m fastmod live", True),
        ("python -u /usr/bin/fastmod study --resume x", True),
        ("python /usr/bin/fastmod race", False),
        ("python -m fastmod doctor", False),
        ("python -m fastmod", False),
        ("python train.py fastmod study", False),
        ("python -c fastmod study", False),
        ("python -m pytest fastmod study", False),
        ("python", False),
    ],
)
def test_commands_that_train(command: str, expected: bool) -> None:
    assert waiting.trains(command.split()) is expected


@pytest.mark.parametrize("name", NAMES)
def test_the_user_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    before = dict(os.environ)
    with waiting.passively():
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert dict(os.environ) == before
    monkeypatch.setenv(name, "1")
    decided = dict(os.environ)
    with waiting.passively():
        assert dict(os.environ) == decided


@pytest.mark.slow
def test_import_leaves_the_environment() -> None:
    program = "import os; before = dict(os.environ); import fastmod; assert dict(os.environ) == before"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


# OpenMP says what it has read as soon as it is loaded, once in each process.
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the OpenMP of GCC")
@pytest.mark.parametrize(
    ("args", "given", "expected"),
    [
        (["study"], {}, ["0"]),
        (["study"], {"GOMP_SPINCOUNT": "77"}, ["77"]),
        (["--version"], {}, ["300000"]),
        ([*SMALL["algo"], "--jobs", "2"], {}, ["0"] * 3),
    ],
    ids=["study", "decided", "short", "jobs"],
)
def test_openmp_has_read_it(args: list[str], given: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    args = ["study", *args, "--out", str(tmp_path / "run")] if len(args) > 1 else args
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "fastmod", *args],
        env={**clean, **given, "OMP_DISPLAY_ENV": "VERBOSE", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert found == expected, done.stderr
