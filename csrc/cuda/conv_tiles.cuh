// Shared by convolutions on tensor cores, above all how pixels are split into tiles and loaded into shared memory.
#pragma once

#include <type_traits>

#include "norm_conv.cuh"
#include "rows.cuh"

namespace fastmod::cuda {

constexpr int kThreads = 128;  // of a block, or of one of its sides (see Product)
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxShared = 64 * 1024 - 1024;  // of the smallest GPU supported, minus what kernels declare statically

// What a lane holds of a pixel or a filter: a unit of kChannels neighbouring channels. Four units make one step, the
// depth of one instruction: lane t of a quad has unit t.
template <typename T>
struct Operand {
  using Unit = uint2;  // two words of two numbers
  static constexpr int kChannels = 4;
  // grown: see split_tf32; 16-bit numbers are multiplied unchanged.
  static __device__ Unit pack(const float (&v)[4], bool, float = 0.0f) {
    T* type = nullptr;
    return {half_word(v[0], v[1], type), half_word(v[2], v[3], type)};
  }
  static __device__ void read(const T* from, float (&v)[4]) {
    for (int i = 0; i < 4; ++i) v[i] = widen(from[i]);
  }
};
template <>
struct Operand<float> {
  using Unit = uint4;  // high parts, low parts
  static constexpr int kChannels = 2;
  static __device__ Unit pack(const float (&v)[2], bool precise, float grown = 0.0f) {
    Unit unit;
    split_tf32(v[0], precise, &unit.x, &unit.z, grown);
    split_tf32(v[1], precise, &unit.y, &unit.w, grown);
    return unit;
  }
  static __device__ void read(const float* from, float (&v)[2]) {
    v[0] = from[0];
    v[1] = from[1];
  }
};
template <typename T>
constexpr int kStep = 4 * Operand<T>::kChannels;

// Along one dimension: result i reads image pixels i * advance + first + tap, tap < taps. Shared memory holds every
// `spacing`-th image pixel; results are `step` of those apart.
struct Window {
  int taps, first, advance, spacing, step;
};
// For the gradient with stride 2, results of each parity (even or odd) form an image of their own. Those of odd ones
// read all that even ones do.
__host__ __device__ inline Window window_of(int kernel, int stride, bool backward, int parity = 1) {
  if (!backward) return kernel == 3 ? Window{3, -1, stride, 1, stride} : Window{1, 0, stride, stride, 1};
  if (stride == 1) return kernel == 3 ? Window{3, -1, 1, 1, 1} : Window{1, 0, 1, 1, 1};
  return kernel == 3 ? Window{1 + parity, 0, 1, 1, 1} : Window{1, 0, 1, 1, 1};
}

// A tile: 2^log_b images, 2^log_h rows, 2^log_w columns of results, which read rows x columns pixels of each image. For
// the gradient with stride 2, as many results of each of four classes: pairs of parities.
struct Tiling {
  int log_b, log_h, log_w, rows, columns, across, down;
  int64_t tiles;
  __host__ __device__ int read() const { return (rows * columns) << log_b; }
  __host__ __device__ int per_image() const { return across * down; }
};

inline int log_at_least(int value, int most) {
  int log = 0;
  while (log < most && (1 << log) < value) ++log;
  return log;
}

// high, wide: of the results, or of the even results if there are four classes.
inline Tiling tiling_of(const ConvShape& shape, bool backward, int high, int wide, int log_pixels, int most_read) {
  const Window window = window_of(shape.kernel, shape.stride, backward);
  Tiling t{};
  t.log_w = log_at_least(wide, (log_pixels + 1) / 2);  // square, which has the least border
  t.log_h = log_at_least(high, log_pixels - t.log_w);
  for (;;) {
    t.log_b = log_pixels - t.log_h - t.log_w;
    t.rows = ((1 << t.log_h) - 1) * window.step + window.taps;
    t.columns = ((1 << t.log_w) - 1) * window.step + window.taps;
    if (t.read() <= most_read || t.log_b == 0) break;
    ++(t.log_h < t.log_w ? t.log_h : t.log_w);  // fewer images, fewer borders
  }
  t.across = (wide + (1 << t.log_w) - 1) >> t.log_w;
  t.down = (high + (1 << t.log_h) - 1) >> t.log_h;
  const int64_t groups = (shape.batch + (1 << t.log_b) - 1) >> t.log_b;
  t.tiles = groups * t.per_image();
  return t;
}

// The position of a tile.
struct Place {
  int64_t b;
  int y, x, part;  // part: index of the tile in the image, for sums per image
  __device__ Place(const Tiling& t, int64_t tile) {
    const int64_t row = quotient(tile, t.across), group = quotient(row, t.down);
    const int down = static_cast<int>(row - group * t.down), across = static_cast<int>(tile - row * t.across);
    b = group << t.log_b;
    y = down << t.log_h;
    x = across << t.log_w;
    part = down * t.across + across;
  }
};

// A pixel of a tile; outside if the tile extends over the edge.
struct Pixel {
  int64_t b;
  int y, x;
  __device__ Pixel(const Tiling& t, const Place& place, int i)
      : b(place.b + (i >> (t.log_h + t.log_w))),
        y(place.y + (i >> t.log_w & ((1 << t.log_h) - 1))),
        x(place.x + (i & ((1 << t.log_w) - 1))) {}
};

// Fills the table of pixels that a tile reads: offset in memory of the first channel for expert 0, or -1 outside.
// There are `images` images for each b.
__device__ inline void fill_table(int64_t* table, const Tiling& t, const Place& place, const Window& window,
                                  int64_t batch, int high, int wide, int images, int channels) {
  const int size = t.rows * t.columns;
#pragma unroll 1
  for (int i = threadIdx.x; i < t.read(); i += static_cast<int>(blockDim.x)) {
    const int image = i / size, rest = i - image * size, row = rest / t.columns, column = rest - row * t.columns;
    const int y = place.y * window.advance + window.first + row * window.spacing;
    const int x = place.x * window.advance + window.first + column * window.spacing;
    const bool inside = place.b + image < batch && y >= 0 && y < high && x >= 0 && x < wide;
    const int64_t pixel = (place.b + image) * images * high * wide + y * wide + x;
    table[i] = inside ? pixel * channels : -1;
  }
}

template <typename T>
struct Problem {
  ConvInput<T> input;
  ConvGrad<T> grad;  // backward only
  const T* weight;
  ConvShape shape;
  int out_high, out_wide;
  Tiling tiling;
  int chunk;  // channels loaded into shared memory at a time: whole steps
  bool vector_read, vector_weight, precise;
  int64_t weight_gap = 0;  // numbers between the filters of one expert and the next
};

template <typename T>
bool on_tensor_cores(const ConvShape& shape) {
  return sizeof(T) <= 4 && !shape.depthwise;
}

// With stride 2 a tile reads four times as many pixels.
__host__ __device__ inline bool half_tiles(const ConvShape& shape) {
  return shape.stride == 2 && shape.kernel == 3;
}

}  // namespace fastmod::cuda
