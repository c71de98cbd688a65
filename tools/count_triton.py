"""Counts what the Triton kernels do, without a GPU, on the PTX that Triton makes of them for sm_80.

    python tools/count_triton.py --ptxvm FOLDER [--op smfr] [--dtype bf16] [--autocast]
    python tools/count_triton.py --ptxvm FOLDER --write      all of it, into docs/gpu-counts.md
    python tools/count_triton.py --launches                  what is launched at the papers' shapes; runs nothing

FOLDER as for tools/count_gpu.py, whose cases these are. Each launch is compiled for the arguments it is given, as
Triton does on a GPU, and interpreted on the memory of this process; results are compared with plain PyTorch in fp64.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import _count_page as page  # noqa: E402  (the path comes first)
import fastmod.kernels  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from _count_cases import CASES, Case  # noqa: E402
from _count_vm import ARCH, Counted, aligned, dtype_of, host_vm, interpreter, selected  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastmod import backend  # noqa: E402
from fastmod.gpu import aten, discover, launch_table, resources, shapes  # noqa: E402
from fastmod.gpu.targets import find  # noqa: E402
from fastmod.models import IsometricNet, ResMixNet  # noqa: E402
from tests.helpers import backends  # noqa: E402

POINTERS = {
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1",
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
}  # fmt: skip
NEAR = 1 << 31

#: Told of a launch: the kernel's name, its grid, its code, and the arguments of that.
Listener = Callable[[str, tuple[int, ...], Any, list[Any]], None]


class Compiled:
    """A Triton kernel whose launches are compiled for ARCH, as Triton would for these arguments, and handed on."""

    def __init__(self, name: str, kernel: Any, listener: Listener) -> None:
        self.name, self.kernel, self.listener = name, kernel, listener

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
        self.listener(self.name, grid, code, arguments)


class Told:
    """A Triton kernel that is told of and left out."""

    def __init__(self, name: str, found: list[tuple[str, int]]) -> None:
        self.name, self.found = name, found

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda **_: self.found.append((self.name, math.prod(grid)))


def _factor_type(x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Of what a product takes, as on a GPU: in the interpreter it is another."""
    return getattr(tl, str(dtype or x.dtype).removeprefix("torch."))


@contextlib.contextmanager
def on_triton(instead: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside, Triton serves CPU tensors, by what stands for its kernels."""
    library = torch.library.Library("fastmod_triton", "IMPL")
    with contextlib.ExitStack() as changed:
        changed.callback(library._destroy)
        for name, launcher in fastmod.kernels.LAUNCHERS.items():
            library.impl(name, launcher, "CPU")
        changed.enter_context(mock.patch.object(backend, "resolve", return_value="triton"))
        changed.enter_context(mock.patch.object(backend, "triton_interprets", return_value=True))
        for stem, file in list(sys.modules.items()):
            if not stem.startswith("fastmod.kernels."):
                continue
            for name, kernel in list(vars(file).items()):
                if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                    label = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
                    changed.enter_context(mock.patch.object(file, name, instead(label, kernel)))
            if hasattr(file, "factor_type"):
                changed.enter_context(mock.patch.object(file, "factor_type", _factor_type))
        yield


def count(case: Case, dtype: str, module: Any) -> Counted:
    tensors, sample, found, phase = case.shape.tensors(dtype=dtype_of(dtype)), case.sample(), Counted(case, dtype), 0

    def run(name: str, grid: tuple[int, ...], code: Any, arguments: list[Any]) -> None:
        vm, kernel = host_vm(module), module.parse(code.asm["ptx"])[code.metadata.name]
        given = arguments + [0] * (len(kernel.params) - len(arguments))
        vm.launch(kernel, grid, (32 * code.metadata.num_warps,), given, dyn=code.metadata.shared)
        row = found.row(phase, name)
        pointers = [each for each in arguments if isinstance(each, int) and each > 1 << 20]
        row.add(vm, module, np.array(pointers), case, tensors)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            needs = resources.of_triton_cubin(Path(file.name), code.metadata.shared, disassemble=False)
        row.needs.add((needs.registers, needs.spills, needs.shared))

    with backends.no_tf32(), _large_tiles(), on_triton(lambda name, kernel: Compiled(name, kernel, run)):
        outputs = sample.call(tensors)
        phase = 1
        grads = torch.autograd.grad(outputs, tensors, [torch.ones_like(out) for out in outputs])
    found.finish(tensors, [*outputs, *grads])
    return found


def _large_tiles() -> Any:
    """The tiles of layers of masked_linear that have programs enough for a large GPU."""
    return mock.patch.object(sys.modules["fastmod.kernels.masked_linear"], "ENOUGH", 0)


#: Of a forward or a backward: our kernels with their numbers of programs, and what torch launches.
Half = tuple[list[tuple[str, int]], list[str]]


def _step(forward: Callable[[], Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]) -> tuple[Half, Half]:
    """Forward and backward of the second step, as what is kept is there then; nothing runs."""
    found: list[tuple[str, int]] = []
    outputs: list[Sequence[torch.Tensor]] = []

    def half(run: Callable[[], Any]) -> Half:
        del found[:]
        others = aten.launches(run)
        return list(found), others

    def backward() -> None:
        torch.autograd.grad(outputs[-1], leaves, [torch.ones_like(out) for out in outputs[-1]])

    with on_triton(lambda name, _: Told(name, found)):
        for _ in range(2):
            there, back = half(lambda: outputs.append(forward())), half(backward)
    ones = len(outputs[-1])  # gradients of the results, which are not the op's
    return there, (back[0], back[1][ones:])


def _nets() -> list[list[str]]:
    """Whole nets in training."""

    def counts(net: torch.nn.Module) -> tuple[int, int]:
        x = torch.randn(4, 3, 16, 16)
        there, back = _step(lambda: [net(x)], list(net.parameters()))
        return len(there[0]) + len(there[1]), len(back[0]) + len(back[1])

    rows = []
    for experts, depth in ((2, 2), (4, 1)):
        found = counts(ResMixNet(experts, depth))
        rows.append([f"ResMixNet({experts},{depth})", f"{found[0]} + {found[1]}", "", ""])
    two, three = (counts(IsometricNet(24, layers, 2, 5)) for layers in (2, 3))
    return [*rows, ["IsometricNet, each further layer", f"{three[0] - two[0]} + {three[1] - two[1]}", "", ""]]


def launches() -> str:
    """At the papers' shapes."""
    rows = []
    for shape in shapes.SHAPES:
        given = [shape.tensors(dtype=dtype) for dtype in launch_table.DTYPES.values()]
        steps = [_step(functools.partial(shape.call, tensors), tensors) for tensors in given]
        each = [" + ".join(str(len(ours) + len(others)) for ours, others in halves) for halves in steps]
        torch_own = [str(sum(len(others) for _, others in halves)) for halves in steps]
        programs = page.sizes(size for ours, _ in steps[0] for _, size in ours)
        rows.append([f"`{shape.op}` {shape.label}", page.pair(each), page.pair(torch_own), programs])
    head = ["op", "launches, forward + backward", "by torch", "programs of each launch, fp32"]
    return f"## Launches of Triton at the papers' shapes\n\n{page.table(head, rows + _nets())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ptxvm", type=Path, help="folder of ptxvm.py")
    parser.add_argument("--op", action="append", help="only this op; repeat for several")
    parser.add_argument("--shape", default="", help="only shapes with this in their names")
    parser.add_argument("--dtype", action="append", choices=list(launch_table.DTYPES), help="only these")
    parser.add_argument("--autocast", action="store_true", help="fp32 tensors under autocast to bf16")
    parser.add_argument("--launches", action="store_true", help="only tell what is launched at the papers' shapes")
    parser.add_argument("--write", action="store_true", help="all ops, autocast too, into docs/gpu-counts.md")
    asked = parser.parse_args()
    discover.kernel_modules()
    if asked.launches:
        print(launches())
        return
    if asked.ptxvm is None or (asked.write and (asked.op or asked.shape or asked.dtype or asked.autocast)):
        parser.error("expected --ptxvm or --launches; --write takes --ptxvm, and all cases")
    aligned()
    here = page.commit()
    module = interpreter(asked.ptxvm)
    print(f"commit {here}, {ARCH}, triton {triton.__version__}\n")
    text = page.section("Triton", _counted(asked, module))
    if asked.write:
        asked.autocast = True
        text += "\n" + page.section("Triton under autocast", _counted(asked, module))
        text += "\n" + launches()
        page.write("Triton", text, sum(os.times()[:4]), here)


def _counted(asked: argparse.Namespace, module: Any) -> list[list[Counted]]:
    """Printed one by one, as it takes a while."""
    served = {name.rpartition("_")[0] for name in fastmod.kernels.LAUNCHERS}
    right = [case for case in CASES if case.part is None and case.shape.op in served and case.triton]
    found = []
    for case in selected(right, asked.op, asked.shape, asked.autocast):
        dtypes = [dtype for dtype in case.dtypes if not asked.dtype or dtype in asked.dtype]
        found.append([count(case, dtype, module) for dtype in dtypes])
        print(f"`{case.shape.op}` {page.of_case(found[-1])}", flush=True)
    print(page.summary(each for counted in found for each in counted))
    return found


if __name__ == "__main__":
    main()
