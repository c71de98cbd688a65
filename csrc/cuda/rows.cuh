// Loads rows of tensors into shared memory, or four neighbours at a time.
#pragma once

#include "mma.cuh"

namespace fastmod::cuda {

template <typename T>
bool rows_aligned(const T* pointer, int64_t row) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

// Copies `rows` rows of `width` elements to shared memory, zeros beyond `valid` and for rows that do not exist:
// from(row) is the address, or null. vector: 16 bytes at a time, for which everything must be aligned.
template <int kThreads, typename T, typename From>
__device__ inline void copy_rows(T* to, int rows, int width, int valid, bool vector, const T* anywhere, From from) {
  constexpr int kMany = 16 / sizeof(T);
  if (vector) {
    const unsigned each = width / kMany;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < rows * each; i += kThreads) {
      // The usual divisors as constants, which makes these divisions cheap.
      const unsigned row = each == 2 ? i / 2 : each == 4 ? i / 4 : each == 18 ? i / 18 : each == 36 ? i / 36 : i / each;
      const int at = static_cast<int>(i - row * each) * kMany;
      const T* source = at < valid ? from(static_cast<int>(row)) : nullptr;
      copy_async<16>(to + row * width + at, source ? source + at : anywhere, source != nullptr);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width, at = i - row * width;
    const T* source = at < valid ? from(row) : nullptr;
    if constexpr (sizeof(T) == 4) {
      copy_async<4>(to + i, source ? source + at : anywhere, source != nullptr);
    } else {
      T value;
      narrow(0.0f, &value);
      if (source) value = source[at];
      to[i] = value;
    }
  }
}

// Reads four neighbours, of which `there` exist; all four at once if `vector`.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};
template <typename T>
__device__ inline void read_four(const T* from, int there, bool vector, float (&v)[4]) {
  if (vector) {
    const auto four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = widen(four.v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = j < there ? widen(from[j]) : 0.0f;
  }
}
template <typename T>
__device__ inline void write_four(const T (&v)[4], int there, bool vector, T* to) {
  if (vector) {
    *reinterpret_cast<Four<T>*>(to) = {{v[0], v[1], v[2], v[3]}};
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < there) to[j] = v[j];
    }
  }
}
template <typename T>
__host__ __device__ inline bool by_four(const T* pointer, int64_t width) {
  return pointer && width % 4 == 0 && reinterpret_cast<uintptr_t>(pointer) % sizeof(Four<T>) == 0;
}

}  // namespace fastmod::cuda
