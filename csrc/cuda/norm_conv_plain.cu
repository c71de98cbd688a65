// norm_conv without tensor cores: depthwise convolutions, whose channels share nothing, and fp64. Depthwise 3x3 of
// stride 1 has its own kernels: norm_conv_depthwise.cu.
//
// A block takes kChannels neighbouring channels and kPixels pixels of one image.
#include "conv_channels.cuh"

namespace fastmod::cuda::plain {
namespace {

constexpr int kPixels = 64;
constexpr int kEach = kPixels / kRows;  // pixels per thread

__host__ __device__ inline int tiles_of(int64_t pixels) { return static_cast<int>((pixels + kPixels - 1) / kPixels); }

// The position of a block: pixels from `first` on of one image.
struct Place {
  int64_t b;
  int first;
  __device__ Place(int tiles)
      : b(blockIdx.x / tiles), first(static_cast<int>(blockIdx.x % tiles) * kPixels) {}
};

template <typename T>
struct Image {
  using C = Compute<T>;
  ConvInput<T> input;
  ConvShape shape;
  int64_t b;
  int expert;

  __device__ const T* at(int pixel) const {
    const int64_t image = shape.shared ? b : b * shape.experts + expert;
    return input.x + (image * (static_cast<int64_t>(shape.high) * shape.wide) + pixel) * shape.in;
  }
  __device__ C z(int pixel, int channel) const {
    C value = affine_of(input, shape.in, expert, channel)(widen(at(pixel)[channel]), input.relu);
    if (input.residual) value += widen(input.residual[at(pixel) - input.x + channel]);
    return rounded<T>(value * gate_of(input, shape, b, expert, channel));
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ConvForward<T> conv, int out_high, int out_wide) {
  using C = Compute<T>;
  const ConvInput<T>& input = conv.input;
  const ConvShape& shape = conv.shape;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = out_high * out_wide, tiles = tiles_of(pixels), taps = shape.kernel * shape.kernel;
  const Place at(tiles);
  const Lane lane(blockIdx.y, shape.out);
  const int expert = blockIdx.z, pad = shape.kernel / 2, depth = shape.depthwise ? 1 : shape.in;
  const Image<T> image{input, shape, at.b, expert};
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + (lane.inside ? lane.channel : 0);
  const T* weight = conv.weight + expert * conv.weight_gap;
  C values[kEach], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pixel = at.first + lane.row + i * kRows;
    values[i] = 0;
    if (!lane.inside || pixel >= pixels) continue;
    const int row = pixel / out_wide * shape.stride - pad, column = pixel % out_wide * shape.stride - pad;
    C sum = conv.bias ? widen(conv.bias[filter]) : C(0);
    for (int tap = 0; tap < taps; ++tap) {
      const int from_row = row + tap / shape.kernel, from_column = column + tap % shape.kernel;
      if (from_row < 0 || from_row >= shape.high || from_column < 0 || from_column >= shape.wide) continue;
      const int from = from_row * shape.wide + from_column;
#pragma unroll 1  // unrolled for fp64, the file took three times as long to compile
      for (int k = 0; k < depth; ++k) {
        const C z = image.z(from, shape.depthwise ? lane.channel : k);
        sum += z * widen(weight[(filter * depth + k) * taps + tap]);
        if (input.sum && lane.channel == 0) narrow(z, input.sum + (image.at(from) - input.x) + k);
      }
    }
    T held;
    narrow(sum, &held);
    conv.y[((at.b * shape.experts + expert) * pixels + pixel) * shape.out + lane.channel] = held;
    values[i] = widen(held);
    total += values[i];
  }
  if (!conv.mean) return;
  const int count = pixels - at.first < kPixels ? pixels - at.first : kPixels;
  const C middle = sum_of_rows<kChannels>(total, sums) / C(count);
  C squares = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const C apart = values[i] - middle;
    if (lane.row + i * kRows < count) squares += apart * apart;
  }
  leave_moments(conv, lane, {C(count), middle, sum_of_rows<kChannels>(squares, sums)});
}

// Scratch: sums for scale and shift [2, E, B * tiles, in], then for the gate [E, B * tiles, in]. Blocks along x finish
// a row of scale and shift, or all rows if x is shared or one row is for all experts.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const __grid_constant__ ConvBackwardX<T> conv, int out_high, int out_wide) {
  using C = Compute<T>;
  const ConvInput<T>& input = conv.input;
  const ConvShape& shape = conv.shape;
  C* partials = conv.scratch;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = shape.high * shape.wide, tiles = tiles_of(pixels), taps = shape.kernel * shape.kernel;
  const Place at(tiles);
  const Lane lane(blockIdx.y, shape.in);
  const bool inside = lane.inside;
  const int pad = shape.kernel / 2, depth = shape.depthwise ? 1 : shape.out;
  const int first_expert = shape.shared ? 0 : blockIdx.z, end_expert = shape.shared ? shape.experts : first_expert + 1;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  C found[kEach] = {}, of_scale = 0, of_shift = 0;
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const Image<T> image{input, shape, at.b, expert};
    const Gradient<T> grad{conv.grad, shape, expert, out_high * out_wide};
    // In a depthwise convolution each channel only sees itself.
    const int64_t same = static_cast<int64_t>(expert) * shape.out + (shape.depthwise && inside ? lane.channel : 0);
    const StatisticsGrad<C> statistics = statistics_grad(conv.grad, same);
    const Affine<C> affine = affine_of(input, shape.in, expert, inside ? lane.channel : 0);
    const C gate = gate_of(input, shape, at.b, expert, inside ? lane.channel : 0);
    const T* weight = conv.weight + expert * conv.weight_gap;
    C of_gate = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int pixel = at.first + lane.row + i * kRows;
      if (!lane.inside || pixel >= pixels) continue;
      C of_z = 0;
      for (int tap = 0; tap < taps; ++tap) {
        const int row = pixel / shape.wide + pad - tap / shape.kernel;
        const int column = pixel % shape.wide + pad - tap % shape.kernel;
        if (row < 0 || column < 0 || row % shape.stride || column % shape.stride) continue;
        const int to_row = row / shape.stride, to_column = column / shape.stride;
        if (to_row >= out_high || to_column >= out_wide) continue;
#pragma unroll 1
        for (int k = 0; k < depth; ++k) {
          const int channel = shape.depthwise ? lane.channel : k;
          const int64_t filter = static_cast<int64_t>(expert) * shape.out + channel;
          const int64_t w = shape.depthwise ? filter : filter * shape.in + lane.channel;
          const int to = to_row * out_wide + to_column;
          const C g = shape.depthwise ? grad.at(at.b, to, channel, statistics) : grad.at(at.b, to, channel);
          of_z += g * widen(weight[w * taps + tap]);
        }
      }
      if (conv.grad_sum) of_z += widen(conv.grad_sum[image.at(pixel) - input.x + lane.channel]);
      if (conv.grad_residual) narrow(of_z, conv.grad_residual + (image.at(pixel) - input.x) + lane.channel);
      const C x = widen(image.at(pixel)[lane.channel]), before = affine.scale * x + affine.shift;
      of_gate += of_z * (input.relu ? rectified(before) : before);
      const C of_value = input.relu && before <= C(0) ? C(0) : of_z * gate;
      of_scale += of_value * x;
      of_shift += of_value;
      found[i] += of_value * affine.scale;
    }
    of_gate = sum_of_rows<kChannels>(of_gate, sums);
    C* own = partials + static_cast<int64_t>(blockIdx.x) * shape.in + lane.channel;
    if (inside && lane.row == 0) own[2 * all + expert * each] = of_gate;
    if (input.scale_rows == 1 && expert + 1 < end_expert) continue;  // one row for all experts
    of_scale = sum_of_rows<kChannels>(of_scale, sums);
    of_shift = sum_of_rows<kChannels>(of_shift, sums);
    if (inside && lane.row == 0) {
      own += (shape.shared && input.scale_rows == 1 ? 0 : expert) * each;
      own[0] = of_scale;
      own[all] = of_shift;
    }
    of_scale = of_shift = 0;
  }
  const int64_t image = shape.shared ? at.b : at.b * shape.experts + first_expert;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pixel = at.first + lane.row + i * kRows;
    if (!conv.grad_x || !lane.inside || pixel >= pixels) continue;
    narrow(found[i], conv.grad_x + (image * pixels + pixel) * shape.in + lane.channel);
  }
  finish_backward_x(conv, lane, at.b, tiles, sums);
}

// Blocks along x share the pixels of all images; lanes are inputs of one output channel. Scratch: partial weights
// [blocks, E, out, inputs, taps], then partial biases [blocks, E, out].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(const __grid_constant__ ConvBackwardWeight<T> conv, int out_high, int out_wide) {
  using C = Compute<T>;
  const ConvInput<T>& input = conv.input;
  const ConvShape& shape = conv.shape;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = out_high * out_wide, taps = shape.kernel * shape.kernel, pad = shape.kernel / 2;
  const int expert = blockIdx.z, across = (shape.in + kChannels - 1) / kChannels;
  const Lane lane(blockIdx.y % across, shape.in);
  const bool inside = lane.inside;
  const int channel = shape.depthwise ? (inside ? lane.channel : 0) : static_cast<int>(blockIdx.y / across);
  const int inputs = shape.depthwise ? 1 : shape.in;
  const Gradient<T> grad{conv.grad, shape, expert, pixels};
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + channel;
  const StatisticsGrad<C> statistics = statistics_grad(conv.grad, filter);
  const int64_t all_pixels = shape.batch * pixels, share = (all_pixels + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * share, last = first + share < all_pixels ? first + share : all_pixels;
  C found[kMaxTaps] = {}, of_bias = 0;
  for (int64_t i = first + lane.row; inside && i < last; i += kRows) {
    const int64_t b = quotient(i, pixels);
    const int pixel = static_cast<int>(i - b * pixels);
    const int row = pixel / out_wide * shape.stride - pad, column = pixel % out_wide * shape.stride - pad;
    const Image<T> image{input, shape, b, expert};
    const C g = grad.at(b, pixel, channel, statistics);
    of_bias += g;
#pragma unroll
    for (int tap = 0; tap < kMaxTaps; ++tap) {
      if (tap >= taps) break;
      const int from_row = row + tap / shape.kernel, from_column = column + tap % shape.kernel;
      if (from_row < 0 || from_row >= shape.high || from_column < 0 || from_column >= shape.wide) continue;
      found[tap] += g * image.z(from_row * shape.wide + from_column, lane.channel);
    }
  }
  const int64_t own = (filter * inputs + (shape.depthwise ? 0 : lane.channel)) * taps;
  leave_weights(conv, lane, found, of_bias, filter, inputs, own, shape.depthwise || lane.channel == 0, sums);
}

// Enough blocks to fill a GPU, but each with enough pixels to be worth a partial result.
unsigned weight_blocks(const ConvShape& shape) {
  const int64_t pixels = shape.batch * shape.out_high() * shape.out_wide(), blocks = (pixels + 255) / 256;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 64 ? 64 : blocks);
}

dim3 grid_of(const ConvShape& shape, int64_t pixels, int channels, int experts) {
  const dim3 blocks = blocks_for(shape.batch * tiles_of(pixels), 1);
  return dim3(blocks.x, static_cast<unsigned>(channel_tiles(channels)), static_cast<unsigned>(experts));
}

}  // namespace

template <typename T>
Scratch forward_scratch(const ConvShape& shape) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(shape)) return depthwise::forward_scratch<T>(shape);
  }
  const int64_t blocks = shape.batch * tiles_of(static_cast<int64_t>(shape.out_high()) * shape.out_wide());
  return {3 * blocks * shape.experts * shape.out,
          shape.experts * channel_tiles(shape.out) * reduce_tickets<kGroup>(blocks)};
}
template <typename T>
Scratch backward_x_scratch(const ConvShape& shape) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(shape)) return depthwise::backward_x_scratch<T>(shape);
  }
  return backward_x_parts(shape, tiles_of(static_cast<int64_t>(shape.high) * shape.wide));
}
template <typename T>
Scratch backward_weight_scratch(const ConvShape& shape) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(shape)) return depthwise::backward_weight_scratch<T>(shape);
  }
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, blocks = weight_blocks(shape);
  const int rows = channel_tiles(shape.in) * (shape.depthwise ? 1 : shape.out);
  return {blocks * filters * ((shape.depthwise ? 1 : shape.in) * shape.kernel * shape.kernel + 1),
          shape.experts * rows * reduce_tickets<kGroup>(blocks)};
}

template <typename T>
cudaError_t forward(const ConvForward<T>& conv, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(conv.shape)) return depthwise::forward<T>(conv, stream);
  }
  const int high = conv.shape.out_high(), wide = conv.shape.out_wide();
  const dim3 grid = grid_of(conv.shape, static_cast<int64_t>(high) * wide, conv.shape.out, conv.shape.experts);
  return FASTMOD_LAUNCH(forward_kernel<T>, grid, kThreads, stream, conv, high, wide);
}

template <typename T>
cudaError_t backward_x(const ConvBackwardX<T>& conv, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(conv.shape)) return depthwise::backward_x<T>(conv, stream);
  }
  const ConvShape& shape = conv.shape;
  const dim3 grid = grid_of(shape, static_cast<int64_t>(shape.high) * shape.wide, shape.in,
                            shape.shared ? 1 : shape.experts);
  return FASTMOD_LAUNCH(backward_x_kernel<T>, grid, kThreads, stream, conv, shape.out_high(), shape.out_wide());
}

template <typename T>
cudaError_t backward_weight(const ConvBackwardWeight<T>& conv, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (depthwise::serves<T>(conv.shape)) return depthwise::backward_weight<T>(conv, stream);
  }
  const ConvShape& shape = conv.shape;
  const int rows = channel_tiles(shape.in) * (shape.depthwise ? 1 : shape.out);
  const dim3 grid(weight_blocks(shape), static_cast<unsigned>(rows), static_cast<unsigned>(shape.experts));
  return FASTMOD_LAUNCH(backward_weight_kernel<T>, grid, kThreads, stream, conv, shape.out_high(), shape.out_wide());
}

FASTMOD_PLAIN_LAUNCHES(template, float, <float>)
FASTMOD_PLAIN_LAUNCHES(template, double, <double>)
FASTMOD_PLAIN_LAUNCHES(template, __half, <__half>)
FASTMOD_PLAIN_LAUNCHES(template, __nv_bfloat16, <__nv_bfloat16>)

}  // namespace fastmod::cuda::plain
