// Masks over weights, drawn and applied. Included once per ISA by instantiate.h.

// ---- noise: words of the Philox contract, many groups of four at a time

typedef uint64_t WideVec __attribute__((vector_size(FASTMOD_VECTOR_BYTES)));
constexpr int kWideLanes = FASTMOD_VECTOR_BYTES / 8;
// Vectors in flight: a round waits for its multiplications, several independent ones fill the wait.
constexpr int kWideVectors = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;
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

// The words of elements start .. start + count - 1, in `buffer` of count + 3 + kNoiseBatch entries.
inline const uint32_t* noise_words(int64_t seed, uint32_t stream, uint64_t start, int64_t count, uint32_t* buffer) {
  constexpr auto sequence = std::make_index_sequence<kWideLanes>{};
  const int64_t groups = (int64_t(start % 4) + count + 3) / 4;
  const WideVec multiplier0 = wide_splat(0xD2511F53u), multiplier1 = wide_splat(0xCD9E8D57u);
  const WideVec low = wide_splat(0xffffffffu);
  WideVec lane;
  for (int i = 0; i < kWideLanes; ++i) lane[i] = i;
  for (int64_t group = 0; group < groups; group += kWideLanes * kWideVectors) {
    WideVec c0[kWideVectors], c1[kWideVectors], c2[kWideVectors], c3[kWideVectors];
    for (int v = 0; v < kWideVectors; ++v) {
      c0[v] = lane + (start / 4 + uint64_t(group + v * kWideLanes));
      c1[v] = c0[v] >> 32;
      c2[v] = wide_splat(stream);
      c3[v] = WideVec{};
    }
    uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
      const WideVec key0 = wide_splat(k0), key1 = wide_splat(k1);
#pragma GCC unroll 4
      for (int v = 0; v < kWideVectors; ++v) {
        const WideVec product0 = multiply_low(c0[v], multiplier0), product1 = multiply_low(c2[v], multiplier1);
        c0[v] = (product1 >> 32) ^ c1[v] ^ key0;
        c1[v] = product1;
        c2[v] = (product0 >> 32) ^ c3[v] ^ key1;
        c3[v] = product0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int v = 0; v < kWideVectors; ++v) {
      // Two words make a lane, the first in its low half, as little-endian memory has them.
      const WideVec first = (c0[v] & low) | (c1[v] << 32), second = (c2[v] & low) | (c3[v] << 32);
      uint32_t* to = buffer + 4 * (group + v * kWideLanes);
      const WideVec lower = interleave_low<WideVec, kWideLanes>(first, second, sequence);
      const WideVec upper = interleave_high<WideVec, kWideLanes>(first, second, sequence);
      std::memcpy(to, &lower, sizeof(lower));
      std::memcpy(to + 2 * kWideLanes, &upper, sizeof(upper));
    }
  }
  return buffer + start % 4;
}

// ---- which words switch a weight off: the formula of mask_constants.h

// Keeps the compiler from fusing the product into an FMA, whose single rounding other backends do not have.
FASTMOD_INLINE Vec<float> unfused(Vec<float> product) {
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

FASTMOD_INLINE IntVec words_off(Vec<float> logit) {
  Vec<float> d = logit < 0.0f ? -logit : logit;
  d = d > mask::kCap ? splat(mask::kCap) : d;
  const IntVec n = __builtin_convertvector(unfused(d * mask::kLog2e) + 0.5f, IntVec);
  const Vec<float> whole = __builtin_convertvector(n, Vec<float>);
  const Vec<float> x = (whole * mask::kLn2High - d) + whole * mask::kLn2Low;
  Vec<float> p = splat(mask::kExp[0]);
  for (int i = 1; i < 6; ++i) p = unfused(p * x) + mask::kExp[i];
  const Vec<float> square = unfused(x * x);
  p = (unfused(p * square) + x) + 1.0f;
  const Vec<float> a = p * (Vec<float>)((127 - n) << 23);
  const IntVec off = __builtin_convertvector((a / (a + 1.0f)) * mask::kWordsF + 0.5f, IntVec);
  return logit < 0.0f ? mask::kWords - off : off;
}

constexpr int64_t kMaskChunk = 1024;  // weights that are taken through all samples at a time

// Per weight of a chunk: how many words switch it off (2^23, all, if its logit is NaN) and, if asked for, what the
// gradient needs, exp(-|l|). Returns whether a logit is NaN.
template <typename T>
bool prepare_masks(const T* logits, int64_t count, int32_t* off, T* decay) {
  bool found = false;
  alignas(64) float narrow[kMaskChunk] = {};
  for (int64_t at = 0; at < count; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, count - at);
    for (int64_t i = 0; i < some; ++i) narrow[i] = float(logits[at + i]);
    for (int64_t i = 0; i < some; i += kLanes<float>) {
      const Vec<float> logit = load(narrow + i);
      const IntVec words = logit == logit ? words_off(logit) : mask::kWords - IntVec{};
      if (some - i >= kLanes<float>) std::memcpy(off + at + i, &words, sizeof(words));
      else std::memcpy(off + at + i, &words, (some - i) * sizeof(int32_t));
    }
    for (int64_t i = 0; i < some; ++i) found |= narrow[i] != narrow[i];
    if (decay)
      for (int64_t i = 0; i < some; i += kLanes<T>) {
        const int64_t lanes = std::min<int64_t>(kLanes<T>, some - i);
        const Vec<T> logit = load_first(logits + at + i, lanes);
        store_first(decay + at + i, vexp<true>(logit < T(0) ? logit : -logit), lanes);
      }
  }
  return found;
}

// ---- one sample of a run of weights

template <typename T>
FASTMOD_INLINE void apply_masks(int64_t count, const uint32_t* words, const int32_t* off, const T* weight, T* out) {
  // A product, not a choice: 0 * inf is NaN here as in torch.
  for (int64_t i = 0; i < count; ++i) {
    const T keep = int32_t(words[i] >> 9) >= off[i] ? T(1) : T(0);
    out[i] = weight ? weight[i] * keep : keep;
  }
}

// sum += grad * s(1 - s) at temperature 1: with a = exp(-|l|) and u counted from the side that l favours,
// s = u / (u + a (1 - u)).
template <typename T>
FASTMOD_INLINE void add_slopes_at_one(int64_t count, const uint32_t* words, const T* logits, const T* decay,
                                      const T* grad, T* sum) {
  for (int64_t i = 0; i < count; ++i) {
    const T u = (T(int32_t(words[i] >> 9)) + T(0.5)) * T(1.0 / 8388608.0), v = T(1) - u;
    const bool low = logits[i] < T(0);
    const T with = low ? v : u, against = low ? u : v;
    const T whole = with + decay[i] * against;
    sum[i] += grad[i] * (with * against * decay[i] / (whole * whole));
  }
}

// At any temperature: s(1 - s) / tau of s = sigmoid((l + log(u / (1 - u))) / tau).
template <typename T>
FASTMOD_INLINE void add_slopes_at(int64_t count, const uint32_t* words, const T* logits, T inverse_tau, const T* grad,
                                  T* sum) {
  alignas(64) T uniform[kLanes<T>];
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const int64_t lanes = std::min<int64_t>(kLanes<T>, count - i);
    for (int j = 0; j < kLanes<T>; ++j) uniform[j] = j < lanes ? uniform_from_word<T>(words[i + j]) : T(0.5);
    const Vec<T> u = load(uniform);
    const Vec<T> z = (load_first(logits + i, lanes) + (vlog(u) - vlog(T(1) - u))) * inverse_tau;
    const Vec<T> e = vexp<true>(z < T(0) ? z : -z), whole = e + T(1);
    const Vec<T> slope = e / (whole * whole) * inverse_tau;
    store_first(sum + i, load_first(sum + i, lanes) + load_first(grad + i, lanes) * slope, lanes);
  }
}

// Weights begin .. begin + count - 1 of one sample: masked (may be null) = mask * weight (null: of ones); sum (may be
// null) += grad * derivative of the relaxed mask.
template <typename T>
void mask_run(const MaskArgs<T>& args, int64_t sample, int64_t begin, int64_t count, const int32_t* off,
              const T* decay, bool has_nan, const T* weight, T* masked, const T* grad, T* sum) {
  alignas(64) uint32_t buffer[kMaskChunk + 3 + kNoiseBatch];
  for (int64_t at = 0; at < count; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, count - at);
    const T* logits = args.logits + begin + at;
    const uint64_t start = uint64_t(args.first + sample) * uint64_t(args.count) + uint64_t(begin + at);
    const uint32_t* words = noise_words(args.seed, args.stream, start, some, buffer);
    if (masked) {
      if (weight) apply_masks<T>(some, words, off + at, weight + at, masked + at);
      else apply_masks<T>(some, words, off + at, nullptr, masked + at);
      if (has_nan)
        for (int64_t i = 0; i < some; ++i)
          if (logits[i] != logits[i]) masked[at + i] = logits[i];  // no NaN turns into a confident mask
    }
    if (!sum) continue;
    if (args.tau == 1.0) add_slopes_at_one<T>(some, words, logits, decay + at, grad + at, sum + at);
    else add_slopes_at<T>(some, words, logits, T(1) / T(args.tau), grad + at, sum + at);
  }
}

// ---- the op by itself: weights begin .. end - 1 through all samples

template <typename T>
void sample_mask_forward(const MaskArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) int32_t off[kMaskChunk];
  for (int64_t at = begin; at < end; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, end - at);
    const bool has_nan = prepare_masks<T>(args.logits + at, some, off, nullptr);
    for (int64_t s = 0; s < args.samples; ++s)
      mask_run<T>(args, s, at, some, off, nullptr, has_nan, args.weight ? args.weight + at : nullptr,
                  args.out + s * args.count + at, nullptr, nullptr);
  }
}

template <typename T>
void sample_mask_backward(const MaskArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) int32_t off[kMaskChunk];
  alignas(64) T decay[kMaskChunk], sum[kMaskChunk];
  for (int64_t at = begin; at < end; at += kMaskChunk) {
    const int64_t some = std::min(kMaskChunk, end - at);
    prepare_masks<T>(args.logits + at, some, off, decay);
    std::fill(sum, sum + some, T(0));
    for (int64_t s = 0; s < args.samples; ++s)
      mask_run<T>(args, s, at, some, off, decay, false, nullptr, nullptr, args.grad + s * args.count + at, sum);
    for (int64_t i = 0; i < some; ++i)
      args.grad_logits[at + i] =
          (args.weight ? sum[i] * args.weight[at + i] : sum[i]) + (args.base ? args.base[at + i] : T(0));
  }
}
