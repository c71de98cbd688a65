"""One op, one place: what CONTRIBUTING.md promises whoever adds an op."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fastmod import backend

ROOT = Path(__file__).resolve().parents[2]

#: The files of an op: these, its tests/ops/test_<op>.py and its bench/test_<op>.py.
OWN = [
    *("fastmod/ops/{}.py", "kernels/{}.py", "csrc/cpu/{}.cpp", "csrc/cpu/{}_kernel.h"),
    *("csrc/cuda/{}.cu", "csrc/cuda/{}_binding.cpp"),
]
EDITED = {"fastmod/ops/__init__.py", "csrc/cuda/launch_*.h"}
#: Layers, models and studies are built of ops.
USERS = ("fastmod/nn/", "fastmod/models/", "fastmod/studies/")

#: Small op -> what else builds upon it, or compares with it.
SMALL = {
    "entropy_penalty": set(),
    "cluster_penalty": set(),
    "gated_residual": {
        *("fastmod/ops/mfnnr.py", "kernels/mfnnr.py", "kernels/smfr.py", "csrc/cpu/mfnnr_kernel.h"),
        "fastmod/bench/baselines.py",
    },
}


def mentions(op: str) -> set[str]:
    """Sources that have the op's name in them, as ``foo`` or as ``Foo``; launch headers as ``launch_*.h``."""
    name = re.compile(f"{op}|{op.title().replace('_', '')}")
    found = set()
    for folder in ("fastmod", "kernels", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and name.search(path.read_text()):
                place = path.relative_to(ROOT).as_posix()
                found.add(re.sub(r"launch_\w+\.h$", "launch_*.h", place))
    return found


@pytest.mark.parametrize("op", SMALL)
def test_a_small_op_is_eight_files_and_two_edits(op: str) -> None:
    assert (ROOT / f"tests/ops/test_{op}.py").exists() and (ROOT / f"bench/test_{op}.py").exists()
    own = {path.format(op) for path in OWN}
    other = {place for place in mentions(op) - own - SMALL[op] if not place.startswith(USERS)}
    assert other == EDITED, f"{op} is mentioned in {sorted(other)}"


def test_contributing_shows_the_files_of_one() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in [*OWN, "tests/ops/test_{}.py", "bench/test_{}.py"]:
        place = path.format("gated_residual")
        (lines,) = re.findall(rf"\| `{re.escape(place)}` \| (\d+) \|", text)
        assert int(lines) == pytest.approx(len((ROOT / place).read_text().splitlines()), rel=0.1), place


def test_every_op_has_files_of_its_own() -> None:
    """So that what is found by their names is found."""
    for op in backend.OPS:
        for place in ("fastmod/ops/{}.py", "tests/ops/test_{}.py", "bench/test_{}.py"):
            assert (ROOT / place.format(op)).exists(), place.format(op)
    kernels = {path.name for path in ROOT.glob("csrc/cpu/*_kernel.h")}
    built = ROOT / "build" / "fastmod_kernels.h"
    if built.exists():  # it is not where somebody else's build is tested
        assert set(re.findall(r"cpu/(\w+\.h)", built.read_text())) == kernels


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_code_of_an_instruction_set_is_its_own(isa: str) -> None:
    """Of a function that several files define the linker keeps one, and older machines could not run this one."""
    compiled = ROOT / "build" / "objects" / "csrc" / "cpu" / f"isa_{isa}.o"
    if not compiled.exists() or shutil.which("nm") is None:
        pytest.skip("needs the objects of a build, and nm")
    told = subprocess.run(["nm", "-C", str(compiled)], capture_output=True, text=True, check=True).stdout
    symbols = re.findall(r"^\w+ ([A-Za-z]) (.+)$", told, re.MULTILINE)
    defined = [name for kind, name in symbols if kind in "TWVuDB"]
    foreign = [name for name in defined if f"fastmod::cpu::{isa}::" not in name]
    assert not foreign, foreign
