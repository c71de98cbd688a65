"""The benchmarks run: tiny cases, and one case of each file with the clock switched off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases import SMOKE, Case
from fastmod import race

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.op)
def test_contenders_agree(case: Case) -> None:
    assert race.worst_error(case.steps(compiled=False)) < 1e-5


def test_files_run() -> None:
    chosen = "fastmod and (128x6x8 or B128 and not 196 and not d5 and not penalty)"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-disable", "-p", "no:xdist", "-k", chosen]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed" in result.stdout
