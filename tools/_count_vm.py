"""A run of a kernel in the interpreter of PTX, on the memory of this process, and what it did."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _count_cases import ROUNDING, Case

import fastmod
from fastmod.gpu import launch_table

ARCH = "sm_80"  # the interpreter knows mma.sync and cp.async, not what came later
_BASE = 4096  # of the interpreter's memory, which is this process's


#: Tensors begin where torch's allocator on a GPU lets them begin, or lines would be counted that are none there.
_ALIGN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int posix_memalign(void** to, size_t alignment, size_t size) {
  static int (*usual)(void**, size_t, size_t);
  if (!usual) usual = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  return usual(to, alignment < 512 ? 512 : alignment, size);
}
"""


def aligned() -> None:
    """Starts this program anew with memory that is aligned as on a GPU."""
    if torch.empty(3).data_ptr() % 512 == 0 == torch.empty(5000).data_ptr() % 512 and os.environ.pop("LD_PRELOAD", ""):
        return
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/align.so"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", library, "-ldl"]
        subprocess.run(command, input=_ALIGN, text=True, check=True)
        done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": library}, check=False)
    sys.exit(done.returncode)


def interpreter(folder: Path) -> Any:
    if not (folder / "ptxvm.py").is_file():
        sys.exit(f"--ptxvm {folder}: expected a folder that holds ptxvm.py")
    sys.path.append(str(folder))
    module: Any = importlib.import_module("ptxvm")
    # Addresses are those of this process: its memory in one window, others far above.
    module.GB, module.SB, module.LB = _BASE, 1 << 60, 1 << 61
    return module


def host_vm(module: Any) -> Any:
    """An interpreter whose global memory is that of this process."""

    class HostVM(module.VM):
        def __init__(self) -> None:
            super().__init__(racecheck=True)
            self.moved: dict[bool, list[Any]] = {False: [], True: []}  # written: first bytes and sizes
            size = (1 << 47) - _BASE
            self.mem = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(_BASE))
            self.valid = np.broadcast_to(np.uint8(1), (size,))
            self.kept: list[Any] = []
            self.flagged = Flagged()

        def locate(self, at: Any, space: str, *access: Any) -> Any:
            """Addresses of shared memory have 32 bits: a base below 0 and an offset beyond it may add up to one."""
            return super().locate(at & 0xFFFFFFFF if space == "shared" else at, space, *access)

        def tally(self, offsets: Any, space: str, size: int, lanes: Any, write: bool) -> None:
            super().tally(offsets, space, size, lanes, write)
            if space == "global":
                self.moved[write].append(np.stack([offsets + _BASE, np.full(len(offsets), size)]))

        def race(self, offsets: Any, size: int, lanes: Any, write: bool) -> None:
            """Accesses of several warps to a byte of shared memory with no barrier between them, one of which writes
            it. Of stores, whether they leave what is there or what the others store."""
            at = (offsets[:, None] + np.arange(size)).ravel()
            warp = np.repeat(lanes >> 5, size)
            now = np.repeat(self.epoch[self.blk[lanes]], size)
            written = (self.we[at] == now) & (self.ww[at] != warp)
            read = (self.re[at] == now) & (self.rw[at] != warp)
            if not write:
                self.rw[at], self.re[at] = warp, now
                self.rw[at[read | (self.rw[at] != warp)]] = -2
                self.flagged.loads += bool(written.any())
                return
            self.ww[at], self.we[at] = warp, now
            together = self.ww[at] != warp
            if not (written | read | together).any():
                return
            self.flagged.stores += 1
            new = self._stored(size, lanes)
            if new is None:
                self.flagged.unknown += 1
                return
            others = self.sh.copy()
            others[at] = new
            differing = together & (others[at] != new) | (written | read) & (self.sh[at] != new)
            self.flagged.differing += bool(differing.any())

        def _stored(self, size: int, lanes: Any) -> Any:
            """The bytes of a plain store, in the order of ``race``."""
            if self.cur.op != "st":
                return None
            kind = self.cur.types[-1]
            values = self.cur.args[1][1] if self.cur.args[1][0] == "vec" else [self.cur.args[1]]
            given = [np.ascontiguousarray(np.broadcast_to(self.get(v, kind, lanes), len(lanes))) for v in values]
            return np.stack(given, 1).view(np.uint8).reshape(len(lanes) * size)

        def alloc(self, array: Any) -> int:
            self.kept.append(np.ascontiguousarray(array))
            return int(self.kept[-1].ctypes.data)

    return HostVM()


@dataclass
class Flagged:
    """Instructions that meet what another warp did to the same byte of shared memory since the last barrier."""

    stores: int = 0
    differing: int = 0  # of the stores: they change a byte that another warp had stored or read
    unknown: int = 0  # of the stores: no plain ones, whose bytes were not compared
    loads: int = 0

    def add(self, other: Flagged) -> None:
        self.stores += other.stores
        self.differing += other.differing
        self.unknown += other.unknown
        self.loads += other.loads


@dataclass
class Row:
    """All launches of one kernel in a forward or a backward."""

    kernel: str
    phase: int  # 0: forward, 1: backward
    launches: int = 0
    instructions: int = 0
    useful: int = 1
    ideal: int = 0  # bytes of the forward or backward, each operand and result once; 0: some blocks alone ran
    bytes: list[int] = field(default_factory=lambda: [0, 0])  # read, written
    lines: list[float] = field(default_factory=list)  # 128-byte lines of a warp's load, of each launch
    worst: float = 0  # the same of the load that takes the most
    banks: list[float] = field(default_factory=list)  # wavefronts of a warp's access to shared memory
    mma: int = 0
    flagged: Flagged = field(default_factory=Flagged)
    weights: int = 0  # bytes read of weights and logits
    images: list[tuple[int, int]] = field(default_factory=list)  # of activations: bytes read, bytes that they hold
    needs: set[tuple[int, int, int]] = field(default_factory=set)  # registers, bytes spilled, shared memory

    def add(self, vm: Any, module: Any, pointers: Any, case: Case, tensors: Sequence[torch.Tensor]) -> None:
        """A launch that ``vm`` ran."""
        told = module.counters(vm)
        self.launches += 1
        self.instructions += told["instructions"]
        self.bytes[0] += told["global_read"]
        self.bytes[1] += told["global_written"]
        self.mma += told["mma"] // 32
        self.flagged.add(vm.flagged)
        if any(key[:2] == ("global", "ld") for key in vm.mt):
            self.lines.append(told["lines_per_load"])
        if any(key[0] == "shared" for key in vm.mt):
            self.banks.append(told["bank_wavefronts"])
        each = [lines / loads for (_, kind), (loads, lines, _) in vm.mpc.items() if kind[:2] == ("global", "ld")]
        self.worst = max([self.worst, *each])
        if case.unit == "weight and sample" and len(tensors) == 3:
            self.weights += sum(_read_of(vm, each) for each in tensors[1:])
        if case.shape.op in ("norm_conv", "norm_sum", "norm_pool"):
            self.images.append(_images(vm, pointers, case, tensors))


@dataclass
class Counted:
    """A case in one dtype."""

    case: Case
    dtype: str
    rows: dict[tuple[int, str], Row] = field(default_factory=dict)
    error: float | None = None  # None: no value was compared
    ideal: tuple[int, int] = (0, 0)

    def row(self, phase: int, kernel: str) -> Row:
        return self.rows.setdefault((phase, kernel), Row(kernel, phase, useful=self.case.useful))

    def finish(self, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        """``found``: outputs and gradients."""
        if self.case.part is None:
            self.error = error_of(self.case, tensors, found)
            inputs = sum(each.nbytes for each in tensors)
            outputs = sum(each.nbytes for each in found[: len(found) - len(tensors)])
            self.ideal = inputs + outputs, 2 * inputs + outputs
            for row in self.rows.values():
                row.ideal = self.ideal[row.phase]


def _read_of(vm: Any, tensor: torch.Tensor) -> int:
    moved, first = vm.moved[False], tensor.data_ptr()
    return sum(int(size[(at >= first) & (at < first + tensor.nbytes)].sum()) for at, size in moved)


def _images(vm: Any, pointers: Any, case: Case, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes read of images and of gradients of images, and how many of those there are.

    Buffers are told apart by the pointers among the launch's arguments. What the launch also writes are partial sums,
    what is no longer than weights or a vector is one."""
    size = math.prod(case.shape.shapes[1])
    small = {size * tensors[1].itemsize}
    vector = 4 * max(math.prod(case.shape.shapes[2]), math.prod(case.shape.shapes[1][:2]))
    read, written = (np.concatenate(vm.moved[write], axis=1).astype(np.int64) for write in (False, True))
    starts = np.unique([*pointers, *(each.data_ptr() for each in tensors)])  # neighbours in memory are not one buffer
    owner = np.searchsorted(starts, read[0], side="right")
    also_written = np.unique(np.searchsorted(starts, written[0], side="right"))
    asked = holds = 0
    for buffer in np.unique(owner):
        own = read[:, owner == buffer]
        held = len(np.unique(np.concatenate([own[0] + byte for byte in range(0, int(own[1].max()), 2)]) // 2)) * 2
        if buffer not in also_written and held not in small and held > vector:
            asked, holds = asked + int(own[1].sum()), holds + held
    return asked, holds


def error_of(case: Case, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Outputs and gradients against plain PyTorch in fp64, relative to the largest value."""
    shape = case.shape
    with fastmod.use_backend("reference"):
        read = [t.detach().bfloat16() if case.autocast else t.detach() for t in tensors]
        wide = [t.double().requires_grad_() for t in read]
        outputs = (shape.call if hasattr(fastmod.ops, shape.op) else shape.plain or shape.call)(wide)
        exact = [*outputs, *torch.autograd.grad(outputs, wide, [torch.ones_like(out) for out in outputs])]
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, exact, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def selected(cases: Sequence[Case], ops: Sequence[str] | None, words: str, autocast: bool) -> list[Case]:
    found = [case for case in cases if (not ops or case.shape.op in ops) and words in case.shape.label]
    if autocast:
        rounding = [case for case in found if case.shape.op in ROUNDING]
        return [case._replace(autocast=True, dtypes=("fp32",)) for case in rounding]
    return found


def dtype_of(name: str) -> torch.dtype:
    return launch_table.DTYPES[name]
