// The activations of a block of a stack, in shared memory, and reading of inputs. See smfr.cuh.
#pragma once

#include "mma.cuh"
#include "multiplex.cuh"

namespace fastmod::cuda {

constexpr int kStackThreads = 256;
constexpr int kStackWarps = kStackThreads / kWarp;
constexpr int kStages = 2;        // units of weights in flight for each lane
constexpr int kUnitChunks = 2;    // chunks per unit
constexpr int kDepthStep = 16;    // inputs per chunk
constexpr int kPairColumns = 16;  // columns per unit: two tiles of 8
constexpr int kThreadsOfRow = kStackThreads / kTileRows;  // in row-wise work half a warp has a row
static_assert(kThreadsOfRow == 16 && kTileRows == 16, "a row belongs to one warp: __syncwarp orders its threads");

// A number that nvcc keeps in a register instead of recomputing it at every use.
__device__ inline int kept(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}
__device__ inline int64_t kept(int64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(value));
#endif
  return value;
}

// ---- activations: [chunk][high, low][row][16 features], so that a lane reads four neighbours of a row at once

constexpr int kChunkFloats = 2 * kTileRows * kDepthStep, kLow = kTileRows * kDepthStep;

__host__ __device__ inline int chunks_of(int features) {
  return static_cast<int>(static_cast<unsigned>(features + kDepthStep - 1) / kDepthStep);
}
__host__ __device__ inline int padded(int features) { return chunks_of(features) * kDepthStep; }

__device__ inline int place_of(int row, int feature) {
  const auto f = static_cast<unsigned>(feature);
  return static_cast<int>(f / kDepthStep * kChunkFloats + f % kDepthStep) + row * kDepthStep;
}

__device__ inline bool finite(float value) { return value - value == 0.0f; }

// high - low == value, and tensor cores read all of low except perhaps its last bit. Low parts of weights have the same
// sign convention, see multiply. A value that is not finite makes the sum not finite, which is then recomputed.
__device__ inline void split_special(float value, float* high, float* low) {
  *high = finite(value) ? __uint_as_float(__float_as_uint(value) & 0xffffe000u) : value;  // close to overflow, or inf
  *low = finite(value) ? *high - value : -value;
}
struct alignas(8) Two32 {
  float v[2];
};
// Stores, for kRows rows 8 apart, two neighbours each, the first of them even, from `place` on.
template <int kRows>
__device__ inline void put_at(float* place, const float (&value)[kRows][2]) {
  uint2 high[kRows];  // words, so that they need no conversion
  Two32 low[kRows];
  float all = 0;
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    uint32_t& word = i % 2 ? high[i / 2].y : high[i / 2].x;
    word = tf32_bits(value[i / 2][i % 2]);
    low[i / 2].v[i % 2] = less_of(value[i / 2][i % 2], word);
    all = i ? all + low[i / 2].v[i % 2] : low[0].v[0];
  }
  if (!finite(all)) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {  // must not change the bits of the other row
      float& rest = low[i / 2].v[i % 2];
      if (finite(rest)) continue;
      float special;
      split_special(value[i / 2][i % 2], &special, &rest);
      (i % 2 ? high[i / 2].y : high[i / 2].x) = __float_as_uint(special);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    reinterpret_cast<uint2*>(place)[i * 4 * kDepthStep] = high[i];
    reinterpret_cast<Two32*>(place)[i * 4 * kDepthStep + kLow / 2] = low[i];
  }
}
__device__ inline void put(float* activations, int row, int feature, float first, float second) {
  const float value[1][2] = {{first, second}};
  put_at(activations + place_of(row, feature), value);
}
__device__ inline void put(float* activations, int row, int feature, float value) {
  float* at = activations + place_of(row, feature);
  at[0] = __uint_as_float(tf32_bits(value));
  at[kLow] = at[0] - value;
  if (!finite(at[kLow])) split_special(value, at, at + kLow);
}
__device__ inline float get(const float* activations, int row, int feature) {
  const float* at = activations + place_of(row, feature);
  return at[0] - at[kLow];
}

// ---- inputs

template <typename T>
__device__ inline float rounded(float value) {
  T low;
  narrow(value, &low);
  return widen(low);
}
// A parameter in the precision that a stack of T computes with.
template <typename T, typename W>
__device__ inline Compute<T> read_as(W value) {
  if constexpr (sizeof(W) > sizeof(T)) {
    return rounded<T>(value);
  } else {
    return widen(value);
  }
}
template <typename T>
__device__ inline Compute<T> read_at(const Blocks<T>& blocks, int64_t i) {
  if constexpr (sizeof(T) < 4) {
    if (blocks.wide) return rounded<T>(static_cast<const float*>(blocks.first)[i]);
  }
  return widen(static_cast<const T*>(blocks.first)[i]);
}

}  // namespace fastmod::cuda
