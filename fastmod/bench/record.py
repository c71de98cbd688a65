"""One run of the benchmarks as JSON: what was measured, with which code, on which machine."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fastmod
from fastmod import doctor
from fastmod.bench.checkout import BenchError, commit
from fastmod.bench.clock import Result, Times

FORMAT = 1


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    os: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} core{'s' if self.cores != 1 else ''}, {self.os}"


@dataclass(frozen=True)
class Record:
    date: str  # UTC, as 2026-01-31T12:00:00
    commit: str  # or "unknown"
    dirty: bool | None  # whether files differed from the commit; None: unknown
    fastmod: str
    torch: str
    machine: Machine
    isa: str  # of the CPU kernels in use
    threads: int
    seconds: float  # asked for, per case and contender
    results: tuple[Result, ...] = ()

    def extended(self, results: Sequence[Result]) -> Record:
        return replace(self, results=tuple(results))


def begin(top: Path, seconds: float, device: str = "cpu") -> Record:
    """A record of the current time, machine and code, without results."""
    sha, dirty = commit(top)
    now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    return Record(
        date=now.isoformat(timespec="seconds"),
        commit=sha,
        dirty=dirty,
        fastmod=fastmod.__version__,
        torch=torch.__version__,
        machine=this_machine(device),
        isa=doctor.extension_state()[1],
        threads=torch.get_num_threads(),
        seconds=seconds,
    )


def this_machine(device: str = "cpu") -> Machine:
    """The name of the device that the steps run on."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = f"{platform.system()} {platform.release()}"
    name = f"{torch.cuda.get_device_name()} with {_cpu()}" if device == "cuda" else _cpu()
    return Machine(name, _cores(), f"{system} {platform.machine()}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or "unknown CPU"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def default_file(folder: Path, record: Record) -> Path:
    """A name made from machine and date that is not taken yet."""
    machine = re.sub(r"[^a-z0-9]+", "-", record.machine.cpu.lower()).strip("-")
    stem = f"{machine}-{record.date[:10]}"
    file, number = folder / f"{stem}.json", 2
    while file.exists():
        file, number = folder / f"{stem}-{number}.json", number + 1
    return file


def check_place(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise BenchError(f"--out: expected a file that can be written, got {file}")


def as_dict(record: Record) -> dict[str, Any]:
    """What is written; ratio, noisy and matches follow from the rest and are there for readers."""
    rows = []
    for r in record.results:
        rows.append(
            {
                "op": r.op,
                "label": r.label,
                "seconds": {name: asdict(times) for name, times in r.times.items()},
                "ratio": None if r.ratio is None else round(r.ratio, 4),
                "target": r.target,
                "error": r.error if math.isfinite(r.error) else None,  # JSON has no infinity
                "tolerance": r.tolerance,
                "matches": r.matches,
                "noisy": r.noisy,
            }
        )
    head = {name: value for name, value in vars(record).items() if name not in ("machine", "results")}
    return {"format": FORMAT, **head, "machine": asdict(record.machine), "results": rows}


def write(file: Path, record: Record) -> None:
    """Write all or nothing: a run that is killed meanwhile leaves the old file."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(as_dict(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(file)


def read(file: Path) -> Record:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise BenchError(f"{file.name}: expected format {FORMAT}, got {data['format']!r}")
        results = tuple(_result(row) for row in data["results"])
        head = {name: data[name] for name in Record.__dataclass_fields__ if name not in ("machine", "results")}
        return Record(**head, machine=Machine(**data["machine"]), results=results)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BenchError(f"{file.name}: expected a file that `fastmod bench --save` wrote ({why})") from None


def _result(row: dict[str, Any]) -> Result:
    times = {name: Times(**values) for name, values in row["seconds"].items()}
    error = math.inf if row["error"] is None else row["error"]
    return Result(row["op"], row["label"], row["target"], error, row["tolerance"], times)
