// The product of pixels and filters: shared by the forward and the gradient of the input.
#pragma once

#include "conv_tiles.cuh"

namespace fastmod::cuda {

// A block has kSides * kWarps warps. Each side computes 8 kN columns for all pixels, which are loaded into shared
// memory once for both sides. If there are four classes of pixels, each warp of a side has one; all classes read the
// same pixels of the gradient, which are loaded and packed once for them.
template <typename T, int kM, int kN, bool kBackward, int kSides, int kClasses = 1>
struct Product {
  static_assert(kClasses == 1 || (kBackward && kClasses == kWarps));
  using Unit = typename Operand<T>::Unit;
  static constexpr int kChannels = Operand<T>::kChannels, kPixels = kWarps * kM * 16, kColumns = kN * 8 * kSides;
  static constexpr int kThreads = cuda::kThreads * kSides;
  static constexpr int kOfClass = kPixels / kClasses;
  static constexpr bool kBackwards = kBackward;

  // Offsets in bytes of shared memory. The results overlap the rest, which is no longer needed by then.
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
  unsigned char* memory;
  Layout layout;
  int expert, column0;
  unsigned turn;  // of the classes among the warps, so that the longest is not always on the same part of the GPU

  __device__ int64_t* table() const { return reinterpret_cast<int64_t*>(memory + layout.table); }
  __device__ float* found() const { return reinterpret_cast<float*>(memory + layout.found); }  // sums over experts
  __device__ float* results() const { return reinterpret_cast<float*>(memory + layout.read); }
  __device__ int depth() const { return kBackward ? p.shape.out : p.shape.in; }

  // Starts copying channels c0 .. c0 + chunk of all taps.
  __device__ void load(int c0) const {
    const int taps = p.shape.kernel * p.shape.kernel, left = depth() - c0, valid = left < p.chunk ? left : p.chunk;
    const int pixels = kBackward ? p.out_high * p.out_wide : p.shape.high * p.shape.wide;
    const int64_t* entries = table();
    const auto pixels_of = [&](const T* images, bool shared, int offset) {
      T* to = reinterpret_cast<T*>(memory + offset);
      const T* own = images + (shared ? 0 : static_cast<int64_t>(expert) * pixels * depth()) + c0;
      copy_rows<kThreads>(to, p.tiling.read(), p.chunk, valid, p.vector_read, images, [&](int row) -> const T* {
        const int64_t entry = entries[row];
        return entry < 0 ? nullptr : own + entry;
      });
    };
    if constexpr (kBackward) {
      pixels_of(p.grad.grad, false, layout.read);
      if (p.grad.y) pixels_of(p.grad.y, false, layout.second);
    } else {
      pixels_of(p.input.x, p.shape.shared, layout.read);
      if (p.input.residual) pixels_of(p.input.residual, false, layout.second);
    }
    T* to = reinterpret_cast<T*>(memory + layout.weight);
    const int64_t filters = static_cast<int64_t>(expert) * p.shape.out;
    const T* weight = p.weight + expert * p.weight_gap;
    if constexpr (kBackward) {  // [chunk of out][columns of in][taps]
      const int columns = p.shape.in - column0 < kColumns ? p.shape.in - column0 : kColumns;
      const auto from = [&](int row) -> const T* {
        if (row >= valid) return nullptr;
        return weight + ((filters + c0 + row) * p.shape.in + column0) * taps;
      };
      copy_rows<kThreads>(to, p.chunk, kColumns * taps, columns * taps, p.vector_weight, weight, from);
    } else {  // [columns of out][chunk of in][taps]
      const auto from = [&](int row) -> const T* {
        if (column0 + row >= p.shape.out) return nullptr;
        return weight + ((filters + column0 + row) * p.shape.in + c0) * taps;
      };
      copy_rows<kThreads>(to, kColumns, p.chunk * taps, valid * taps, p.vector_weight, weight, from);
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
            if (p.grad.y) Operand<T>::read(second + i * p.chunk + local, y);
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
            if (p.input.residual) add_residual(second + i * p.chunk + local, entries[i], channel, v);
          }
        }
        units[(step * pixels + i) * 4 + t] = Operand<T>::pack(v, p.precise);
      }
    }
  }

  // Adds a residual. The first column of blocks also writes the sum, as there one block reads each pixel.
  __device__ void add_residual(const T* from, int64_t entry, int channel, float (&v)[kChannels]) const {
    float added[kChannels];
    Operand<T>::read(from, added);
    T* to = p.input.sum + entry + static_cast<int64_t>(expert) * p.shape.high * p.shape.wide * depth() + channel;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      T held;
      narrow(v[j] + added[j], &held);
      v[j] = widen(held);
      if (column0 == 0 && channel + j < depth()) to[j] = held;
    }
  }

  // Packs filters: units [tap][step][column][4], in the order in which they meet pixels. Of four classes, the taps of
  // the first come first: one, two, two and four.
  __device__ void pack_weights() const {
    constexpr int kGroups = kThreads / (4 * kColumns);
    const int t = threadIdx.x % 4, column = threadIdx.x / 4 % kColumns, taps = p.shape.kernel * p.shape.kernel;
    const int steps = p.chunk / kStep<T>;
    constexpr uint64_t kOfClasses = 0x026817354;  // a digit for each tap
    const T* weight = reinterpret_cast<const T*>(memory + layout.weight);
    Unit* units = reinterpret_cast<Unit*>(memory + layout.weights);
    // Every step's sum starts at zero and is truncated once; compensating for that costs least here.
    const float grown = depth() > kExactDepth ? kCutOff : 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x / (4 * kColumns); i < taps * steps; i += kGroups) {
      const int tap = steps == 1 ? i : i / steps, local = (i - tap * steps) * kStep<T> + t * kChannels;
      int from = kBackward ? taps - 1 - tap : tap;
      if constexpr (kClasses == 4) from = taps == 1 ? 0 : static_cast<int>(kOfClasses >> 4 * tap & 15);
      float v[kChannels];
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        v[j] = widen(kBackward ? weight[((local + j) * kColumns + column) * taps + from]
                               : weight[(column * p.chunk + local + j) * taps + from]);
      }
      units[(i * kColumns + column) * 4 + t] = Operand<T>::pack(v, p.precise, grown);
    }
  }

  // The first column of this thread's side.
  __device__ int first_column() const {
    return kSides == 1 ? 0 : static_cast<int>(threadIdx.x) / cuda::kThreads * kN * 8;
  }

  // This warp's share of the pixels: a part of them, or a class.
  __device__ int share() const {
    const unsigned warp = threadIdx.x / kWarp;
    return static_cast<int>((kClasses == 4 ? warp + turn : warp) % kWarps);
  }

  // Adds one chunk's share to the sums.
  __device__ void multiply(float (&total)[kM][kN][4], float (&low)[kM][kN][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int own = share(), parity_y = own >> 1, parity_x = own & 1, first = kClasses == 4 ? 0 : own * kM * 16;
    const bool none = kClasses == 4 && p.shape.kernel == 1 && own > 0;  // only even pixels of even rows have a gradient
    const Window window = window_of(p.shape.kernel, p.shape.stride, kBackward);
    const int taps_y = kClasses == 4 ? (none ? 0 : window_of(p.shape.kernel, 2, true, parity_y).taps) : window.taps;
    const int taps_x = kClasses == 4 ? window_of(p.shape.kernel, 2, true, parity_x).taps : window.taps;
    // Either a row of taps, or the steps of a single tap, never both.
    const int steps = p.chunk / kStep<T>, products = taps_x * steps, columns = p.tiling.columns * 4;
    const int stride = steps == 1 ? 4 : p.tiling.read() * 4;
    const Unit* weights = reinterpret_cast<const Unit*>(memory + layout.weights) + first_column() * 4 + lane;
    if constexpr (kClasses == 4) weights += (own == 0 ? 0 : 2 * own - 1) * steps * kColumns * 4;
    const Unit* rows[kM][2];  // where the lane's two rows of each product start to read
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + m * 16 + half * 8 + g;
        const int image = i >> (p.tiling.log_h + p.tiling.log_w), y = i >> p.tiling.log_w & ((1 << p.tiling.log_h) - 1);
        const int x = i & ((1 << p.tiling.log_w) - 1);
        const int start = (image * p.tiling.rows + y * window.step) * p.tiling.columns + x * window.step;
        rows[m][half] = reinterpret_cast<const Unit*>(memory + layout.units) + start * 4 + t;
      }
    }
#pragma unroll 1
    for (int tap_y = 0; tap_y < taps_y; ++tap_y) {
      int offset = tap_y * columns;
#pragma unroll 1
      for (int i = products; i > 0; --i) {
        float part[kM][kN][4] = {};
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
  }

  // Computes the whole product into results(), [pixel][column], one class after the other. All threads may read it on
  // return.
  __device__ void run() const {
    float total[kM][kN][4] = {}, low[kM][kN][4] = {};
    __syncthreads();  // the table is complete; results of the previous expert have been read
    load(0);
    for (int c0 = 0; c0 < depth(); c0 += p.chunk) {
      wait_copies<0>();
      __syncthreads();  // this chunk has arrived; the previous one is no longer needed
      pack_pixels(c0);
      pack_weights();
      __syncthreads();
      if (c0 + p.chunk < depth()) load(c0 + p.chunk);
      multiply(total, low);
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarp, own = share();
    float* out = results() + first_column();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = (own * kM + m) * 16 + j / 2 * 8 + lane / 4;
          out[i * kPitch + n * 8 + lane % 4 * 2 + j % 2] = total[m][n][j] + low[m][n][j];
        }
      }
    }
    __syncthreads();
  }
};

// Sums of kColumns columns, four per thread, over all threads with the same columns, in a fixed order; all get the
// sums.
template <int kColumns, int kSides>
__device__ inline void sum_of_columns(float (&v)[4], float* sums) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset >= kColumns / 4; offset /= 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] += __shfl_xor_sync(kAllLanes, v[j], offset);
  }
  __syncthreads();  // the previous sums have been read
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (lane < kColumns / 4) sums[warp * kColumns + lane * 4 + j] = v[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = 0;
#pragma unroll
    for (int w = 0; w < kWarps * kSides; ++w) v[j] += sums[w * kColumns + lane % (kColumns / 4) * 4 + j];
  }
}

}  // namespace fastmod::cuda
