"""The programs and packages that compiling needs: each is found, or an error says in one line what to do."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from typing import Any

from fastmod.gpu.targets import Target


class MissingToolError(RuntimeError):
    """What the user has to install."""


def triton() -> Any:
    """The triton module, if it can compile."""
    try:
        import triton as module
    except ImportError:
        raise MissingToolError('no triton: pip install "fastmod[triton]" adds it') from None
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MissingToolError(
            "TRITON_INTERPRET is set: Triton interprets kernels and compiles none; unset it and try again"
        )
    return module


def ptxas(target: Target) -> tuple[str, str]:
    """Path and version of the assembler that Triton takes for ``target``."""
    blackwell = isinstance(target.arch, int) and target.arch >= 100
    # Looked up in the class, as reading the knob itself searches for the program. Older versions have one ptxas for
    # all.
    has_two = "ptxas_blackwell" in vars(type(triton().knobs.nvidia))
    return _carried("ptxas_blackwell" if blackwell and has_two else "ptxas")


def cuobjdump() -> str:
    return _carried("cuobjdump")[0]


def _carried(name: str) -> tuple[str, str]:
    """A program from the wheel of Triton, or the one that TRITON_<NAME>_PATH names."""
    try:
        tool = getattr(triton().knobs.nvidia, name)
    except RuntimeError:
        raise MissingToolError(
            f"no {name.replace('_', '-')}: this triton came without it; set TRITON_{name.upper()}_PATH "
            "to the one of a CUDA toolkit"
        ) from None
    return str(tool.path), str(tool.version)


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") or (shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None)
    if found is None:
        raise MissingToolError("no nvcc: put the CUDA toolkit on PATH or set CUDA_HOME")
    return found


@functools.cache
def nvcc_version(path: str) -> str:
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bV(\d+\.\d+\.\d+)", told)
    if version is None:
        raise MissingToolError(f"{path}: does not tell its version as nvcc does")
    return version[1]


@functools.cache
def nvcc_targets(path: str) -> frozenset[str]:
    """The architectures that this nvcc knows."""
    told = subprocess.run([path, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    return frozenset(told.split())
