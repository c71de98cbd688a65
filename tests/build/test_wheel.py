"""A wheel without the extension: Python alone, for GPU users who have torch and triton but no compiler."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("fastmod", "kernels", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, **environment: str) -> str:
    """Not in the checkout, where Python would find the package without installing it."""
    words, elsewhere = [str(part) for part in command], Path(ROOT.anchor)
    result = subprocess.run(words, capture_output=True, text=True, cwd=elsewhere, env={**os.environ, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / part)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", out, tree, FASTMOD_EXTENSION="0")
    [found] = out.glob("*.whl")
    return found


def test_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".pyd", ".cpp"))]
    assert {"fastmod/ops/multiplex.py", "fastmod/kernels/multiplex.py", "fastmod/py.typed"} <= set(names)


@pytest.mark.slow
def test_doctor_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # torch and the rest as they are here; a path in a .pth file brings no editable installation along.
    Path(own, "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    code = "import warnings; warnings.simplefilter('error', RuntimeWarning); import fastmod; print(fastmod.__file__)"
    assert str(tmp_path) in run(python, "-c", code)
    report = json.loads(run(python, "-m", "fastmod", "doctor", "--json"))
    lines = [line for line in report["lines"] if line["device"] == "cpu"]
    assert {line["state"] for line in lines if line["backend"] == "reference"} == {"ok"}
    assert {line["state"] for line in lines if line["backend"] == "native"} == {"unavailable"}
    assert not report["problems"] and "without the extension" in report["extension"]
    program = (
        "import torch, fastmod; m = fastmod.nn.SMFR(3, 2, 4, 2, 1); m(torch.randn(2, 3, 4)).sum().backward();"
        "print(all(p.grad is not None for p in m.parameters()))"
    )
    assert run(python, "-c", program).split() == ["True"]


def test_triton_serves_without_the_extension(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import torch, fastmod\n"
        "x, l = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 2)\n"
        "with fastmod.use_backend('triton'):\n"
        "    out = fastmod.ops.multiplex(x, l)\n"
        "with fastmod.use_backend('reference'):\n"
        "    torch.testing.assert_close(out, fastmod.ops.multiplex(x, l))\n"
        "out.sum().backward()\n"
        "print(fastmod.backends()['multiplex']['cpu'], x.grad is not None)"
    )
    found = run(sys.executable, "-c", program, PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1")
    assert "'native': False, 'triton': True" in found and found.strip().endswith("True")
