"""What a compiled kernel needs, read from its machine code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastmod.gpu import tools

#: Tensor core instructions of all NVIDIA generations: HMMA, DMMA, HGMMA (sm_90), UTCHMMA (sm_100), QMMA and so on.
_TENSOR_CORE = re.compile(r"\b(?:UTC)?[A-Z]{1,2}MMA\b")
_MFMA = re.compile(r"^\s*v_s?mfma\w*", re.MULTILINE)
_PTXAS_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")


@dataclass(frozen=True)
class Resources:
    registers: int  # of a thread
    spills: int  # bytes per thread (AMD: registers, and bytes of scratch) that did not fit into registers
    shared: int  # bytes of a block
    tensor_core: int  # instructions


def of_triton_cubin(cubin: Path, shared: int, *, disassemble: bool) -> Resources:
    """``shared`` is allocated at launch and is not in the cubin. Triton kernels have no arrays in local memory: what is
    there was spilled."""
    usage = _dump(cubin, "--dump-resource-usage")
    registers, stack, local = (_only(rf"\b{field}:(\d+)", usage) for field in ("REG", "STACK", "LOCAL"))
    count = sum(tensor_core_of(cubin).values()) if disassemble else 0
    return Resources(registers, stack + local, shared, count)


def of_hsaco(assembly: str, shared: int) -> Resources:
    """``shared`` as above."""

    def field(name: str) -> int:
        return _only(rf"\.{name}:\s+(\d+)", assembly)

    spills = field("vgpr_spill_count") + field("sgpr_spill_count") + field("private_segment_fixed_size")
    return Resources(field("vgpr_count"), spills, shared, len(_MFMA.findall(assembly)))


def of_cuda_cubin(cubin: Path, log: str, *, disassemble: bool) -> dict[str, Resources]:
    """By mangled name, from what ``ptxas -v`` wrote; without ``disassemble`` no tensor core instruction is expected."""
    counts = tensor_core_of(cubin) if disassemble else {}
    found = {}
    for symbol, told in _entries(log):
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", told))
        shared = re.search(r"(\d+) bytes smem", told)
        registers = _only(r"Used (\d+) registers", told)
        found[symbol] = Resources(registers, spilled, int(shared[1]) if shared else 0, counts.get(symbol, 0))
    return found


def _entries(log: str) -> Iterator[tuple[str, str]]:
    parts = _PTXAS_ENTRY.split(log)[1:]
    yield from zip(parts[::3], parts[2::3], strict=True)


def tensor_core_of(cubin: Path) -> dict[str, int]:
    """Tensor core instructions of each function."""
    parts = re.split(r"^\s*Function : (\S+)$", _dump(cubin, "--dump-sass"), flags=re.MULTILINE)[1:]
    return {name: len(_TENSOR_CORE.findall(code)) for name, code in zip(parts[::2], parts[1::2], strict=True)}


def _dump(cubin: Path, what: str) -> str:
    command = [tools.cuobjdump(), what, str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {what} {cubin}: {done.stderr.strip()}")
    return done.stdout


def _only(pattern: str, text: str) -> int:
    """The number that ``pattern`` finds; of several, as when a kernel calls functions, the largest."""
    numbers = [int(n) for n in re.findall(pattern, text)]
    if not numbers:
        raise RuntimeError(f"{pattern} is not in what the compiler told")
    return max(numbers)
