"""Import never fails: without the extension, with one for another torch, without triton, plain PyTorch serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_whole_package_is_silent(copy: Path) -> None:
    assert use(copy).split() == ["0", "native"]


@pytest.mark.slow
def test_no_extension(copy: Path) -> None:
    for library in copy.glob("_C*"):
        library.unlink()
    found = use(copy)
    assert found.startswith("1 reference") and "no compiled extension" in found and "pip install" in found


@pytest.mark.slow
def test_extension_built_for_another_torch(copy: Path) -> None:
    stamp = json.loads((copy / "_build.json").read_text())
    (copy / "_build.json").write_text(json.dumps({**stamp, "torch": "1.13.0"}))
    found = use(copy)
    assert found.startswith("1 reference") and "built for torch 1.13.0, you have" in found and "pip install" in found


@pytest.mark.slow
def test_extension_that_does_not_load(copy: Path) -> None:
    (library,) = copy.glob("_C*")
    library.write_bytes(b"not a library")
    found = use(copy)
    assert found.startswith("1 reference") and "does not load" in found


def test_extension_that_defines_the_ops(copy: Path) -> None:
    """As those of older sources did, with other arguments: importing still works, and plain PyTorch serves."""
    (library,) = copy.glob("_C*")
    library.unlink()
    (copy / "_C.py").write_text("""
import torch
older = torch.library.Library("fastmod", "DEF")
older.define("multiplex(Tensor x) -> Tensor")
for name in ("gated_residual_forward", "gated_residual_forward.triton"):
    older.define(f"{name}(Tensor x, Tensor new, Tensor gate) -> Tensor")
""")
    found = use(copy)
    assert found.startswith("1 reference") and "older sources" in found and "pip install" in found


def test_extension_whose_kernels_have_other_arguments(copy: Path) -> None:
    """The sources moved on and nobody built: what torch would refuse to define must not end the import."""
    op = copy / "ops" / "gated_residual.py"
    text = op.read_text()
    for name in ("gated_residual_forward(", "gated_residual_backward("):
        assert name in text
        text = text.replace(name, f"{name}int more, ")
    op.write_text(text)
    found = use(copy)
    assert found.startswith("1 reference") and "older sources" in found and "pip install" in found


@pytest.mark.slow
def test_damaged_stamp(copy: Path) -> None:
    (copy / "_build.json").write_text("{")
    assert use(copy).startswith("1 reference")


@pytest.mark.slow
def test_no_triton(copy: Path) -> None:
    program = "import sys; sys.modules['triton'] = None\n" + USE + "print(fastmod.backends()['mfnnr']['cpu']['triton'])"
    assert use(copy, program).split() == ["0", "native", "False"]


@pytest.mark.slow
def test_triton_needs_no_extension(copy: Path) -> None:
    """Its kernels serve schemas that exist without a compiler: here every op that has some, forward and backward,
    interpreted."""
    for library in copy.glob("_C*"):
        library.unlink()
    if not (copy / "kernels").exists():
        shutil.copytree(PACKAGE.parent / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import os, sys, warnings
os.environ["TRITON_INTERPRET"] = "1"
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
warnings.simplefilter("ignore")
import torch, fastmod
from fastmod.samples import SAMPLES
assert not fastmod._extension.LOADED
samples = [sample for sample in SAMPLES if sample.op in fastmod._extension.triton_ops()]
assert {sample.op for sample in samples} >= {"multiplex", "mfnnr", "sample_mask", "masked_linear", "norm_conv"}
for sample in samples:
    found = {}
    for name in ("triton", "reference"):
        with fastmod.use_backend(name):
            found[name] = [value for _, value in sample.run(sample.tensors())]
    torch.testing.assert_close(found["triton"], found["reference"], atol=1e-3, rtol=1e-3)
print("agreed on", len(samples))
"""
    pytest.importorskip("triton", reason="Triton is for Linux")
    assert use(copy, program).split()[:2] == ["agreed", "on"]


def test_stamp_of_the_module_is_that_beside_it() -> None:
    module = fastmod._extension.MODULE
    stamp = fastmod._extension.built_stamp()
    assert module.stamp() == stamp
    assert {"torch", "cuda", "compiler", "archs", "flags"} <= set(stamp)


def test_use_backend_as_call_and_as_context() -> None:
    try:
        fastmod.use_backend("reference")
        with fastmod.use_backend("native"):
            assert fastmod.backend.active() == "native"
        assert fastmod.backend.active() == "reference"
    finally:
        fastmod.use_backend("auto")
    assert fastmod.backend.active() == "auto"


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


@pytest.mark.slow
def test_every_package_is_installed(tmp_path: Path) -> None:
    """An editable install finds a folder that a wheel would leave out. In a copy: setup.py writes the build's stamp."""
    root = Path(fastmod.__file__).resolve().parent.parent
    for folder in ("fastmod", "kernels", "csrc"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "_C*"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / file, tmp_path)
    program = """
import json, setuptools
from distutils.core import run_setup
found = run_setup("setup.py", stop_after="config")
print(json.dumps([found.packages, found.package_dir]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packages, places = json.loads(done.stdout)
    folders = {".".join(path.parent.relative_to(root).parts) for path in root.glob("fastmod/**/__init__.py")}
    assert len(folders) > 8 and sorted(packages) == sorted(folders | {"fastmod.kernels"})
    assert places == {"fastmod.kernels": "kernels"}
    # A folder of modules without an __init__.py would be left out too.
    assert {path.parent for path in (root / "fastmod").rglob("*.py")} == {
        path.parent for path in (root / "fastmod").rglob("__init__.py")
    }


def test_size_of_the_extension() -> None:
    """Debug information made 50 MB of it."""
    (library,) = PACKAGE.glob("_C*.so")
    assert library.stat().st_size < 10e6


@pytest.mark.slow
def test_import_is_light() -> None:
    """The compiler alone takes a second to import, and many need it never."""
    program = """
import sys, torch
before = set(sys.modules)
import fastmod
added = set(sys.modules) - before
assert "torch._dynamo" not in sys.modules
assert all(name.partition(".")[0] == "fastmod" for name in added), added
assert len(added) < 64, added
x = torch.randn(2, 3, 4, requires_grad=True)
fastmod.nn.SMFR(3, 2, 4, 2, 1)(x).sum().backward()
assert "torch._dynamo" not in sys.modules
print(fastmod.masks.MaskedModel.__name__, fastmod.data.MNIST.__name__, fastmod.models.FNN.__name__)
print(set(fastmod.__all__) <= set(dir(fastmod)), hasattr(fastmod, "nonsense"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["MaskedModel", "MNIST", "FNN", "True", "False"], done.stdout + done.stderr
