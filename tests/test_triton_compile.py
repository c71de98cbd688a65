"""Every Triton kernel compiled to machine code, without a GPU: cubin for four CUDA architectures, hsaco for gfx942.

A kernel must not spill: with no stack and no local memory on CUDA, no spilled registers and no scratch on AMD.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton
import triton.language as tl
from fastmod.kernels import gated_residual, masked_linear, mfnnr, multiplex, range_penalty, sample_mask
from fastmod.kernels._common import OPTIONS, row_tile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDE = {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32", "fp64": "fp64"}
COMPUTE = {"fp32": tl.float32, "fp64": tl.float64}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

SOFTMAX, GUMBEL = 0, 1


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own, so that a kernel is really compiled and nothing is left behind."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def compile_kernel(kernel: Any, target: str, values: dict[str, Any], **options: Any) -> Any:
    """Compile ``kernel``; ``values``: a pointer type such as ``*fp32``, a tuple of them, or a constexpr's value.

    Scalars have the types of their annotations. Pointers count as aligned to 16 bytes, as torch's are.
    """
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    aligned = [["tt.divisibility", 16]]
    for i, param in enumerate(kernel.params):
        name, value = param.name, values.get(param.name)
        if name not in values:
            assert param.annotation_type, f"{name}: no value and no type"
            signature[name] = param.annotation_type
        elif isinstance(value, str):
            signature[name], attributes[(i,)] = value, aligned
        elif isinstance(value, tuple) and isinstance(value[0], str):
            signature[name] = value
            attributes.update({(i, j): aligned for j in range(len(value))})
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={**OPTIONS, **options})


def assert_no_spills(compiled: Any, target: str, path: Path) -> None:
    if target.startswith("gfx"):
        assembly = compiled.asm["amdgcn"]
        assert len(compiled.asm["hsaco"]) > 0
        for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            counts = re.findall(rf"\.{field}:\s+(\d+)", assembly)
            assert counts, f"{field} is not in the assembly"
            assert set(counts) == {"0"}, f"{field}: {counts}"
        return
    cubin = path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [BIN / "cuobjdump", "--dump-resource-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.findall(r"STACK:(\d+)", usage)
    local = re.findall(r"LOCAL:(\d+)", usage)
    assert stack, usage
    assert set(stack) == set(local) == {"0"}, usage
    print(target, usage.strip().splitlines()[-1].strip())


def routing(mode: int, by_pointer: bool) -> dict[str, Any]:
    return {"tau_ptr": "*fp32" if by_pointer else None, "seed_ptr": "*i64" if by_pointer else None, "MODE": mode}


def pointwise_cases(dtype: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> kernel and its values, for every kernel but the fused FNNs."""
    p, wide = f"*{dtype}", WIDE[dtype]
    w, ct = f"*{wide}", COMPUTE[wide]
    cases: dict[str, tuple[Any, dict[str, Any]]] = {}
    for d in (10, 32, 1000):
        tile = {**row_tile(d, ct), "CT": ct}
        large = d == 1000
        cases[f"multiplex_forward-D{d}"] = multiplex.forward_kernel, {
            "blocks_ptr": p, "logits_ptr": p, "out_ptr": p, "copy_ptr": p if large else None,
            "partials_ptr": w if large else None, "PENALTY": large, **routing(GUMBEL if large else SOFTMAX, large),
            **tile,
        }  # fmt: skip
        cases[f"multiplex_backward_logits-D{d}"] = multiplex.backward_logits_kernel, {
            "grad_ptr": p, "blocks_ptr": p, "logits_ptr": p, "dlogits_ptr": p, "weights_ptr": w,
            "dtau_ptr": w if large else None, "grad_penalty_ptr": w if large else None,
            **routing(GUMBEL if large else SOFTMAX, large), **tile,
        }  # fmt: skip
    for d in (10, 196):
        tile = {**row_tile(d, ct), "CT": ct}
        large = d == 196
        cases[f"multiplex_backward_blocks-D{d}"] = multiplex.backward_blocks_kernel, {
            "weights_ptr": w, "grad_ptr": p, "add_ptr": w if large else None, "dblocks_ptr": p, **tile,
        }  # fmt: skip
        cases[f"gated_residual_forward-D{d}"] = gated_residual.forward_kernel, {
            "x_ptr": p, "new_ptr": p, "gate_ptr": p, "out_ptr": p, "copy_ptr": p if large else None,
            "partials_ptr": w if large else None, "PENALTY": large, **tile,
        }  # fmt: skip
        cases[f"gated_residual_backward-D{d}"] = gated_residual.backward_kernel, {
            "grad_ptr": p, "x_ptr": p, "new_ptr": p, "gate_ptr": p, "dx_ptr": p, "dnew_ptr": p, "dgate_ptr": p,
            "grad_penalty_ptr": w if large else None, **tile,
        }  # fmt: skip
    flat = {"BLOCK": range_penalty.BLOCK, "CT": ct}
    cases["range_penalty_forward"] = range_penalty.forward_kernel, {"t_ptr": p, "partials_ptr": w, **flat}
    cases["range_penalty_backward"] = range_penalty.backward_kernel, {
        "grad_ptr": w, "t_ptr": p, "out_ptr": p, **flat,
    }  # fmt: skip
    if dtype == wide:  # the wide MFNNR computes in the compute dtype
        cases["leaky"] = mfnnr.leaky_kernel, {"t_ptr": w, "BLOCK": mfnnr.LEAKY_BLOCK}
        cases["leaky_backward"] = mfnnr.leaky_backward_kernel, {
            "grad_ptr": w, "hidden_ptr": w, "BLOCK": mfnnr.LEAKY_BLOCK,
        }  # fmt: skip
    return cases


def fused_values(
    dtype: str, size: tuple[int, int, int], hidden: tuple[int, ...], mode: int
) -> list[tuple[Any, dict[str, Any]]]:
    """The two kernels of the fused MFNNR with their values."""
    m, n, d = size
    p, wide = f"*{dtype}", WIDE[dtype]
    w, ct = f"*{wide}", COMPUTE[wide]
    tile = mfnnr.fused_tile(n, d, ct)
    layers = len(hidden) + 1
    shared = {
        "params": (p,) * (2 * layers), "outs": (w,) * layers, "x_ptr": p, "routed_ptr": w, "partials_ptr": w,
        "N": n, "D": d, "PENALTY": True, "CT": ct, **tile,
    }  # fmt: skip
    route = {**shared, "logits_ptr": p, "M": m, "WIDTHS": (*hidden, m * n), **routing(mode, mode == GUMBEL)}
    update = {
        **shared, "out_ptr": p, "gate_ptr": p, "CONTEXT": m * d, "WIDTHS": (*hidden, n * d + n),
    }  # fmt: skip
    return [(mfnnr.route_kernel, route), (mfnnr.update_kernel, update)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pointwise(dtype: str, target: str, tmp_path: Path) -> None:
    for name, (kernel, values) in pointwise_cases(dtype).items():
        print(name, end=" ")
        assert_no_spills(compile_kernel(kernel, target, values), target, tmp_path)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_pointwise_fp64(target: str, tmp_path: Path) -> None:
    for name, (kernel, values) in pointwise_cases("fp64").items():
        print(name, end=" ")
        assert_no_spills(compile_kernel(kernel, target, values), target, tmp_path)


FUSED = {
    "hidden100": ("fp32", (6, 8, 10), (100,), SOFTMAX),
    "layers3": ("fp32", (8, 8, 10), (100, 100, 100), GUMBEL),
    "hidden128": ("fp32", (16, 16, 32), (128,), SOFTMAX),
    "bf16": ("bf16", (5, 4, 196), (128,), GUMBEL),
    "fp64": ("fp64", (6, 8, 10), (100,), SOFTMAX),
}


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in FUSED for target in TARGETS if name != "fp64" or target in ("sm_90", "gfx942")],
)
def test_fused(name: str, target: str, tmp_path: Path) -> None:
    for kernel, values in fused_values(*FUSED[name]):
        assert_no_spills(compile_kernel(kernel, target, values), target, tmp_path)


def mask_cases(dtype: str) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Name -> kernel, its values and its options. One Philox call serves one weight or, in "quads", four."""
    p, ct = f"*{dtype}", COMPUTE[WIDE[dtype]]
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    for weights in (1000, 1001):
        quads = weights == 1000
        shared = {"logits_ptr": p, "seed_ptr": "*i64" if quads else None, **sample_mask.tile(weights, ct)}
        name = "-quads" if quads else ""
        cases[f"forward{name}"] = (
            sample_mask.forward_kernel,
            {**shared, "weight_ptr": p if quads else None, "out_ptr": p},
            sample_mask.EXACT_OPTIONS,
        )
        for at_one in (True, False):
            optional = p if quads == at_one else None
            cases[f"backward{name}-{'one' if at_one else 'any'}"] = (
                sample_mask.backward_kernel,
                {**shared, "grad_ptr": p, "weight_ptr": optional, "base_ptr": optional, "dlogits_ptr": p,
                 "AT_ONE": at_one},
                OPTIONS,
            )  # fmt: skip
    return cases


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(dtype, target) for dtype in WIDE for target in TARGETS if dtype != "fp64" or target in ("sm_90", "gfx942")],
)
def test_masks(dtype: str, target: str, tmp_path: Path) -> None:
    for name, (kernel, values, options) in mask_cases(dtype).items():
        print(name, end=" ")
        compiled = compile_kernel(kernel, target, values, **options)
        assert_no_spills(compiled, target, tmp_path)
        if name.startswith("forward"):
            assert_nothing_fused(compiled, target)


def masked_linear_cases(dtype: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> kernel and its values; with few rows and a word a weight, and with many rows in quads."""
    p, wide = f"*{dtype}", COMPUTE[WIDE[dtype]]
    factors = {"fp16": tl.float16, "bf16": tl.bfloat16}.get(dtype, wide)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {}
    for rows, inputs in ((5, 33), (64, 64)):
        quads = inputs == 64
        shared = {
            "weight_ptr": p, "off_ptr": "*i32", "seed_ptr": "*i64" if quads else None,
            **masked_linear.tile(rows, inputs, factors, wide),
        }  # fmt: skip
        name = f"rows{rows}"
        cases[f"forward-{name}"] = masked_linear.forward_kernel, {
            **shared, "x_ptr": p, "biases_ptr": p if quads else None, "out_ptr": p,
        }  # fmt: skip
        cases[f"backward_x-{name}"] = masked_linear.backward_x_kernel, {**shared, "grad_ptr": p, "dx_ptr": p}
        for at_one in (True, False):
            optional = p if quads == at_one else None
            cases[f"backward_weight-{name}-{'one' if at_one else 'any'}"] = masked_linear.backward_weight_kernel, {
                **shared, "grad_ptr": p, "x_ptr": p, "logits_ptr": p, "dlogits_ptr": p, "dweight_ptr": optional,
                "AT_ONE": at_one, **masked_linear.WEIGHT_TILE,
            }  # fmt: skip
    return cases


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(dtype, target) for dtype in WIDE for target in TARGETS if dtype != "fp64" or target in ("sm_90", "gfx942")],
)
def test_masked_linear(dtype: str, target: str, tmp_path: Path) -> None:
    values = {"logits_ptr": f"*{dtype}", "off_ptr": "*i32", "BLOCK": masked_linear.THRESHOLDS_BLOCK}
    thresholds = compile_kernel(masked_linear.thresholds_kernel, target, values, **sample_mask.EXACT_OPTIONS)
    assert_no_spills(thresholds, target, tmp_path)
    assert_nothing_fused(thresholds, target)
    for name, (kernel, values) in masked_linear_cases(dtype).items():
        print(name, end=" ")
        assert_no_spills(compile_kernel(kernel, target, values), target, tmp_path)


def assert_nothing_fused(compiled: Any, target: str) -> None:
    """Masks agree with other backends only if every product is rounded; fusing by ptxas is switched off as well."""
    assert compiled.metadata.enable_fp_fusion is False
    if target.startswith("gfx"):
        assembly = compiled.asm["amdgcn"]
        fused = len(re.findall(r"\bv_(?:pk_)?fma\w*_f32", assembly))
        divisions = len(re.findall(r"\bv_div_fixup_f32", assembly))
        assert divisions > 0
        assert fused <= 5 * divisions, f"{fused} FMAs, of which {divisions} divisions have 5 each"
    else:
        assert "fma.rn.f32" not in compiled.asm["ptx"]
