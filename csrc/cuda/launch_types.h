// Shared by the launch functions of all ops: see launch.h.
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

// A tensor of T or, if `wide` is not null (under autocast), of fp32. That is rounded to T when it is read, and not
// rounded when it is written. T may be const.
template <typename T>
struct Mixed {
  T* narrow;
  std::conditional_t<std::is_const_v<T>, const float, float>* wide = nullptr;
};

// The actual type of a single number behind a pointer to the compute dtype: that dtype or, in a 16-bit net, a narrower
// one.
enum NumberType : int { kWideNumber, kHalfNumber, kBFloat16Number };

// What a launch needs besides its arguments: uninitialised numbers of the compute dtype, and tickets, which are zero
// before and after it.
struct Scratch {
  int64_t numbers, tickets;
};

}  // namespace fastmod::cuda
