"""Compiles Triton kernels to cubin and hsaco. The target is given, so no GPU is needed."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastmod.gpu import resources, tools
from fastmod.gpu.specialisation import Specialisation
from fastmod.gpu.targets import Target

PRODUCTS = re.compile(r"\b(?:wg)?mma\.|\btcgen05\.mma")  # the instructions of tensor cores in PTX
#: Options that Triton derives from a target and that matter to its front end only for numbers of eight bits.
_OF_ONE_TARGET = ("arch", "supported_fp8_dtypes", "deprecated_fp8_dot_operand_dtypes", "max_num_imprecise_acc_default")
_ALIGNED = [["tt.divisibility", 16]]  # as is the memory of every torch tensor


def on_target(spec: Specialisation, target: Target | None) -> Specialisation:
    """With the values and options that differ on AMD."""
    if target is None or target.nvidia:
        return spec
    options = {name: value for name, value in spec.on_amd.items() if name in spec.options}
    values = {name: value for name, value in spec.on_amd.items() if name not in spec.options}
    return spec._replace(values={**spec.values, **values}, options={**spec.options, **options}, on_amd={})


class _Source(ASTSource):
    """Triton's front end, which runs Python over a kernel's syntax tree, asks a target for no more than its maker: the
    code that it makes for the first one is read back for the others."""

    read_before: ClassVar[OrderedDict[tuple[str, ...], str]] = OrderedDict()
    most = 64  # kernels of one op and dtype; up to a megabyte each

    def make_ir(self, target: GPUTarget, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
        chosen = {name: value for name, value in vars(options).items() if name not in _OF_ONE_TARGET}
        key = (target.backend, self.hash(), repr(sorted(chosen.items())))
        if key not in self.read_before:
            module = super().make_ir(target, options, codegen_fns, module_map, context)
            self.read_before[key] = module.str()
            if len(self.read_before) > self.most:
                self.read_before.popitem(last=False)
            return module
        with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
            file.write(self.read_before[key])
            file.flush()
            module = ir.parse_mlir_module(file.name, context)
        module.context = context  # which lives as long
        return module


def source(spec: Specialisation, target: Target | None = None) -> ASTSource:
    """Options for one target, by default NVIDIA's."""
    spec = on_target(spec, target)
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = [param.name for param in spec.kernel.params]
    for name in spec.values:
        if name not in names:
            raise ValueError(f"{name}: {spec.kernel.__name__} has no such argument, expected one of {', '.join(names)}")
    for i, param in enumerate(spec.kernel.params):
        name, value = param.name, spec.values.get(param.name)
        if name not in spec.values:
            if not param.annotation_type:
                raise ValueError(f"{name}: {spec.kernel.__name__} has neither a value nor a type for it")
            signature[name] = param.annotation_type
        elif isinstance(value, str):
            signature[name], attributes[(i,)] = value, _ALIGNED
        elif isinstance(value, tuple) and isinstance(value[0], str):
            signature[name] = value
            attributes.update({(i, j): _ALIGNED for j in range(len(value))})
        else:
            signature[name], constants[name] = "constexpr", value
    return _Source(spec.kernel, signature=signature, constexprs=constants, attrs=attributes)


def key(spec: Specialisation, target: Target) -> str:
    """Depends on the kernel and all that it calls, its constants, the compiler and the target."""
    versions = [triton.__version__, tools.ptxas(target)[1] if target.nvidia else ""]
    parts = [source(spec, target).hash(), sorted(on_target(spec, target).options.items()), target, versions]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def compiled(spec: Specialisation, target: Target, *, disassemble: bool = True) -> tuple[Any, resources.Resources]:
    """Triton's compiled kernel, whose ``asm`` holds every stage, and what it needs; tensor core instructions of NVIDIA
    count as 0 without ``disassemble``."""
    kernel = triton.compile(
        source(spec, target),
        target=GPUTarget(target.backend, target.arch, target.warp),
        options=dict(on_target(spec, target).options),
    )
    if not target.nvidia:
        return kernel, resources.of_hsaco(kernel.asm["amdgcn"], kernel.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        # Disassembling takes half as long as compiling, so only if there is something to count.
        disassemble = disassemble and PRODUCTS.search(kernel.asm["ptx"]) is not None
        return kernel, resources.of_triton_cubin(Path(file.name), kernel.metadata.shared, disassemble=disassemble)


def told(spec: Specialisation, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    """Signature and constants of a specialisation in a form that JSON can hold."""
    each = source(spec, target)
    signature = {name: list(t) if isinstance(t, tuple) else t for name, t in each.signature.items() if t != "constexpr"}
    constants = {spec.kernel.params[path[0]].name: _plain(value) for path, value in each.constants.items()}
    return signature, constants


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
