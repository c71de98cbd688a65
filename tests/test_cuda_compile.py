"""nvcc compiles every kernel file for every architecture served, without spilling registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).parent.parent / "csrc" / "cuda"
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.parametrize("name", [path.stem for path in sorted(CUDA.glob("*.cu"))])
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    source, target = CUDA / f"{name}.cu", tmp_path / f"{name}.o"
    command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", *targets, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    seen = set(re.findall(r"Compiling entry function '\w+' for 'sm_(\d+)'", done.stderr))
    assert seen == {str(arch) for arch in ARCHITECTURES}
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert set(spills) == {("0", "0")}, done.stderr
    shared = [int(size) for size in re.findall(r"(\d+) bytes smem", done.stderr)]
    assert all(size <= 48 * 1024 for size in shared), shared
