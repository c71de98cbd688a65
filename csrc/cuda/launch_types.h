// What the launch functions of all ops have in common: see launch.h.
#pragma once

#include <cstdint>
#include <type_traits>

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

// A tensor of T or, where `wide` is not null, under autocast, of fp32: it counts as rounded to T where it is read, and is
// not rounded where it is written. T may be const.
template <typename T>
struct Mixed {
  T* narrow;
  std::conditional_t<std::is_const_v<T>, const float, float>* wide = nullptr;
};

// What a single number is, which a pointer to the compute dtype tells: of that dtype, or, in a net of 16 bits, narrower.
enum NumberType : int { kWideNumber, kHalfNumber, kBFloat16Number };

// What a launch needs beside its arguments: numbers of the compute dtype, not initialised, and tickets, which are zero
// before and after it.
struct Scratch {
  int64_t numbers, tickets;
};

}  // namespace fastmod::cuda
