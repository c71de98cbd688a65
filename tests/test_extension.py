"""Import never fails: without the extension, with one for another torch, without triton, plain PyTorch serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import fastmod

PACKAGE = Path(fastmod.__file__).parent

USE = """
import sys, warnings
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]  # the copy alone, not the installed package
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, fastmod
messages = [str(w.message) for w in caught if "fastmod" in str(w.message)]
x = torch.randn(3, 6, 10, requires_grad=True)
model = fastmod.nn.SMFR(6, 5, 10, 4, 1, hidden=7)
(model(x).sum() + model.penalty()).backward()
assert x.grad.isfinite().all()
assert fastmod.ops.multiplex(x, torch.randn(3, 6, 2)).shape == (3, 2, 10)
print(len(messages), fastmod.backends()["smfr"]["cpu"]["auto"], *messages)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, Python files and extension, that a test may damage."""
    shutil.copytree(PACKAGE, tmp_path / "fastmod", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "fastmod"


def use(copy: Path, program: str = USE) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=copy.parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_whole_package_is_silent(copy: Path) -> None:
    assert use(copy).split() == ["0", "native"]


def test_no_extension(copy: Path) -> None:
    for library in copy.glob("_C*"):
        library.unlink()
    found = use(copy)
    assert found.startswith("1 reference") and "no compiled extension" in found and "pip install" in found


def test_extension_built_for_another_torch(copy: Path) -> None:
    stamp = json.loads((copy / "_build.json").read_text())
    (copy / "_build.json").write_text(json.dumps({**stamp, "torch": "1.13.0"}))
    found = use(copy)
    assert found.startswith("1 reference") and "built for torch 1.13.0, you have" in found and "pip install" in found


def test_extension_that_does_not_load(copy: Path) -> None:
    (library,) = copy.glob("_C*")
    library.write_bytes(b"not a library")
    found = use(copy)
    assert found.startswith("1 reference") and "does not load" in found


def test_damaged_stamp(copy: Path) -> None:
    (copy / "_build.json").write_text("{")
    assert use(copy).startswith("1 reference")


def test_no_triton(copy: Path) -> None:
    program = "import sys; sys.modules['triton'] = None\n" + USE + "print(fastmod.backends()['mfnnr']['cpu']['triton'])"
    assert use(copy, program).split() == ["0", "native", "False"]


def test_stamp_of_the_module_is_that_beside_it() -> None:
    module = fastmod._extension.MODULE
    stamp = fastmod._extension.built_stamp()
    assert module.stamp() == stamp
    assert {"torch", "cuda", "compiler", "archs", "flags"} <= set(stamp)


def test_use_backend_as_call_and_as_context() -> None:
    try:
        fastmod.use_backend("reference")
        with fastmod.use_backend("native"):
            assert fastmod.backend._active == "native"
        assert fastmod.backend._active == "reference"
    finally:
        fastmod.use_backend("auto")


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        ("8.0 9.0", (8, 0), True),
        ("8.0 9.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.0 9.0", (12, 0), False),
        ("8.0;9.0+PTX", (12, 0), True),
        ("9.0a", (9, 0), True),
        ("9.0+PTX", (7, 5), False),
        ("visible GPUs", (7, 5), True),
    ],
)
def test_architectures(archs: str, capability: tuple[int, int], expected: bool) -> None:
    assert fastmod._extension.covers(archs, capability) is expected


def test_every_package_is_installed() -> None:
    """An editable install finds a folder that a wheel would leave out."""
    root = Path(fastmod.__file__).resolve().parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(path.parent.relative_to(root).parts) for path in root.glob("fastmod/**/__init__.py")}
    assert set(settings["packages"]) == folders | {"fastmod.kernels"}
