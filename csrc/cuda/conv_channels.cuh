// Shared by norm_conv_plain.cu and norm_conv_depthwise.cu: convolutions without tensor cores. The lanes of a warp take
// kChannels neighbouring channels, which are side by side in memory; the warps of a block share the pixels.
#pragma once

#include "norm_conv.cuh"

namespace fastmod::cuda {

constexpr int kThreads = 128;
constexpr int kChannels = kWarp;
constexpr int kRows = kThreads / kChannels;
constexpr int kMaxTaps = 9;

inline int channel_tiles(int channels) { return (channels + kChannels - 1) / kChannels; }

// The channel of a thread, in the `tile`-th group of kChannels, and its row among the threads of that channel.
struct Lane {
  int channel, row;
  bool inside;
  __device__ Lane(unsigned tile, int channels)
      : channel(static_cast<int>(tile) * kChannels + static_cast<int>(threadIdx.x) % kChannels),
        row(threadIdx.x / kChannels),
        inside(channel < channels) {}
};

template <typename T>
struct Gradient {
  using C = Compute<T>;
  ConvGrad<T> grad;
  ConvShape shape;
  int expert, pixels;

  __device__ C at(int64_t b, int pixel, int channel, const StatisticsGrad<C>& statistics) const {
    return at(((b * shape.experts + expert) * pixels + pixel) * shape.out + channel, statistics);
  }
  __device__ C at(int64_t i, const StatisticsGrad<C>& statistics) const {
    // The offset is not added on its own: the same rounding in every pixel would accumulate in sums over many pixels.
    C added = statistics.offset;
    if (grad.y) added += statistics.slope * (widen(grad.y[i]) - statistics.mean);
    return rounded<T>(widen(grad.grad[i]) + added);
  }
  __device__ C at(int64_t b, int pixel, int channel) const {
    const int64_t statistics = static_cast<int64_t>(expert) * shape.out + channel;
    return at(b, pixel, channel, statistics_grad(grad, statistics));
  }
};

// Stores a block's share of mean and variance, and computes both once all blocks along x have stored theirs. Scratch:
// moments [E, blocks along x, out]. Only row 0 of `moments` counts.
template <typename T>
__device__ inline void leave_moments(const ConvForward<T>& conv, const Lane& lane,
                                     const Moments<Compute<T>>& moments) {
  using C = Compute<T>;
  const int expert = blockIdx.z;
  const bool own = lane.inside && lane.row == 0;
  const int64_t filter = static_cast<int64_t>(expert) * conv.shape.out + (lane.inside ? lane.channel : 0);
  const auto left_by = [&](int64_t block) {
    return conv.scratch + 3 * ((static_cast<int64_t>(expert) * gridDim.x + block) * conv.shape.out + lane.channel);
  };
  if (own) moments.write(left_by(blockIdx.x));
  unsigned* tickets = conv.tickets + (expert * gridDim.y + blockIdx.y) * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(tickets, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool all) {
    if (!own) return;
    Moments<C> sum;
    for (int64_t block = first; block < end; block += step) sum.join(Moments<C>::read(left_by(block)));
    if (!all) return sum.write(left_by(first));
    conv.mean[filter] = sum.mean;
    conv.var[filter] = sum.squares / sum.count;
    if (conv.norm.scale) finish_norm(conv.norm, filter, sum.mean, sum.squares / sum.count);
  });
}

// The end of the gradient of x: adds up the partial sums that blocks stored, [2, E, B * tiles, in] for scale and shift
// and [E, B * tiles, in] for gates. `tiles`: of an image; b: the image.
template <typename T>
__device__ inline void finish_backward_x(const ConvBackwardX<T>& conv, const Lane& lane, int64_t b, int tiles,
                                         Compute<T>* sums) {
  using C = Compute<T>;
  const ConvShape& shape = conv.shape;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  if (conv.grad_scale) {
    const Block block{blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z};
    finish_affine<kChannels>(conv.scratch, conv.grad_scale, conv.grad_shift, conv.tickets, shape,
                             conv.input.scale_rows, block, lane.channel, sums);
  }
  if (!conv.grad_gate) return;
  unsigned* own = conv.tickets + affine_tickets(gridDim.x, gridDim.y, shape.experts);
  if (!last_to_arrive(own + (b * gridDim.z + blockIdx.z) * gridDim.y + blockIdx.y, tiles)) return;
  if (!lane.inside || lane.row > 0) return;
  const int first = shape.shared ? 0 : blockIdx.z, end = shape.shared ? shape.experts : first + 1;
  for (int expert = first; expert < end; ++expert) {
    const C* part = conv.scratch + 2 * all + expert * each + lane.channel;
    C of_gate = 0;
    for (int64_t tile = b * tiles; tile < (b + 1) * tiles; ++tile) of_gate += fresh(part + tile * shape.in);
    narrow(of_gate, conv.grad_gate + (b * shape.experts + expert) * shape.in + lane.channel);
  }
}
inline Scratch backward_x_parts(const ConvShape& shape, int64_t tiles) {
  const int across = channel_tiles(shape.in);
  const int64_t blocks = shape.batch * tiles;
  return {3 * blocks * shape.experts * shape.in,
          affine_tickets(blocks, across, shape.experts) + shape.batch * shape.experts * across};
}

// Adds up the gradients of weights and bias over the warps, then over the blocks along x. Scratch: partial weights
// [blocks, E, out, inputs, taps], then partial biases [blocks, E, out]. `own`: the weights of one filter; `once`:
// whether this thread's lane also handles what the filter has only once (its bias and batch norm).
template <typename T>
__device__ inline void leave_weights(const ConvBackwardWeight<T>& conv, const Lane& lane,
                                     const Compute<T> (&found)[kMaxTaps], Compute<T> of_bias, int64_t filter,
                                     int inputs, int64_t own, bool once, Compute<T>* sums) {
  using C = Compute<T>;
  const int taps = conv.shape.kernel * conv.shape.kernel;
  const int64_t filters = static_cast<int64_t>(conv.shape.experts) * conv.shape.out, weights = filters * inputs * taps;
  const bool first_row = lane.inside && lane.row == 0, with_bias = conv.grad_bias && once && first_row;
  C *partials = conv.scratch, *biases = partials + gridDim.x * weights;
  if (conv.grad.grad_scale && once && first_row && blockIdx.x == 0) norm_grads(conv.grad, filter);
#pragma unroll
  for (int tap = 0; tap < kMaxTaps; ++tap) {
    if (tap >= taps) break;
    const C total = sum_of_rows<kChannels>(found[tap], sums);
    if (first_row) partials[blockIdx.x * weights + own + tap] = total;
  }
  of_bias = sum_of_rows<kChannels>(of_bias, sums);
  if (with_bias) biases[blockIdx.x * filters + filter] = of_bias;
  unsigned* ticket = conv.tickets + (blockIdx.z * gridDim.y + blockIdx.y) * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool all) {
    if (!lane.inside) return;
    for (int tap = lane.row; tap < taps; tap += kRows) {
      C total = 0;
      for (int64_t block = first; block < end; block += step) total += fresh(partials + block * weights + own + tap);
      if (!all) partials[first * weights + own + tap] = total;
      else if (conv.grad_weight) narrow(total, conv.grad_weight + own + tap);
    }
    if (!with_bias) return;
    C total = 0;
    for (int64_t block = first; block < end; block += step) total += fresh(biases + block * filters + filter);
    if (!all) biases[first * filters + filter] = total;
    else narrow(total, conv.grad_bias + filter);
  });
}

}  // namespace fastmod::cuda
