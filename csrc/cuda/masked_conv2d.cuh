// Shared by the kernels of masked_conv2d: which pixels use which taps of a filter, and where they are in memory.
#pragma once

#include "masked_linear.cuh"

namespace fastmod::cuda {

template <typename T>
inline bool aligned_to(const Mixed<T>& tensor, size_t bytes) {
  const void* first = tensor.wide ? static_cast<const void*>(tensor.wide) : tensor.narrow;
  return reinterpret_cast<uintptr_t>(first) % bytes == 0;
}

constexpr int kMaxTaps = kMaxKernel * kMaxKernel;
constexpr int kNoTap = 63;  // marks an empty place in a chunk: no pixel has this tap

// One dimension. For tap k, result i reads source i * advance + origin + shift[k] with filter tap weight[k]; the result
// is at first + i * spread.
struct Axis {
  int results, source, advance, origin, first, spread, taps;
  int weight[kMaxKernel], shift[kMaxKernel];

  // For the forward, dimension d.
  __device__ void read_by_forward(const MaskedConvShape& shape, int d) {
    results = d ? shape.out_wide : shape.out_high;
    source = d ? shape.wide : shape.high;
    advance = shape.stride[d];
    origin = -shape.padding[d];
    first = 0;
    spread = 1;
    taps = shape.kernel[d];
    for (int tap = 0; tap < taps; ++tap) {
      weight[tap] = tap;
      shift[tap] = tap * shape.dilation[d];
    }
  }
  // For the gradient of x. Pixels with the same residue modulo the stride form an image of their own, as they use the
  // same taps.
  __device__ void read_by_backward(const MaskedConvShape& shape, int d, int residue) {
    const int size = d ? shape.wide : shape.high, stride = shape.stride[d];
    results = size > residue ? (size - residue + stride - 1) / stride : 0;
    source = d ? shape.out_wide : shape.out_high;
    advance = 1;
    origin = 0;
    first = residue;
    spread = stride;
    taps = 0;
    for (int tap = 0; tap < shape.kernel[d]; ++tap) {
      const int from = residue + shape.padding[d] - tap * shape.dilation[d];
      if (from % stride) continue;
      weight[taps] = tap;
      shift[taps] = from / stride;
      ++taps;
    }
  }
};

// A result pixel: (i, j) of image `image` of the sample. It does not exist if image < 0.
struct ResultPixel {
  int64_t image;
  int i, j;
  __device__ ResultPixel(int64_t pixel, int64_t images, int high, int wide) {
    const int64_t row = quotient(pixel, wide);
    image = quotient(row, high);
    i = static_cast<int>(row - image * high);
    j = static_cast<int>(pixel - row * wide);
    if (image >= images) image = -1;
  }
};

// Which taps (numbered row by row) read a pixel inside the source, one bit each.
__device__ inline uint64_t taps_inside(const Axis& y, const Axis& x, int i, int j) {
  uint64_t across = 0, all = 0;
  for (int tap = 0; tap < x.taps; ++tap) {
    const int at = j * x.advance + x.origin + x.shift[tap];
    if (static_cast<unsigned>(at) < static_cast<unsigned>(x.source)) across |= uint64_t(1) << tap;
  }
  for (int tap = 0; tap < y.taps; ++tap) {
    const int at = i * y.advance + y.origin + y.shift[tap];
    if (static_cast<unsigned>(at) < static_cast<unsigned>(y.source)) all |= across << tap * x.taps;
  }
  return all;
}

// The place in shared memory of four numbers, the given quarter of a row's or column's depth. Neither writing (eight
// columns at a time) nor reading (two columns at a time) has bank conflicts.
__device__ inline int unit_place(int column, int quarter) { return column * 4 + (quarter ^ (column >> 1 & 3)); }

// The 32 columns of a warp are distributed over tiles so that each lane gets eight neighbours, from 8 t on. Column g of
// tile n is
__device__ inline int dealt_column(int g, int n) { return 8 * (g >> 1) + 2 * n + (g & 1); }

// sums += a b over a chunk of 16. Tensor cores round towards zero, so fp32 sums start at zero for every chunk; for
// 16-bit numbers the final rounding is much larger.
template <typename T, bool kPrecise>
__device__ inline void multiply_into(const typename Four<T>::Unit (&a)[2][Four<T>::kParts],
                                     const typename Four<T>::Unit (&b)[Four<T>::kParts], float (&sums)[4]) {
  if constexpr (sizeof(T) == 4) {
    float found[4];
    Four<T>::template multiply<kPrecise>(a, b, found);
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] += found[e];
  } else {
    mma(static_cast<T*>(nullptr), sums, {a[0][0].x, a[1][0].x, a[0][0].y, a[1][0].y}, b[0].x, b[0].y);
  }
}

}  // namespace fastmod::cuda
