"""nvcc compiles every kernel file for every architecture served, without spilling registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).parent.parent / "csrc" / "cuda"
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    return nvcc


@pytest.mark.parametrize("name", [path.stem for path in sorted(CUDA.glob("*.cu"))])
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
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


@pytest.mark.parametrize(
    ("file", "kernel", "count"),
    [
        ("sample_mask", "forward_kernel", 8),  # four dtypes, one or four weights a thread
        ("masked_linear", "thresholds_kernel", 4),
    ],
)
def test_masks_are_drawn_unfused(file: str, kernel: str, count: int, tmp_path: Path) -> None:
    """Masks agree with other backends only if every product is rounded: an operator in place of an intrinsic would be
    fused, and change so few masks that no other test need see it."""
    target = tmp_path / f"{file}.ptx"
    command = [find_nvcc(), "-std=c++17", "-O3", "-arch=sm_90", "-ptx", str(CUDA / f"{file}.cu"), "-o", str(target)]
    subprocess.run(command, check=True)
    kernels = {
        name: body
        for name, body in re.findall(r"\.entry (\w+)\((.*?)^}", target.read_text(), re.DOTALL | re.MULTILINE)
        if kernel in name
    }
    assert len(kernels) == count
    for name, body in kernels.items():
        assert "mul.rn.f32" in body and "div.rn.f32" in body, name
        # ptxas could still fuse a sum without a rounding mode; the product mask * weight meets no sum
        assert not re.search(r"\bfma\.|\b(add|sub)\.(ftz\.)?f32", body), name
