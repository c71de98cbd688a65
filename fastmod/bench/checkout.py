"""What only a checkout has: the cases, the commit, the folder of measurements."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fastmod.bench.steps import Case

_BESIDE = Path(__file__).resolve().parent.parent.parent


class BenchError(Exception):
    """An error that the user can fix, in one line."""


def root() -> Path:
    """The checkout that this fastmod is part of. The cases of another one nearby would belong to other code."""
    if not ((_BESIDE / "bench" / "__init__.py").is_file() and (_BESIDE / "pyproject.toml").is_file()):
        raise BenchError(
            "fastmod bench needs a checkout, for the cases in its bench/ folder; this fastmod is installed without one "
            "(`fastmod race` works anywhere)"
        )
    return _BESIDE


def _modules() -> list[ModuleType]:
    top = root()
    if str(top) not in sys.path:
        sys.path.append(str(top))  # at the end, so that it shadows nothing else
    modules = [importlib.import_module(f"bench.{file.stem}") for file in sorted((top / "bench").glob("test_*.py"))]
    for module in modules:
        if top not in Path(module.__file__ or "").resolve().parents:
            raise BenchError(f"bench: expected the package of {top}, another one of that name is found before it")
    return modules


def cases() -> list[Case]:
    """``CASES`` of every ``bench/test_<op>.py``."""
    return [case for module in _modules() for case in module.CASES]


def smoke() -> list[Case]:
    """``SMOKE`` of every file: cases small enough to run with the tests."""
    return [case for module in _modules() for case in module.SMOKE]


def chosen(all_cases: Sequence[Case], words: Sequence[str]) -> list[Case]:
    """The cases whose op or label contains one of the words; without words, all."""
    found = [case for case in all_cases if not words or any(w.lower() in case.name.lower() for w in words)]
    if not found:
        ops = ", ".join(dict.fromkeys(case.op for case in all_cases))
        raise BenchError(f"WORDS: expected part of an op or a label, got {' '.join(words)}; ops: {ops}")
    return found


def commit(top: Path) -> tuple[str, bool | None]:
    """The commit of the checkout and whether files differ from it; ``("unknown", None)`` without git.

    docs/ is ignored: it does not affect speed, and every saved measurement changes it.
    """
    try:
        if Path(_git(top, "rev-parse", "--show-toplevel")).resolve() != top.resolve():
            return "unknown", None  # an unpacked archive inside another repository
        return _git(top, "rev-parse", "HEAD"), bool(_git(top, "status", "--porcelain", "--", ".", ":(exclude)docs"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None


def _git(top: Path, *words: str) -> str:
    command = ["git", "-C", str(top), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
