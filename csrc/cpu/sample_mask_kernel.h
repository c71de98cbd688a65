// Draws masks over weights and applies them.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// Masks over `count` weights, with the noise of samples first .. first + samples - 1.
template <typename T>
struct MaskArgs {
  int64_t count, first, samples, seed;
  uint32_t stream;
  double tau;
  const T *logits, *weight;  // [P]; the weight may be null
  T* out;                    // [S, P], forward only
  const T *grad, *base;      // [S, P], [P] or null, backward only
  T* grad_logits;            // [P]
};

template <typename T>
struct SampleMaskKernels {
  void (*forward)(const MaskArgs<T>&, int64_t begin, int64_t end);
  void (*backward)(const MaskArgs<T>&, int64_t begin, int64_t end);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

// ---- noise: words of the Philox contract, many groups of four at a time

typedef uint64_t WideVec __attribute__((vector_size(FASTMOD_VECTOR_BYTES)));
constexpr int kWideLanes = FASTMOD_VECTOR_BYTES / 8;
// Independent vectors in flight hide the latency of a round's multiplications; as many as the registers hold.
constexpr int kWideVectors = FASTMOD_VECTOR_BYTES == 64 ? 4 : FASTMOD_VECTOR_BYTES == 32 ? 3 : 2;
constexpr int64_t kNoiseBatch = 4 * kWideLanes * kWideVectors;

// Product of the low halves of every 64-bit lane; the high halves may hold anything.
FASTMOD_INLINE WideVec multiply_low(WideVec a, WideVec b) {
#if FASTMOD_VECTOR_BYTES == 64
  return (WideVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif FASTMOD_VECTOR_BYTES == 32
  return (WideVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (WideVec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

FASTMOD_INLINE WideVec wide_splat(uint64_t value) { return value - WideVec{}; }

// What all groups of a seed and a stream have in common. Below group 2^32 they share three words of the counter and so
// most of the first three rounds, which is folded into the keys and saves an eighth of all instructions. The other keys
// are read from memory, which costs less than recomputing them for every batch and takes no registers.
struct NoiseKeys {
  static constexpr int kRounds = 10;
  static constexpr uint64_t kEnd = uint64_t(1) << 32;  // the first group for which this does not hold
  static constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  WideVec round[kRounds][2];
  WideVec lanes[kWideVectors];  // the first product of every lane minus that of the batch's first group
  int64_t seed;
  uint32_t stream;

  NoiseKeys(int64_t seed_, uint32_t stream_) : seed(seed_), stream(stream_) {
    uint32_t key[kRounds][2], k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (auto& pair : key) {
      pair[0] = k0;
      pair[1] = k1;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const uint64_t first = uint64_t(stream) * kMultiplier1;
    const uint64_t second = uint64_t(uint32_t(first >> 32) ^ key[0][0]) * kMultiplier0;
    key[1][0] ^= uint32_t(first);
    key[1][1] ^= uint32_t(second >> 32);
    key[2][1] ^= uint32_t(second);
    for (int r = 0; r < kRounds; ++r)
      for (int i = 0; i < 2; ++i) round[r][i] = wide_splat(key[r][i]);
    // Even lanes hold the first half of a vector's groups, odd lanes the second, so that the last step leaves the words
    // in order.
    for (int v = 0; v < kWideVectors; ++v)
      for (int i = 0; i < kWideLanes; ++i)
        lanes[v][i] = uint64_t(v * kWideLanes + i / 2 + i % 2 * (kWideLanes / 2)) * kMultiplier0;
  }
};

// Interleaves the even lanes of a and b, or the odd ones (kOdd = 1).
template <int kOdd, size_t... i>
FASTMOD_INLINE WideVec alternate(WideVec a, WideVec b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, int(i - i % 2 + kOdd + i % 2 * kWideLanes)...);
}

// Groups that NoiseKeys does not cover, from 2^34 masks on. Kept out of line so that the usual path stays short.
__attribute__((noinline, cold)) inline void distant_noise(const NoiseKeys& keys, uint64_t group, int64_t groups,
                                                          uint32_t* to) {
  for (int64_t i = 0; i < groups; ++i) {
    const PhiloxWords words = philox_group(keys.seed, group + uint64_t(i), keys.stream);
    std::memcpy(to + 4 * i, words.word, sizeof(words.word));
  }
}

// The words of kVectors vectors of groups, starting at `group`.
template <int kVectors>
FASTMOD_INLINE void noise_batch(const NoiseKeys& keys, uint64_t group, uint32_t* to) {
  constexpr int64_t kGroups = kVectors * kWideLanes;
  if (group + kGroups > keys.kEnd) [[unlikely]] return distant_noise(keys, group, kGroups, to);
  const WideVec multiplier0 = wide_splat(keys.kMultiplier0), multiplier1 = wide_splat(keys.kMultiplier1);
  const WideVec start = wide_splat(group * keys.kMultiplier0);
  // A word is the low half of a lane; the high half may hold anything.
  WideVec c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const WideVec product0 = start + keys.lanes[v];
    const WideVec product1 = multiply_low((product0 >> 32) ^ keys.round[0][1], multiplier1);
    c0[v] = (product1 >> 32) ^ keys.round[1][0];
    c1[v] = product1;
    c2[v] = product0 ^ keys.round[1][1];
    c3[v] = WideVec{};  // folded into the key of the next round
  }
#pragma GCC unroll 10
  for (int r = 2; r + 1 < keys.kRounds; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const WideVec product0 = multiply_low(c0[v], multiplier0), product1 = multiply_low(c2[v], multiplier1);
      WideVec with0 = c1[v] ^ keys.round[r][0], with1 = c3[v] ^ keys.round[r][1];
      // Combines with the keys first, as they are ready; the compiler would start with the products and wait longer.
      // AVX-512 has one instruction for all three.
      if (FASTMOD_VECTOR_BYTES < 64) with0 = opaque(with0), with1 = opaque(with1);
      c0[v] = (product1 >> 32) ^ with0;
      c1[v] = product1;
      c2[v] = (product0 >> 32) ^ with1;
      c3[v] = product0;
    }
  }
  constexpr auto sequence = std::make_index_sequence<kWideLanes>{};
  const auto swapped = [](WideVec halves) FASTMOD_INLINE_LAMBDA {
    return (WideVec)exchanged<1>((IntVec)halves, std::make_index_sequence<kLanes<float>>{});
  };
  const auto& key = keys.round[keys.kRounds - 1];
  const WideVec low = wide_splat(0xffffffffu);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v, to += 4 * kWideLanes) {
    // The last round leaves two words in a lane, the first in its low half: their order in little-endian memory.
    const WideVec product0 = multiply_low(c0[v], multiplier0), product1 = multiply_low(c2[v], multiplier1);
    const WideVec first = swapped(product1) ^ ((c1[v] ^ key[0]) & low);
    const WideVec second = swapped(product0) ^ ((c3[v] ^ key[1]) & low);
    const WideVec lower = alternate<0>(first, second, sequence), upper = alternate<1>(first, second, sequence);
    std::memcpy(to, &lower, sizeof(lower));
    std::memcpy(to + 2 * kWideLanes, &upper, sizeof(upper));
  }
}

// The words of elements start .. start + count - 1, within a buffer of count + 3 + kNoiseBatch entries.
inline const uint32_t* noise_words(const NoiseKeys& keys, uint64_t start, int64_t count, uint32_t* buffer) {
  const int64_t groups = (int64_t(start % 4) + count + 3) / 4;
  int64_t done = 0;
  const auto take = [&]<int kVectors>() FASTMOD_INLINE_LAMBDA {
    noise_batch<kVectors>(keys, start / 4 + uint64_t(done), buffer + 4 * done);
    done += kVectors * kWideLanes;
  };
  while (done + kWideVectors * kWideLanes <= groups) take.template operator()<kWideVectors>();
  while (done + kWideLanes < groups) take.template operator()<2>();
  if (done < groups) take.template operator()<1>();
  return buffer + start % 4;
}

// ---- which words switch a weight off: the formula of constants.h

// Keeps the compiler from fusing the product into an FMA, whose single rounding other backends do not have.
FASTMOD_INLINE Vec<float> unfused(Vec<float> product) { return opaque(product); }

// exp(-|l|), by the formula of constants.h up to |l| = 32. Beyond that masks no longer change (no word is off, or all
// are), and the gradient needs it down to the smallest normal number. Several vectors side by side hide the latency of
// each step.
template <int kVectors>
FASTMOD_INLINE void mask_decay(const Vec<float>* logit, Vec<float>* decay) {
  const Vec<float> far = splat(-87.0f);
  Vec<float> minus[kVectors], x[kVectors], p[kVectors];
  IntVec n[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    minus[v] = (Vec<float>)((IntVec)logit[v] | INT32_MIN);  // -|l|
    const Vec<float> d = maximum<float>(minus[v], far);
    n[v] = __builtin_convertvector(unfused(d * -mask::kLog2e) + 0.5f, IntVec);
    const Vec<float> whole = __builtin_convertvector(n[v], Vec<float>);
    x[v] = (whole * mask::kLn2High + d) + whole * mask::kLn2Low;
    p[v] = splat(mask::kExp[0]);
  }
#pragma GCC unroll 5
  for (int i = 1; i < 6; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) p[v] = opaque(unfused(p[v] * x[v]) + mask::kExp[i]);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Vec<float> square = unfused(x[v] * x[v]), found = (unfused(p[v] * square) + x[v]) + 1.0f;
    decay[v] = minus[v] < far ? Vec<float>{} : found * (Vec<float>)((127 - n[v]) << 23);
  }
}

// Any number if the logit is NaN: no mask is made from it then.
FASTMOD_INLINE IntVec words_off(Vec<float> logit, Vec<float> a) {
  const IntVec off = __builtin_convertvector((a / (a + 1.0f)) * mask::kWordsF + 0.5f, IntVec);
  return logit < 0.0f ? mask::kWords - off : off;
}

constexpr int64_t kMaskChunk = 1024;  // weights that go through all samples together

FASTMOD_INLINE bool any(IntVec v) {
  int32_t found = 0;
  for (int i = 0; i < kLanes<float>; ++i) found |= v[i];
  return found != 0;
}

// Per weight, `off`: how many words switch it off, and `decay`: exp(-|l|), which the gradient needs; either may be
// null. Returns whether a logit is NaN.
inline bool prepare_masks(const float* logits, int64_t count, int32_t* off, float* decay) {
  IntVec nans{};
  int64_t i = 0;
  const auto take = [&]<int kVectors>(auto lanes) FASTMOD_INLINE_LAMBDA {
    Vec<float> logit[kVectors], a[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      logit[v] = load_lanes<float>(logits + i + v * kLanes<float>, lanes);
      nans |= logit[v] != logit[v];
    }
    mask_decay<kVectors>(logit, a);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, i += lanes) {
      if (off) {
        const IntVec words = words_off(logit[v], a[v]);
        std::memcpy(off + i, &words, lanes * sizeof(int32_t));
      }
      if (decay) store_lanes<float>(decay + i, a[v], lanes);
    }
  };
  constexpr std::integral_constant<int64_t, kLanes<float>> whole;
  while (i + 4 * kLanes<float> <= count) take.template operator()<4>(whole);
  while (i + kLanes<float> <= count) take.template operator()<1>(whole);
  if (i < count) take.template operator()<1>(count - i);
  return any(nans);
}

inline bool prepare_masks(const double* logits, int64_t count, int32_t* off, double* decay) {
  alignas(64) float narrow[kMaskChunk];
  bool has_nan = false;
  for (int64_t at = 0; at < count; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, count - at);
    for (int64_t i = 0; i < some; ++i) narrow[i] = float(logits[at + i]);
    has_nan |= prepare_masks(narrow, some, off ? off + at : nullptr, nullptr);
  }
  for (int64_t i = 0; decay && i < count; i += kLanes<double>) {
    const int64_t lanes = std::min<int64_t>(kLanes<double>, count - i);
    const Vec<double> logit = load_first(logits + i, lanes);
    store_first(decay + i, vexp<true>(logit < 0.0 ? logit : -logit), lanes);
  }
  return has_nan;
}

// ---- one sample of a run of weights

// kLanes<T> uniforms of the noise contract, measured from the side that the logits favour: u, or 1 - u where a logit is
// negative. The contract turns a word with all bits inverted into 1 - u.
template <typename T>
FASTMOD_INLINE Vec<T> load_favoured(const uint32_t* words, Vec<T> logit) {
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes<T>)));
  typedef int32_t Counts __attribute__((vector_size(4 * kLanes<T>)));
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Int;
  typedef Int Signs __attribute__((vector_size(FASTMOD_VECTOR_BYTES)));
  Words some;
  std::memcpy(&some, words, sizeof(some));
  some ^= (Words)__builtin_convertvector((Signs)logit >> (8 * sizeof(T) - 1), Counts);
  return __builtin_convertvector((Counts)(some >> 9), Vec<T>) * T(1.0 / 8388608.0) + T(0.5 / 8388608.0);
}

// One sample of weights begin .. begin + count - 1. Any result may be null.
template <typename T>
struct MaskRun {
  int64_t sample, begin, count;
  const int32_t* off;    // of prepare_masks; null: neither `masked`, `kept` nor `grad_weight` is wanted
  const T* decay;        // likewise; null: `grad_logits` is not wanted
  bool has_nan;          // whether a logit is NaN
  const T* weight;       // null: ones
  T* masked;             // mask * weight
  uint16_t* kept;        // the masks of every vector of weights, a bit each
  const T* grad;         // of the masked weights
  T *grad_logits;        // += grad * derivative of the relaxed mask
  T *grad_weight;        // += grad * mask
  const T *next_logits, *next_weight;  // what this sample prefetches: its share of the next piece, or null
};

// 1 where a lane is true, else 0.
template <typename T, typename Truth>
FASTMOD_INLINE Vec<T> as_ones(Truth kept) {
  if constexpr (sizeof(T) == 4) return (Vec<T>)(kept & (Truth)splat(T(1)));
  else return Vec<T>{} - __builtin_convertvector(kept, Vec<T>);  // a minus alone would make zeros negative
}

// Which of kLanes<T> weights are kept: lanes of 32 bits, all set or all clear.
template <typename T>
FASTMOD_INLINE auto compare_kept(const uint32_t* words, const int32_t* off) {
  typedef int32_t Counts __attribute__((vector_size(4 * kLanes<T>)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes<T>)));
  Words some;
  Counts limit;
  std::memcpy(&some, words, sizeof(some));
  std::memcpy(&limit, off, sizeof(limit));
  return Counts((Counts)(some >> 9) >= limit);
}
// 1 where a weight is kept, else 0.
template <typename T>
FASTMOD_INLINE Vec<T> load_kept(const uint32_t* words, const int32_t* off) {
  return as_ones<T>(compare_kept<T>(words, off));
}

// Packs true lanes into bits, and back.
template <typename Truth>
FASTMOD_INLINE uint16_t bits_of(Truth kept) {
#if FASTMOD_VECTOR_BYTES == 64
  if constexpr (sizeof(kept) == 64) return uint16_t(_mm512_movepi32_mask((__m512i)kept));
#endif
#if FASTMOD_VECTOR_BYTES >= 32
  if constexpr (sizeof(kept) == 32) return uint16_t(_mm256_movemask_ps((__m256)kept));
#endif
  int32_t lanes[sizeof(kept) / 4], bits = 0;
  std::memcpy(lanes, &kept, sizeof(kept));
  for (size_t i = 0; i < sizeof(kept) / 4; ++i) bits |= (lanes[i] & 1) << i;
  return uint16_t(bits);
}
template <typename T>
FASTMOD_INLINE Vec<T> ones_where(uint16_t bits) {
#if FASTMOD_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_mov_ps(bits, (__m512)splat(T(1)));
#endif
  typedef int32_t Counts __attribute__((vector_size(4 * kLanes<T>)));
  alignas(64) int32_t lanes[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = 1 << i;
  Counts lane;
  std::memcpy(&lane, lanes, sizeof(lane));
  return as_ones<T>(Counts((lane & int32_t(bits)) != 0));
}

// s(1 - s) at temperature 1: with a = exp(-|l|), s = u / (u + a (1 - u)).
template <typename T>
FASTMOD_INLINE Vec<T> slope_at_one(Vec<T> u, Vec<T> decay) {
  const Vec<T> against = T(1) - u, share = reciprocal(u + decay * against);
  return u * against * decay * (share * share);
}

// At any temperature: s(1 - s) / tau of s = sigmoid((|l| + log(u / (1 - u))) / tau).
template <typename T>
FASTMOD_INLINE Vec<T> slope_at(Vec<T> size, Vec<T> u, T inverse_tau) {
  const Vec<T> z = (size + (vlog(u) - vlog(T(1) - u))) * inverse_tau;
  const Vec<T> e = vexp<true>(z < T(0) ? z : -z), whole = e + T(1);
  return e / (whole * whole) * inverse_tau;
}

// Entries at .. at + count - 1 of a run, with their words already drawn.
template <typename T, typename Count>
FASTMOD_INLINE void mask_part(const MaskArgs<T>& args, const MaskRun<T>& run, int64_t at, Count count,
                              const uint32_t* words) {
  const T* logits = args.logits + run.begin + at;
  const auto kept = [&](int64_t i) FASTMOD_INLINE_LAMBDA { return load_kept<T>(words + i, run.off + at + i); };
  if (run.masked && run.weight)
    by_vectors<T>(count, [&](int64_t i, auto lanes) FASTMOD_INLINE_LAMBDA {
      // A product, not a choice: 0 * inf is NaN here as in torch.
      const Vec<T> weight = load_lanes<T>(run.weight + at + i, lanes);
      store_lanes<T>(run.masked + at + i, weight * kept(i), lanes);
    });
  else if (run.masked)
    by_vectors<T>(count, [&](int64_t i, auto lanes) FASTMOD_INLINE_LAMBDA {
      store_lanes<T>(run.masked + at + i, kept(i), lanes);
    });
  if (run.kept)
    by_vectors<T>(count, [&](int64_t i, auto) FASTMOD_INLINE_LAMBDA {
      run.kept[(at + i) / kLanes<T>] = bits_of(compare_kept<T>(words + i, run.off + at + i));
    });
  const auto add = [&](T* sum, const auto& derivative) FASTMOD_INLINE_LAMBDA {
    by_vectors<T>(count, [&](int64_t i, auto lanes) FASTMOD_INLINE_LAMBDA {
      const Vec<T> added = load_lanes<T>(run.grad + at + i, lanes) * derivative(i, lanes);
      store_lanes<T>(sum + at + i, load_lanes<T>(sum + at + i, lanes) + added, lanes);
    });
  };
  if (run.grad_weight)
    add(run.grad_weight, [&](int64_t i, auto) FASTMOD_INLINE_LAMBDA { return kept(i); });
  for (int64_t i = 0; run.has_nan && i < count; ++i)
    if (logits[i] != logits[i]) {  // a NaN must not become a confident mask
      if (run.masked) run.masked[at + i] = logits[i];
      if (run.grad_weight) run.grad_weight[at + i] = logits[i];
    }
  if (!run.grad_logits) return;
  if (args.tau == 1.0)
    add(run.grad_logits, [&](int64_t i, auto lanes) FASTMOD_INLINE_LAMBDA {
      const Vec<T> u = load_favoured<T>(words + i, load_lanes<T>(logits + i, lanes));
      return slope_at_one<T>(u, load_lanes<T>(run.decay + at + i, lanes));
    });
  else
    add(run.grad_logits, [&, inverse_tau = T(1) / T(args.tau)](int64_t i, auto lanes) FASTMOD_INLINE_LAMBDA {
      const Vec<T> logit = load_lanes<T>(logits + i, lanes);
      return slope_at<T>(logit < T(0) ? -logit : logit, load_favoured<T>(words + i, logit), inverse_tau);
    });
}

// Inlined, as a run may be a short row of a piece: writing its MaskRun to memory would cost as much as a batch of
// noise.
template <typename T>
FASTMOD_INLINE void mask_run(const MaskArgs<T>& args, const NoiseKeys& keys, const MaskRun<T>& run) {
  alignas(64) uint32_t buffer[kMaskChunk + 3 + kNoiseBatch];
  const uint64_t start = uint64_t(args.first + run.sample) * uint64_t(args.count) + uint64_t(run.begin);
  int64_t at = 0;
  // Batch by batch: while the words of one are computed, the loads and stores of another complete, and a little of the
  // next piece is prefetched. All of it at once would stall.
  const int64_t each = kNoiseBatch / args.samples;
  for (int64_t next = 0; start % 4 == 0 && at + kNoiseBatch <= run.count; at += kNoiseBatch, next += each) {
    if (run.next_logits) {
      prefetch<0>(run.next_logits + next, each);
      prefetch<0>(run.next_weight + next, each);
    }
    noise_batch<kWideVectors>(keys, (start + uint64_t(at)) / 4, buffer);
    mask_part<T>(args, run, at, std::integral_constant<int64_t, kNoiseBatch>{}, buffer);
  }
  for (; at < run.count; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, run.count - at);
    mask_part<T>(args, run, at, some, noise_words(keys, start + uint64_t(at), some, buffer));
  }
}

// ---- the op by itself: weights begin .. end - 1 through all samples

template <typename T>
void sample_mask_forward(const MaskArgs<T>& args, int64_t begin, int64_t end) {
  const NoiseKeys keys(args.seed, args.stream);
  alignas(64) int32_t off[kMaskChunk];
  for (int64_t at = begin; at < end; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, end - at);
    const bool has_nan = prepare_masks(args.logits + at, some, off, nullptr);
    for (int64_t s = 0; s < args.samples; ++s) {
      MaskRun<T> run{.sample = s, .begin = at, .count = some, .off = off, .has_nan = has_nan};
      run.weight = args.weight ? args.weight + at : nullptr;
      run.masked = args.out + s * args.count + at;
      mask_run<T>(args, keys, run);
    }
  }
}

template <typename T>
void sample_mask_backward(const MaskArgs<T>& args, int64_t begin, int64_t end) {
  const NoiseKeys keys(args.seed, args.stream);
  alignas(64) T decay[kMaskChunk], sum[kMaskChunk];
  for (int64_t at = begin; at < end; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, end - at);
    prepare_masks(args.logits + at, some, nullptr, decay);
    std::fill(sum, sum + some, T(0));
    for (int64_t s = 0; s < args.samples; ++s) {
      MaskRun<T> run{.sample = s, .begin = at, .count = some, .decay = decay};
      run.grad = args.grad + s * args.count + at;
      run.grad_logits = sum;
      mask_run<T>(args, keys, run);
    }
    for (int64_t i = 0; i < some; ++i)
      args.grad_logits[at + i] =
          (args.weight ? sum[i] * args.weight[at + i] : sum[i]) + (args.base ? args.base[at + i] : T(0));
  }
}

FASTMOD_KERNELS(SampleMaskKernels, .forward = sample_mask_forward<T>, .backward = sample_mask_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_sample_mask(const at::Tensor& logits, const std::optional<at::Tensor>& weight,
                              const at::Tensor& seed, int64_t first, int64_t samples, int64_t stream) {
  check_float(logits, "logits");
  check_mask_noise(seed, first, samples, stream);
  if (!weight) return;
  check_like(logits, *weight, "weight");
  TORCH_CHECK_VALUE(weight->sizes() == logits.sizes(), "weight: expected the shape of logits, ", logits.sizes(),
                    ", got ", weight->sizes());
}

}  // namespace fastmod

#endif
