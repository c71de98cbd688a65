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

// How many words switch a weight off whose logit is of this size and positive: the formula of constants.h. The
// intrinsics are never fused into other FMAs, whose single rounding other backends do not have; the FMAs here have exact
// products, and so round as a product and a sum do.
__device__ inline int32_t fewest_off(float size) {
  // Constants of their own: device code cannot index a constexpr array of the host.
  constexpr float c0 = mask::kExp[0], c1 = mask::kExp[1], c2 = mask::kExp[2];
  constexpr float c3 = mask::kExp[3], c4 = mask::kExp[4], c5 = mask::kExp[5];
  const float d = size < mask::kCap ? size : mask::kCap;
  const int32_t n = static_cast<int32_t>(__fadd_rn(__fmul_rn(d, mask::kLog2e), 0.5f));
  const float whole = static_cast<float>(n);
  const float x = __fmaf_rn(whole, mask::kLn2Low, __fmaf_rn(whole, mask::kLn2High, -d));
  float p = __fadd_rn(__fmul_rn(c0, x), c1);
  p = __fadd_rn(__fmul_rn(p, x), c2);
  p = __fadd_rn(__fmul_rn(p, x), c3);
  p = __fadd_rn(__fmul_rn(p, x), c4);
  p = __fadd_rn(__fmul_rn(p, x), c5);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(x, x)), x), 1.0f);
  const float a = __uint_as_float(__float_as_uint(p) - (static_cast<uint32_t>(n) << 23));  // p * 2^-n
  const float share = __fdiv_rn(a, __fadd_rn(a, 1.0f));
  return static_cast<int32_t>(__fmaf_rn(share, mask::kWordsF, 0.5f));
}
// For any logit; all of them where it is NaN.
__device__ inline int32_t words_off(float logit) {
  if (logit != logit) return mask::kWords;
  const int32_t off = fewest_off(fabsf(logit));
  return logit < 0.0f ? mask::kWords - off : off;
}

// sigmoid(-logit), NaN for NaN, with an error below 2^-21: a few instructions, where the exact formula takes thirty.
__device__ inline float roughly_off(float logit) {
#if defined(__CUDA_ARCH__)
  float power, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(logit * mask::kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(power + 1.0f));
  return share;
#else
  return 1.0f / (1.0f + exp2f(logit * mask::kLog2e));
#endif
}
// A noise word below low_word(roughly_off(logit)) does not keep a weight, one that is kUnsure above it does. Between them
// words_off decides.
constexpr uint32_t kUnsure = 1u << 13;
__device__ inline uint32_t low_word(float share) {
  const float low = share * 4294967296.0f - 4096.0f;
#if defined(__CUDA_ARCH__)
  return __float2uint_rz(low);  // 0 below 0
#else
  return low > 0.0f ? static_cast<uint32_t>(low) : 0u;
#endif
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
