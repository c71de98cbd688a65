// Tensor core instructions on the host, one warp operation each: see csrc/cuda/mma.cuh, whose place this takes.
#pragma once

#include "cuda_host.h"

namespace cuda_host {

enum class Operand { kTf32, kBfloat16, kHalf };

// Fragments of mma.m16n8k8 (tf32) and mma.m16n8k16 (16 bits): a row-major, b column-major, 2 numbers of 16 bits a word.
struct MmaLane {
  Operand kind;
  float d[4];
  unsigned a[4], b[2];
};
void run_mma(void* const* lanes);

// Each lane has read the row of 16 bytes that it gave the address of; the 8x8 matrices are then dealt out transposed.
struct MatrixLane {
  unsigned row[4];     // of matrix lane / 8
  unsigned result[4];
};
void run_ldmatrix_transposed(void* const* lanes);

}  // namespace cuda_host
