// Squared distances between templates, summed over differences: norms minus products would cancel for near templates.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct ClusterPenaltyKernels {
  // Works on some columns of a bank [templates, size]; `bank` and `out` point at the first of them.
  void (*forward)(const T* bank, int64_t templates, int64_t size, int64_t columns, double* sums);
  void (*backward)(const T* bank, const T* weights, int64_t templates, int64_t size, int64_t columns, T* out);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T, int kRows, int kColumns>
FASTMOD_INLINE void distance_block(const T* a, const T* b, int64_t size, int64_t columns, double* sums,
                                   int64_t sums_stride) {
  Vec<T> sum[kRows][kColumns] = {};
  by_vectors<T>(columns, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    Vec<T> right[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) right[j] = load_lanes(b + j * size + c, left);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> row = load_lanes(a + i * size + c, left);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) {
        const Vec<T> apart = row - right[j];
        sum[i][j] += apart * apart;
      }
    }
  });
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) sums[i * sums_stride + j] += double(sum_lanes<T>(sum[i][j]));
}

// Adds what `columns` columns, starting at `bank`, contribute to sums [K, K]; only the upper triangle is valid.
template <typename T>
void cluster_penalty_forward(const T* bank, int64_t templates, int64_t size, int64_t columns, double* sums) {
  constexpr int kBlock = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t i = 0;
  for (; i + kBlock <= templates; i += kBlock) {
    const T* row = bank + i * size;
    double* out = sums + i * templates;
    int64_t j = i;
    for (; j + kBlock <= templates; j += kBlock)
      distance_block<T, kBlock, kBlock>(row, bank + j * size, size, columns, out + j, templates);
    for (; j < templates; ++j) distance_block<T, kBlock, 1>(row, bank + j * size, size, columns, out + j, templates);
  }
  for (; i < templates; ++i)
    for (int64_t j = i + 1; j < templates; ++j)
      distance_block<T, 1, 1>(bank + i * size, bank + j * size, size, columns, sums + i * templates + j, templates);
}

// kRows rows of out = sum_j weights[k, j] * (template k - template j).
template <typename T, int kRows>
FASTMOD_INLINE void pull_block(const T* bank, const T* weights, int64_t templates, int64_t size, int64_t columns,
                               int64_t row, T* out) {
  by_vectors<T>(columns, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    Vec<T> own[kRows], sum[kRows] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) own[i] = load_lanes(bank + (row + i) * size + c, left);
    for (int64_t j = 0; j < templates; ++j) {
      const Vec<T> other = load_lanes(bank + j * size + c, left);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sum[i] += weights[(row + i) * templates + j] * (own[i] - other);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) store_lanes(out + (row + i) * size + c, sum[i], left);
  });
}

template <typename T>
void cluster_penalty_backward(const T* bank, const T* weights, int64_t templates, int64_t size, int64_t columns,
                              T* out) {
  int64_t row = 0;
  for (; row + 4 <= templates; row += 4) pull_block<T, 4>(bank, weights, templates, size, columns, row, out);
  for (; row < templates; ++row) pull_block<T, 1>(bank, weights, templates, size, columns, row, out);
}

FASTMOD_KERNELS(ClusterPenaltyKernels, .forward = cluster_penalty_forward<T>, .backward = cluster_penalty_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
