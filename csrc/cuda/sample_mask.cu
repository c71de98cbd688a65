// sample_mask: binary masks over weights, multiplied by the weights, and the gradient of the logits. A thread takes its
// weights through all samples, so that each weight's threshold is computed once.
#include "masks.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 256;

// Neighbouring elements that one thread reads and writes at once: at most 16 bytes.
template <typename T, int kEach>
struct alignas(kEach * sizeof(T) < 16 ? kEach * sizeof(T) : 16) Pack {
  T value[kEach];
};

template <int kEach, typename T>
__device__ Pack<T, kEach> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kEach>*>(from);
}

template <typename T, int kEach>
__device__ void store(const Pack<T, kEach>& pack, T* to) {
  *reinterpret_cast<Pack<T, kEach>*>(to) = pack;
}

// The words of the kEach elements from `index` on; for kEach 4, index must be a multiple of 4.
template <int kEach>
__device__ Pack<uint32_t, kEach> noise_words(int64_t seed, uint64_t index, uint32_t stream) {
  if constexpr (kEach == kQuad) {
    const PhiloxWords words = philox_group(seed, index / kQuad, stream);
    return {{words.word[0], words.word[1], words.word[2], words.word[3]}};
  } else {
    static_assert(kEach == 1, "a Philox call gives four words");
    return {{noise_word(seed, index, stream)}};
  }
}

// The noise index of element `at` of a sample; unsigned, as it may exceed 2^63.
__device__ uint64_t noise_index(const MaskNoise& noise, int64_t sample, int64_t count, int64_t at) {
  return static_cast<uint64_t>(noise.first + sample) * static_cast<uint64_t>(count) + static_cast<uint64_t>(at);
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* logits, const T* weight, T* out, int64_t count, MaskNoise noise) {
  using C = Compute<T>;
  const int64_t at = global_thread() * kEach;
  if (at >= count) return;
  const Pack<T, kEach> own = load<kEach>(logits + at);
  Pack<T, kEach> weights;
  if (weight) weights = load<kEach>(weight + at);
  int32_t off[kEach];
  C value[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const C logit = widen(own.value[i]);
    off[i] = words_off(to_float(logit));
    value[i] = weight ? widen(weights.value[i]) : C(1);
    if (logit != logit) value[i] = logit;  // a NaN must not become a confident mask
  }
  const int64_t seed = seed_of(noise);
  for (int64_t s = 0; s < noise.samples; ++s) {
    const auto words = noise_words<kEach>(seed, noise_index(noise, s, count, at), noise.stream);
    Pack<T, kEach> masked;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const C keep = static_cast<int32_t>(words.value[i] >> 9) >= off[i] ? C(1) : C(0);
      narrow(value[i] * keep, masked.value + i);  // a product, not a choice: 0 * inf is NaN as in torch
    }
    store(masked, out + s * count + at);
  }
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* grad, const T* logits, const T* weight, const T* base, T* grad_logits, Compute<T> tau,
                    int64_t count, MaskNoise noise) {
  using C = Compute<T>;
  const int64_t at = global_thread() * kEach;
  if (at >= count) return;
  const Pack<T, kEach> own = load<kEach>(logits + at);
  C logit[kEach], decay[kEach], total[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    logit[i] = widen(own.value[i]);
    decay[i] = exponential(-magnitude(logit[i]));
    total[i] = C(0);
  }
  const int64_t seed = seed_of(noise);
  for (int64_t s = 0; s < noise.samples; ++s) {
    const auto words = noise_words<kEach>(seed, noise_index(noise, s, count, at), noise.stream);
    const Pack<T, kEach> grads = load<kEach>(grad + s * count + at);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const C u = uniform_from_word<C>(words.value[i]);
      total[i] += widen(grads.value[i]) * mask_slope(u, logit[i], decay[i], tau);
    }
  }
  Pack<T, kEach> result;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (weight) total[i] *= widen(weight[at + i]);
    if (base) total[i] += widen(base[at + i]);
    narrow(total[i], result.value + i);
  }
  store(result, grad_logits + at);
}

// Whether threads may take four elements each: no sample and no thread begins inside a Philox group, and every pointer
// (or null) is aligned like a Pack.
template <typename T, typename... Pointers>
bool in_quads(int64_t count, Pointers... pointers) {
  const uintptr_t any = (uintptr_t{0} | ... | reinterpret_cast<uintptr_t>(pointers));
  return count % kQuad == 0 && any % alignof(Pack<T, kQuad>) == 0;
}

}  // namespace

template <typename T>
cudaError_t sample_mask_forward(const T* logits, const T* weight, T* out, int64_t count, MaskNoise noise,
                                cudaStream_t stream) {
  if (count * noise.samples == 0) return cudaSuccess;
  if (in_quads<T>(count, logits, weight, out)) {
    return FASTMOD_LAUNCH((forward_kernel<T, kQuad>), blocks_for(count, kThreads * kQuad), kThreads, stream, logits,
                          weight, out, count, noise);
  }
  return FASTMOD_LAUNCH((forward_kernel<T, 1>), blocks_for(count, kThreads), kThreads, stream, logits, weight, out,
                        count, noise);
}

template <typename T>
cudaError_t sample_mask_backward(const T* grad, const T* logits, const T* weight, const T* base, T* grad_logits,
                                 Compute<T> tau, int64_t count, MaskNoise noise, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (in_quads<T>(count, grad, logits, grad_logits)) {
    return FASTMOD_LAUNCH((backward_kernel<T, kQuad>), blocks_for(count, kThreads * kQuad), kThreads, stream, grad,
                          logits, weight, base, grad_logits, tau, count, noise);
  }
  return FASTMOD_LAUNCH((backward_kernel<T, 1>), blocks_for(count, kThreads), kThreads, stream, grad, logits, weight,
                        base, grad_logits, tau, count, noise);
}

#define FASTMOD_INSTANTIATE(T)                                                                                     \
  template cudaError_t sample_mask_forward<T>(const T*, const T*, T*, int64_t, MaskNoise, cudaStream_t);           \
  template cudaError_t sample_mask_backward<T>(const T*, const T*, const T*, const T*, T*, Compute<T>, int64_t,    \
                                               MaskNoise, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
