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

FASTMOD_HOST_DEVICE PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                           uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The four words of elements 4*group .. 4*group+3.
FASTMOD_HOST_DEVICE PhiloxWords philox_group(int64_t seed, uint64_t group, uint32_t stream) {
  const uint64_t key = static_cast<uint64_t>(seed);
  return philox4x32(static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), stream, 0u,
                    static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// Exact in fp32, strictly inside (0, 1).
template <typename Scalar>
FASTMOD_HOST_DEVICE Scalar uniform_from_word(uint32_t word) {
  return (static_cast<Scalar>(word >> 9) + Scalar(0.5)) * Scalar(1.0 / 8388608.0);
}

}  // namespace fastmod
