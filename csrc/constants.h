// Numbers that the kernels of several backends must agree on. No torch headers.
#pragma once

#include <cstdint>

namespace fastmod {

// How the routing logits become weights; as in fastmod/ops/multiplex.py.
enum Mode : int { kSoftmax = 0, kGumbel = 1, kArgmax = 2 };

// One noise stream per random op, so that two ops given one seed draw independent noise; as in fastmod/noise.py.
constexpr uint32_t kStreamMultiplex = 0;
constexpr uint32_t kStreamMask = 1;
constexpr uint32_t kStreamMaskBias = 2;

constexpr double kLeakySlope = 0.01;
constexpr double kNoPenalty = -1;   // stands for the threshold where there is no range penalty
constexpr int64_t kBatchTile = 64;  // mfnnr_forward pads what it saves to whole tiles of the batch

}  // namespace fastmod

// The number of noise words that switch a weight off. Every backend uses this formula, so masks agree bit for bit.
//
// A weight with logit l is kept when word >> 9, uniform in [0, 2^23), is at least
//     off(l) = floor(sigmoid(-|l|) * 2^23 + 1/2), or 2^23 minus that when l < 0.
// The sigmoid is a / (1 + a) with a = exp(-|l|), in fp32 and in this order of correctly rounded operations, none of
// them fused (fastmod/ops/sample_mask.py spells it out):
//     d = min(|l|, 32)    n = floor(d * kLog2e + 0.5)    x = n * kLn2High - d + n * kLn2Low    (exact products)
//     a = (((((((c0 x + c1) x + c2) x + c3) x + c4) x + c5) * (x x)) + x + 1) * 2^-n
// Beyond 32 masks no longer change: sigmoid(-32) is far below the resolution of the noise.
namespace fastmod::mask {

constexpr float kCap = 32.0f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f;  // 10 bits: n * kLn2High is exact
constexpr float kLn2Low = -0x1.bd01p-13f;  // 17 bits: so is n * kLn2Low
constexpr float kExp[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                          4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr float kWordsF = 8388608.0f;
constexpr int32_t kWords = 1 << 23;

}  // namespace fastmod::mask
