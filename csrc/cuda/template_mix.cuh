// Weights of templates from logits, and the matrix products of mixtures.
#pragma once

#include "rows.cuh"

namespace fastmod::cuda {

__device__ inline float hyperbolic_tangent(float value) { return tanhf(value); }
__device__ inline double hyperbolic_tangent(double value) { return tanh(value); }

// One row of logits. All lanes of a warp call the constructor and then hold the same values, except for the logits:
// each lane has those at lane, lane + 32 and so on, and keeps the first one so that it is read only once.
template <typename T>
struct Mixture {
  using C = Compute<T>;
  const T* logits;  // if null, all weights are 0
  int64_t count;
  int mixing;
  C first, largest, total;

  __device__ Mixture(const T* row, int64_t count_, int mixing_)
      : logits(row), count(count_), mixing(mixing_), first(0), largest(-INFINITY), total(0) {
    const int lane = threadIdx.x % kWarp;
    if (logits && lane < count) first = widen(logits[lane]);
    if (!logits || mixing != kMixSoftmax) return;
    for (int64_t k = lane; k < count; k += kWarp) {
      const C value = at(k);
      if (value > largest) largest = value;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const C other = __shfl_xor_sync(kAllLanes, largest, offset);
      if (other > largest) largest = other;
    }
    for (int64_t k = lane; k < count; k += kWarp) total += exponential(at(k) - largest);  // includes any NaN
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
  }
  __device__ C at(int64_t k) const { return k < kWarp ? first : widen(logits[k]); }
  // The weight of one of this lane's templates; 0 beyond the last.
  __device__ C weight(int64_t k) const {
    if (!logits || k >= count) return 0;
    const C value = at(k);
    if (mixing == kMixSoftmax) return exponential(value - largest) / total;
    return mixing == kMixTanh ? hyperbolic_tangent(value) : value;
  }
};

// What a lane holds of a row or a column in one instruction: kOfLane neighbours, each with a high part (words x and y)
// and a low part (z and w). fp32 is split into two tf32 numbers. 16-bit numbers need only a high part. Their low part
// is the number itself if finite, else 0; it is multiplied by the low parts of weights, which are fp32 and split into
// two 16-bit numbers.
template <typename T>
constexpr int kOfLane = sizeof(T) == 4 ? 2 : 4;
template <typename T>
constexpr int kDepth = 4 * kOfLane<T>;

__device__ inline uint4 unit_of_data(const float (&v)[2], float*) {
  uint4 unit;
  split_tf32(v[0], true, &unit.x, &unit.z);
  split_tf32(v[1], true, &unit.y, &unit.w);
  return unit;
}
__device__ inline uint4 unit_of_weights(const float (&v)[2], float* type) { return unit_of_data(v, type); }

template <typename T>
__device__ inline uint4 unit_of_data(const float (&v)[4], T* type) {
  float finite[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) finite[i] = v[i] - v[i] == 0.0f ? v[i] : 0.0f;
  return {half_word(v[0], v[1], type), half_word(v[2], v[3], type), half_word(finite[0], finite[1], type),
          half_word(finite[2], finite[3], type)};
}
template <typename T>
__device__ inline uint4 unit_of_weights(const float (&v)[4], T* type) {
  float low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    T high;
    narrow(v[i], &high);
    low[i] = v[i] - widen(high);
    if (low[i] - low[i] != 0.0f) low[i] = 0.0f;
  }
  return {half_word(v[0], v[1], type), half_word(v[2], v[3], type), half_word(low[0], low[1], type),
          half_word(low[2], low[3], type)};
}

// total + low += a b, for kN tiles of 16 x 8 with the same a: units of rows g and g + 8. kExact: both factors are
// 16-bit numbers and have high parts only. fp32 sums leave the tensor cores after each product, as those round towards
// zero.
template <typename T, bool kExact, int kN>
__device__ inline void multiply(const uint4& a0, const uint4& a1, const uint4 (&b)[kN], float (&total)[kN][4],
                                float (&low)[kN][4]) {
  T* type = nullptr;
  const uint32_t high[4] = {a0.x, a1.x, a0.y, a1.y}, rest[4] = {a0.z, a1.z, a0.w, a1.w};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if constexpr (sizeof(T) == 4) {
      float part[4] = {};
      mma(type, part, high, b[n].x, b[n].y);
      mma(type, low[n], high, b[n].z, b[n].w);
      mma(type, low[n], rest, b[n].x, b[n].y);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[n][j] += part[j];
    } else {
      mma(type, total[n], high, b[n].x, b[n].y);
      if constexpr (!kExact) mma(type, low[n], rest, b[n].z, b[n].w);
    }
  }
}

// Place of the unit that lane t of four reads for a row and step. Two neighbouring rows with an even number of units of
// 64 bytes would have bank conflicts.
__device__ inline int unit_at(int row, int step, int steps, int t) {
  return (row * steps + (steps % 2 == 0 ? step ^ (row & 1) : step)) * 4 + t;
}

// ---- template_mix_plain.cu: fp64, and sizes that do not fit the kernels on tensor cores

template <typename T>
int64_t plain_mix_parts(MixShape shape);
template <typename T>
cudaError_t plain_mix_forward(const T* logits, const T* bank, T* out, Compute<T>* weights, MixShape shape,
                              cudaStream_t stream);
// partials [parts, rows, templates] and grad_bank may each be null.
template <typename T>
cudaError_t plain_mix_backward(const T* grad, const T* logits, const T* bank, Compute<T>* weights,
                               Compute<T>* partials, T* grad_bank, MixShape shape, cudaStream_t stream);

}  // namespace fastmod::cuda
