"""Counts what the Triton kernels do, without a GPU, on the PTX that Triton makes of them for sm_80.

    python tools/count_triton.py --ptxvm FOLDER [--op smfr] [--dtype bf16]

FOLDER as for tools/count_gpu.py, whose cases these are. Each launch is compiled for the arguments it is given, as
Triton does on a GPU, and interpreted on the memory of this process; results are compared with plain PyTorch in fp64.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import fastmod.kernels  # noqa: E402
import torch  # noqa: E402  (the path comes first)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from count_gpu import ARCH, CASES, Case, commit, error_of, host_vm, interpreter, rule, weight_case  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastmod import backend  # noqa: E402
from fastmod.gpu import discover, launch_table, resources, shapes  # noqa: E402
from fastmod.gpu.targets import find  # noqa: E402

#: Sums as deep as in a large layer, of few columns: forward, and for the gradient of x.
DEEP = (weight_case(shapes.masked_linear(128, 2000, 64, 4), 4), weight_case(shapes.masked_linear(128, 64, 2000, 4), 4))
POINTERS = {
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1",
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
}  # fmt: skip
NEAR = 1 << 31


@dataclass
class Total:
    """Of all launches of one kernel in a step."""

    launches: int = 0
    instructions: int = 0
    read: int = 0
    written: int = 0
    mma: int = 0
    races: int = 0
    lines: list[float] = field(default_factory=list)
    wavefronts: list[float] = field(default_factory=list)
    needs: set[tuple[int, int, int]] = field(default_factory=set)  # registers, bytes spilled, shared memory


class Counted:
    """A Triton kernel whose launches are compiled for ARCH, as Triton would for these arguments, and interpreted."""

    def __init__(self, name: str, kernel: Any, module: Any, totals: dict[str, Total]) -> None:
        self.name, self.kernel, self.module, self.totals = name, kernel, module, totals

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda **values: self.launch(tuple(grid), values)

    def launch(self, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        names = [param.name for param in self.kernel.params]
        options = {name: values.pop(name) for name in list(values) if name not in names}
        signature: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        arguments: list[Any] = []

        def given(place: tuple[int, ...], param: Any, value: Any) -> str:
            """The type of an argument, which joins the others."""
            own = not param.do_not_specialize
            if isinstance(value, torch.Tensor):
                kind, value = POINTERS[value.dtype], value.data_ptr()
            elif isinstance(value, float):
                kind = param.annotation_type or "fp32"
            else:
                kind = param.annotation_type or ("i32" if -NEAR <= value < NEAR else "i64")
            if own and isinstance(value, int) and value % 16 == 0:
                attributes[place] = [["tt.divisibility", 16]]
            arguments.append(value)
            return str(kind)

        for i, param in enumerate(self.kernel.params):
            value = values.get(param.name, param.default if param.has_default else None)
            one = isinstance(value, int) and value == 1 and not param.do_not_specialize
            if param.is_constexpr or value is None or one:
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, tuple):
                signature[param.name] = tuple(given((i, j), param, each) for j, each in enumerate(value))
            else:
                signature[param.name] = given((i,), param, value)
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        target = find(ARCH)
        code = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp), options=options)
        found = self.module.parse(code.asm["ptx"])[code.metadata.name]
        vm = host_vm(self.module)
        arguments += [0] * (len(found.params) - len(arguments))
        vm.launch(found, grid, (32 * code.metadata.num_warps,), arguments, dyn=code.metadata.shared)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            needs = resources.of_triton_cubin(Path(file.name), code.metadata.shared, disassemble=False)
        self._add(vm, needs)

    def _add(self, vm: Any, needs: Any) -> None:
        told, own = self.module.counters(vm), self.totals.setdefault(self.name, Total())
        own.launches += 1
        own.instructions += told["instructions"]
        own.read += told["global_read"]
        own.written += told["global_written"]
        own.mma += told["mma"]
        own.races += len(vm.races)
        own.lines.append(told["lines_per_load"])
        own.wavefronts.append(told["bank_wavefronts"])
        own.needs.add((needs.registers, needs.spills, needs.shared))


def _factor_type(x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Of what a product takes, as on a GPU: in the interpreter it is another."""
    return getattr(tl, str(dtype or x.dtype).removeprefix("torch."))


@contextlib.contextmanager
def counting(module: Any) -> Iterator[dict[str, Total]]:
    """Inside, Triton serves CPU tensors, by kernels that are interpreted and counted: kernel -> what it did."""
    totals: dict[str, Total] = {}
    library = torch.library.Library("fastmod_triton", "IMPL")
    with contextlib.ExitStack() as changed:
        changed.callback(library._destroy)
        for name, launcher in fastmod.kernels.LAUNCHERS.items():
            library.impl(name, launcher, "CPU")
        changed.enter_context(mock.patch.object(backend, "resolve", return_value="triton"))
        for stem, file in list(sys.modules.items()):
            if not stem.startswith("fastmod.kernels."):
                continue
            for name, kernel in list(vars(file).items()):
                if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                    label = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
                    changed.enter_context(mock.patch.object(file, name, Counted(label, kernel, module, totals)))
            if hasattr(file, "factor_type"):
                changed.enter_context(mock.patch.object(file, "factor_type", _factor_type))
            if stem.endswith(".masked_linear"):  # the tiles of layers that have programs enough for a large GPU
                changed.enter_context(mock.patch.object(file, "ENOUGH", 0))
        yield totals


def print_case(case: Case, dtype: str, module: Any) -> None:
    tensors = case.shape.tensors(dtype=launch_table.DTYPES[dtype])
    with counting(module) as totals:
        outputs = case.shape.call(tensors)
        grads = torch.autograd.grad(outputs, tensors, [torch.ones_like(out) for out in outputs])
    about = f"`{case.shape.op}` {case.shape.label} | {dtype}"
    for name, own in totals.items():
        needs = "; ".join(f"{r}, {s}, {m}" for r, s, m in sorted(own.needs))
        each = f"{own.instructions / case.useful:.2f} per {case.unit}"
        print(
            f"| {about} | `{name}` | {own.launches} | {each} | {own.read} | {own.written} "
            f"| {_mean(own.lines)} | {_mean(own.wavefronts)} | {own.mma} | {needs} | {own.races} |"
        )
    error = error_of(case, tensors, [*outputs, *grads])
    print(f"| {about} | largest error against fp64: {error:.1e} | | | | | | | | | |", flush=True)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}, {max(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ptxvm", type=Path, required=True, help="folder of ptxvm.py")
    parser.add_argument("--op", action="append", help="only this op; repeat for several")
    parser.add_argument("--shape", default="", help="only shapes with this in their names")
    parser.add_argument("--dtype", action="append", choices=list(launch_table.DTYPES), help="only these")
    asked = parser.parse_args()
    discover.kernel_modules()
    module = interpreter(asked.ptxvm)
    print(f"commit {commit()}, {ARCH}, triton {triton.__version__}\n")
    columns = "case | dtype | kernel | launches | instructions per | read | written | lines per load, worst kernel"
    columns += " | bank wavefronts, worst kernel | mma | registers, spills, shared | races"
    print(f"| {columns} |\n{rule(12)}")
    served = {name.rpartition("_")[0] for name in fastmod.kernels.LAUNCHERS}
    for case in [*CASES, *DEEP]:
        right = case.part is None and case.shape.op in served and asked.shape in case.shape.label
        if right and (not asked.op or case.shape.op in asked.op):
            for dtype in asked.dtype or case.dtypes:
                print_case(case, dtype, module)


if __name__ == "__main__":
    main()
