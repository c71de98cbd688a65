// Shared by the convolutions on tensor cores (norm_conv.cu) and the plain ones (norm_conv_plain.cu).
#pragma once

#include "reduce.cuh"

namespace fastmod::cuda {

// Rounded to T.
template <typename T>
__device__ inline Compute<T> rounded(Compute<T> value) {
  T held;
  narrow(value, &held);
  return widen(held);
}

// Scale, shift and gate of one channel; ones and zeros if there are none.
template <typename C>
struct Affine {
  C scale = 1, shift = 0;
  __device__ C operator()(C x, bool relu) const {
    const C value = scale * x + shift;
    return relu ? rectified(value) : value;
  }
};
template <typename T>
__device__ inline Affine<Compute<T>> affine_of(const ConvInput<T>& input, int in, int expert, int channel) {
  if (!input.scale) return {};
  const int64_t at = static_cast<int64_t>(input.scale_rows == 1 ? 0 : expert) * in + channel;
  return {input.scale[at], input.shift[at]};
}
template <typename T>
__device__ inline Compute<T> gate_of(const ConvInput<T>& input, const ConvShape& shape, int64_t b, int expert,
                                     int channel) {
  return input.gate ? widen(input.gate[(b * shape.experts + expert) * shape.in + channel]) : Compute<T>(1);
}

// What mean and variance add to the gradient of y: offset + slope * (y - mean).
template <typename C>
struct StatisticsGrad {
  C offset = 0, slope = 0, mean = 0;
};
template <typename T>
__device__ inline StatisticsGrad<Compute<T>> statistics_grad(const ConvGrad<T>& grad, int64_t channel) {
  using C = Compute<T>;
  StatisticsGrad<C> result;
  if (grad.grad_scale) {  // for a batch norm: scale = weight / sqrt(var + eps), shift = bias - mean * scale
    const C of_shift = grad.grad_shift[channel], whole = grad.grad_scale[channel] - grad.mean[channel] * of_shift;
    const C factor = grad.scale[channel] * grad.per_value;
    return {-factor * of_shift, -factor * whole / (grad.var[channel] + grad.eps), grad.mean[channel]};
  }
  if (grad.grad_mean) result.offset = grad.grad_mean[channel] * grad.per_value;
  if (grad.grad_var) {
    result.slope = C(2) * grad.grad_var[channel] * grad.per_value;
    result.mean = grad.mean[channel];
  }
  return result;
}

// The gradients of a batch norm's own parameters.
template <typename T>
__device__ inline void norm_grads(const ConvGrad<T>& grad, int64_t channel) {
  using C = Compute<T>;
  const C of_shift = grad.grad_shift[channel], whole = grad.grad_scale[channel] - grad.mean[channel] * of_shift;
  if (grad.norm_weight) grad.norm_weight[channel] = whole * inverse_root(grad.var[channel] + grad.eps);
  if (grad.norm_bias) grad.norm_bias[channel] = of_shift;
}

// The position of a block among those of its convolution. It replaces blockIdx and gridDim, as several convolutions may
// share a launch.
struct Block {
  unsigned x, y, z, across, down, deep;
};

// Count, mean and sum of squared deviations, combined by the formula of Chan, Golub and LeVeque, without cancellation.
template <typename C>
struct Moments {
  C count = 0, mean = 0, squares = 0;
  __device__ void join(const Moments& other) {
    const C total = count + other.count, part = other.count / total, apart = other.mean - mean;
    squares += other.squares + apart * apart * count * part;
    mean += apart * part;
    count = total;
  }
  __device__ static Moments read(const C* from) { return {fresh(from), fresh(from + 1), fresh(from + 2)}; }
  __device__ void write(C* to) const {
    to[0] = count;
    to[1] = mean;
    to[2] = squares;
  }
};

// Computes the gradients of scale and shift from the sums that the blocks along x and z have stored for the channels of
// a block along y: partials [2, E, blocks along x, in]. One expert's blocks sum up a row of them. If one row is for all
// experts, all blocks sum it up; if blocks take all experts (block.deep is 1), the blocks along x sum up each row in
// turn. Threads with the same channel, kColumns apart, share the work through `sums` [threads].
template <int kColumns, typename C>
__device__ inline void finish_affine(C* partials, C* grad_scale, C* grad_shift, unsigned* tickets,
                                     const ConvShape& shape, int scale_rows, const Block& block, int channel, C* sums) {
  const int row = threadIdx.x / kColumns, rows = static_cast<int>(blockDim.x) / kColumns;
  const int64_t across = block.across, second = shape.experts * across * shape.in;
  const bool there = channel < shape.in;
  const bool together = scale_rows == 1 && block.deep > 1;  // partials of all experts are one long list
  const int first_row = block.deep == 1 ? 0 : together ? 0 : static_cast<int>(block.z);
  const int end_row = block.deep == 1 ? scale_rows : first_row + 1;
  const unsigned blocks = block.across * (together ? block.deep : 1);
  const unsigned own = together ? block.z * block.across + block.x : block.x;
  unsigned* ticket = tickets + (first_row * block.down + block.y) * reduce_tickets<kGroup>(blocks);
  reduce_in_order<kGroup>(ticket, own, blocks, [&](unsigned first, unsigned end, unsigned step, bool all) {
    for (int r = first_row; r < end_row; ++r) {
      C* part = partials + r * across * shape.in + channel;
      C of_scale = 0, of_shift = 0;
#pragma unroll 4
      for (int64_t from = first + row * static_cast<int64_t>(step); there && from < end; from += rows * step) {
        of_scale += fresh(part + from * shape.in);
        of_shift += fresh(part + second + from * shape.in);
      }
      of_scale = sum_of_rows<kColumns>(of_scale, sums);
      of_shift = sum_of_rows<kColumns>(of_shift, sums);
      if (!there || row > 0) continue;
      C* to_scale = all ? grad_scale + static_cast<int64_t>(r) * shape.in + channel : part + first * shape.in;
      C* to_shift = all ? grad_shift + static_cast<int64_t>(r) * shape.in + channel : part + second + first * shape.in;
      *to_scale = of_scale;
      *to_shift = of_shift;
    }
  });
}
// Enough for any arrangement of the experts.
__host__ __device__ inline int64_t affine_tickets(int64_t blocks, int64_t across, int experts) {
  return experts * across * reduce_tickets<kGroup>(blocks);
}

// ---- launches without tensor cores, each of one convolution

// In namespaces of their own: FASTMOD_PLAIN_LAUNCHES(template <typename T>, T) declares them, and
// FASTMOD_PLAIN_LAUNCHES(template, float, <float>) instantiates them.
#define FASTMOD_PLAIN_LAUNCHES(Template, T, ...)                                            \
  Template Scratch forward_scratch __VA_ARGS__(const ConvShape&);                           \
  Template Scratch backward_x_scratch __VA_ARGS__(const ConvShape&);                        \
  Template Scratch backward_weight_scratch __VA_ARGS__(const ConvShape&);                   \
  Template cudaError_t forward __VA_ARGS__(const ConvForward<T>&, cudaStream_t);            \
  Template cudaError_t backward_x __VA_ARGS__(const ConvBackwardX<T>&, cudaStream_t);       \
  Template cudaError_t backward_weight __VA_ARGS__(const ConvBackwardWeight<T>&, cudaStream_t);

// norm_conv_plain.cu: any dtype
namespace plain {
FASTMOD_PLAIN_LAUNCHES(template <typename T>, T)
}  // namespace plain

// norm_conv_depthwise.cu: depthwise 3x3 of stride 1 where experts do not share x
namespace depthwise {
template <typename T>
bool serves(const ConvShape& shape) {
  return sizeof(T) <= 4 && shape.depthwise && shape.kernel == 3 && shape.stride == 1 && !shape.shared;
}
FASTMOD_PLAIN_LAUNCHES(template <typename T>, T)
}  // namespace depthwise

}  // namespace fastmod::cuda
