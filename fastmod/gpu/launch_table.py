"""Launches of every op at the papers' shapes: launches.csv and, kernel by kernel, geometry.csv.

A test compares both with the counts of the host harness; ``tools/count_gpu.py --write-launches`` rewrites them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FILE = Path(__file__).with_name("launches.csv")
GEOMETRY = Path(__file__).with_name("geometry.csv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Row(NamedTuple):
    """Launches of CUDA C++ and of torch's own ops for it; the seed of a random op is already on the device."""

    op: str
    shape: str  # the label of fastmod.gpu.shapes
    dtype: str
    forward: int
    backward: int
    eager: (
        int | None
    )  # of both in plain PyTorch, as fastmod.bench.baselines has it; None where there is no such version


class Geometry(NamedTuple):
    """Launches of one of our kernels in a forward and backward; those of torch are not known."""

    op: str
    shape: str
    dtype: str
    kernel: str  # <file>.<kernel><template arguments>
    launches: int  # of this size
    blocks: int
    threads: int  # of a block
    dynamic: int  # bytes of shared memory, besides the static ones of the kernel


def read() -> list[Row]:
    return [
        Row(
            line["op"],
            line["shape"],
            line["dtype"],
            int(line["forward"]),
            int(line["backward"]),
            int(line["eager"]) if line["eager"] else None,
        )
        for line in _lines(FILE)
    ]


def read_geometry() -> list[Geometry]:
    found = []
    for line in _lines(GEOMETRY):
        numbers = [int(line[name]) for name in Geometry._fields[4:]]
        found.append(Geometry(line["op"], line["shape"], line["dtype"], line["kernel"], *numbers))
    return found


def write(rows: Sequence[Row], geometry: Sequence[Geometry]) -> None:
    for path, table in ((FILE, rows), (GEOMETRY, geometry)):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table[0]._fields)
            writer.writerows(table)


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
