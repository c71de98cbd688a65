"""nvcc compiles every kernel file for every architecture served, without spilling registers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastmod.gpu import cuda_part, discover, resources, tools
from fastmod.gpu.targets import TARGETS, USUAL, torch_list

FILES = discover.cuda_files()
#: All kernels of these are products of matrices, but those that finish one; of fp64 there are none on tensor cores.
ON_TENSOR_CORES = (
    "masked_conv2d",
    "masked_conv2d_weight",
    "masked_linear",
    "masked_linear_weight",
    "mfnnr",
    "mfnnr_weight",
)
#: By the PTX that they share.
FAMILIES = [
    [name for name, target in TARGETS.items() if target.nvidia and target.virtual == virtual]
    for virtual in dict.fromkeys(target.virtual for target in TARGETS.values() if target.nvidia)
]


@pytest.fixture(autouse=True)
def nvcc() -> None:
    try:
        tools.cuobjdump()
        tools.nvcc()
    except tools.MissingToolError as error:
        pytest.skip(str(error))


def kernels_in(path: Path) -> set[str]:
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", path.read_text()))


def test_every_file_is_found() -> None:
    assert len(FILES) >= 6
    assert all(len(kernels_in(path)) >= 1 for path in FILES.values())


def test_every_target_is_compiled_for() -> None:
    assert [name for family in FAMILIES for name in family] == [name for name in TARGETS if TARGETS[name].nvidia]


@pytest.mark.parametrize("family", FAMILIES, ids="+".join)
@pytest.mark.parametrize("name", FILES)
def test_compiles_without_spills(name: str, family: list[str], tmp_path: Path) -> None:
    ptx = tmp_path / "kernels.ptx"
    log = cuda_part.write_ptx(FILES[name], TARGETS[family[0]].virtual, ptx, host="sm_80" in family)
    assert "warning" not in log, log
    if name in DRAWN:
        masks_are_drawn_unfused(name, ptx)
    for target in family:
        compiles_without_spills(name, target, ptx, disassemble=target == family[0])


def compiles_without_spills(name: str, target: str, ptx: Path, *, disassemble: bool) -> None:
    # sm_75 knows neither tf32 nor bf16. Of one PTX, in which the products stand, one disassembly is enough.
    on_tensor_cores = disassemble and name in ON_TENSOR_CORES and target != "sm_75"
    found, log = cuda_part.compiled(
        FILES[name], TARGETS[target], ptx.with_name(f"{target}.cubin"), ptx=ptx, disassemble=on_tensor_cores
    )
    assert "warning" not in log, log
    assert {cuda_part.readable(symbol)[0] for symbol in found} == kernels_in(FILES[name])
    assert set(re.findall(r"Compiling entry function '\w+' for '(\w+)'", log)) == {target}
    for symbol, needs in found.items():
        assert needs.spills == 0, (symbol, needs)
        assert 0 < needs.registers <= 255, (symbol, needs)
        assert needs.shared <= 48 * 1024, (symbol, needs)
        if on_tensor_cores and "finish" not in symbol and "double" not in cuda_part.readable(symbol)[1]:
            assert needs.tensor_core > 0, (symbol, needs)


#: File -> a kernel of its that draws masks, and how many there are: in 16 bits twice, as they may read fp32.
DRAWN = {
    "sample_mask": ("forward_kernel", 8),  # four dtypes, one or four weights a thread
    "masked_linear": ("product_kernel", 10),  # forward and backward
    "masked_linear_weight": ("weight_kernel", 10),  # two sizes of blocks
    "masked_conv2d": ("product_kernel", 20),  # forward and backward, 32 or 64 channels a block
    "masked_conv2d_weight": ("finish_kernel", 3),
}


def test_all_that_draw_are_found() -> None:
    assert set(DRAWN) <= set(FILES)


def masks_are_drawn_unfused(file: str, ptx: Path) -> None:
    """Masks agree with other backends only if every product is rounded: an operator in place of an intrinsic would be
    fused, and change so few masks that no other test need see it."""
    kernel, count = DRAWN[file]
    kernels = {
        name: body
        for name, body in re.findall(r"\.entry (\w+)\((.*?)^}", ptx.read_text(), re.DOTALL | re.MULTILINE)
        if kernel in name
    }
    assert len(kernels) == count
    for name, body in kernels.items():
        # Of every threshold 8 products and 9 sums, which ptxas does not fuse as they have a rounding mode.
        products, sums = body.count("mul.rn.f32"), body.count("add.rn.f32")
        assert "div.rn.f32" in body and products > 0 and 9 * products == 8 * sums, (name, products, sums)


HOST_ONLY = """
__device__ int twice(int value) { return 2 * value; }
__host__ __device__ int four_times(int value) { return 2 * twice(value); }
__global__ void double_kernel(int* values) { values[threadIdx.x] = four_times(values[threadIdx.x]); }
"""


def test_what_only_the_host_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "both.cu").write_text(HOST_ONLY)
    cuda_part.write_ptx(tmp_path / "both.cu", "compute_80", tmp_path / "device.ptx")
    with pytest.raises(RuntimeError, match="calling a __device__ function"):
        cuda_part.write_ptx(tmp_path / "both.cu", "compute_80", tmp_path / "host.ptx", host=True)


SPILLING = """
#include "size.h"
__global__ void __launch_bounds__(1024, 2) hungry_kernel(const float* from, float* to) {
  float value[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) value[i] = from[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSize; ++i) to[threadIdx.x + 1024 * i] = value[i] * value[(i * 7) % kSize];
}
"""


def test_a_spill_is_seen_and_a_header_counts(tmp_path: Path) -> None:
    source, target = tmp_path / "hungry.cu", TARGETS["sm_90"]
    source.write_text(SPILLING)
    (tmp_path / "size.h").write_text("constexpr int kSize = 96;\n")
    (needs,) = cuda_part.compiled(source, target, tmp_path / "hungry.cubin")[0].values()
    assert needs.spills > 0
    before = cuda_part.key(source, target)
    assert before == cuda_part.key(source, target) != cuda_part.key(source, TARGETS["sm_120"])
    (tmp_path / "size.h").write_text("constexpr int kSize = 95;\n")
    assert cuda_part.key(source, target) != before


TENSOR_CORE = """
#include <mma.h>
__global__ void product_kernel(const __half* a, const __half* b, float* c) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, __half, row_major> left;
  fragment<matrix_b, 16, 16, 16, __half, row_major> right;
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, 0.0f);
  load_matrix_sync(left, a, 16);
  load_matrix_sync(right, b, 16);
  mma_sync(sum, left, right, sum);
  store_matrix_sync(c, sum, 16, mem_row_major);
}
"""


def test_tensor_core_instructions_are_counted(tmp_path: Path) -> None:
    (tmp_path / "product.cu").write_text(TENSOR_CORE)
    found, _ = cuda_part.compiled(tmp_path / "product.cu", TARGETS["sm_80"], tmp_path / "product.cubin")
    assert [needs.tensor_core for needs in found.values()] == [2]  # m16n8k16, twice
    assert list(found) == list(resources.tensor_core_of(tmp_path / "product.cubin"))


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("_ZN7fastmod4cuda46_GLOBAL__N__abab8c22_8_mfnnr_cu_9dcce545_2148212route_kernelIfEEvPKT_", ["float"]),
        # The 24 of the hash, read as a length, would end where the kernel's name does.
        ("_ZN7fastmod4cuda46_GLOBAL__N__abab8c22_8_mfnnr_cu_9d24e545_2148212route_kernelIfEEvPKT_", ["float"]),
        ("_ZN1a12route_kernelI13__nv_bfloat16Li4EEEvPKT_", ["__nv_bfloat16", 4]),
        ("_ZN1a12route_kernelI13__nv_bfloat16S1_fEEvPKT_", ["__nv_bfloat16", "__nv_bfloat16", "float"]),
        ("_ZN1a12route_kernelI6__halfLb1EdEEvPKT_", ["__half", 1, "double"]),
        ("_ZN1a12route_kernelEPf", []),
        ("_Z12route_kernelPf", []),
    ],
)
def test_names_are_readable(symbol: str, expected: list[object]) -> None:
    assert cuda_part.readable(symbol) == ("route_kernel", expected)


def test_an_error_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("__global__ void bad_kernel() { nonsense; }\n")
    with pytest.raises(RuntimeError, match='identifier "nonsense" is undefined'):
        cuda_part.compiled(tmp_path / "bad.cu", TARGETS["sm_90"], tmp_path / "bad.cubin")


def test_names_for_torch() -> None:
    assert torch_list(USUAL) == "8.0 9.0 12.0"
    assert torch_list(["sm_75", "sm_100"]) == "7.5 10.0"
