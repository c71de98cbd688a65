// Shared by the kernels of weight masks: thresholds, noise, and the slope of the relaxed mask.
#pragma once

#include "../constants.h"
#include "common.cuh"

namespace fastmod::cuda {

constexpr int kQuad = 4;  // words of one Philox call

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(double value) { return static_cast<float>(value); }
__device__ inline float magnitude(float value) { return fabsf(value); }
__device__ inline double magnitude(double value) { return fabs(value); }

// How many words switch a weight off whose logit has this size and is positive: the formula of constants.h. The
// intrinsics are never fused into FMAs, whose single rounding other backends do not have. The explicit FMAs have exact
// products, and so round like a product and a sum.
__device__ inline int32_t fewest_off(float size) {
  // Copied, as device code cannot index a constexpr array of the host.
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
// For any logit; all words if it is NaN.
__device__ inline int32_t words_off(float logit) {
  if (logit != logit) return mask::kWords;
  const int32_t off = fewest_off(fabsf(logit));
  return logit < 0.0f ? mask::kWords - off : off;
}

// sigmoid(-logit), NaN for NaN, with an error below 2^-21, in a few instructions; the exact formula takes thirty.
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
// A noise word below low_word(roughly_off(logit)) drops a weight, one at least kUncertainWords above that keeps it. For
// words in between words_off decides.
constexpr uint32_t kUncertainWords = 1u << 13;
__device__ inline uint32_t low_word(float share) {
  const float low = share * 4294967296.0f - 4096.0f;
#if defined(__CUDA_ARCH__)
  return __float2uint_rz(low);  // 0 below 0
#else
  return low > 0.0f ? static_cast<uint32_t>(low) : 0u;
#endif
}

__device__ inline uint32_t& word_of(uint4& unit, int i) {
  return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}

__device__ inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// For the rare words near the threshold: sets the words of four weights to the largest or to 0 by the exact threshold.
__device__ inline void decide(PhiloxWords& words, uint4& low, const float4& logits) {
  const float logit[] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    words.word[i] = static_cast<int32_t>(words.word[i] >> 9) >= words_off(logit[i]) ? 0xffffffffu : 0u;
    word_of(low, i) |= 1u;
  }
}

// step: distance to the seed of this copy of the layer
__device__ inline int64_t seed_of(const MaskNoise& noise, int64_t step = 0) {
  return noise.seed ? noise.seed[step] : noise.seed_value;
}

// The same number, which nvcc then keeps in a register instead of recomputing it in every loop.
template <typename Number>
__device__ inline Number held(Number value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Number) == 8) {
    asm("" : "+l"(value));
  } else {
    asm("" : "+r"(value));
  }
#endif
  return value;
}

// What the Philox groups of one seed and stream have in common, computed once. They share two words of the counter, and
// groups below 2^32 also a third, which is 0 (the upper half of the group). The first three rounds of these words are
// folded into the keys, which leaves 55 of 60 instructions.
class MaskKeys {
 public:
  __device__ MaskKeys(int64_t seed, uint32_t stream) {
    const uint64_t key = static_cast<uint64_t>(seed);
    const auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      first_[round] = k0 + static_cast<uint32_t>(round) * 0x9E3779B9u;
      second_[round] = k1 + static_cast<uint32_t>(round) * 0xBB67AE85u;
    }
    uint32_t high, low;
    wide_product(stream, kMultiplier1, &high, &low);
    first_[0] ^= high;
    first_[1] ^= low;
    wide_product(first_[0], kMultiplier0, &high, &low);
    second_[1] ^= high;
    second_[2] ^= low;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      first_[round] = held(first_[round]);
      second_[round] = held(second_[round]);
    }
  }

  // The words of elements 4 * group .. 4 * group + 3.
  __device__ PhiloxWords near(uint32_t group) const { return rounds(group, second_[1], second_[2]); }
  __device__ PhiloxWords any(uint64_t group) const {
    uint32_t high, low;
    wide_product(first_[0] ^ static_cast<uint32_t>(group >> 32), kMultiplier0, &high, &low);
    return rounds(static_cast<uint32_t>(group), (second_[0] + 0xBB67AE85u) ^ high,
                  (second_[0] + 2 * 0xBB67AE85u) ^ low);
  }

 private:
  static constexpr int kRounds = 10;
  static constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  uint32_t first_[kRounds], second_[kRounds];

  __device__ PhiloxWords rounds(uint32_t group, uint32_t second1, uint32_t second2) const {
    uint32_t high0, low0, high1, low1;
    wide_product(group, kMultiplier0, &high0, &low0);
    wide_product(high0 ^ second_[0], kMultiplier1, &high1, &low1);
    uint32_t c0 = high1 ^ first_[1], c1 = low1, c2 = low0 ^ second1, c3 = 0;
#pragma unroll
    for (int round = 2; round < kRounds; ++round) {
      wide_product(c0, kMultiplier0, &high0, &low0);
      wide_product(c2, kMultiplier1, &high1, &low1);
      c0 = xor_of_three(high1, c1, first_[round]);
      c2 = round == 2 ? high0 ^ second2 : xor_of_three(high0, c3, second_[round]);
      c1 = low1;
      c3 = low0;
    }
    return {{c0, c1, c2, c3}};
  }
};

// Noise words of weights index .. index + 3; index need not be a multiple of 4.
__device__ inline PhiloxWords words_from(const MaskKeys& keys, uint64_t index) {
  PhiloxWords words = keys.any(index / kQuad);
  const PhiloxWords next = keys.any(index / kQuad + 1);
  uint32_t moved[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {  // by comparisons: an indexed local array would be in memory
    const uint32_t far = i + 2 < kQuad ? words.word[i + 2] : next.word[i + 2 - kQuad];
    const uint32_t near = i < kQuad ? words.word[i] : next.word[i - kQuad];
    moved[i] = index & 2 ? far : near;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) words.word[i] = index & 1 ? moved[i + 1] : moved[i];
  return words;
}

// Whether MaskKeys::near can be used: rows of `width` weights begin at multiples of 4, and all groups of the samples
// before noise.first + noise.samples, of `count` weights each, are below 2^32.
__host__ __device__ inline bool near_quads(const MaskNoise& noise, int64_t count, int64_t width) {
  return width % kQuad == 0 && (count == 0 || noise.first + noise.samples <= (int64_t{1} << 34) / count);
}

// s(1 - s) at temperature 1: with decay = exp(-|l|) and u measured from the side that l favours,
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

// exp(-|logit|) with a relative error below 2^-23 (1 + |logit|), no more than rounding the logit causes.
__device__ inline float quick_decay(float logit) {
#if defined(__CUDA_ARCH__)
  float decay;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(decay) : "f"(fabsf(logit) * -mask::kLog2e));
  return decay;
#else
  return exp2f(fabsf(logit) * -mask::kLog2e);
#endif
}

// slope_at_one / decay, in few instructions. bits: the upper 23 bits of the noise word; flip: 2^23 - 1 if the logit is
// negative, else 0, as inverted bits give 1 - u.
__device__ inline float quick_slope(uint32_t bits, uint32_t flip, float decay) {
#if defined(__CUDA_ARCH__)
  uint32_t above_one;
  float u, slope;
  asm("lop3.b32 %0, %1, %2, %3, 0xbe;" : "=r"(above_one) : "r"(bits), "r"(flip), "r"(0x3f800000u));  // (a ^ b) | c
  asm("add.f32 %0, %1, 0fBF7FFFFF;" : "=f"(u) : "r"(above_one));                                     // 2^-24 - 1
  const float v = 1.0f - u, sum = u + decay * v;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(slope) : "f"(u * v), "f"(sum * sum));  // 2^-48 <= sum * sum < 4
  return slope;
#else
  const float u = __uint_as_float((bits ^ flip) | 0x3f800000u) - 0.999999940395355224609375f, v = 1.0f - u;
  const float sum = u + decay * v;
  return u * v / (sum * sum);
#endif
}

// The slope at any temperature; decay = exp(-|l|) is used only at temperature 1.
template <typename C>
__device__ inline C mask_slope(C u, C logit, C decay, C tau) {
  return tau == C(1) ? slope_at_one(u, logit < C(0), decay) : slope_at(u, logit, tau);
}

}  // namespace fastmod::cuda
