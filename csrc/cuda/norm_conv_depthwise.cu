// norm_conv, depthwise 3x3 of stride 1. Channels share nothing, and each number is multiplied by only nine weights, so
// that the speed depends on how numbers get to their products.
//
// A block takes kChannels channels and a tile of pixels of one image, or all of a small image. What the tile reads,
// with its borders, is loaded into shared memory once, fully processed: scaled, rectified and gated, or for a gradient
// with the contributions of mean and variance added. A thread then takes 2 x 4 pixels at a time, for which it reads 24
// numbers of its channel into registers: three per pixel instead of nine.
#include "conv_channels.cuh"

namespace fastmod::cuda::depthwise {
namespace {

constexpr int kHigh = 2, kWide = 4;  // a thread's pixels at a time
constexpr int kTaps = kMaxTaps;

// Tiles of high x wide pixels, in whole patches of kHigh x kWide.
struct Tiling {
  int high, wide, down, across;
  __host__ __device__ int tiles() const { return down * across; }  // per image
  __host__ __device__ int columns() const { return wide + 2; }     // with borders
  __host__ __device__ int staged() const { return (high + 2) * columns(); }
};

int rounded_up(int value, int step) { return (value + step - 1) / step * step; }

Tiling tiling_of(const ConvShape& shape) {
  Tiling t{};
  t.wide = rounded_up(shape.wide < 32 ? shape.wide : 32, kWide);
  t.across = (shape.wide + t.wide - 1) / t.wide;
  // Higher tiles have fewer borders, and are used as long as there are enough blocks for a GPU.
  for (int high = t.wide <= 16 ? 16 : 8;; high = 8) {
    t.high = rounded_up(shape.high < high ? shape.high : high, kHigh);
    t.down = (shape.high + t.high - 1) / t.high;
    if (high == 8 || shape.batch * shape.experts * channel_tiles(shape.out) * t.tiles() >= 128) return t;
  }
}

template <typename T>
size_t bytes_of(const Tiling& t) {
  return sizeof(T) * kChannels * t.staged();
}

// The position of a tile.
struct Place {
  int64_t b;
  int y, x;
  __device__ Place(const Tiling& t, int64_t tile) : b(quotient(tile, t.tiles())) {
    const int own = static_cast<int>(tile - b * t.tiles()), row = own / t.across;
    y = row * t.high;
    x = (own - row * t.across) * t.wide;
  }
};

// Loads the numbers of a tile into `staged`, [row][column][channel]: value(offset) for the pixel at `offset` in its
// image, 0 beyond the image.
template <typename T, typename Value>
__device__ inline void stage(T* staged, const Tiling& t, const Place& place, const ConvShape& shape, const Lane& lane,
                             const Value& value) {
  if (!lane.inside) return;
  const int columns = t.columns(), end = t.staged();
  int y = place.y - 1, x = lane.row;  // in the tile
#pragma unroll 4
  for (int i = lane.row; i < end; i += kRows) {
    const int column = place.x - 1 + x;
    const bool there = static_cast<unsigned>(y) < static_cast<unsigned>(shape.high) &&
                       static_cast<unsigned>(column) < static_cast<unsigned>(shape.wide);
    Compute<T> found = 0;
    if (there) found = value(static_cast<int64_t>(y * shape.wide + column) * shape.in);
    narrow(found, staged + i * kChannels);
    x += kRows;
    if (x >= columns) x -= columns, ++y;  // there are more columns than rows of threads
  }
}

// Calls take(row, column, window) for every patch of a thread, where `window` holds the numbers that its pixels read. A
// patch may extend over the edge: `inside` tells which of its pixels exist.
template <typename T, typename Take>
__device__ inline void walk(const T* staged, const Tiling& t, const Place& place, const Lane& lane, const Take& take) {
  if (!lane.inside) return;
  const int across = t.wide / kWide, patches = t.high / kHigh * across, pitch = t.columns() * kChannels;
#pragma unroll 1
  for (int patch = lane.row; patch < patches; patch += kRows) {
    const int down = patch / across, y = down * kHigh, x = (patch - down * across) * kWide;
    const T* from = staged + y * pitch + x * kChannels;
    Compute<T> window[kHigh + 2][kWide + 2];
#pragma unroll
    for (int i = 0; i < kHigh + 2; ++i) {
#pragma unroll
      for (int j = 0; j < kWide + 2; ++j) window[i][j] = widen(from[j * kChannels]);
      from += pitch;
    }
    take(place.y + y, place.x + x, window);
  }
}

// Calls each(offset of the pixel in its image, row and column in the patch) for the pixels of a patch inside the image.
template <typename Each>
__device__ inline void inside(const ConvShape& shape, int y, int x, const Each& each) {
  int64_t row = static_cast<int64_t>(y * shape.wide + x) * shape.in;
#pragma unroll
  for (int i = 0; i < kHigh; ++i) {
    int64_t at = row;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (y + i < shape.high && x + j < shape.wide) each(at, i, j);
      at += shape.in;
    }
    row += static_cast<int64_t>(shape.wide) * shape.in;
  }
}

template <typename C>
__device__ inline C product(const C (&window)[kHigh + 2][kWide + 2], const C (&filter)[kTaps], int i, int j, C sum) {
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) sum += window[i + tap / 3][j + tap % 3] * filter[tap];
  return sum;
}

template <typename T>
__device__ inline void read_filter(const T* from, bool backwards, Compute<T> (&filter)[kTaps]) {
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) filter[tap] = widen(from[backwards ? kTaps - 1 - tap : tap]);
}

// Offset of image b of an expert, for the thread's channel.
__device__ inline int64_t image_at(const ConvShape& shape, int64_t b, int expert, const Lane& lane) {
  return (b * shape.experts + expert) * shape.high * shape.wide * shape.in + lane.channel;
}

// Loads what the convolution reads for a tile.
template <typename T>
__device__ inline void stage_input(T* staged, const Tiling& t, const Place& place, const ConvInput<T>& input,
                                   const ConvShape& shape, int expert, const Lane& lane) {
  const int channel = lane.inside ? lane.channel : 0;
  const T* x = input.x + image_at(shape, place.b, expert, lane);
  const Affine<Compute<T>> affine = affine_of(input, shape.in, expert, channel);
  const Compute<T> gate = gate_of(input, shape, place.b, expert, channel);
  stage(staged, t, place, shape, lane, [&](int64_t at) { return affine(widen(x[at]), input.relu) * gate; });
}

// Blocks: tiles of all images x channels x experts.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ConvForward<T> conv, const __grid_constant__ Tiling t) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(C, sums, 3 * kThreads);
  const ConvShape& shape = conv.shape;
  const Lane lane(blockIdx.y, shape.out);
  const Place place(t, blockIdx.x);
  const int expert = blockIdx.z;
  T* staged = reinterpret_cast<T*>(memory) + threadIdx.x % kChannels;
  stage_input(staged, t, place, conv.input, shape, expert, lane);
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + (lane.inside ? lane.channel : 0);
  C weights[kTaps];
  read_filter(conv.weight + expert * conv.weight_gap + filter * kTaps, false, weights);
  const C bias = conv.bias ? widen(conv.bias[filter]) : C(0);
  T* y = conv.y + image_at(shape, place.b, expert, lane);
  Moments<C> moments;
  __syncthreads();
  walk(staged, t, place, lane, [&](int row, int column, const auto& window) {
    C values[kHigh][kWide] = {}, total = 0, squares = 0;
    int count = 0;
    inside(shape, row, column, [&](int64_t at, int i, int j) {
      T held;
      narrow(product(window, weights, i, j, bias), &held);
      y[at] = held;
      values[i][j] = widen(held);
      total += values[i][j];
      ++count;
    });
    if (!conv.mean || count == 0) return;
    const C middle = total / C(count);
    inside(shape, row, column, [&](int64_t, int i, int j) {
      squares += (values[i][j] - middle) * (values[i][j] - middle);
    });
    moments.join({C(count), middle, squares});
  });
  if (!conv.mean) return;
  moments.write(sums + 3 * threadIdx.x);
  __syncthreads();
  if (lane.row == 0) {
    for (int row = 1; row < kRows; ++row) {
      const C* from = sums + 3 * (row * kChannels + threadIdx.x);
      if (from[0] > 0) moments.join({from[0], from[1], from[2]});
    }
  }
  leave_moments(conv, lane, moments);
}

// Blocks and scratch: see finish_backward_x.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const __grid_constant__ ConvBackwardX<T> conv, const __grid_constant__ Tiling t) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(C, sums, kThreads);
  const ConvShape& shape = conv.shape;
  const ConvInput<T>& input = conv.input;
  const Lane lane(blockIdx.y, shape.in);
  const Place place(t, blockIdx.x);
  const int expert = blockIdx.z, channel = lane.inside ? lane.channel : 0;
  const int64_t image = image_at(shape, place.b, expert, lane);
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + channel;
  T* staged = reinterpret_cast<T*>(memory) + threadIdx.x % kChannels;
  {
    const Gradient<T> grad{conv.grad, shape, expert, 0};
    const StatisticsGrad<C> statistics = statistics_grad(conv.grad, filter);
    stage(staged, t, place, shape, lane, [&](int64_t at) { return grad.at(image + at, statistics); });
  }
  C weights[kTaps];
  read_filter(conv.weight + expert * conv.weight_gap + filter * kTaps, true, weights);
  const Affine<C> affine = affine_of(input, shape.in, expert, channel);
  const C gate = gate_of(input, shape, place.b, expert, channel);
  C of_scale = 0, of_shift = 0, of_gate = 0;
  __syncthreads();
  walk(staged, t, place, lane, [&](int row, int column, const auto& window) {
    inside(shape, row, column, [&](int64_t at, int i, int j) {
      const C of_z = product(window, weights, i, j, C(0));
      const C x = widen(input.x[image + at]), before = affine.scale * x + affine.shift;
      of_gate += of_z * (input.relu ? rectified(before) : before);
      const C of_value = input.relu && before <= C(0) ? C(0) : of_z * gate;
      of_scale += of_value * x;
      of_shift += of_value;
      if (conv.grad_x) narrow(of_value * affine.scale, conv.grad_x + image + at);
    });
  });
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  C* own = conv.scratch + static_cast<int64_t>(blockIdx.x) * shape.in + expert * each + lane.channel;
  of_scale = sum_of_rows<kChannels>(of_scale, sums);
  of_shift = sum_of_rows<kChannels>(of_shift, sums);
  of_gate = sum_of_rows<kChannels>(of_gate, sums);
  if (lane.inside && lane.row == 0) {
    own[0] = of_scale;
    own[all] = of_shift;
    own[2 * all] = of_gate;
  }
  finish_backward_x(conv, lane, place.b, t.tiles(), sums);
}

// Blocks along x share the tiles of all images. Scratch: see leave_weights.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(const __grid_constant__ ConvBackwardWeight<T> conv, const __grid_constant__ Tiling t) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(C, sums, kThreads);
  const ConvShape& shape = conv.shape;
  const Lane lane(blockIdx.y, shape.in);
  const int expert = blockIdx.z;
  const int64_t filter = static_cast<int64_t>(expert) * shape.out + (lane.inside ? lane.channel : 0);
  const Gradient<T> grad{conv.grad, shape, expert, 0};
  const StatisticsGrad<C> statistics = statistics_grad(conv.grad, filter);
  T* staged = reinterpret_cast<T*>(memory) + threadIdx.x % kChannels;
  C found[kTaps] = {}, of_bias = 0;
  const int64_t tiles = shape.batch * t.tiles();
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Place place(t, tile);
    const int64_t image = image_at(shape, place.b, expert, lane);
    __syncthreads();  // the previous tile is no longer needed
    stage_input(staged, t, place, conv.input, shape, expert, lane);
    __syncthreads();
    walk(staged, t, place, lane, [&](int row, int column, const auto& window) {
      inside(shape, row, column, [&](int64_t at, int i, int j) {
        const C g = grad.at(image + at, statistics);
        of_bias += g;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) found[tap] += g * window[i + tap / 3][j + tap % 3];
      });
    });
  }
  leave_weights(conv, lane, found, of_bias, filter, 1, filter * kTaps, true, sums);
}

// Enough blocks to fill a GPU, each with several tiles per partial result.
int64_t weight_shares(const ConvShape& shape) {
  const int64_t tiles = shape.batch * tiling_of(shape).tiles(), most = (tiles + 1) / 2;
  const int64_t blocks = static_cast<int64_t>(channel_tiles(shape.in)) * shape.experts;
  const int64_t wanted = (256 + blocks - 1) / blocks;
  return wanted < most ? wanted : most;
}

dim3 grid_of(const ConvShape& shape, int64_t across) {
  return dim3(blocks_for(across, 1).x, static_cast<unsigned>(channel_tiles(shape.in)),
              static_cast<unsigned>(shape.experts));
}

}  // namespace

template <typename T>
Scratch forward_scratch(const ConvShape& shape) {
  const int64_t blocks = shape.batch * tiling_of(shape).tiles();
  return {3 * blocks * shape.experts * shape.out,
          shape.experts * channel_tiles(shape.out) * reduce_tickets<kGroup>(blocks)};
}
template <typename T>
Scratch backward_x_scratch(const ConvShape& shape) {
  return backward_x_parts(shape, tiling_of(shape).tiles());
}
template <typename T>
Scratch backward_weight_scratch(const ConvShape& shape) {
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, blocks = weight_shares(shape);
  return {blocks * filters * (kTaps + 1), shape.experts * channel_tiles(shape.in) * reduce_tickets<kGroup>(blocks)};
}

template <typename T>
cudaError_t forward(const ConvForward<T>& conv, cudaStream_t stream) {
  const Tiling t = tiling_of(conv.shape);
  const auto kernel = forward_kernel<T>;
  return FASTMOD_LAUNCH_DYNAMIC(kernel, grid_of(conv.shape, conv.shape.batch * t.tiles()), kThreads, bytes_of<T>(t),
                                stream, conv, t);
}
template <typename T>
cudaError_t backward_x(const ConvBackwardX<T>& conv, cudaStream_t stream) {
  const Tiling t = tiling_of(conv.shape);
  const auto kernel = backward_x_kernel<T>;
  return FASTMOD_LAUNCH_DYNAMIC(kernel, grid_of(conv.shape, conv.shape.batch * t.tiles()), kThreads, bytes_of<T>(t),
                                stream, conv, t);
}
template <typename T>
cudaError_t backward_weight(const ConvBackwardWeight<T>& conv, cudaStream_t stream) {
  const Tiling t = tiling_of(conv.shape);
  const auto kernel = backward_weight_kernel<T>;
  return FASTMOD_LAUNCH_DYNAMIC(kernel, grid_of(conv.shape, weight_shares(conv.shape)), kThreads, bytes_of<T>(t),
                                stream, conv, t);
}

FASTMOD_PLAIN_LAUNCHES(template, float, <float>)
FASTMOD_PLAIN_LAUNCHES(template, __half, <__half>)
FASTMOD_PLAIN_LAUNCHES(template, __nv_bfloat16, <__nv_bfloat16>)

}  // namespace fastmod::cuda::depthwise
