// Shared by ops that average normalised images over their pixels.
#pragma once

#include "reduce.cuh"

namespace fastmod::cuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolChannels = kWarp;
constexpr int kPoolRows = kPoolThreads / kPoolChannels;
constexpr int kRun = 32;  // pixels of a thread per partial sum: short sums lose fewer digits

// A block has kPoolChannels channels of one image; here is what is the same for all of its pixels.
template <typename T>
struct PoolPlace {
  using C = Compute<T>;
  int row, channel;
  bool there;
  int64_t image, expert, first;  // first: of the image's pixels, in this channel
  C scale, shift;

  __device__ PoolPlace(const PoolInput<T>& input, const SumShape& shape)
      : row(threadIdx.x / kPoolChannels),
        channel(blockIdx.y * kPoolChannels + threadIdx.x % kPoolChannels),
        there(channel < shape.channels),
        image(blockIdx.x),
        expert(image - quotient(image, shape.experts) * shape.experts),
        first(image * shape.pixels * shape.channels + channel) {
    scale = there ? input.scale[expert * shape.channels + channel] : C(0);
    shift = there ? input.shift[expert * shape.channels + channel] : C(0);
  }
  // Calls step(offset) for each pixel of this thread, and after_run() after every kRun of them.
  template <typename Step, typename AfterRun>
  __device__ void by_pixels(const SumShape& shape, Step step, AfterRun after_run) const {
    for (int64_t begin = row; there && begin < shape.pixels; begin += kRun * kPoolRows) {
#pragma unroll 4
      for (int i = 0; i < kRun; ++i) {
        const int64_t pixel = begin + i * kPoolRows;
        if (pixel < shape.pixels) step(first + pixel * shape.channels);
      }
      after_run();
    }
  }
};

// The mean over the pixels, for all threads with the same channel. sums: [kPoolThreads].
template <typename T>
__device__ inline Compute<T> pooled_mean(const PoolPlace<T>& place, const PoolInput<T>& input, const SumShape& shape,
                                         Compute<T>* sums) {
  using C = Compute<T>;
  C total = 0, part = 0;
  place.by_pixels(
      shape,
      [&](int64_t i) {
        const C value = place.scale * widen(input.x[i]) + place.shift;
        part += input.relu ? rectified(value) : value;
      },
      [&] {
        total += part;
        part = 0;
      });
  return sum_of_rows<kPoolChannels>(total, sums) / C(shape.pixels);
}

inline int64_t pool_blocks_across(SumShape shape) { return (shape.channels + kPoolChannels - 1) / kPoolChannels; }

}  // namespace fastmod::cuda
