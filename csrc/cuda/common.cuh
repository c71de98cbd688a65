// Shared by all kernel files: dtypes, noise, block sums. No torch headers, so that a file compiles in seconds and g++
// can compile the same source for the host harness in tests/helpers/cuda_host (FASTMOD_CUDA_HOST).
#pragma once

#include "launch.h"

#if !defined(FASTMOD_CUDA_HOST)
// A launch as an expression of type cudaError_t; the harness has its own versions of both macros.
#define FASTMOD_LAUNCH(kernel, grid, block, stream, ...) \
  (kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__), cudaGetLastError())
#define FASTMOD_SHARED(type, name, size) __shared__ type name[size]
// The same with `bytes` of dynamic shared memory; more than 48 KB need an attribute of the kernel.
#define FASTMOD_LAUNCH_DYNAMIC(kernel, grid, block, bytes, stream, ...)                                              \
  ([&]() -> cudaError_t {                                                                                            \
    const size_t asked = (bytes);                                                                                    \
    if (asked > 48 * 1024) {                                                                                         \
      const cudaError_t refused = cudaFuncSetAttribute(                                                              \
          reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,                        \
          static_cast<int>(asked));                                                                                  \
      if (refused != cudaSuccess) return refused;                                                                    \
    }                                                                                                                \
    kernel<<<(grid), (block), asked, (stream)>>>(__VA_ARGS__);                                                       \
    return cudaGetLastError();                                                                                       \
  }())
// For kernels that first checked shared_limit(). The host harness restricts all others to what every target has.
#define FASTMOD_LAUNCH_LARGE FASTMOD_LAUNCH_DYNAMIC
#define FASTMOD_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#include "../philox.h"

namespace fastmod::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// Second argument of __launch_bounds__ for the larger kernels: left to itself, ptxas aims at more than two blocks per
// multiprocessor and spills registers for them.

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest even if T is narrower than the compute dtype.
__device__ inline void narrow(float value, float* out) { *out = value; }
__device__ inline void narrow(double value, double* out) { *out = value; }
__device__ inline void narrow(float value, __half* out) { *out = __float2half_rn(value); }
__device__ inline void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }

template <typename C>
__device__ inline C number_at(const C* numbers, NumberType type) {
  if (type == kHalfNumber) return static_cast<C>(widen(*reinterpret_cast<const __half*>(numbers)));
  if (type == kBFloat16Number) return static_cast<C>(widen(*reinterpret_cast<const __nv_bfloat16*>(numbers)));
  return *numbers;
}
template <typename C>
__device__ inline void put_number(C value, C* to, NumberType type) {
  if (type == kHalfNumber) {
    narrow(static_cast<float>(value), reinterpret_cast<__half*>(to));
  } else if (type == kBFloat16Number) {
    narrow(static_cast<float>(value), reinterpret_cast<__nv_bfloat16*>(to));
  } else {
    *to = value;
  }
}
// The number `steps` places after `numbers`.
template <typename C>
__host__ __device__ inline C* number_after(C* numbers, NumberType type, int64_t steps) {
  using Byte = std::conditional_t<std::is_const_v<C>, const unsigned char, unsigned char>;
  const int64_t each = type == kWideNumber ? static_cast<int64_t>(sizeof(C)) : 2;
  return reinterpret_cast<C*>(reinterpret_cast<Byte*>(numbers) + steps * each);
}

__device__ inline float exponential(float value) { return expf(value); }
__device__ inline double exponential(double value) { return exp(value); }
__device__ inline float logarithm(float value) { return logf(value); }
__device__ inline double logarithm(double value) { return log(value); }

// exp of arguments not above 0, with an absolute error of half a unit in the last place of 1. That is enough for a
// softmax and costs a quarter of expf.
__device__ inline double exp_below(double value) { return exp(value); }
__device__ inline float exp_below(float value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.44269504f));
  return result;
#else
  return exp2f(value * 1.44269504f);
#endif
}

template <typename C>
__device__ inline C sigmoid(C value) {
  return C(1) / (C(1) + exponential(-value));
}

// t - clamp(t, -threshold, threshold); a NaN stays a NaN.
template <typename C>
__device__ inline C excess(C t, C threshold) {
  return t > threshold ? t - threshold : t < -threshold ? t + threshold : t - t;
}

// a / b for a, b >= 0. The 64-bit division costs several times the 32-bit one, and offsets nearly always fit 32 bits.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)) : a / b;
}

// The word of element `index`; contract in fastmod/noise.py.
__device__ inline uint32_t noise_word(int64_t seed, uint64_t index, uint32_t stream) {
  const PhiloxWords words = philox_group(seed, index / 4, stream);
  // Selected by comparisons: an indexed local array would be in memory.
  const uint32_t low = index & 1 ? words.word[1] : words.word[0], high = index & 1 ? words.word[3] : words.word[2];
  return index & 2 ? high : low;
}

template <typename C>
__device__ inline C uniform_at(int64_t seed, int64_t index, uint32_t stream) {
  return uniform_from_word<C>(noise_word(seed, static_cast<uint64_t>(index), stream));
}

template <typename C>
__device__ inline C gumbel_of_word(uint32_t word) {
  return -logarithm(-logarithm(uniform_from_word<C>(word)));
}
template <typename C>
__device__ inline C gumbel_at(int64_t seed, int64_t index) {
  return gumbel_of_word<C>(noise_word(seed, static_cast<uint64_t>(index), kStreamMultiplex));
}

// Sum over the block in a fixed order, valid in thread 0. blockDim.x must be a multiple of the warp size. A second call
// in a kernel needs a barrier before it.
template <typename C>
__device__ inline C block_sum(C value) {
  FASTMOD_SHARED(C, warp_sums, kWarp);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_down_sync(kAllLanes, value, offset);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  C total = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total += warp_sums[warp];
  }
  return total;
}

// Widened to 64 bits before the multiplication.
__device__ inline int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// Blocks for `count` items, all on grid.x. Beyond the limit of grid.x the launch fails with an error.
inline dim3 blocks_for(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return dim3(static_cast<unsigned>(blocks < 0xffffffffll ? blocks : 0xffffffffll));
}

// Shared memory that a block may have on the current GPU, capped at kMostShared, which is the most any kernel uses.
constexpr int kMostShared = 99 * 1024;
inline int shared_limit() {
#if defined(FASTMOD_CUDA_HOST)
  return kMostShared;
#else
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return 0;
  }
  return bytes < kMostShared ? bytes : kMostShared;
#endif
}

}  // namespace fastmod::cuda
