// What the launch functions of all ops have in common: see launch.h.
#pragma once

#include <cstdint>

#if defined(FASTMOD_CUDA_HOST)
#include "cuda_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#endif

#include "../constants.h"

namespace fastmod::cuda {

// The dtype a kernel computes in: fp64 for fp64, else fp32.
template <typename T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

// What a launch needs beside its arguments: numbers of the compute dtype, not initialised, and tickets, which are zero
// before and after it.
struct Scratch {
  int64_t numbers, tickets;
};

}  // namespace fastmod::cuda
