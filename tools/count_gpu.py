"""Counts what the CUDA C++ kernels do, without a GPU: prints the tables of docs/gpu.md.

    python tools/count_gpu.py                       launches, registers, spills, shared memory, tensor core instructions
    python tools/count_gpu.py --ptxvm FOLDER        and what a run of their PTX does: instructions, bytes, lines
    python tools/count_gpu.py --autocast            of fp32 tensors under autocast to bf16
    python tools/count_gpu.py --write-launches      fastmod/gpu/launches.csv and geometry.csv anew

Needs nvcc, g++ and Triton's wheel (for its cuobjdump). Triton's kernels: tools/count_triton.py. FOLDER holds
ptxvm.py, an interpreter of PTX that is no part of this project: with ``VM`` (``launch(kernel, grid, block, arguments,
dynamic)``), ``parse`` and ``counters``. The ops run over the host harness of the tests; the interpreter takes each
launch over, with its arguments, on the memory of this process, so that all that follows meets the right values, and
the results are compared with plain PyTorch in fp64.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402  (the path comes first)
import torch  # noqa: E402

import fastmod  # noqa: E402
from fastmod.gpu import aten, cuda_part, discover, launch_table, shapes, tools  # noqa: E402
from fastmod.gpu.targets import find  # noqa: E402
from fastmod.ops import _pool_linear as _pool_linear_op  # noqa: E402
from fastmod.ops import _squeeze_excite as _squeeze_excite_op  # noqa: E402
from tests.helpers.cuda_host import recorder  # noqa: E402

ARCH = "sm_80"  # the interpreter knows mma.sync and cp.async, not what came later
_BASE = 4096  # of the interpreter's memory, which is this process's


#: Of a launch: the blocks to be interpreted, and what their instructions are divided by.
Part = Callable[[recorder.Launch], tuple[Sequence[int], int]]


class Case(NamedTuple):
    """A shape small enough to be interpreted. ``useful``: what the instructions of a kernel are divided by, of one
    product, though a kernel of a backward may have two. With a ``part`` only some blocks run, and no value is
    compared. ``autocast``: fp32 tensors where bf16 is asked for."""

    shape: shapes.Shape
    unit: str
    useful: int
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    part: Part | None = None
    autocast: bool = False

    def sample(self) -> shapes.Shape:
        """What is run."""
        call = self.shape.call

        def lowered(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return call(tensors)

        return replace(self.shape, call=lowered) if self.autocast else self.shape


def _products(shape: shapes.Shape, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Case:
    return Case(shape, "multiply-add", shape.products, dtypes)


def weight_case(shape: shapes.Shape, samples: int) -> Case:
    """Of an op whose work goes by weights."""
    return Case(shape, "weight and sample", samples * math.prod(shape.shapes[-1]))


def _masked_columns(launch: recorder.Launch) -> tuple[Sequence[int], int]:
    """Of 2000 x 2000, 4 samples: the blocks that share 64 columns of a product, or 64 x 64 of a gradient."""
    if "weight_kernel" in launch.name:
        return [33], 4 * 64 * 64
    across = 32  # blocks of 64 columns, the last of which is not whole
    return range(3, launch.grid[0], across), 4 * 64 * 2000


def _first_images(launch: recorder.Launch) -> tuple[Sequence[int], int]:
    """Of 64 to 64 channels, 3x3, 48 images of 16 px, two tiles of pixels each: the blocks of the first four images.
    Of the gradient of the weight, whose blocks share the images, none."""
    tiles = 96
    columns = 0 if "weight" in launch.name else launch.grid[0] // tiles
    return [column * tiles + tile for column in range(columns) for tile in range(8)], 4 * 16 * 16 * 64 * 64 * 9


def _pool_linear(batch: int, channels: int, size: int, outputs: int) -> Case:
    """The end of a gater. It has no name in ``fastmod.ops``: ``plain`` is what it is compared with."""

    def call(run: Callable[..., torch.Tensor]) -> shapes.Call:
        return lambda t: [run(t[0].movedim(-1, -3), t[1], t[2], t[3], t[4], True, 1, True)]

    tensors = (batch, size, size, channels), (channels,), (channels,), (outputs, channels), (outputs,)
    label = f"B{batch} {channels} channels {size} px to {outputs}"
    kernel, plain = call(_pool_linear_op._run), call(_pool_linear_op.reference)
    shape = shapes.Shape("pool_linear", label, tensors, kernel, wide=(1, 2), plain=plain)
    return Case(shape, "number of x", math.prod(tensors[0]))


def _squeeze_excite(batch: int, experts: int, channels: int, size: int, squeezed: int) -> Case:
    """The same of a task's squeeze-excite in training."""

    def kernel(t: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        running = [torch.zeros_like(t[i]) for i in (4, 5, 7, 8)]
        moving = (0.1, 0.1), (1e-5, 1e-5)
        return [_squeeze_excite_op._run(t[0].movedim(-1, -3), t[1], t[2], list(t[3:]), running, *moving)]

    def plain(t: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [_squeeze_excite_op.reference(t[0].movedim(-1, -3), *t[1:], eps=(1e-5, 1e-5))]

    affine, small = (experts, channels), (experts, squeezed)
    layers = (experts, squeezed, channels), small, small, (experts, channels, squeezed), affine, affine
    tensors = ((batch, experts, size, size, channels), affine, affine, *layers)
    label = f"B{batch} E{experts} {channels} channels {size} px, {squeezed} squeezed"
    shape = shapes.Shape("squeeze_excite", label, tensors, kernel, wide=tuple(range(1, 9)), plain=plain)
    return Case(shape, "number of x", math.prod(tensors[0]))


CASES = (
    _products(shapes.smfr(16, (6, 8, 8, 8, 5), 10, (100,))),
    _products(shapes.smfr(32, (3, 2), 40, (160,))),
    _products(shapes.multiplex(16, 8, 8, 10)),
    _products(shapes.multiplex(4, 16, 16, 32)),
    _products(shapes.multiplex(2, 5, 4, 196)),
    weight_case(shapes.masked_linear(128, 128, 64, 4), 4),
    weight_case(shapes.masked_linear(128, 2000, 2000, 4), 4)._replace(part=_masked_columns),
    weight_case(shapes.sample_mask(8192, 4), 4),
    _products(shapes.masked_conv2d(4, 32, 8, 64, 2)),
    _products(shapes.norm_conv(4, 1, 16, 16, 32)),
    _products(shapes.norm_conv(4, 1, 32, 32, 16)),
    _products(shapes.norm_conv(4, 1, 64, 64, 8)),
    _products(shapes.norm_conv(1, 1, 64, 64, 16)),
    _products(shapes.norm_conv(48, 1, 64, 64, 16))._replace(part=_first_images),
    _products(shapes.norm_conv(4, 1, 16, 32, 32, 2)),
    _products(shapes.norm_conv(2, 1, 24, 144, 8, kernel=1), ("fp32",)),
    _products(shapes.norm_conv(2, 1, 144, 24, 8, kernel=1), ("fp32",)),
    _products(shapes.norm_conv(2, 1, 144, 144, 8, depthwise=True)),
    _products(shapes.norm_conv(1, 1, 144, 144, 16, depthwise=True)),
    _pool_linear(4, 32, 8, 10),
    _squeeze_excite(4, 1, 48, 8, 12),
)


class Counts(NamedTuple):
    instructions: int
    read: int
    written: int
    mma: int
    lines: float  # 128-byte lines per load of a warp
    worst: float  # the same of the load that takes the most
    images: float  # bytes read of activations, against what they hold; weights, vectors and partial sums apart
    others: float  # bytes read of weights and vectors, against what they hold
    whose: tuple[int, ...]  # bytes read of activations, weights, vectors, partial sums
    races: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ptxvm", type=Path, help="folder of ptxvm.py")
    parser.add_argument("--op", action="append", help="only this op; repeat for several")
    parser.add_argument("--shape", help="only shapes with this in their names")
    parser.add_argument("--autocast", action="store_true", help="fp32 tensors under autocast to bf16")
    parser.add_argument("--write-launches", action="store_true", help="only write launches.csv and geometry.csv anew")
    asked = parser.parse_args()
    if asked.write_launches:
        launch_table.write(*counted_launches())
        print(f"wrote {launch_table.FILE} and {launch_table.GEOMETRY}")
        return
    print(f"commit {commit()}, {ARCH}, nvcc {tools.nvcc_version(tools.nvcc())}\n")
    wanted = [case for case in CASES if not asked.op or case.shape.op in asked.op]
    if asked.autocast:
        wanted = [case._replace(autocast=True, dtypes=("fp32",)) for case in wanted]
    if asked.shape:
        wanted = [case for case in wanted if asked.shape in case.shape.label]
    else:
        print_launches(asked.op)
        print_resources({launch.name.partition(".")[0] for case in wanted for launch in ours(case)})
    if asked.ptxvm is None:
        print("Not counted: instructions, bytes and lines of a run. They need an interpreter of PTX: --ptxvm FOLDER.")
        return
    vm = interpreter(asked.ptxvm)
    columns = "case | dtype | kernel | launches | instructions per | read | written | lines per load, worst | mma"
    columns += " | activations read, of what they hold | weights and vectors"
    columns += " | read: activations + weights + vectors + partial sums | races"
    print(f"| {columns} |\n{rule(13)}")
    for case in wanted:
        for dtype in case.dtypes:
            print_counts(case, dtype, vm)


def commit() -> str:
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def rule(columns: int) -> str:
    return "|" + " --- |" * columns


# ---------------------------------------------------------------------------------------------- without running


def counted_launches() -> tuple[list[launch_table.Row], list[launch_table.Geometry]]:
    rows, geometry = [], []
    for shape in shapes.SHAPES:
        for name, dtype in launch_table.DTYPES.items():
            found = recorder.record(shape, dtype)
            eager = shape.plain and len(aten.of_step(shape.plain, shape.tensors(dtype=dtype)))
            counts = len(found.forward), len(found.backward), eager
            rows.append(launch_table.Row(shape.op, shape.label, name, *counts))
            geometry += found.geometry(shape.op, shape.label, name)
    return rows, geometry


def print_launches(ops: list[str] | None) -> None:
    print(f"| op | shape | dtype | launches, forward + backward | by torch |\n{rule(5)}")
    for shape in shapes.SHAPES:
        for name, dtype in launch_table.DTYPES.items():
            if not ops or shape.op in ops:
                found = recorder.record(shape, dtype)
                torch_own = sum(each.name.startswith("aten::") for half in found for each in half)
                each = f"{len(found.forward)} + {len(found.backward)}"
                print(f"| `{shape.op}` | {shape.label} | {name} | {each} | {torch_own} |")
    print()


def ours(case: Case) -> list[recorder.Launch]:
    found = [recorder.record(case.sample(), launch_table.DTYPES[dtype]) for dtype in case.dtypes]
    launches = [each for recording in found for half in recording for each in half]
    return [each for each in launches if not each.name.startswith("aten::")]


def print_resources(stems: set[str]) -> None:
    """Of the kernels that the cases launch; the dynamic shared memory of a launch stands beside its geometry."""
    launched = {launch.name for case in CASES for launch in ours(case)}
    print(f"| kernel | registers | bytes spilled | static shared memory | tensor core instructions |\n{rule(5)}")
    for stem in sorted(stems):
        with tempfile.TemporaryDirectory() as folder:
            found, _ = cuda_part.compiled(discover.cuda_files()[stem], find(ARCH), Path(folder) / "kernels.cubin")
        for symbol, needs in sorted(found.items()):
            name, arguments = cuda_part.readable(symbol)
            full = f"{stem}.{name}<{','.join(map(str, arguments))}>"
            if full in launched:
                print(f"| `{full}` | {needs.registers} | {needs.spills} | {needs.shared} | {needs.tensor_core} |")
    print()


# -------------------------------------------------------------------------------------------------- interpreted


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

        def tally(self, offsets: Any, space: str, size: int, lanes: Any, write: bool) -> None:
            super().tally(offsets, space, size, lanes, write)
            if space == "global":
                self.moved[write].append(np.stack([offsets + _BASE, np.full(len(offsets), size)]))

        def alloc(self, array: Any) -> int:
            self.kept.append(np.ascontiguousarray(array))
            return int(self.kept[-1].ctypes.data)

    return HostVM()


@cache
def _ptx(stem: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        source = str(discover.cuda_files()[stem])
        subprocess.run([tools.nvcc(), *cuda_part.FLAGS, f"-arch={ARCH}", "-ptx", source, "-o", str(out)], check=True)
        return out.read_text()


@cache
def kernel(module: Any, name: str) -> Any:
    """By the name that the recorder gives a launch."""
    stem, _, wanted = name.partition(".")
    for symbol, found in module.parse(_ptx(stem)).items():
        short, arguments = cuda_part.readable(symbol)
        if f"{short}<{','.join(map(str, arguments))}>" == wanted:
            return found
    sys.exit(f"{name}: not in the PTX of {stem}.cu")


def reads(vm: Any, launch: recorder.Launch, weight: int, vector: int) -> tuple[float, float, tuple[int, ...]]:
    """Bytes read of activations, and of weights and vectors, each against the bytes that are read at least once; and
    bytes read of activations, weights, vectors and partial sums.

    Buffers are told apart by the pointers among the launch's arguments. What the launch also writes are partial sums;
    of the others, what is ``weight`` bytes long is a weight and what is no longer than ``vector`` a vector."""
    words = np.concatenate([np.frombuffer(each[: len(each) // 8 * 8], np.int64) for each in launch.arguments])
    pointers = np.unique(words[(words > 1 << 20) & (words < 1 << 47)])
    read, written = (np.concatenate(vm.moved[write], axis=1).astype(np.int64) for write in (False, True))
    owner = np.searchsorted(pointers, read[0], side="right")
    also_written = np.unique(np.searchsorted(pointers, written[0], side="right"))
    totals = np.zeros((2, 4), np.int64)  # asked for, held: of activations, weights, vectors, partial sums
    for buffer in np.unique(owner):
        own = read[:, owner == buffer]
        held = len(np.unique(np.concatenate([own[0] + byte for byte in range(0, int(own[1].max()), 2)]) // 2)) * 2
        kind = 3 if buffer in also_written else 1 if held == weight else 2 if held <= vector else 0
        totals[:, kind] += own[1].sum(), held
    asked, held_bytes = totals[0], np.maximum(totals[1], 1)
    others = asked[1:3].sum() / max(int(totals[1, 1:3].sum()), 1)
    return float(asked[0] / held_bytes[0]), float(others), tuple(map(int, asked))


def print_counts(case: Case, dtype: str, module: Any) -> None:
    counts: list[tuple[str, Counts]] = []
    useful: dict[str, int] = {}

    def run(launch: recorder.Launch) -> None:
        vm = host_vm(module)
        blocks, useful[launch.name] = case.part(launch) if case.part else (None, case.useful)
        if blocks is not None and not blocks:
            return
        interpret(vm, kernel(module, launch.name), launch, blocks)
        told = module.counters(vm)
        each = [lines / loads for (_, kind), (loads, lines, _) in vm.mpc.items() if kind[:2] == ("global", "ld")]
        worst = max(each, default=0.0)
        moved = told["global_read"], told["global_written"]
        images, others, whose = 0.0, 0.0, tuple[int, ...]()
        if case.shape.op == "norm_conv":
            affine, weight = math.prod(case.shape.shapes[2]), math.prod(case.shape.shapes[1])
            filters = math.prod(case.shape.shapes[1][:2])
            size = weight * launch_table.DTYPES[dtype].itemsize
            images, others, whose = reads(vm, launch, size, 4 * max(affine, filters))
        lines, races = told["lines_per_load"], len(vm.races)
        own = Counts(told["instructions"], *moved, told["mma"], lines, worst, images, others, whose, races)
        counts.append((launch.name, own))

    error = "not compared"
    if case.part:
        recorder.results(case.sample(), case.shape.tensors(dtype=launch_table.DTYPES[dtype]), run)
    else:
        error = f"{interpreted_error(case, launch_table.DTYPES[dtype], run):.1e}"
    names, lowered = list(dict.fromkeys(name for name, _ in counts)), " autocast" if case.autocast else ""
    for name in names:
        own = [each for other, each in counts if other == name]
        ratio = sum(each.instructions for each in own) / useful[name]
        lines = f"{sum(each.lines for each in own) / len(own):.1f}, {max(each.worst for each in own):.0f}"
        read, written = sum(each.read for each in own), sum(each.written for each in own)
        whose = " + ".join(map(str, own[0].whose))
        print(
            f"| `{case.shape.op}` {case.shape.label} | {dtype}{lowered} | `{name}` | {len(own)} "
            f"| {ratio:.2f} per {case.unit} "
            f"| {read} | {written} | {lines} | {sum(each.mma for each in own)} "
            f"| {own[0].images:.2f} | {own[0].others:.2f} | {whose} | {sum(each.races for each in own)} |"
        )
    print(f"| | | largest error against fp64 | | {error} | | | | | | | | |", flush=True)


def interpret(vm: Any, code: Any, launch: recorder.Launch, blocks: Sequence[int] | None) -> None:
    """A launch, or some of its blocks."""
    run = vm.run
    if blocks is not None:
        vm.run = lambda code, all_blocks, *rest: run(code, np.intersect1d(all_blocks, blocks), *rest)
    vm.launch(code, launch.grid, launch.block, list(launch.arguments), dyn=launch.dynamic)


def interpreted_error(case: Case, dtype: torch.dtype, run: recorder.Listener) -> float:
    """Of the interpreted kernels."""
    tensors = case.shape.tensors(dtype=dtype)
    return error_of(case, tensors, recorder.results(case.sample(), tensors, run))


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


if __name__ == "__main__":
    main()
