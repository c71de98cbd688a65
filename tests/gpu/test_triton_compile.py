"""Every Triton kernel compiled to machine code, without a GPU: cubin for four CUDA architectures, hsaco for gfx942.

A kernel must not spill: no stack and no local memory on CUDA, no spilled registers and no scratch on AMD.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from triton import JITFunction, knobs

from fastmod.gpu import discover, triton_part, worker
from fastmod.gpu.specialisation import DTYPES
from fastmod.gpu.targets import TARGETS, Target

#: Triton makes of sm_86 and sm_89 what it makes of sm_80, but for fp64, where it is that of sm_120.
TESTED = [name for name, target in TARGETS.items() if target.triton and name not in ("sm_86", "sm_89")]
ONE_OF_EACH_MAKER = ("sm_90", "gfx942")
#: Their code depends on how the dtype is rounded; of the others fp16 is bf16 with another conversion.
MASKS = ("sample_mask", "masked_linear")
#: Masks agree with other backends bit for bit only if every product is rounded.
UNFUSED = {
    "sample_mask.forward_kernel",
    "masked_linear.forward_kernel",
    "masked_linear.backward_x_kernel",
    "masked_conv2d.draw_kernel",
    "masked_conv2d.weight_kernel",
}


#: fp64 without tensor cores for it: sums of 64 rows and the slopes fit in eight warps, not in four.
TIGHTEST = ("masked_linear.backward_weight_kernel.fp64-rows64-any", "sm_120")


def targets_of(op: str, dtype: str) -> list[str]:
    if dtype == "fp64":
        return list(ONE_OF_EACH_MAKER)
    return ["sm_90"] if dtype == "fp16" and op not in MASKS else TESTED


#: Of fp64 MFNNRs go layer by layer, and masked convolutions sample by sample, by torch's.
LEFT_OUT = {"smfr": ("fp64",), "masked_conv2d": ("fp64",)}


def dtypes_of(op: str) -> list[str]:
    return [name for name in DTYPES if name not in LEFT_OUT.get(op, ())]


CASES = [
    (op, dtype, target)
    for op in discover.kernel_modules()
    for dtype in dtypes_of(op)
    for target in targets_of(op, dtype)
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own, so that a kernel is really compiled and nothing is left behind."""
    # With line numbers, as in what is shipped: without them a kernel may take two registers more, and nothing is saved.
    with worker.here(str(tmp_path_factory.mktemp("triton"))):
        yield


@pytest.mark.parametrize(("op", "dtype", "target"), CASES)
def test_compiles_without_spills(op: str, dtype: str, target: str) -> None:
    names = [name for name in discover.specialisations() if re.match(rf"{op}\.\w+\.{dtype}(-|$)", name)]
    assert names
    for name in names:
        spec = discover.specialisations()[name]
        counted = (dtype, target) in (("bf16", "sm_90"), ("fp32", target))
        # Disassembling takes half as long as compiling. ptxas keeps the products of PTX: one target shows that.
        kernel, needs = triton_part.compiled(spec, TARGETS[target], disassemble=target == "sm_90" and counted)
        print(name, target, needs)
        assert len(kernel.asm[TARGETS[target].suffix]) > 0
        assert needs.spills == 0, f"{name}: {needs}"
        assert needs.registers > 0
        if counted and TARGETS[target].nvidia:
            told = triton_part.PRODUCTS.search(kernel.asm["ptx"]) is not None
            assert told == on_tensor_cores(name, dtype), f"{name}: {needs}"
            assert target != "sm_90" or (needs.tensor_core > 0) == told, f"{name}: {needs}"
        if name.rpartition(".")[0] in UNFUSED:
            assert_nothing_fused(kernel, TARGETS[target])


def on_tensor_cores(name: str, dtype: str) -> bool:
    """The products of two-byte numbers are what tensor cores are for. fp32 is exact without them, or by three products
    of tf32, as in norm_conv, template_mix, mfnnr and smfr; depthwise convolutions have no products of matrices."""
    op, kernel, _ = name.split(".")
    if op == "norm_conv":
        return kernel != "columns_kernel" and "depthwise" not in name
    if op == "masked_conv2d":
        return kernel not in ("draw_kernel", "finish_kernel")
    if op == "template_mix":
        return kernel != "finish_kernel"
    return op in ("masked_linear", "mfnnr", "smfr", "squeeze_excite") and kernel != "penalty_kernel"


def test_tightest_kernel_does_not_spill() -> None:
    name, target = TIGHTEST
    needs = triton_part.compiled(discover.specialisations()[name], TARGETS[target])[1]
    assert needs.spills == 0, f"{name}: {needs}"


def assert_nothing_fused(kernel: Any, target: Target) -> None:
    """In Triton's code; fusing by ptxas is switched off as well."""
    assert kernel.metadata.enable_fp_fusion is False
    if target.nvidia:
        assert "fma.rn.f32" not in kernel.asm["ptx"]
        return
    assembly = kernel.asm["amdgcn"]
    fused = len(re.findall(r"\bv_(?:pk_)?fma\w*_f32", assembly))
    divisions = len(re.findall(r"\bv_div_fixup_f32", assembly))
    assert divisions > 0
    assert fused <= 5 * divisions, f"{fused} FMAs, of which {divisions} divisions have 5 each"


def own_modules(module: ModuleType) -> tuple[str, str]:
    """Of an op: the launchers' file and, where there is one, that of its kernels, with an underscore."""
    package, _, stem = module.__name__.rpartition(".")
    return module.__name__, f"{package}._{stem}"


def test_every_kernel_is_in_the_lists() -> None:
    listed = {name.rpartition(".")[0] for name in discover.specialisations()}
    written = {
        f"{stem}.{name}"
        for stem, module in discover.kernel_modules().items()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ in own_modules(module)
    }
    assert listed == written and len(listed) >= 15
    assert listed >= UNFUSED


def test_every_file_has_a_list() -> None:
    folder = Path(next(iter(discover.kernel_modules().values())).__file__).parent
    assert set(discover.kernel_modules()) == {path.stem for path in folder.glob("*.py") if path.stem[0] != "_"}


def test_every_dtype_is_in_the_lists() -> None:
    for op in discover.kernel_modules():
        found = {
            name.split(".")[2].partition("-")[0] for name in discover.specialisations() if name.startswith(f"{op}.")
        }
        assert found == set(dtypes_of(op))


def test_a_key_tells_everything_apart() -> None:
    """The same twice, another for each target, dtype, constant, option and kernel. On AMD some are the same kernel."""
    specs = discover.specialisations()
    targets = [TARGETS[name] for name in TESTED]
    keys = [triton_part.key(spec, target) for spec in specs.values() for target in targets]
    resolved = [(target.name, triton_part.on_target(each, target)) for each in specs.values() for target in targets]
    told = {(name, repr(each.kernel.fn), repr(each.values), repr(each.options)) for name, each in resolved}
    assert len(set(keys)) == len(told)
    of_nvidia = [key for key, (name, _) in zip(keys, resolved, strict=True) if TARGETS[name].nvidia]
    assert len(set(of_nvidia)) == len(of_nvidia) > 3 * len(specs)
    name, spec = next(each for each in specs.items() if "BLOCK_R" in each[1].values)
    first = keys[list(specs).index(name) * len(targets)]
    assert triton_part.key(spec, targets[0]) == first, name
    for changed in (
        spec._replace(options={**spec.options, "num_warps": 8}),
        spec._replace(values={**spec.values, "BLOCK_R": 1}),
    ):
        assert triton_part.key(changed, targets[0]) != first, name


@pytest.mark.parametrize("name", ["norm_sum.forward_kernel.bf16-block", "mfnnr.linear_backward_kernel.fp16-large"])
def test_code_of_the_front_end_serves_all_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code is the same, to the byte, whether it was made from the syntax tree or from what another target's
    front end has left."""
    spec, target = discover.specialisations()[name], TARGETS["sm_90"]
    made = []
    for before in (None, TARGETS["sm_80"]):
        monkeypatch.setattr(triton_part._Source, "read_before", OrderedDict())
        monkeypatch.setattr(knobs.compilation, "always_compile", True)
        if before is not None:
            triton_part.compiled(spec, before, disassemble=False)
        made.append(triton_part.compiled(spec, target, disassemble=False)[0].asm["cubin"])
        assert len(triton_part._Source.read_before) == 1
    assert made[0] == made[1]


def test_a_wrong_list_is_told() -> None:
    spec = discover.specialisations()["range_penalty.forward_kernel.fp32"]
    with pytest.raises(ValueError, match=r"blocks: forward_kernel has no such argument, expected one of t_ptr, "):
        triton_part.source(spec._replace(values={**spec.values, "blocks": "*fp32"}))
    with pytest.raises(ValueError, match="t_ptr: forward_kernel has neither a value nor a type for it"):
        triton_part.source(spec._replace(values={}))


def test_who_is_asked_for_tf32() -> None:
    """Convolutions: torch's setting of convolutions, which allows it by default; other products: that of products."""
    from fastmod.kernels._images import IEEE, TF32, TF32_THRICE, precision

    x, before = torch.zeros(1), torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        assert (precision(x, convolution=True), precision(x)) == (TF32, TF32_THRICE)
        torch.backends.cudnn.allow_tf32 = False
        assert precision(x, convolution=True) == TF32_THRICE
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert precision(x.double(), convolution=True) == IEEE
