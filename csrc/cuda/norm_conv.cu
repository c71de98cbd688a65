// norm_conv on tensor cores: implicit matrix products of pixels by channels; depthwise and fp64 go to norm_conv_plain.cu.
//
// Forward and the gradient of the input are one product. A block takes a tile of result pixels and up to 32 result channels
// of one expert and walks through the channels that are read, a chunk at a time. Of each chunk the pixels that the tile
// reads, border included, and the weights come into shared memory as they are (cp.async, while the chunk before is
// multiplied). From there they are packed once: scaled, shifted, rectified, gated, and laid out as the tensor cores want
// them, fp32 as two tf32 numbers each. The taps of the filter then only differ in where they begin to read.
//
// Tensor cores round towards zero when they add up. Sums of fp32 are therefore short ones, added by ordinary additions;
// the products with low parts, which are 2^11 times smaller, have sums of their own.
#include <type_traits>

#include "mma.cuh"
#include "norm_conv.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kShareGroup = 8;  // partial weights are large
constexpr int kMaxShared = 64 * 1024 - 1024;  // of the smallest GPU served, less what kernels declare themselves

// What a lane holds of a pixel or of a filter: a unit of kChannels neighbouring channels. Four units are one step, the depth
// of one instruction: lane t of a quad has unit t.
template <typename T>
struct Operand {
  using Unit = uint2;  // two words of two numbers
  static constexpr int kChannels = 4;
  static __device__ Unit pack(const float (&v)[4], bool) {
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
  static __device__ Unit pack(const float (&v)[2], bool precise) {
    Unit unit;
    split_tf32(v[0], precise, &unit.x, &unit.z);
    split_tf32(v[1], precise, &unit.y, &unit.w);
    return unit;
  }
  static __device__ void read(const float* from, float (&v)[2]) {
    v[0] = from[0];
    v[1] = from[1];
  }
};
template <typename T>
constexpr int kStep = 4 * Operand<T>::kChannels;

// Along one dimension: result i reads image pixels i * advance + first + tap, tap < taps, and meets filter tap
// weight + tap * weight_step. Shared memory has every `spacing`-th image pixel; results are `step` of those apart.
struct Window {
  int taps, first, weight, weight_step, advance, spacing, step;
};
// Gradient with stride 2: results of one parity, even or odd, make up an image of their own.
__host__ __device__ inline Window window_of(int kernel, int stride, bool backward, int parity) {
  if (!backward) return kernel == 3 ? Window{3, -1, 0, 1, stride, 1, stride} : Window{1, 0, 0, 0, stride, stride, 1};
  if (stride == 1) return kernel == 3 ? Window{3, -1, 2, -1, 1, 1, 1} : Window{1, 0, 0, 0, 1, 1, 1};
  if (kernel == 1) return Window{1 - parity, 0, 0, 0, 1, 1, 1};
  return parity ? Window{2, 0, 2, -2, 1, 1, 1} : Window{1, 0, 1, 0, 1, 1, 1};
}

// A tile: 2^log_b images, 2^log_h rows, 2^log_w columns of results, which read rows x columns pixels of each image.
struct Tiling {
  int log_b, log_h, log_w, rows, columns, across, down, classes;
  int64_t tiles;
  __host__ __device__ int read() const { return (rows * columns) << log_b; }
  int per_image() const { return across * down * classes; }
};

int log_at_least(int value, int most) {
  int log = 0;
  while (log < most && (1 << log) < value) ++log;
  return log;
}

// high, wide: of the results, of the even ones where there are four classes of them.
Tiling tiling_of(const ConvShape& shape, bool backward, int high, int wide, int log_pixels, int most_read) {
  const int classes = backward && shape.stride == 2 ? 4 : 1;
  const Window window = window_of(shape.kernel, shape.stride, backward, shape.kernel == 3 ? 1 : 0);
  Tiling t{};
  t.classes = classes;
  t.log_w = log_at_least(wide, 4);
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

// Where a tile lies.
struct Place {
  int64_t b;
  int y, x, parity_y, parity_x, part;  // part: of the image, for sums per image
  __device__ Place(const Tiling& t, int64_t tile) {
    const int64_t spatial = quotient(tile, t.classes), row = quotient(spatial, t.across), group = quotient(row, t.down);
    const int of_class = static_cast<int>(tile - spatial * t.classes);
    const int down = static_cast<int>(row - group * t.down), across = static_cast<int>(spatial - row * t.across);
    b = group << t.log_b;
    y = down << t.log_h;
    x = across << t.log_w;
    parity_y = of_class >> 1;
    parity_x = of_class & 1;
    part = (down * t.across + across) * t.classes + of_class;
  }
};

// A pixel of a tile; outside where the tile hangs over the edge.
struct Pixel {
  int64_t b;
  int y, x;
  __device__ Pixel(const Tiling& t, const Place& place, int i)
      : b(place.b + (i >> (t.log_h + t.log_w))),
        y(place.y + (i >> t.log_w & ((1 << t.log_h) - 1))),
        x(place.x + (i & ((1 << t.log_w) - 1))) {}
};

// Where in memory the pixels lie that a tile reads: offsets of their first channel, of expert 0, or -1 outside. `images` are
// there for each b.
__device__ inline void fill_table(int64_t* table, const Tiling& t, const Place& place, const Window& wy,
                                  const Window& wx, int64_t batch, int high, int wide, int images, int channels) {
  const int size = t.rows * t.columns;
#pragma unroll 1
  for (int i = threadIdx.x; i < t.read(); i += kThreads) {
    const int image = i / size, rest = i - image * size, row = rest / t.columns, column = rest - row * t.columns;
    const int y = place.y * wy.advance + wy.first + row * wy.spacing;
    const int x = place.x * wx.advance + wx.first + column * wx.spacing;
    const bool inside = place.b + image < batch && y >= 0 && y < high && x >= 0 && x < wide;
    const int64_t pixel = (place.b + image) * images * high * wide + y * wide + x;
    table[i] = inside ? pixel * channels : -1;
  }
}

// `rows` rows of `width` elements each to shared memory, zeros beyond `valid` and for rows that are not inside: from(row) is
// the address, or null. kVector: 16 bytes at a time, which everything is aligned to.
template <typename T, typename From>
__device__ inline void copy_rows(T* to, int rows, int width, int valid, bool vector, const T* anywhere, From from) {
  constexpr int kMany = 16 / sizeof(T);
  if (vector) {
    const unsigned each = width / kMany;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < rows * each; i += kThreads) {
      // Divisions by the usual numbers, which are cheap as constants.
      const unsigned row = each == 2 ? i / 2 : each == 4 ? i / 4 : each == 18 ? i / 18 : each == 36 ? i / 36 : i / each;
      const int at = static_cast<int>(i - row * each) * kMany;
      const T* source = at < valid ? from(static_cast<int>(row)) : nullptr;
      copy_async<16>(to + row * width + at, source ? source + at : anywhere, source != nullptr);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width, at = i - row * width;
    const T* source = at < valid ? from(row) : nullptr;
    if constexpr (sizeof(T) == 4) {
      copy_async<4>(to + i, source ? source + at : anywhere, source != nullptr);
    } else {
      T value;
      narrow(0.0f, &value);
      if (source) value = source[at];
      to[i] = value;
    }
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
  int chunk;  // channels that come into shared memory at a time: whole steps
  bool vector_read, vector_weight, precise;
};

// ---- the product of forward and backward_x

template <typename T, int kM, int kN, bool kBackward>
struct Product {
  using Unit = typename Operand<T>::Unit;
  static constexpr int kChannels = Operand<T>::kChannels, kPixels = kWarps * kM * 16, kColumns = kN * 8;

  // Bytes of shared memory, all at once; the results lie over the rest when that is done with.
  struct Layout {
    int table, read, second, weight, units, weights, found, end;
    __host__ __device__ Layout(const Tiling& t, int chunk, int kernel, bool both, bool several) {
      const int pixels = t.read(), taps = kernel * kernel;
      table = 0;
      read = (pixels * 8 + 15) / 16 * 16;
      second = read + pixels * chunk * static_cast<int>(sizeof(T));
      weight = second + (both ? second - read : 0);
      units = weight + kColumns * chunk * taps * static_cast<int>(sizeof(T));
      weights = units + pixels * (chunk / kChannels) * static_cast<int>(sizeof(Unit));
      end = weights + taps * kColumns * (chunk / kChannels) * static_cast<int>(sizeof(Unit));
      const int results = read + kPixels * kPitch * 4;
      if (end < results) end = results;
      found = end;
      if (several) end += results - read;
    }
  };
  static constexpr int kPitch = kColumns + 8;

  const Problem<T>& p;
  const Place& place;
  const Window &wy, &wx;
  unsigned char* memory;
  Layout layout;
  int expert, column0;

  __device__ int64_t* table() const { return reinterpret_cast<int64_t*>(memory + layout.table); }
  __device__ float* found() const { return reinterpret_cast<float*>(memory + layout.found); }  // over experts
  __device__ float* results() const { return reinterpret_cast<float*>(memory + layout.read); }
  __device__ int depth() const { return kBackward ? p.shape.out : p.shape.in; }

  // Starts copies of channels c0 .. c0 + chunk, of all taps.
  __device__ void load(int c0) const {
    const int taps = p.shape.kernel * p.shape.kernel, left = depth() - c0, valid = left < p.chunk ? left : p.chunk;
    const int pixels = kBackward ? p.out_high * p.out_wide : p.shape.high * p.shape.wide;
    const int64_t* entries = table();
    const auto pixels_of = [&](const T* images, bool shared, int offset) {
      T* to = reinterpret_cast<T*>(memory + offset);
      const T* own = images + (shared ? 0 : static_cast<int64_t>(expert) * pixels * depth()) + c0;
      copy_rows(to, p.tiling.read(), p.chunk, valid, p.vector_read, images, [&](int row) -> const T* {
        const int64_t entry = entries[row];
        return entry < 0 ? nullptr : own + entry;
      });
    };
    if constexpr (kBackward) {
      pixels_of(p.grad.grad, false, layout.read);
      if (p.grad.grad_var) pixels_of(p.grad.y, false, layout.second);
    } else {
      pixels_of(p.input.x, p.shape.shared, layout.read);
    }
    T* to = reinterpret_cast<T*>(memory + layout.weight);
    const int64_t filters = static_cast<int64_t>(expert) * p.shape.out;
    if constexpr (kBackward) {  // [chunk of out][columns of in][taps]
      const int columns = p.shape.in - column0 < kColumns ? p.shape.in - column0 : kColumns;
      copy_rows(to, p.chunk, kColumns * taps, columns * taps, p.vector_weight, p.weight, [&](int row) -> const T* {
        if (row >= valid) return nullptr;
        return p.weight + ((filters + c0 + row) * p.shape.in + column0) * taps;
      });
    } else {  // [columns of out][chunk of in][taps]
      copy_rows(to, kColumns, p.chunk * taps, valid * taps, p.vector_weight, p.weight, [&](int row) -> const T* {
        if (column0 + row >= p.shape.out) return nullptr;
        return p.weight + ((filters + column0 + row) * p.shape.in + c0) * taps;
      });
    }
    commit_copies();
  }

  // Packs pixels: units [step][pixel][4].
  __device__ void pack_pixels(int c0) const {
    const int t = threadIdx.x % 4, pixels = p.tiling.read();
    const T* read = reinterpret_cast<const T*>(memory + layout.read);
    const T* second = reinterpret_cast<const T*>(memory + layout.second);
    const int64_t* entries = table();
    Unit* units = reinterpret_cast<Unit*>(memory + layout.units);
    for (int step = 0; step < p.chunk / kStep<T>; ++step) {
      const int local = step * kStep<T> + t * kChannels, channel = c0 + local;
      Affine<float> affine[kChannels];
      StatisticsGrad<float> statistics[kChannels];
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        const bool there = channel + j < depth();
        if constexpr (kBackward) {
          if (there) statistics[j] = statistics_grad(p.grad, static_cast<int64_t>(expert) * depth() + channel + j);
        } else {
          affine[j].scale = 0.0f;  // zeros stay zeros
          if (there) affine[j] = affine_of(p.input, depth(), expert, channel + j);
        }
      }
      float gate[kChannels];
      int gate_image = -1;
#pragma unroll 2
      for (int i = threadIdx.x / 4; i < pixels; i += kThreads / 4) {
        float v[kChannels] = {};
        if (entries[i] >= 0) {
          Operand<T>::read(read + i * p.chunk + local, v);
          if constexpr (kBackward) {
            float y[kChannels] = {};
            if (p.grad.grad_var) Operand<T>::read(second + i * p.chunk + local, y);
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
              v[j] += statistics[j].offset + statistics[j].slope * (y[j] - statistics[j].mean);
            }
          } else {
            const int image = p.input.gate ? i / (p.tiling.rows * p.tiling.columns) : -1;
            if (image != gate_image) {
              gate_image = image;
#pragma unroll
              for (int j = 0; j < kChannels; ++j) {
                const bool there = channel + j < depth();
                gate[j] = there ? gate_of(p.input, p.shape, place.b + image, expert, channel + j) : 0.0f;
              }
            }
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
              v[j] = affine[j](v[j], p.input.relu);
              if (p.input.gate) v[j] *= gate[j];
            }
          }
        }
        units[(step * pixels + i) * 4 + t] = Operand<T>::pack(v, p.precise);
      }
    }
  }

  // Packs filters: units [tap of the window][step][column][4].
  __device__ void pack_weights() const {
    constexpr int kGroups = kThreads / (4 * kColumns);
    const int t = threadIdx.x % 4, column = threadIdx.x / 4 % kColumns, taps = p.shape.kernel * p.shape.kernel;
    const int steps = p.chunk / kStep<T>;
    const T* weight = reinterpret_cast<const T*>(memory + layout.weight);
    Unit* units = reinterpret_cast<Unit*>(memory + layout.weights);
#pragma unroll 2
    for (int i = threadIdx.x / (4 * kColumns); i < wy.taps * wx.taps * steps; i += kGroups) {
      const int tap = steps == 1 ? i : i / steps, local = (i - tap * steps) * kStep<T> + t * kChannels;
      const int tap_y = wx.taps == 3 ? tap / 3 : tap / wx.taps, tap_x = tap - tap_y * wx.taps;
      const int from = (wy.weight + tap_y * wy.weight_step) * p.shape.kernel + wx.weight + tap_x * wx.weight_step;
      float v[kChannels];
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        v[j] = widen(kBackward ? weight[((local + j) * kColumns + column) * taps + from]
                               : weight[(column * p.chunk + local + j) * taps + from]);
      }
      units[(i * kColumns + column) * 4 + t] = Operand<T>::pack(v, p.precise);
    }
  }

  // One chunk's share of the sums.
  __device__ void multiply(float (&total)[kM][kN][4], float (&low)[kM][kN][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    // A row of taps, or the steps of the only one: never both.
    const int steps = p.chunk / kStep<T>, products = wx.taps * steps, columns = p.tiling.columns * 4;
    const int stride = steps == 1 ? 4 : p.tiling.read() * 4;
    const Unit* weights = reinterpret_cast<const Unit*>(memory + layout.weights) + lane;
    const Unit* rows[kM][2];  // where the lane's two rows of every product begin to read
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = (static_cast<int>(threadIdx.x) / kWarp * kM + m) * 16 + half * 8 + g;
        const int image = i >> (p.tiling.log_h + p.tiling.log_w), y = i >> p.tiling.log_w & ((1 << p.tiling.log_h) - 1);
        const int x = i & ((1 << p.tiling.log_w) - 1);
        const int start = (image * p.tiling.rows + y * wy.step) * p.tiling.columns + x * wx.step;
        rows[m][half] = reinterpret_cast<const Unit*>(memory + layout.units) + start * 4 + t;
      }
    }
#pragma unroll 1
    for (int tap_y = 0; tap_y < wy.taps; ++tap_y) {
      float part[kM][kN][4] = {};
      int offset = tap_y * columns;
#pragma unroll 1
      for (int i = products; i > 0; --i) {
        Unit a[kM][2], b[kN];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          a[m][0] = rows[m][0][offset];
          a[m][1] = rows[m][1][offset];
        }
#pragma unroll
        for (int n = 0; n < kN; ++n) b[n] = weights[n * 8 * 4];
        weights += kColumns * 4;
        offset += stride;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const uint32_t high[4] = {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y};
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            T* type = nullptr;
            if constexpr (sizeof(T) == 4) {
              mma(type, part[m][n], high, b[n].x, b[n].y);
            } else {
              mma(type, total[m][n], high, b[n].x, b[n].y);
            }
          }
          if constexpr (sizeof(T) == 4) {
            if (p.precise) {
              const uint32_t rest[4] = {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w};
              T* type = nullptr;
#pragma unroll
              for (int n = 0; n < kN; ++n) {
                mma(type, low[m][n], high, b[n].z, b[n].w);
                mma(type, low[m][n], rest, b[n].x, b[n].y);
              }
            }
          }
        }
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[m][n][j] += part[m][n][j];
          }
        }
      }
    }
  }

  // The whole product into results(), [pixel][column]. All threads may read it on return.
  __device__ void run() const {
    float total[kM][kN][4] = {}, low[kM][kN][4] = {};
    __syncthreads();  // the table is there; results of another expert have been read
    load(0);
    for (int c0 = 0; c0 < depth(); c0 += p.chunk) {
      wait_copies<0>();
      __syncthreads();  // this chunk has come; the one before is done with
      pack_pixels(c0);
      pack_weights();
      __syncthreads();
      if (c0 + p.chunk < depth()) load(c0 + p.chunk);
      multiply(total, low);
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    float* out = results();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = (static_cast<int>(threadIdx.x) / kWarp * kM + m) * 16 + j / 2 * 8 + lane / 4;
          out[i * kPitch + n * 8 + lane % 4 * 2 + j % 2] = total[m][n][j] + low[m][n][j];
        }
      }
    }
    __syncthreads();
  }
};

// Four neighbouring channels, of which `there` exist; all four at once if `vector`.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};
template <typename T>
__device__ inline void read_four(const T* from, int there, bool vector, float (&v)[4]) {
  if (vector) {
    const auto four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = widen(four.v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = j < there ? widen(from[j]) : 0.0f;
  }
}
template <typename T>
__device__ inline void write_four(const T (&v)[4], int there, bool vector, T* to) {
  if (vector) {
    *reinterpret_cast<Four<T>*>(to) = {{v[0], v[1], v[2], v[3]}};
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < there) to[j] = v[j];
    }
  }
}
template <typename T>
__device__ inline bool by_four(const T* pointer, int channels) {
  return pointer && channels % 4 == 0 && reinterpret_cast<uintptr_t>(pointer) % sizeof(Four<T>) == 0;
}

// Sums of kColumns columns, four to a thread, over all threads with the same ones; all of them get it. A fixed order.
template <int kColumns>
__device__ inline void sum_of_columns(float (&v)[4], float* sums) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset >= kColumns / 4; offset /= 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] += __shfl_xor_sync(kAllLanes, v[j], offset);
  }
  __syncthreads();  // the sums before have been read
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (lane < kColumns / 4) sums[warp * kColumns + lane * 4 + j] = v[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) v[j] += sums[w * kColumns + lane % (kColumns / 4) * 4 + j];
  }
}

__device__ inline int at_most(int value, int most) { return value < most ? value : most; }

// Pixels of a tile that are inside. Forward only: one class.
__device__ inline int pixels_inside(const Tiling& t, const Place& place, int64_t batch, int high, int wide) {
  const int64_t images = batch - place.b;
  return (images < (1 << t.log_b) ? static_cast<int>(images) : 1 << t.log_b) * at_most(high - place.y, 1 << t.log_h) *
         at_most(wide - place.x, 1 << t.log_w);
}

// Blocks: tiles x columns x experts. Scratch: mean and squares [E, tiles, out, 2].
template <typename T, int kM, int kN>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ Problem<T> p, const T* bias, T* y, float* mean, float* var, float* partials,
                   unsigned* tickets) {
  using Own = Product<T, kM, kN, false>;
  constexpr int kColumns = Own::kColumns, kRows = kThreads / kColumns;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  const int expert = blockIdx.z, column0 = blockIdx.y * kColumns;
  const Tiling& t = p.tiling;
  const Place place(t, blockIdx.x);
  const Window window = window_of(p.shape.kernel, p.shape.stride, false, 0);
  const Own product{p, place, window, window, memory, {t, p.chunk, p.shape.kernel, false, false}, expert, column0};
  fill_table(product.table(), t, place, window, window, p.shape.batch, p.shape.high, p.shape.wide,
             p.shape.shared ? 1 : p.shape.experts, p.shape.in);
  product.run();

  float* results = product.results();
  {
    constexpr int kFours = kColumns / 4;
    const int column = threadIdx.x % kFours * 4, channel = column0 + column, there = p.shape.out - channel;
    const int64_t filter = static_cast<int64_t>(expert) * p.shape.out + channel;
    const bool vector = by_four(y, p.shape.out) && there > 0;
    float offset[4] = {}, total[4] = {}, squares[4] = {};
    if (bias && there > 0) read_four(bias + filter, there, false, offset);
    T* own = y + expert * static_cast<int64_t>(p.out_high) * p.out_wide * p.shape.out + channel;
    const int64_t image = static_cast<int64_t>(p.shape.experts) * p.out_high * p.out_wide;
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      if (there <= 0 || pixel.b >= p.shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) continue;
      auto& result = *reinterpret_cast<Four<float>*>(results + i * Own::kPitch + column);
      T held[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        narrow(result.v[j] + offset[j], held + j);
        result.v[j] = widen(held[j]);
        total[j] += result.v[j];
      }
      write_four(held, there, vector, own + (pixel.b * image + pixel.y * p.out_wide + pixel.x) * p.shape.out);
    }
    if (!mean) return;
    const float count = static_cast<float>(pixels_inside(t, place, p.shape.batch, p.out_high, p.out_wide));
    sum_of_columns<kColumns>(total, sums);
#pragma unroll
    for (int j = 0; j < 4; ++j) total[j] /= count;
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      if (pixel.b >= p.shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) continue;
      const auto result = *reinterpret_cast<const Four<float>*>(results + i * Own::kPitch + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) squares[j] += (result.v[j] - total[j]) * (result.v[j] - total[j]);
    }
    sum_of_columns<kColumns>(squares, sums);
    float* left = partials + 3 * ((static_cast<int64_t>(expert) * gridDim.x + blockIdx.x) * p.shape.out + channel);
    if (threadIdx.x < kFours) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < there) Moments<float>{count, total[j], squares[j]}.write(left + 3 * j);
      }
    }
  }
  const int column = threadIdx.x % kColumns, channel = column0 + column, row = threadIdx.x / kColumns;
  const bool there = channel < p.shape.out;
  const int64_t filter = static_cast<int64_t>(expert) * p.shape.out + channel;
  const auto left_by = [&](int64_t block) {
    return partials + 3 * ((static_cast<int64_t>(expert) * gridDim.x + block) * p.shape.out + channel);
  };
  unsigned* ticket = tickets + (expert * gridDim.y + blockIdx.y) * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool all) {
    Moments<float> moments;
#pragma unroll 4
    for (int64_t block = first + row * static_cast<int64_t>(step); there && block < end; block += kRows * step) {
      moments.join(Moments<float>::read(left_by(block)));
    }
    float* shared = results;  // [kRows][kColumns][3]
    moments.write(shared + 3 * threadIdx.x);
    __syncthreads();
    if (!there || row > 0) return;
    for (int i = column + kColumns; i < kThreads; i += kColumns) {
      const Moments<float> other{shared[3 * i], shared[3 * i + 1], shared[3 * i + 2]};
      if (other.count > 0) moments.join(other);
    }
    if (!all) return moments.write(left_by(first));
    mean[filter] = moments.mean;
    var[filter] = moments.squares / moments.count;
  });
}

// Blocks: tiles x columns x experts; x shared: one block for all experts. Scratch: sums for scale and shift
// [2, E, tiles, in], then for the gate [E, B, tiles of an image, in].
template <typename T, int kM, int kN>
__global__ void __launch_bounds__(kThreads, 2)
    backward_x_kernel(const __grid_constant__ Problem<T> p, T* grad_x, float* grad_scale, float* grad_shift,
                      T* grad_gate, float* partials, unsigned* tickets) {
  using Own = Product<T, kM, kN, true>;
  constexpr int kColumns = Own::kColumns, kRows = kThreads / kColumns;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(float, sums, kThreads);
  const Tiling& t = p.tiling;
  const ConvShape& shape = p.shape;
  const Place place(t, blockIdx.x);
  const Window wy = window_of(shape.kernel, shape.stride, true, place.parity_y);
  const Window wx = window_of(shape.kernel, shape.stride, true, place.parity_x);
  const bool shared = shape.shared;
  const int first_expert = shared ? 0 : blockIdx.z, end_expert = shared ? shape.experts : first_expert + 1;
  const int column0 = blockIdx.y * kColumns, column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  const int channel = column0 + column, spread = t.classes == 4 ? 2 : 1, per_image = t.across * t.down * t.classes;
  const bool there = channel < shape.in;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.in, all = shape.experts * each;
  const int64_t gates = shape.batch * per_image * shape.in;  // of an expert
  const bool backward_affine = grad_scale != nullptr, backward_gate = grad_gate != nullptr;
  constexpr int kFours = kColumns / 4;
  const int four = column0 + static_cast<int>(threadIdx.x) % kFours * 4, fours = shape.in - four;
  const bool vector_x = by_four(p.input.x, shape.in) && fours > 0, vector_grad = by_four(grad_x, shape.in) && fours > 0;
  float of_scale[4] = {}, of_shift[4] = {};
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const Own product{p, place, wy, wx, memory, {t, p.chunk, shape.kernel, p.grad.grad_var != nullptr, shared}, expert,
                      column0};
    if (expert == first_expert) {
      fill_table(product.table(), t, place, wy, wx, shape.batch, p.out_high, p.out_wide, shape.experts, shape.out);
    }
    product.run();
    float* results = product.results();
    Affine<float> affine[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < fours) affine[j] = affine_of(p.input, shape.in, expert, four + j);
    }
#pragma unroll 2
    for (int i = threadIdx.x / kFours; i < Own::kPixels; i += kThreads / kFours) {
      const Pixel pixel(t, place, i);
      const int y = pixel.y * spread + place.parity_y, x = pixel.x * spread + place.parity_x;
      auto& result = *reinterpret_cast<Four<float>*>(results + i * Own::kPitch + four - column0);
      if (fours <= 0 || pixel.b >= shape.batch || y >= shape.high || x >= shape.wide) {
        result = {};
        continue;
      }
      const int64_t image = shared ? pixel.b : pixel.b * shape.experts + expert;
      const int64_t at = ((image * shape.high + y) * shape.wide + x) * shape.in + four;
      float read[4], of_x[4];
      read_four(p.input.x + at, fours, vector_x, read);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float before = affine[j].scale * read[j] + affine[j].shift, of_z = result.v[j];
        const bool gated = p.input.gate && j < fours;
        const float gate = gated ? gate_of(p.input, shape, pixel.b, expert, four + j) : 1.0f;
        const float of_value = p.input.relu && before <= 0.0f ? 0.0f : of_z * gate;
        result.v[j] = of_z * (p.input.relu ? rectified(before) : before);
        of_scale[j] += of_value * read[j];
        of_shift[j] += of_value;
        of_x[j] = of_value * affine[j].scale;
      }
      if (!grad_x) continue;
      if (shared) {
        auto& sum = *reinterpret_cast<Four<float>*>(product.found() + i * Own::kPitch + four - column0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (expert > 0) of_x[j] += sum.v[j];
          sum.v[j] = of_x[j];
        }
      }
      if (expert + 1 < end_expert) continue;
      T held[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow(of_x[j], held + j);
      write_four(held, fours, vector_grad, grad_x + at);
    }
    if (backward_affine && (p.input.scale_rows > 1 || expert + 1 == end_expert)) {
      sum_of_columns<kColumns>(of_scale, sums);
      sum_of_columns<kColumns>(of_shift, sums);
      const int to = shared && p.input.scale_rows == 1 ? 0 : expert;
      float* own = partials + to * each + static_cast<int64_t>(blockIdx.x) * shape.in + four;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (threadIdx.x < kFours && j < fours) {
          own[j] = of_scale[j];
          own[all + j] = of_shift[j];
        }
        of_scale[j] = of_shift[j] = 0;
      }
    }
    if (backward_gate) {
      __syncthreads();
      const int pixels = 1 << (t.log_h + t.log_w);
      for (int image = row; there && image < 1 << t.log_b && place.b + image < shape.batch; image += kRows) {
        float total = 0;
        for (int i = 0; i < pixels; ++i) total += results[(image * pixels + i) * Own::kPitch + column];
        partials[2 * all + expert * gates + ((place.b + image) * per_image + place.part) * shape.in + channel] = total;
      }
    }
  }
  if (backward_affine) {
    finish_affine<kColumns>(partials, grad_scale, grad_shift, tickets, shape, p.input.scale_rows, channel, sums);
  }
  if (!backward_gate) return;
  // The last of an image's blocks finishes its gates.
  unsigned* ticket = tickets + affine_tickets(gridDim.x, gridDim.y, shape.experts);
  const int64_t group = quotient(blockIdx.x, per_image);
  if (!last_to_arrive(ticket + (group * gridDim.z + blockIdx.z) * gridDim.y + blockIdx.y, per_image)) return;
  for (int expert = first_expert; expert < end_expert; ++expert) {
    const float* part = partials + 2 * all + expert * gates + channel;
    for (int image = row; there && image < 1 << t.log_b && place.b + image < shape.batch; image += kRows) {
      float total = 0;
      for (int i = 0; i < per_image; ++i) total += fresh(part + ((place.b + image) * per_image + i) * shape.in);
      narrow(total, grad_gate + ((place.b + image) * shape.experts + expert) * shape.in + channel);
    }
  }
}

// ---- backward_weight: the product of gradients and inputs over all pixels

// A block takes kOut output and kIn input channels and every gridDim.x-th tile of pixels. Of its warps two share the
// input channels, and those two pairs the pixels of a tile.
template <typename T, int kTaps, int kPixels, int kM>
struct WeightProduct {
  using Unit = typename Operand<T>::Unit;
  static constexpr int kChannels = Operand<T>::kChannels, kOut = 16 * kM, kIn = 16;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kDepth = kWide ? 8 : 16;                   // pixels of one instruction
  static constexpr int kOwn = kPixels / 2, kSteps = kOwn / kDepth;  // of a warp
  static constexpr int kGroup = kSteps < 2 ? kSteps : 2;          // steps whose gradients stay in registers for all taps
  // From pixel to pixel, in numbers of `Packed`: off each other's banks.
  using Packed = std::conditional_t<kWide, uint2, uint16_t>;  // fp32: high and low part
  static constexpr int kGradPitch = kWide ? kOut + 4 : kOut + 8, kInPitch = kWide ? kIn + 4 : kIn + 8;

  struct Layout {
    int table, grad, second, input, grads, inputs, end;
    __host__ __device__ Layout(const Tiling& t, bool both) {
      const int pixels = t.read();
      table = 0;
      grad = (pixels * 8 + 15) / 16 * 16;
      second = grad + kPixels * kOut * static_cast<int>(sizeof(T));
      input = second + (both ? second - grad : 0);
      grads = input + pixels * kIn * static_cast<int>(sizeof(T));
      inputs = grads + kPixels * kGradPitch * static_cast<int>(sizeof(Packed));
      end = inputs + pixels * kInPitch * static_cast<int>(sizeof(Packed));
      const int sums = grad + 2 * kWarp * kTaps * kM * 4 * 4;  // of two warps
      if (end < sums) end = sums;
    }
  };

  const Problem<T>& p;
  const Window& window;
  unsigned char* memory;
  Layout layout;
  int expert, out0, in0;

  __device__ int64_t* table() const { return reinterpret_cast<int64_t*>(memory + layout.table); }

  __device__ void load(const Place& place) const {
    const ConvShape& shape = p.shape;
    const int out_left = shape.out - out0, in_left = shape.in - in0;
    const auto gradients = [&](const T* images, int offset) {
      T* to = reinterpret_cast<T*>(memory + offset);
      copy_rows(to, kPixels, kOut, out_left, p.vector_weight, images, [&](int row) -> const T* {
        const Pixel pixel(p.tiling, place, row);
        if (pixel.b >= shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) return nullptr;
        const int64_t image = pixel.b * shape.experts + expert;
        return images + ((image * p.out_high + pixel.y) * p.out_wide + pixel.x) * shape.out + out0;
      });
    };
    gradients(p.grad.grad, layout.grad);
    if (p.grad.grad_var) gradients(p.grad.y, layout.second);
    const int64_t* entries = table();
    T* to = reinterpret_cast<T*>(memory + layout.input);
    const int64_t image = static_cast<int64_t>(shape.high) * shape.wide * shape.in;
    const T* own = p.input.x + (shape.shared ? 0 : expert * image) + in0;
    copy_rows(to, p.tiling.read(), kIn, in_left, p.vector_read, p.input.x, [&](int row) -> const T* {
      const int64_t entry = entries[row];
      return entry < 0 ? nullptr : own + entry;
    });
    commit_copies();
  }

  __device__ void store(Packed* to, const float (&v)[kChannels]) const {
    if constexpr (kWide) {
      uint4 both;
      split_tf32(v[0], p.precise, &both.x, &both.y);
      split_tf32(v[1], p.precise, &both.z, &both.w);
      *reinterpret_cast<uint4*>(to) = both;
    } else {
      *reinterpret_cast<uint2*>(to) = Operand<T>::pack(v, false);
    }
  }

  // [pixel][out]; adds this thread's share of the bias' gradient up. What is the same for all tiles is read again for
  // each: registers are short.
  __device__ void pack_gradients(const Place& place, float (&of_bias)[kChannels]) const {
    constexpr int kAcross = kOut / kChannels;
    const int unit = threadIdx.x % kAcross * kChannels;
    StatisticsGrad<float> statistics[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const int channel = out0 + unit + j;
      if (channel < p.shape.out) {
        statistics[j] = statistics_grad(p.grad, static_cast<int64_t>(expert) * p.shape.out + channel);
      }
    }
    const T* grad = reinterpret_cast<const T*>(memory + layout.grad) + unit;
    const T* second = reinterpret_cast<const T*>(memory + layout.second) + unit;
    Packed* packed = reinterpret_cast<Packed*>(memory + layout.grads) + unit;
#pragma unroll 1
    for (int i = threadIdx.x / kAcross; i < kPixels; i += kThreads / kAcross) {
      const Pixel pixel(p.tiling, place, i);
      float v[kChannels] = {};
      if (pixel.b < p.shape.batch && pixel.y < p.out_high && pixel.x < p.out_wide) {
        float y[kChannels] = {};
        Operand<T>::read(grad + i * kOut, v);
        if (p.grad.grad_var) Operand<T>::read(second + i * kOut, y);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          v[j] += statistics[j].offset + statistics[j].slope * (y[j] - statistics[j].mean);
          of_bias[j] += v[j];
        }
      }
      store(packed + i * kGradPitch, v);
    }
  }

  // [pixel][in]
  __device__ void pack_inputs(const Place& place) const {
    constexpr int kAcross = kIn / kChannels;
    const int unit = threadIdx.x % kAcross * kChannels;
    Affine<float> affine[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const int channel = in0 + unit + j;
      affine[j].scale = 0.0f;  // zeros stay zeros
      if (channel < p.shape.in) affine[j] = affine_of(p.input, p.shape.in, expert, channel);
    }
    const T* read = reinterpret_cast<const T*>(memory + layout.input) + unit;
    Packed* packed = reinterpret_cast<Packed*>(memory + layout.inputs) + unit;
    const int64_t* entries = table();
#pragma unroll 1
    for (int i = threadIdx.x / kAcross; i < p.tiling.read(); i += kThreads / kAcross) {
      float v[kChannels] = {};
      if (entries[i] >= 0) {
        Operand<T>::read(read + i * kIn, v);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          v[j] = affine[j](v[j], p.input.relu);
          const int channel = in0 + unit + j;
          if (p.input.gate && channel < p.shape.in) {
            const int64_t b = place.b + i / (p.tiling.rows * p.tiling.columns);
            v[j] *= gate_of(p.input, p.shape, b, expert, channel);
          }
        }
      }
      store(packed + i * kInPitch, v);
    }
  }

  // Where the pixels that result pixel i reads begin.
  __device__ int start_of(int i) const {
    const Tiling& t = p.tiling;
    const int image = i >> (t.log_h + t.log_w), y = i >> t.log_w & ((1 << t.log_h) - 1), x = i & ((1 << t.log_w) - 1);
    return (image * t.rows + y * window.step) * t.columns + x * window.step;
  }

  __device__ void multiply(float (&total)[kTaps][kM][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
    const int first = warp / 2 * kOwn, columns = p.tiling.columns;
    const Packed* grads = reinterpret_cast<const Packed*>(memory + layout.grads);
    const Packed* inputs = reinterpret_cast<const Packed*>(memory + layout.inputs) + warp % 2 * 8;
#pragma unroll 1
    for (int begin = first; begin < first + kOwn; begin += kGroup * kDepth) {
      if constexpr (kWide) {
        uint32_t high[kGroup][kM][4], low[kGroup][kM][4];
        int start[kGroup][2];
#pragma unroll
        for (int s = 0; s < kGroup; ++s) {
#pragma unroll
          for (int j = 0; j < 2; ++j) start[s][j] = start_of(begin + s * 8 + j * 4 + t) * kInPitch + g;
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint2 both = grads[(begin + s * 8 + j / 2 * 4 + t) * kGradPitch + m * 16 + j % 2 * 8 + g];
              high[s][m][j] = both.x;
              low[s][m][j] = both.y;
            }
          }
        }
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          const int offset = kTaps == 1 ? 0 : (tap / 3 * columns + tap % 3) * kInPitch;
          float part[kM][4] = {};
#pragma unroll
          for (int s = 0; s < kGroup; ++s) {
            const uint2 b0 = inputs[start[s][0] + offset], b1 = inputs[start[s][1] + offset];
            T* type = nullptr;
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              if (p.precise) {
                mma(type, part[m], high[s][m], b0.y, b1.y);
                mma(type, part[m], low[s][m], b0.x, b1.x);
              }
              mma(type, part[m], high[s][m], b0.x, b1.x);
            }
          }
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[tap][m][j] += part[m][j];
          }
        }
      } else {
        const int matrix = lane / 8;
        uint32_t a[kGroup][kM][4];
#pragma unroll
        for (int s = 0; s < kGroup; ++s) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            const int pixel = begin + s * 16 + matrix / 2 * 8 + lane % 8;
            ldmatrix_transposed(a[s][m], grads + pixel * kGradPitch + m * 16 + matrix % 2 * 8);
          }
        }
        const int start = start_of(begin + matrix % (2 * kGroup) * 8 + lane % 8) * kInPitch;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          const int offset = kTaps == 1 ? 0 : (tap / 3 * columns + tap % 3) * kInPitch;
          uint32_t b[4];  // two words a step
          ldmatrix_transposed(b, inputs + start + offset);
          float part[kM][4] = {};
          T* type = nullptr;
#pragma unroll
          for (int s = 0; s < kGroup; ++s) {
#pragma unroll
            for (int m = 0; m < kM; ++m) mma(type, part[m], a[s][m], b[2 * s], b[2 * s + 1]);
          }
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[tap][m][j] += part[m][j];
          }
        }
      }
    }
  }
};

// Blocks: shares of the tiles x (out and in channels) x experts. Scratch: partial weights [shares, E, out, in, taps], then
// partial biases [shares, E, out].
template <typename T, int kTaps, int kPixels, int kM>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(const __grid_constant__ Problem<T> p, T* grad_weight, T* grad_bias, float* partials,
                           unsigned* tickets) {
  using Own = WeightProduct<T, kTaps, kPixels, kM>;
  constexpr int kChannels = Own::kChannels, kOut = Own::kOut, kIn = Own::kIn;
  FASTMOD_DYNAMIC_SHARED(memory);
  const ConvShape& shape = p.shape;
  const Tiling& t = p.tiling;
  const int expert = blockIdx.z, across = (shape.in + kIn - 1) / kIn;
  const int out0 = blockIdx.y / across * kOut, in0 = blockIdx.y % across * kIn;
  const Window window = window_of(shape.kernel, shape.stride, false, 0);
  const Own product{p, window, memory, {t, p.grad.grad_var != nullptr}, expert, out0, in0};
  const int64_t filter0 = static_cast<int64_t>(expert) * shape.out + out0;
  float total[kTaps][kM][4] = {}, of_bias[kChannels] = {};
  for (int64_t tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
    const Place place(t, tile);
    if (tile == blockIdx.x) {
      fill_table(product.table(), t, place, window, window, shape.batch, shape.high, shape.wide,
                 shape.shared ? 1 : shape.experts, shape.in);
      __syncthreads();
      product.load(place);
    }
    wait_copies<0>();
    __syncthreads();  // this tile has come; the one before is done with
    product.pack_gradients(place, of_bias);
    product.pack_inputs(place);
    __syncthreads();
    if (tile + gridDim.x < t.tiles) {
      const Place next(t, tile + gridDim.x);
      fill_table(product.table(), t, next, window, window, shape.batch, shape.high, shape.wide,
                 shape.shared ? 1 : shape.experts, shape.in);
      __syncthreads();
      product.load(next);
    }
    product.multiply(total);
  }
  __syncthreads();

  // The two warps with the other half of the pixels hand their sums over.
  float* sums = reinterpret_cast<float*>(memory + product.layout.grad);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int i = 0; i < kTaps * kM * 4; ++i) {
    if (warp >= 2) sums[(i * 2 + warp % 2) * kWarp + lane] = total[i / (4 * kM)][i / 4 % kM][i % 4];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTaps * kM * 4; ++i) {
    if (warp < 2) sums[(i * 2 + warp) * kWarp + lane] += total[i / (4 * kM)][i / 4 % kM][i % 4];
  }
  __syncthreads();
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, weights = filters * shape.in * kTaps;
  float* own = partials + blockIdx.x * weights + (filter0 * shape.in + in0) * kTaps;
#pragma unroll 2
  for (int i = threadIdx.x; i < kOut * kIn * kTaps; i += kThreads) {
    const int out = i / (kIn * kTaps), rest = i % (kIn * kTaps), in = rest / kTaps, tap = rest % kTaps;
    if (out0 + out >= shape.out || in0 + in >= shape.in) continue;
    const int word = tap * kM * 4 + out / 16 * 4 + out % 16 / 8 * 2 + in % 2, from = out % 8 * 4 + in % 8 / 2;
    own[static_cast<int64_t>(out) * shape.in * kTaps + rest] = sums[(word * 2 + in / 8) * kWarp + from];
  }
  __syncthreads();
  const bool with_bias = grad_bias && in0 == 0;
  float* biases = partials + gridDim.x * weights;
  if (with_bias) {
    constexpr int kAcross = kOut / kChannels;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      sums[threadIdx.x / kAcross * kOut + threadIdx.x % kAcross * kChannels + j] = of_bias[j];
    }
    __syncthreads();
    if (threadIdx.x < kOut && out0 + static_cast<int>(threadIdx.x) < shape.out) {
      float bias = 0;
      for (int row = 0; row < kThreads / kAcross; ++row) bias += sums[row * kOut + threadIdx.x];
      biases[blockIdx.x * filters + filter0 + threadIdx.x] = bias;
    }
  }
  unsigned* ticket = tickets + (expert * gridDim.y + blockIdx.y) * reduce_tickets<kShareGroup>(gridDim.x);
  reduce_in_order<kShareGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool all) {
    for (int i = threadIdx.x; i < kOut * kIn * kTaps; i += kThreads) {
      const int out = i / (kIn * kTaps), rest = i % (kIn * kTaps);
      if (out0 + out >= shape.out || in0 + rest / kTaps >= shape.in) continue;
      const int64_t at = ((filter0 + out) * shape.in + in0) * kTaps + rest;
      float sum = 0;
#pragma unroll 4
      for (int64_t share = first; share < end; share += step) sum += fresh(partials + share * weights + at);
      if (!all) partials[first * weights + at] = sum;
      else if (grad_weight) narrow(sum, grad_weight + at);
    }
    if (!with_bias || threadIdx.x >= kOut || out0 + static_cast<int>(threadIdx.x) >= shape.out) return;
    float sum = 0;
    for (int64_t share = first; share < end; share += step) sum += fresh(biases + share * filters + filter0 + threadIdx.x);
    if (!all) biases[first * filters + filter0 + threadIdx.x] = sum;
    else narrow(sum, grad_bias + filter0 + threadIdx.x);
  });
}

// ---- launches

template <typename T>
bool aligned(const T* pointer, int64_t row) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

template <typename T>
bool on_tensor_cores(const ConvShape& shape) {
  return sizeof(T) <= 4 && !shape.depthwise;
}

template <typename T>
int chunk_of(const ConvShape& shape) {
  return shape.kernel == 1 ? 2 * kStep<T> : kStep<T>;
}

// The stride makes a tile read four times as many pixels.
bool half_tiles(const ConvShape& shape, bool backward) {
  return !backward && shape.stride == 2 && shape.kernel == 3;
}
Tiling product_tiling(const ConvShape& shape, bool backward) {
  const bool half = half_tiles(shape, backward);
  const int spread = backward ? shape.stride : 1;
  const int high = backward ? (shape.high + spread - 1) / spread : shape.out_high();
  const int wide = backward ? (shape.wide + spread - 1) / spread : shape.out_wide();
  return tiling_of(shape, backward, high, wide, half ? 6 : 7, half ? 300 : 256);
}
Tiling weight_tiling(const ConvShape& shape) {
  const bool half = half_tiles(shape, false);
  return tiling_of(shape, false, shape.out_high(), shape.out_wide(), half ? 5 : 6, half ? 162 : 112);
}
int weight_blocks(const ConvShape& shape) {
  return (shape.out <= 16 ? 1 : (shape.out + 31) / 32) * ((shape.in + 15) / 16);
}
// Enough blocks to fill a GPU, each with several tiles to one partial result.
int64_t weight_shares(const ConvShape& shape) {
  const int64_t tiles = weight_tiling(shape).tiles, blocks = static_cast<int64_t>(weight_blocks(shape)) * shape.experts;
  const int64_t wanted = (256 + blocks - 1) / blocks, most = (tiles + 1) / 2;
  return wanted < most ? wanted : most;
}
bool narrow_columns(const ConvShape& shape, bool backward) {
  return backward ? shape.shared || shape.in <= 16 : shape.out <= 16;
}

int column_blocks(const ConvShape& shape, bool backward) {
  const int each = narrow_columns(shape, backward) ? 16 : 32;
  return ((backward ? shape.in : shape.out) + each - 1) / each;
}

}  // namespace

template <typename T>
Scratch norm_conv_forward_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::forward_scratch<T>(shape);
  const int64_t tiles = product_tiling(shape, false).tiles;
  return {3 * tiles * shape.experts * shape.out, shape.experts * column_blocks(shape, false) * reduce_tickets<kGroup>(tiles)};
}
template <typename T>
Scratch norm_conv_backward_x_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::backward_x_scratch<T>(shape);
  const Tiling tiling = product_tiling(shape, true);
  const int columns = column_blocks(shape, true);
  return {(2 * tiling.tiles + shape.batch * tiling.per_image()) * shape.experts * shape.in,
          affine_tickets(tiling.tiles, columns, shape.experts) + tiling.tiles / tiling.per_image() * shape.experts * columns};
}
template <typename T>
Scratch norm_conv_backward_weight_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::backward_weight_scratch<T>(shape);
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, shares = weight_shares(shape);
  return {shares * filters * (static_cast<int64_t>(shape.in) * shape.kernel * shape.kernel + 1),
          shape.experts * weight_blocks(shape) * reduce_tickets<kShareGroup>(shares)};
}

template <typename T>
cudaError_t norm_conv_forward(ConvInput<T> input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                              Compute<T>* var, Compute<T>* scratch, unsigned* tickets, bool allow_tf32,
                              ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (on_tensor_cores<T>(shape)) {
      const Tiling tiling = product_tiling(shape, false);
      const int taps = shape.kernel * shape.kernel;
      const Problem<T> p{input, {}, weight, shape, shape.out_high(), shape.out_wide(), tiling, chunk_of<T>(shape),
                         aligned(input.x, shape.in), aligned(weight, static_cast<int64_t>(shape.in) * taps), !allow_tf32};
      const auto run = [&](auto tiles_m, auto tiles_n) {
        constexpr int kM = decltype(tiles_m)::value, kN = decltype(tiles_n)::value;
        const typename Product<T, kM, kN, false>::Layout layout(tiling, p.chunk, shape.kernel, false, false);
        if (layout.end > kMaxShared) return cudaErrorInvalidValue;
        const unsigned columns = static_cast<unsigned>(column_blocks(shape, false));
        const dim3 grid(blocks_for(tiling.tiles, 1).x, columns, static_cast<unsigned>(shape.experts));
        const auto kernel = forward_kernel<T, kM, kN>;
        return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, kThreads, static_cast<size_t>(layout.end), stream, p, bias, y, mean,
                                      var, scratch, tickets);
      };
      using One = std::integral_constant<int, 1>;
      using Two = std::integral_constant<int, 2>;
      using Four = std::integral_constant<int, 4>;
      const bool few = narrow_columns(shape, false);
      if (half_tiles(shape, false)) return few ? run(One{}, Two{}) : run(One{}, Four{});
      return few ? run(Two{}, Two{}) : run(Two{}, Four{});
    }
  }
  return plain::forward<T>(input, weight, bias, y, mean, var, scratch, tickets, shape, stream);
}

template <typename T>
cudaError_t norm_conv_backward_x(ConvGrad<T> grad, ConvInput<T> input, const T* weight, T* grad_x,
                                 Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                                 unsigned* tickets, bool allow_tf32, ConvShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (on_tensor_cores<T>(shape)) {
      const Tiling tiling = product_tiling(shape, true);
      const int taps = shape.kernel * shape.kernel;
      const bool vector = aligned(grad.grad, shape.out) && (!grad.grad_var || aligned(grad.y, shape.out));
      const Problem<T> p{input, grad, weight, shape, shape.out_high(), shape.out_wide(), tiling, chunk_of<T>(shape),
                         vector, aligned(weight, static_cast<int64_t>(shape.in) * taps), !allow_tf32};
      const auto run = [&](auto tiles_n) {
        constexpr int kN = decltype(tiles_n)::value;
        const typename Product<T, 2, kN, true>::Layout layout(tiling, p.chunk, shape.kernel, grad.grad_var != nullptr,
                                                                 shape.shared);
        if (layout.end > kMaxShared) return cudaErrorInvalidValue;
        const unsigned columns = static_cast<unsigned>(column_blocks(shape, true));
        const unsigned experts = shape.shared ? 1 : static_cast<unsigned>(shape.experts);
        const dim3 grid(blocks_for(tiling.tiles, 1).x, columns, experts);
        const auto kernel = backward_x_kernel<T, 2, kN>;
        return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, kThreads, static_cast<size_t>(layout.end), stream, p, grad_x,
                                      grad_scale, grad_shift, grad_gate, scratch, tickets);
      };
      if (narrow_columns(shape, true)) return run(std::integral_constant<int, 2>{});
      return run(std::integral_constant<int, 4>{});
    }
  }
  return plain::backward_x<T>(grad, input, weight, grad_x, grad_scale, grad_shift, grad_gate, scratch, tickets, shape,
                              stream);
}

template <typename T>
cudaError_t norm_conv_backward_weight(ConvGrad<T> grad, ConvInput<T> input, T* grad_weight, T* grad_bias,
                                      Compute<T>* scratch, unsigned* tickets, bool allow_tf32, ConvShape shape,
                                      cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (on_tensor_cores<T>(shape)) {
      const Tiling tiling = weight_tiling(shape);
      const bool vector = aligned(grad.grad, shape.out) && (!grad.grad_var || aligned(grad.y, shape.out));
      const Problem<T> p{input, grad, nullptr, shape, shape.out_high(), shape.out_wide(), tiling, 0,
                         aligned(input.x, shape.in), vector, !allow_tf32};
      const auto run = [&](auto taps, auto pixels, auto tiles_m) {
        constexpr int kTaps = decltype(taps)::value, kPixels = decltype(pixels)::value, kM = decltype(tiles_m)::value;
        const typename WeightProduct<T, kTaps, kPixels, kM>::Layout layout(tiling, grad.grad_var != nullptr);
        if (layout.end > kMaxShared) return cudaErrorInvalidValue;
        const dim3 grid(static_cast<unsigned>(weight_shares(shape)), static_cast<unsigned>(weight_blocks(shape)),
                        static_cast<unsigned>(shape.experts));
        const auto kernel = backward_weight_kernel<T, kTaps, kPixels, kM>;
        return FASTMOD_LAUNCH_DYNAMIC(kernel, grid, kThreads, static_cast<size_t>(layout.end), stream, p, grad_weight,
                                      grad_bias, scratch, tickets);
      };
      const auto either = [&](auto taps, auto pixels) {
        return shape.out <= 16 ? run(taps, pixels, std::integral_constant<int, 1>{})
                               : run(taps, pixels, std::integral_constant<int, 2>{});
      };
      using Nine = std::integral_constant<int, 9>;
      if (shape.kernel == 1) return either(std::integral_constant<int, 1>{}, std::integral_constant<int, 64>{});
      if (half_tiles(shape, false)) return either(Nine{}, std::integral_constant<int, 32>{});
      return either(Nine{}, std::integral_constant<int, 64>{});
    }
  }
  return plain::backward_weight<T>(grad, input, grad_weight, grad_bias, scratch, tickets, shape, stream);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template Scratch norm_conv_forward_scratch<T>(ConvShape);                                                            \
  template Scratch norm_conv_backward_x_scratch<T>(ConvShape);                                                         \
  template Scratch norm_conv_backward_weight_scratch<T>(ConvShape);                                                    \
  template cudaError_t norm_conv_forward<T>(ConvInput<T>, const T*, const T*, T*, Compute<T>*, Compute<T>*,            \
                                            Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);                    \
  template cudaError_t norm_conv_backward_x<T>(ConvGrad<T>, ConvInput<T>, const T*, T*, Compute<T>*, Compute<T>*, T*,  \
                                               Compute<T>*, unsigned*, bool, ConvShape, cudaStream_t);                 \
  template cudaError_t norm_conv_backward_weight<T>(ConvGrad<T>, ConvInput<T>, T*, T*, Compute<T>*, unsigned*, bool,   \
                                                    ConvShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
