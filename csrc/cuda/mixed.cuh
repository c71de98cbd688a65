// Tensors of T or, under autocast, of fp32 that is treated as rounded to T. Kernels are compiled for both cases:
// without kMixed they have plain pointers and no overhead.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace fastmod::cuda {

template <bool kMixed, typename T>
using Operand = std::conditional_t<kMixed, Mixed<T>, T*>;

// The form in which a kernel with or without kMixed takes a tensor.
template <bool kMixed, typename T>
__host__ __device__ inline Operand<kMixed, T> operand(const Mixed<T>& tensor) {
  if constexpr (kMixed) {
    return tensor;
  } else {
    return tensor.narrow;
  }
}
// Calls run(std::bool_constant), which tells whether any of the tensors is fp32 instead of T.
template <typename T, typename Run, typename... Tensors>
cudaError_t with_mixed(Run run, const Tensors&... tensors) {
  if constexpr (sizeof(T) == 2) {
    if (((tensors.wide != nullptr) || ...)) return run(std::true_type());
  }
  return run(std::false_type());
}

template <typename T>
__host__ __device__ inline Mixed<T> operator+(const Mixed<T>& tensor, int64_t step) {
  if (tensor.wide) return {nullptr, tensor.wide + step};
  return {tensor.narrow + step, nullptr};
}
template <typename T>
__host__ __device__ inline Mixed<T>& operator+=(Mixed<T>& tensor, int64_t step) {
  return tensor = tensor + step;
}

// Whether the tensor is given.
template <typename T>
__host__ __device__ inline bool given(const T* tensor) {
  return tensor != nullptr;
}
template <typename T>
__host__ __device__ inline bool given(const Mixed<T>& tensor) {
  return tensor.narrow != nullptr || tensor.wide != nullptr;
}

// One of two, chosen member by member: choosing by address would force it into memory.
template <typename T>
__device__ inline T* either(bool first, T* one, T* other) {
  return first ? one : other;
}
template <typename T>
__device__ inline Mixed<T> either(bool first, const Mixed<T>& one, const Mixed<T>& other) {
  return {first ? one.narrow : other.narrow, first ? one.wide : other.wide};
}

template <typename T>
__device__ inline float rounded_to(float value) {
  T low;
  narrow(value, &low);
  return widen(low);
}

template <typename T>
__device__ inline Compute<T> value_at(const T* from, int64_t i) {
  return widen(from[i]);
}
template <typename T>
__device__ inline float value_at(const Mixed<const T>& from, int64_t i) {
  return from.wide ? rounded_to<T>(from.wide[i]) : widen(from.narrow[i]);
}

// Gradients of fp32 are not rounded.
template <typename T>
__device__ inline void put_at(Compute<T> value, T* to, int64_t i) {
  narrow(value, to + i);
}
template <typename T>
__device__ inline void put_at(float value, const Mixed<T>& to, int64_t i) {
  if (to.wide) {
    to.wide[i] = value;
  } else {
    narrow(value, to.narrow + i);
  }
}

}  // namespace fastmod::cuda
