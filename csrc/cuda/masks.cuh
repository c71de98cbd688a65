// What the weight-mask kernels share: thresholds, noise, and the slope of the relaxed mask.
#pragma once

#include "../constants.h"
#include "common.cuh"

namespace fastmod::cuda {

constexpr int kQuad = 4;  // words of one Philox call

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(double value) { return static_cast<float>(value); }
__device__ inline float magnitude(float value) { return fabsf(value); }
__device__ inline double magnitude(double value) { return fabs(value); }

// How many words switch a weight off: the formula of constants.h. The intrinsics are never fused into FMAs, whose
// single rounding other backends do not have.
__device__ inline int32_t words_off(float logit) {
  if (logit != logit) return mask::kWords;
  // Constants of their own: device code cannot index a constexpr array of the host.
  constexpr float c0 = mask::kExp[0], c1 = mask::kExp[1], c2 = mask::kExp[2];
  constexpr float c3 = mask::kExp[3], c4 = mask::kExp[4], c5 = mask::kExp[5];
  const float size = fabsf(logit), d = size < mask::kCap ? size : mask::kCap;
  const int32_t n = static_cast<int32_t>(__fadd_rn(__fmul_rn(d, mask::kLog2e), 0.5f));
  const float whole = static_cast<float>(n);
  const float x = __fadd_rn(__fsub_rn(__fmul_rn(whole, mask::kLn2High), d), __fmul_rn(whole, mask::kLn2Low));
  float p = __fadd_rn(__fmul_rn(c0, x), c1);
  p = __fadd_rn(__fmul_rn(p, x), c2);
  p = __fadd_rn(__fmul_rn(p, x), c3);
  p = __fadd_rn(__fmul_rn(p, x), c4);
  p = __fadd_rn(__fmul_rn(p, x), c5);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(x, x)), x), 1.0f);
  const float a = __fmul_rn(p, __int_as_float((127 - n) << 23));
  const float share = __fdiv_rn(a, __fadd_rn(a, 1.0f));
  const int32_t off = static_cast<int32_t>(__fadd_rn(__fmul_rn(share, mask::kWordsF), 0.5f));
  return logit < 0.0f ? mask::kWords - off : off;
}

__device__ inline int64_t seed_of(const MaskNoise& noise) { return noise.seed ? *noise.seed : noise.seed_value; }

// s(1 - s) at temperature 1: with decay = exp(-|l|) and u counted from the side that l favours,
// s = u / (u + decay (1 - u)).
template <typename C>
__device__ inline C slope_at_one(C u, bool low, C decay) {
  const C v = C(1) - u, with = low ? v : u, against = low ? u : v;
  const C sum = with + decay * against;
  return with * against * decay / (sum * sum);
}

// s(1 - s) / tau of s = sigmoid((l + log(u / (1 - u))) / tau)
template <typename C>
__device__ inline C slope_at(C u, C logit, C tau) {
  const C z = (logit + (logarithm(u) - logarithm(C(1) - u))) / tau;
  const C e = exponential(-magnitude(z)), sum = C(1) + e;
  return e / (sum * sum) / tau;
}

// The slope at any temperature; decay = exp(-|l|) is used at 1.
template <typename C>
__device__ inline C mask_slope(C u, C logit, C decay, C tau) {
  return tau == C(1) ? slope_at_one(u, logit < C(0), decay) : slope_at(u, logit, tau);
}

}  // namespace fastmod::cuda
