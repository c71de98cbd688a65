"""Counts what the CUDA C++ kernels do, without a GPU: prints the tables of docs/gpu-counts.md.

    python tools/count_gpu.py                       launches, registers, spills, tensor core instructions
    python tools/count_gpu.py --ptxvm FOLDER        and what a run of their PTX does: instructions, bytes, lines
    python tools/count_gpu.py --autocast            of fp32 tensors under autocast to bf16
    python tools/count_gpu.py --write               writes all of it into docs/gpu-counts.md
    python tools/count_gpu.py --write-launches      fastmod/gpu/launches.csv and geometry.csv anew

Needs nvcc, g++ and Triton's wheel (for its cuobjdump). Triton's kernels: tools/count_triton.py. FOLDER holds
ptxvm.py, an interpreter of PTX that is no part of this project: with ``VM`` (``launch(kernel, grid, block, arguments,
dynamic)``), ``parse`` and ``counters``. The ops run over the host harness of the tests; the interpreter takes each
launch over, with its arguments, on the memory of this process, so that all that follows meets the right values, and
the results are compared with plain PyTorch in fp64.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import _count_page as page  # noqa: E402  (the path comes first)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from _count_cases import CASES, Case  # noqa: E402
from _count_vm import ARCH, Counted, aligned, dtype_of, host_vm, interpreter, selected  # noqa: E402

from fastmod.gpu import aten, cuda_part, discover, launch_table, resources, shapes, tools  # noqa: E402
from fastmod.gpu.targets import find  # noqa: E402
from tests.helpers.cuda_host import recorder  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ptxvm", type=Path, help="folder of ptxvm.py")
    parser.add_argument("--op", action="append", help="only this op; repeat for several")
    parser.add_argument("--shape", default="", help="only shapes with this in their names")
    parser.add_argument("--autocast", action="store_true", help="fp32 tensors under autocast to bf16")
    parser.add_argument("--write", action="store_true", help="all ops, autocast too, into docs/gpu-counts.md")
    parser.add_argument("--write-launches", action="store_true", help="only write launches.csv and geometry.csv anew")
    asked = parser.parse_args()
    if asked.write_launches:
        launch_table.write(*counted_launches())
        print(f"wrote {launch_table.FILE} and {launch_table.GEOMETRY}")
        return
    if asked.ptxvm is not None:
        aligned()
    here = page.commit()
    print(f"commit {here}, {ARCH}, nvcc {tools.nvcc_version(tools.nvcc())}\n")
    if asked.write:
        if asked.ptxvm is None or asked.op or asked.shape or asked.autocast:
            parser.error("--write takes --ptxvm, and all cases")
        vm = interpreter(asked.ptxvm)
        text = page.section("CUDA C++", _counted(_cases(asked), vm))
        asked.autocast = True
        text += "\n" + page.section("CUDA C++ under autocast", _counted(_cases(asked), vm))
        text += "\n" + tensor_cores() + "\n" + launches(None)
        page.write("CUDA", text, sum(os.times()[:4]), here)
        return
    wanted = _cases(asked)
    if not asked.shape:
        print(launches(asked.op))
        print(needs({launch.name.partition(".")[0] for case in wanted for launch in ours(case)}))
    if asked.ptxvm is None:
        print("Not counted: instructions, bytes and lines of a run. They need an interpreter of PTX: --ptxvm FOLDER.")
        return
    _counted(wanted, interpreter(asked.ptxvm))


def _cases(asked: argparse.Namespace) -> list[Case]:
    return selected([case for case in CASES if case.cuda], asked.op, asked.shape, asked.autocast)


def _counted(cases: Sequence[Case], module: Any) -> list[list[Counted]]:
    """Printed one by one, as it takes a while."""
    found = []
    for case in cases:
        found.append([count(case, dtype, module) for dtype in case.dtypes])
        print(f"`{case.shape.op}` {page.of_case(found[-1])}", flush=True)
    print(page.summary(each for counted in found for each in counted))
    return found


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


def launches(ops: list[str] | None) -> str:
    """Of CUDA C++ at the papers' shapes."""
    rows = []
    for shape in shapes.SHAPES:
        if ops and shape.op not in ops:
            continue
        found = [recorder.record(shape, dtype) for dtype in launch_table.DTYPES.values()]
        torch_own = [
            sum(each.name.startswith("aten::") for half in each_dtype for each in half) for each_dtype in found
        ]
        each = page.pair([f"{len(both.forward)} + {len(both.backward)}" for both in found])
        own = [one for half in found[0] for one in half if not one.name.startswith("aten::")]
        rows.append(
            [
                f"`{shape.op}` {shape.label}",
                each,
                page.pair(list(map(str, torch_own))),
                page.sizes(math.prod(one.grid) for one in own),
            ]
        )
    head = ["op", "launches, forward + backward", "by torch", "blocks of each launch, fp32"]
    return f"## Launches of CUDA C++ at the papers' shapes\n\n{page.table(head, rows)}"


def ours(case: Case) -> list[recorder.Launch]:
    found = [recorder.record(case.sample(), dtype_of(dtype)) for dtype in case.dtypes]
    launches = [each for recording in found for half in recording for each in half]
    return [each for each in launches if not each.name.startswith("aten::")]


def needs(stems: set[str]) -> str:
    """Of the kernels that the cases launch; the dynamic shared memory of a launch stands beside its geometry."""
    launched = {launch.name for case in CASES if case.cuda for launch in ours(case)}
    rows = []
    for stem in sorted(stems):
        for name, each in compiled(stem)[0].items():
            if name in launched:
                cells = each.registers, each.spills, each.shared, each.tensor_core
                rows.append([f"`{name}`", *map(str, cells)])
    head = ["kernel", "registers", "bytes spilled", "static shared memory", "tensor core instructions"]
    return page.table(head, rows)


def tensor_cores() -> str:
    """Instructions in the machine code of each kernel that has some, the most of its instances."""
    kinds = {"float": "fp32", "__nv_bfloat16": "bf16", "__half": "fp16"}
    rows = []
    for stem, file in discover.cuda_files().items():
        if not any("mma" in path.read_text() for path in cuda_part._with_headers(file)):
            continue
        found: dict[str, dict[str, int]] = {}
        for name, each in compiled(stem)[0].items():
            short, _, arguments = name.partition("<")
            kind = kinds.get(arguments.rstrip(">").split(",")[0])
            if kind and each.tensor_core:
                own = found.setdefault(short, {})
                own[kind] = max(own.get(kind, 0), each.tensor_core)
        rows += [[f"`{short}`", *(str(own.get(kind, "")) for kind in kinds.values())] for short, own in found.items()]
    about = f"Of {ARCH}, the most of a kernel's instances, by the dtype of what is read; fp64 has none.\n"
    told = page.table(["kernel", *kinds.values()], rows)
    return f"## Tensor-core instructions in the machine code of CUDA C++\n{about}\n{told}"


@cache
def compiled(stem: str) -> tuple[dict[str, resources.Resources], str]:
    """What each kernel of a file needs, by the name that the recorder gives it, and the file's PTX."""
    source = discover.cuda_files()[stem]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernels.ptx"
        target = find(ARCH)
        cuda_part.write_ptx(source, target.virtual, ptx)
        found, _ = cuda_part.compiled(source, target, Path(folder) / "kernels.cubin", ptx=ptx)
        return {_name(stem, symbol): found[symbol] for symbol in sorted(found)}, ptx.read_text()


def _name(stem: str, symbol: str) -> str:
    name, arguments = cuda_part.readable(symbol)
    return f"{stem}.{name}<{','.join(map(str, arguments))}>"


# -------------------------------------------------------------------------------------------------- interpreted


@cache
def kernel(module: Any, name: str) -> Any:
    """By the name that the recorder gives a launch."""
    stem, _, _ = name.partition(".")
    for symbol, found in _parsed(module, stem).items():
        if _name(stem, symbol) == name:
            return found
    sys.exit(f"{name}: not in the PTX of {stem}.cu")


@cache
def _parsed(module: Any, stem: str) -> Any:
    return module.parse(compiled(stem)[1])


def count(case: Case, dtype: str, module: Any) -> Counted:
    found, phase = Counted(case, dtype), 0
    tensors, sample = case.shape.tensors(dtype=dtype_of(dtype)), case.sample()

    def call(t: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal phase
        outputs = sample.call(t)
        phase = 1
        return outputs

    def run(launch: recorder.Launch) -> None:
        vm = host_vm(module)
        row = found.row(phase, launch.name.partition("<")[0])
        blocks, row.useful = case.part(launch) if case.part else (None, case.useful)
        if blocks is not None and not blocks:
            del found.rows[phase, row.kernel]
            return
        interpret(vm, kernel(module, launch.name), launch, blocks)
        words = np.concatenate([np.frombuffer(each[: len(each) // 8 * 8], np.int64) for each in launch.arguments])
        row.add(vm, module, words[(words > 1 << 20) & (words < 1 << 47)], case, tensors)
        told = compiled(launch.name.partition(".")[0])[0][launch.name]
        row.needs.add((told.registers, told.spills, told.shared + launch.dynamic))

    results = recorder.results(replace(sample, call=call), tensors, run)
    found.finish(tensors, results)
    return found


def interpret(vm: Any, code: Any, launch: recorder.Launch, blocks: Sequence[int] | None) -> None:
    """A launch, or some of its blocks."""
    run = vm.run
    if blocks is not None:
        vm.run = lambda code, all_blocks, *rest: run(code, np.intersect1d(all_blocks, blocks), *rest)
    vm.launch(code, launch.grid, launch.block, list(launch.arguments), dyn=launch.dynamic)


if __name__ == "__main__":
    main()
