// Philox4x32-10 (Salmon et al., 2011), shared by the CPU and the CUDA kernels; contract in fastmod/noise.py.
#pragma once

#include <cstdint>

#include "constants.h"

#if defined(__CUDACC__) || defined(FASTMOD_CUDA_HOST)
#define FASTMOD_HOST_DEVICE __host__ __device__ inline
#else
#define FASTMOD_HOST_DEVICE inline
#endif

namespace fastmod {

struct PhiloxWords {
  uint32_t word[4];
};

// high : low = a * b
FASTMOD_HOST_DEVICE void wide_product(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
#if defined(__CUDA_ARCH__)
  *high = __umulhi(a, b);
  *low = a * b;
#else
  const uint64_t product = static_cast<uint64_t>(a) * b;
  *high = static_cast<uint32_t>(product >> 32);
  *low = static_cast<uint32_t>(product);
#endif
}

FASTMOD_HOST_DEVICE uint32_t xor_of_three(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t result;  // one instruction; otherwise nvcc leaves it to ptxas to find it
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return a ^ b ^ c;
#endif
}

// The keys of the ten rounds. CUDA kernels hold them all in registers; nvcc would recompute them for every call.
class PhiloxKeys {
 public:
  FASTMOD_HOST_DEVICE explicit PhiloxKeys(int64_t seed) {
    const uint64_t key = static_cast<uint64_t>(seed);
    const auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      first_[round] = k0 + static_cast<uint32_t>(round) * 0x9E3779B9u;
      second_[round] = k1 + static_cast<uint32_t>(round) * 0xBB67AE85u;
      asm("" : "+r"(first_[round]), "+r"(second_[round]));
    }
  }
  __device__ uint32_t first(int round) const { return first_[round]; }
  __device__ uint32_t second(int round) const { return second_[round]; }

 private:
  uint32_t first_[10], second_[10];
#else
    k0_ = k0;
    k1_ = k1;
  }
  FASTMOD_HOST_DEVICE uint32_t first(int round) const { return k0_ + static_cast<uint32_t>(round) * 0x9E3779B9u; }
  FASTMOD_HOST_DEVICE uint32_t second(int round) const { return k1_ + static_cast<uint32_t>(round) * 0xBB67AE85u; }

 private:
  uint32_t k0_, k1_;
#endif
};

FASTMOD_HOST_DEVICE PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, const PhiloxKeys& keys) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    uint32_t high0, low0, high1, low1;
    wide_product(c0, 0xD2511F53u, &high0, &low0);
    wide_product(c2, 0xCD9E8D57u, &high1, &low1);
    // In the first rounds one term and the key are the same for all words of a stream, and nvcc combines them once.
    c0 = round < 2 ? high1 ^ c1 ^ keys.first(round) : xor_of_three(high1, c1, keys.first(round));
    c1 = low1;
    c2 = round < 1 ? high0 ^ c3 ^ keys.second(round) : xor_of_three(high0, c3, keys.second(round));
    c3 = low0;
  }
  return {{c0, c1, c2, c3}};
}

// The four words of elements 4*group .. 4*group+3.
FASTMOD_HOST_DEVICE PhiloxWords philox_group(const PhiloxKeys& keys, uint64_t group, uint32_t stream) {
  return philox4x32(static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), stream, 0u, keys);
}
FASTMOD_HOST_DEVICE PhiloxWords philox_group(int64_t seed, uint64_t group, uint32_t stream) {
  return philox_group(PhiloxKeys(seed), group, stream);
}

// Exact in fp32, strictly inside (0, 1).
template <typename Scalar>
FASTMOD_HOST_DEVICE Scalar uniform_from_word(uint32_t word) {
  return (static_cast<Scalar>(word >> 9) + Scalar(0.5)) * Scalar(1.0 / 8388608.0);
}

}  // namespace fastmod
