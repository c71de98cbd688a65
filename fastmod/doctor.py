"""Self-test: runs every op on every backend, forward and backward, against the fp64 reference."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fastmod
from fastmod import _extension, backend
from fastmod.samples import SAMPLES, Sample

OK, UNAVAILABLE, FAILED = "ok", "unavailable", "FAILED"
DEVICES = ("cpu", "cuda")
TOLERANCE = 2e-5  # of fp32 results on these small samples, relative to the largest value


@dataclass(frozen=True)
class Line:
    """The result of one op on one backend and device."""

    op: str
    backend: str
    device: str
    state: str
    detail: str


@dataclass(frozen=True)
class Report:
    versions: dict[str, str]
    extension: str
    stamp: dict[str, str]
    cpu_isa: str
    lines: list[Line]
    problems: list[str]  # what should work and does not, besides the lines

    @property
    def healthy(self) -> bool:
        return not self.problems and all(line.state != FAILED for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def examine() -> Report:
    stamp, isa, problems = extension_state()
    lines = [examine_op(op, name, device) for op in backend.OPS for device in DEVICES for name in backend.BACKENDS[1:]]
    return Report(versions(), _extension.STATUS, stamp, isa, lines, problems)


def versions() -> dict[str, str]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "fastmod": fastmod.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "CUDA (torch)": torch.version.cuda or "none",
        "GPU": gpu,
        "threads": str(torch.get_num_threads()),
    }


def extension_state() -> tuple[dict[str, str], str, list[str]]:
    """Build stamp, instruction set in use, problems."""
    written = _extension.built_stamp()
    if _extension.MODULE is None:
        return written or {}, "none", [] if left_out(written) else [_extension.STATUS]
    stamp = _extension.MODULE.stamp()
    compiled = json.loads(stamp) if isinstance(stamp, str) else dict(stamp)
    problems = []
    if compiled != written:
        changed = sorted(key for key in {*compiled, *(written or {})} if compiled.get(key) != (written or {}).get(key))
        problems.append(
            f"the extension and its stamp file differ in {', '.join(changed)}; rebuild it with: {_extension.REBUILD}"
        )
    return compiled, str(_extension.MODULE.cpu_isa()), problems


def left_out(stamp: dict[str, str] | None) -> bool:
    """Whether this is an installation without the extension, by choice."""
    return stamp is not None and stamp.get("extension") == "off"


def examine_op(op: str, name: str, device: str) -> Line:
    if device == "cuda" and not torch.cuda.is_available():
        return Line(op, name, device, UNAVAILABLE, "no CUDA device")
    if not backend.available(op, device)[name]:
        should_work, reason = why_not(op, name, device)
        return Line(op, name, device, FAILED if should_work else UNAVAILABLE, reason)
    worst = 0.0
    for sample in SAMPLES:
        if sample.op != op:
            continue
        try:
            error, where = sample_error(sample, name, device)
        except Exception as exception:  # whatever it is, it belongs in the report
            first = (str(exception).strip() or type(exception).__name__).splitlines()[0]
            return Line(op, name, device, FAILED, f"{sample.label}: {type(exception).__name__}: {first}")
        if not error <= TOLERANCE:
            return Line(op, name, device, FAILED, f"{sample.label}: {where} is off by {error:.1e}")
        worst = max(worst, error)
    picked = ", auto" if backend.automatic(op, device) == name else ""
    return Line(op, name, device, OK, f"error {worst:.0e}{picked}")


def sample_error(sample: Sample, name: str, device: str) -> tuple[float, str]:
    """Largest error of fp32 outputs and gradients against the fp64 reference, and where it is."""
    with backend.use_backend("reference"):
        expected = sample.run(sample.tensors(dtype=torch.float64))
    with backend.use_backend(name):
        found = sample.run(sample.tensors(device=device))
    worst = (0.0, "nothing")
    for (where, value), (_, truth) in zip(found, expected, strict=True):
        if value.shape != truth.shape:
            return float("inf"), f"the shape of {where}"
        error = (value.double().cpu() - truth).abs().max().item() / max(1.0, truth.abs().max().item())
        if not error <= worst[0]:
            worst = (error, where)
        if error != error:
            break
    return worst


def why_not(op: str, name: str, device: str) -> tuple[bool, str]:
    """Why a backend cannot serve, and whether it should."""
    if name == "native":
        if not _extension.LOADED:
            meant = left_out(_extension.built_stamp())
            return not meant, "installed without the extension" if meant else "the extension is not loaded"
        return False, f"no {device} kernels in this build"
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if op not in _extension.triton_ops():
        try:
            importlib.import_module("fastmod.kernels")
        except ImportError as error:
            return True, f"fastmod.kernels does not import: {error}"
        if importlib.util.find_spec(f"fastmod.kernels.{op}") is None:
            return False, "has no Triton kernels"
        return True, f"fastmod.kernels registers no {op}"
    return False, "on a CPU needs TRITON_INTERPRET=1"
