// Images of several experts in the torch-facing CPU code: [..., C, H, W] with channels innermost in memory.
#pragma once

#include <ATen/Functions.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>

#include "cpu/host.h"
#include "cpu/vec.h"
#include "cpu/winograd.h"

namespace fastmod::cpu {

// In the form that the kernels read: [..., H, W, C], contiguous, fp64 or fp32.
inline at::Tensor channels_last(const at::Tensor& images) {
  return readable(images.movedim(-3, -1));
}

// An empty [..., C, H, W] that the kernels write as [..., H, W, C]; `like` gives the dtype of the sums.
// Not a permuted view: autograd forbids in-place writes into views returned by a custom op.
inline at::Tensor empty_images(at::IntArrayRef sizes, const at::Tensor& like) {
  const auto rank = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  const auto place = [&](int64_t dim) {
    strides[dim] = step;
    step *= std::max<int64_t>(sizes[dim], 1);
  };
  for (const int64_t dim : {rank - 3, rank - 1, rank - 2}) place(dim);
  for (int64_t dim = rank - 4; dim >= 0; --dim) place(dim);
  return at::cpu::empty_strided(sizes, strides, like.options().dtype(compute_type(like)));
}

// out[i] = sum over `count` rows of parts [count, size], in the same order for any number of threads.
template <typename T>
void sum_rows(const T* parts, int64_t count, int64_t size, T* out) {
  std::vector<double> sums(size, 0.0);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < size; ++i) sums[i] += parts[row * size + i];
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<T>(sums[i]);
}

// Mean and variance over all images from those of each image; every image has `count` values.
template <typename T>
void combine_stats(const T* means, const T* squares, int64_t images, int64_t channels, double count, T* mean, T* var) {
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, square = 0;
    for (int64_t i = 0; i < images; ++i) sum += means[i * channels + c];
    const double middle = sum / images;
    for (int64_t i = 0; i < images; ++i) {
      const double distance = means[i * channels + c] - middle;
      square += squares[i * channels + c] + count * distance * distance;
    }
    mean[c] = static_cast<T>(middle);
    var[c] = static_cast<T>(square / (images * count));
  }
}

// weight [E, cout, cin, k, k], each output times its scale [E, cout] unless that is null -> [E, k, k, cin, columns]
template <typename T>
at::Tensor packed_taps(const at::Tensor& weight, int64_t columns, const T* scale = nullptr) {
  const int64_t experts = weight.size(0), outputs = weight.size(1), inputs = weight.size(2);
  const int64_t taps = weight.size(3) * weight.size(4), matrix = inputs * columns;
  const at::Tensor out = empty_wide({experts * taps * matrix}, weight);
  const T* from = weight.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  for_each<T>(experts * taps, 4.0 * matrix, 0, weight, [&](int64_t index, T*) {
    const int64_t expert = index / taps;
    const T* w = from + expert * outputs * inputs * taps + index % taps;
    const T* factor = scale ? scale + expert * outputs : nullptr;
    T* row = to + index * matrix;
    for (int64_t i = 0; i < inputs; ++i, row += columns) {
      for (int64_t o = 0; o < outputs; ++o) row[o] = w[(o * inputs + i) * taps] * (factor ? factor[o] : T(1));
      std::fill(row + outputs, row + columns, T(0));
    }
  });
  return out;
}

// Not in fp64, which is for exactness, and not for few channels, where the transforms cost more than they save.
template <typename T>
bool uses_winograd(int64_t kernel, int64_t stride, int64_t cin, int64_t cout) {
  return sizeof(T) == 4 && kernel == 3 && stride == 1 && cin >= 8 && cout >= 8;
}

// The weights transformed for Winograd: [E, 9, matrix] -> [E, 16, matrix]
template <typename T>
at::Tensor winograd_taps(const at::Tensor& taps, int64_t experts, int64_t matrix) {
  const at::Tensor out = empty_wide({experts * 16 * matrix}, taps);
  for (int64_t e = 0; e < experts; ++e)
    kernels<WinogradKernels<T>>().weights(taps.const_data_ptr<T>() + e * 9 * matrix, matrix,
                                          out.data_ptr<T>() + e * 16 * matrix);
  return out;
}

template <typename T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

// Sums gradients [B, E, C] over the batch, in the shape of the parameter: [E, C], or [1, C] if also summed over E.
template <typename T>
at::Tensor parameter_grad(const at::Tensor& parts, const at::Tensor& parameter) {
  const at::Tensor out = at::empty(parameter.sizes(), parameter.options());
  if (out.numel()) sum_rows(parts.const_data_ptr<T>(), parts.numel() / out.numel(), out.numel(), out.data_ptr<T>());
  return out;
}

}  // namespace fastmod::cpu
