// norm_conv without tensor cores: depthwise convolutions, whose channels have nothing to share, and fp64.
//
// A block takes kChannels neighbouring channels and kPixels pixels of one image; a warp's lanes are channels, which lie
// side by side in memory.
#include "norm_conv.cuh"

namespace fastmod::cuda::plain {
namespace {

constexpr int kThreads = 128;
constexpr int kChannels = kWarp;
constexpr int kRows = kThreads / kChannels;
constexpr int kPixels = 64;
constexpr int kEach = kPixels / kRows;  // pixels of a thread
constexpr int kMaxTaps = 9;

__host__ __device__ inline int tiles_of(int64_t pixels) { return static_cast<int>((pixels + kPixels - 1) / kPixels); }
inline int channel_tiles(int channels) { return (channels + kChannels - 1) / kChannels; }

// Where a block works: one image, pixels first .. of it, one channel a thread.
struct Place {
  int64_t b;
  int first, channel, row, lane;
  __device__ Place(int tiles)
      : b(blockIdx.x / tiles),
        first(static_cast<int>(blockIdx.x % tiles) * kPixels),
        channel(static_cast<int>(blockIdx.y) * kChannels + threadIdx.x % kChannels),
        row(threadIdx.x / kChannels),
        lane(threadIdx.x % kChannels) {}
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
    const C value = affine_of(input, shape.in, expert, channel)(widen(at(pixel)[channel]), input.relu);
    return rounded<T>(value * gate_of(input, shape, b, expert, channel));
  }
};

template <typename T>
struct Gradient {
  using C = Compute<T>;
  ConvGrad<T> grad;
  ConvShape shape;
  int expert, pixels;

  __device__ C at(int64_t b, int pixel, int channel, const StatisticsGrad<C>& statistics) const {
    const int64_t i = ((b * shape.experts + expert) * pixels + pixel) * shape.out + channel;
    C value = widen(grad.grad[i]) + statistics.offset;
    if (grad.grad_var) value += statistics.slope * (widen(grad.y[i]) - statistics.mean);
    return rounded<T>(value);
  }
  __device__ C at(int64_t b, int pixel, int channel) const {
    const int64_t statistics = static_cast<int64_t>(expert) * shape.out + channel;
    return at(b, pixel, channel, statistics_grad(grad, statistics));
  }
};

// Sum over the rows of a block in a fixed order, for every channel; all threads get it. Two barriers.
template <typename C>
__device__ inline C sum_of_rows(C value, C* sums, const Place& place) {
  __syncthreads();  // the sums before have been read
  sums[place.row * kChannels + place.lane] = value;
  __syncthreads();
  C total = 0;
  for (int row = 0; row < kRows; ++row) total += sums[row * kChannels + place.lane];
  return total;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ConvInput<T> input, const T* weight, const T* bias, T* y,
                   Compute<T>* mean, Compute<T>* var, Compute<T>* partials, unsigned* tickets,
                   const __grid_constant__ ConvShape shape, int out_high, int out_wide) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = out_high * out_wide, tiles = tiles_of(pixels), taps = shape.kernel * shape.kernel;
  const Place at(tiles);
  const int expert = blockIdx.z, pad = shape.kernel / 2, depth = shape.depthwise ? 1 : shape.in;
  const Image<T> image{input, shape, at.b, expert};
  const bool inside = at.channel < shape.out;
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + (inside ? at.channel : 0);
  C values[kEach], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pixel = at.first + at.row + i * kRows;
    values[i] = 0;
    if (!inside || pixel >= pixels) continue;
    const int row = pixel / out_wide * shape.stride - pad, column = pixel % out_wide * shape.stride - pad;
    C sum = bias ? widen(bias[filter]) : C(0);
    for (int tap = 0; tap < taps; ++tap) {
      const int from_row = row + tap / shape.kernel, from_column = column + tap % shape.kernel;
      if (from_row < 0 || from_row >= shape.high || from_column < 0 || from_column >= shape.wide) continue;
      const int from = from_row * shape.wide + from_column;
      for (int k = 0; k < depth; ++k) {
        sum += image.z(from, shape.depthwise ? at.channel : k) * widen(weight[(filter * depth + k) * taps + tap]);
      }
    }
    T held;
    narrow(sum, &held);
    y[((at.b * shape.experts + expert) * pixels + pixel) * shape.out + at.channel] = held;
    values[i] = widen(held);
    total += values[i];
  }
  if (!mean) return;
  const int count = pixels - at.first < kPixels ? pixels - at.first : kPixels;
  const C middle = sum_of_rows(total, sums, at) / C(count);
  C squares = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const C apart = values[i] - middle;
    if (at.row + i * kRows < count) squares += apart * apart;
  }
  squares = sum_of_rows(squares, sums, at);
  if (inside && at.row == 0) {
    C* own = partials + 2 * ((static_cast<int64_t>(expert) * gridDim.x + blockIdx.x) * shape.out + at.channel);
    own[0] = middle;
    own[1] = squares;
  }
  if (!last_to_arrive(tickets + expert * gridDim.y + blockIdx.y, gridDim.x) || at.row > 0 || !inside) return;
  Moments<C> all;
  for (int64_t tile = 0; tile < gridDim.x; ++tile) {
    const C* part = partials + 2 * ((static_cast<int64_t>(expert) * gridDim.x + tile) * shape.out + at.channel);
    const int left = pixels - static_cast<int>(tile % tiles) * kPixels;
    all.join(C(left < kPixels ? left : kPixels), fresh(part), fresh(part + 1));
  }
  mean[filter] = all.mean;
  var[filter] = all.squares / all.count;
}

// Scratch: sums for scale and shift [2, E, B * tiles, in], then for the gate [E, B * tiles, in].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const __grid_constant__ ConvGrad<T> gradient, const __grid_constant__ ConvInput<T> input,
                      const T* weight, T* grad_x, Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate,
                      Compute<T>* partials, unsigned* ticket, const __grid_constant__ ConvShape shape, int out_high,
                      int out_wide) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = shape.high * shape.wide, tiles = tiles_of(pixels), taps = shape.kernel * shape.kernel;
  const Place at(tiles);
  const int pad = shape.kernel / 2, depth = shape.depthwise ? 1 : shape.out;
  const bool inside = at.channel < shape.in;
  const int first_expert = shape.shared ? 0 : blockIdx.z, end_expert = shape.shared ? shape.experts : first_expert + 1;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  C found[kEach] = {};
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const Image<T> image{input, shape, at.b, expert};
    const Gradient<T> grad{gradient, shape, expert, out_high * out_wide};
    const Affine<C> affine = affine_of(input, shape.in, expert, inside ? at.channel : 0);
    const C gate = gate_of(input, shape, at.b, expert, inside ? at.channel : 0);
    C of_scale = 0, of_shift = 0, of_gate = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int pixel = at.first + at.row + i * kRows;
      if (!inside || pixel >= pixels) continue;
      C of_z = 0;
      for (int tap = 0; tap < taps; ++tap) {
        const int row = pixel / shape.wide + pad - tap / shape.kernel;
        const int column = pixel % shape.wide + pad - tap % shape.kernel;
        if (row < 0 || column < 0 || row % shape.stride || column % shape.stride) continue;
        const int to_row = row / shape.stride, to_column = column / shape.stride;
        if (to_row >= out_high || to_column >= out_wide) continue;
        for (int k = 0; k < depth; ++k) {
          const int channel = shape.depthwise ? at.channel : k;
          const int64_t filter = static_cast<int64_t>(expert) * shape.out + channel;
          const int64_t w = shape.depthwise ? filter : filter * shape.in + at.channel;
          of_z += grad.at(at.b, to_row * out_wide + to_column, channel) * widen(weight[w * taps + tap]);
        }
      }
      const C x = widen(image.at(pixel)[at.channel]), before = affine.scale * x + affine.shift;
      of_gate += of_z * (input.relu ? rectified(before) : before);
      const C of_value = input.relu && before <= C(0) ? C(0) : of_z * gate;
      of_scale += of_value * x;
      of_shift += of_value;
      found[i] += of_value * affine.scale;
    }
    of_scale = sum_of_rows(of_scale, sums, at);
    of_shift = sum_of_rows(of_shift, sums, at);
    of_gate = sum_of_rows(of_gate, sums, at);
    if (inside && at.row == 0) {
      C* own = partials + expert * each + static_cast<int64_t>(blockIdx.x) * shape.in + at.channel;
      own[0] = of_scale;
      own[all] = of_shift;
      own[2 * all] = of_gate;
    }
  }
  const int64_t image = shape.shared ? at.b : at.b * shape.experts + first_expert;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pixel = at.first + at.row + i * kRows;
    if (grad_x && inside && pixel < pixels) narrow(found[i], grad_x + (image * pixels + pixel) * shape.in + at.channel);
  }
  if (!grad_scale && !grad_gate) return;
  if (!last_to_arrive(ticket + blockIdx.y, gridDim.x * gridDim.z) || !inside) return;
  C of_scale = 0, of_shift = 0;
  for (int expert = 0; expert < shape.experts; ++expert) {
    const C* part = partials + expert * each + at.channel;
    if (grad_scale && at.row == 0) {
      if (input.scale_rows > 1) of_scale = of_shift = 0;
      for (int64_t tile = 0; tile < gridDim.x; ++tile) {
        of_scale += fresh(part + tile * shape.in);
        of_shift += fresh(part + all + tile * shape.in);
      }
      const int64_t to = static_cast<int64_t>(input.scale_rows > 1 ? expert : 0) * shape.in + at.channel;
      grad_scale[to] = of_scale;
      grad_shift[to] = of_shift;
    }
    for (int64_t b = at.row; grad_gate && b < shape.batch; b += kRows) {
      C of_gate = 0;
      for (int64_t tile = b * tiles; tile < (b + 1) * tiles; ++tile) of_gate += fresh(part + 2 * all + tile * shape.in);
      narrow(of_gate, grad_gate + (b * shape.experts + expert) * shape.in + at.channel);
    }
  }
}

// Blocks along x share the pixels of all images out; lanes are inputs of one output channel. Scratch: partial weights
// [blocks, E, out, inputs, taps], then partial biases [blocks, E, out].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(const __grid_constant__ ConvGrad<T> gradient, const __grid_constant__ ConvInput<T> input,
                           T* grad_weight, T* grad_bias, Compute<T>* partials, unsigned* tickets,
                           const __grid_constant__ ConvShape shape, int out_high, int out_wide) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kRows * kChannels);
  const int pixels = out_high * out_wide, taps = shape.kernel * shape.kernel, pad = shape.kernel / 2;
  const int expert = blockIdx.z, across = (shape.in + kChannels - 1) / kChannels;
  Place at(1);
  at.channel = static_cast<int>(blockIdx.y % across) * kChannels + at.lane;
  const bool inside = at.channel < shape.in;
  const int channel = shape.depthwise ? (inside ? at.channel : 0) : static_cast<int>(blockIdx.y / across);
  const int inputs = shape.depthwise ? 1 : shape.in;
  const Gradient<T> grad{gradient, shape, expert, pixels};
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + channel;
  const StatisticsGrad<C> statistics = statistics_grad(gradient, filter);
  const int64_t all_pixels = shape.batch * pixels, share = (all_pixels + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * share, last = first + share < all_pixels ? first + share : all_pixels;
  C found[kMaxTaps] = {}, of_bias = 0;
  for (int64_t i = first + at.row; inside && i < last; i += kRows) {
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
      found[tap] += g * image.z(from_row * shape.wide + from_column, at.channel);
    }
  }
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, weights = filters * inputs * taps;
  const int64_t own = (filter * inputs + (shape.depthwise ? 0 : at.channel)) * taps;
  C* biases = partials + gridDim.x * weights;
  const bool with_bias = grad_bias && inside && (shape.depthwise || at.channel == 0) && at.row == 0;
#pragma unroll
  for (int tap = 0; tap < kMaxTaps; ++tap) {
    if (tap >= taps) break;
    const C total = sum_of_rows(found[tap], sums, at);
    if (inside && at.row == 0) partials[blockIdx.x * weights + own + tap] = total;
  }
  of_bias = sum_of_rows(of_bias, sums, at);
  if (with_bias) biases[blockIdx.x * filters + filter] = of_bias;
  if (!last_to_arrive(tickets + expert * gridDim.y + blockIdx.y, gridDim.x) || !inside) return;
  for (int tap = at.row; grad_weight && tap < taps; tap += kRows) {
    C total = 0;
    for (int64_t block = 0; block < gridDim.x; ++block) total += fresh(partials + block * weights + own + tap);
    narrow(total, grad_weight + own + tap);
  }
  if (!with_bias) return;
  C total = 0;
  for (int64_t block = 0; block < gridDim.x; ++block) total += fresh(biases + block * filters + filter);
  narrow(total, grad_bias + filter);
}

// Enough blocks to fill a GPU, each with enough pixels to be worth its partial result.
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
int64_t forward_scratch(const ConvShape& shape) {
  const int64_t pixels = static_cast<int64_t>(shape.out_high()) * shape.out_wide();
  return 2 * shape.batch * tiles_of(pixels) * shape.experts * shape.out;
}
template <typename T>
int64_t backward_x_scratch(const ConvShape& shape) {
  return 3 * shape.batch * tiles_of(static_cast<int64_t>(shape.high) * shape.wide) * shape.experts * shape.in;
}
template <typename T>
int64_t backward_weight_scratch(const ConvShape& shape) {
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out;
  return weight_blocks(shape) * filters * ((shape.depthwise ? 1 : shape.in) * shape.kernel * shape.kernel + 1);
}

template <typename T>
cudaError_t forward(const ConvInput<T>& input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                    Compute<T>* var, Compute<T>* scratch, unsigned* tickets, const ConvShape& shape,
                    cudaStream_t stream) {
  const int high = shape.out_high(), wide = shape.out_wide();
  const dim3 grid = grid_of(shape, static_cast<int64_t>(high) * wide, shape.out, shape.experts);
  return FASTMOD_LAUNCH(forward_kernel<T>, grid, kThreads, stream, input, weight, bias, y, mean, var, scratch, tickets,
                        shape, high, wide);
}

template <typename T>
cudaError_t backward_x(const ConvGrad<T>& grad, const ConvInput<T>& input, const T* weight, T* grad_x,
                       Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                       unsigned* tickets, const ConvShape& shape, cudaStream_t stream) {
  const dim3 grid = grid_of(shape, static_cast<int64_t>(shape.high) * shape.wide, shape.in,
                            shape.shared ? 1 : shape.experts);
  return FASTMOD_LAUNCH(backward_x_kernel<T>, grid, kThreads, stream, grad, input, weight, grad_x, grad_scale,
                        grad_shift, grad_gate, scratch, tickets, shape, shape.out_high(), shape.out_wide());
}

template <typename T>
cudaError_t backward_weight(const ConvGrad<T>& grad, const ConvInput<T>& input, T* grad_weight, T* grad_bias,
                            Compute<T>* scratch, unsigned* tickets, const ConvShape& shape, cudaStream_t stream) {
  const int rows = channel_tiles(shape.in) * (shape.depthwise ? 1 : shape.out);
  const dim3 grid(weight_blocks(shape), static_cast<unsigned>(rows), static_cast<unsigned>(shape.experts));
  return FASTMOD_LAUNCH(backward_weight_kernel<T>, grid, kThreads, stream, grad, input, grad_weight, grad_bias, scratch,
                        tickets, shape, shape.out_high(), shape.out_wide());
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template int64_t forward_scratch<T>(const ConvShape&);                                                              \
  template int64_t backward_x_scratch<T>(const ConvShape&);                                                           \
  template int64_t backward_weight_scratch<T>(const ConvShape&);                                                      \
  template cudaError_t forward<T>(const ConvInput<T>&, const T*, const T*, T*, Compute<T>*, Compute<T>*, Compute<T>*, \
                                  unsigned*, const ConvShape&, cudaStream_t);                                         \
  template cudaError_t backward_x<T>(const ConvGrad<T>&, const ConvInput<T>&, const T*, T*, Compute<T>*, Compute<T>*, \
                                     T*, Compute<T>*, unsigned*, const ConvShape&, cudaStream_t);                     \
  template cudaError_t backward_weight<T>(const ConvGrad<T>&, const ConvInput<T>&, T*, T*, Compute<T>*, unsigned*,    \
                                          const ConvShape&, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda::plain
