"""Launches of every op at the papers' shapes: launches.csv, which a test holds to what the host harness counts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).with_name("launches.csv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Row(NamedTuple):
    """CUDA C++, with what torch's own ops launch for it; the seed of a random op is on the device already."""

    op: str
    shape: str  # the label of fastmod.gpu.shapes
    dtype: str
    forward: int
    backward: int


def read() -> list[Row]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return [
            Row(line["op"], line["shape"], line["dtype"], int(line["forward"]), int(line["backward"]))
            for line in csv.DictReader(file)
        ]


def write(rows: list[Row]) -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
