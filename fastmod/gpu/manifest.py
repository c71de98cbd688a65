"""manifest.json: the contents of a folder of compiled kernels, also used by the next run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
#: Part of every key: kernels of a manifest of another format are compiled again.
FORMAT = 1


@dataclass(frozen=True)
class Kernel:
    name: str  # <op>.<kernel>, then dtype and case (Triton) or template arguments (CUDA C++)
    source: str  # triton or cuda
    target: str
    symbol: str  # its name inside the file
    signature: dict[str, Any]  # types of the arguments (Triton)
    constants: dict[str, Any]
    options: dict[str, Any]
    registers: int
    spills: int
    shared: int
    tensor_core: int
    file: str  # relative to the manifest; CUDA C++ kernels share one
    sha256: str
    key: str  # of everything it was made from


def read(folder: Path) -> list[Kernel]:
    """The kernels of a folder; none if it holds no manifest, or one that is damaged or of another format."""
    try:
        told = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return [Kernel(**each) for each in told["kernels"]] if told["format"] == FORMAT else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def write(folder: Path, kernels: list[Kernel], **facts: Any) -> None:
    told = {"format": FORMAT, **facts, "kernels": [dataclasses.asdict(each) for each in kernels]}
    part = folder / f"{NAME}.{os.getpid()}"
    part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / NAME)  # atomically: a killed run leaves the old file or the new one


def sha256(path: Path) -> str | None:
    """None if there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
