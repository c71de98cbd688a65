// norm_conv: the gradient of the weight on tensor cores, the product of gradients and inputs over all pixels; see
// norm_conv.cu.
#include <algorithm>

#include "conv_group.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kShareGroup = 8;    // small, as partial weights are large
constexpr int kOwnShared = 1024;  // more than kernels declare statically

// A block takes kOut output and kIn input channels and every gridDim.x-th tile of pixels. It has twice as many warps
// for 32 input channels as for 16, so that gradients, of which y makes two tensors, are read and packed once for 32.
// Each warp has eight input channels; two such rows of warps share the pixels of a tile.
template <typename T, int kTaps, int kPixels, int kM, int kSides>
struct WeightProduct {
  using Unit = typename Operand<T>::Unit;
  static constexpr int kChannels = Operand<T>::kChannels, kOut = 16 * kM, kIn = 16 * kSides, kEights = kIn / 8;
  static constexpr int kThreads = cuda::kThreads * kSides;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kDepth = kWide ? 8 : 16;                     // pixels per instruction
  static constexpr int kOwn = kPixels / 2, kSteps = kOwn / kDepth;  // per warp
  // Steps whose gradients stay in registers for all taps; sums for 9 taps x 32 outputs in fp32 leave room for only one.
  static constexpr int kGroup = kSteps < 2 || (kWide && kTaps * kM > 9) ? 1 : 2;
  // Distance between pixels in units of `Packed`, chosen to avoid bank conflicts.
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
      const int sums = grad + kEights * kWarp * kTaps * kM * 4 * 4;  // of half the warps
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
      copy_rows<kThreads>(to, kPixels, kOut, out_left, p.vector_weight, images, [&](int row) -> const T* {
        const Pixel pixel(p.tiling, place, row);
        if (pixel.b >= shape.batch || pixel.y >= p.out_high || pixel.x >= p.out_wide) return nullptr;
        const int64_t image = pixel.b * shape.experts + expert;
        return images + ((image * p.out_high + pixel.y) * p.out_wide + pixel.x) * shape.out + out0;
      });
    };
    gradients(p.grad.grad, layout.grad);
    if (p.grad.y) gradients(p.grad.y, layout.second);
    const int64_t* entries = table();
    T* to = reinterpret_cast<T*>(memory + layout.input);
    const int64_t image = static_cast<int64_t>(shape.high) * shape.wide * shape.in;
    const T* own = p.input.x + (shape.shared ? 0 : expert * image) + in0;
    copy_rows<kThreads>(to, p.tiling.read(), kIn, in_left, p.vector_read, p.input.x, [&](int row) -> const T* {
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

  // Packs into [pixel][out] and adds up this thread's share of the bias' gradient. What is the same for all tiles is
  // read again for each, as registers are scarce.
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
        if (p.grad.y) Operand<T>::read(second + i * kOut, y);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          v[j] += statistics[j].offset + statistics[j].slope * (y[j] - statistics[j].mean);
          of_bias[j] += v[j];
        }
      }
      store(packed + i * kGradPitch, v);
    }
  }

  // Packs into [pixel][in].
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

  // The first of the pixels that result pixel i reads.
  __device__ int start_of(int i) const {
    const Tiling& t = p.tiling;
    const int image = i >> (t.log_h + t.log_w), y = i >> t.log_w & ((1 << t.log_h) - 1), x = i & ((1 << t.log_w) - 1);
    return (image * t.rows + y * window.step) * t.columns + x * window.step;
  }

  __device__ void multiply(float (&total)[kTaps][kM][4]) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
    const int first = warp / kEights * kOwn, columns = p.tiling.columns;
    const Packed* grads = reinterpret_cast<const Packed*>(memory + layout.grads);
    const Packed* inputs = reinterpret_cast<const Packed*>(memory + layout.inputs) + warp % kEights * 8;
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
          uint32_t b[4];  // two words per step
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

template <typename T>
struct Task {
  Problem<T> p;
  T* grad_weight;
  T* grad_bias;
  float* partials;
  unsigned* tickets;
  Share share;
};

// Blocks: shares of the tiles x (out and in channels) x experts. Scratch: partial weights [shares, E, out, in, taps],
// then partial biases [shares, E, out].
template <typename T, int kTaps, int kPixels, int kM, int kSides>
__device__ void backward_weight(const Task<T>& task, const Block& block, unsigned char* memory) {
  using Own = WeightProduct<T, kTaps, kPixels, kM, kSides>;
  constexpr int kChannels = Own::kChannels, kOut = Own::kOut, kIn = Own::kIn, kEights = Own::kEights;
  constexpr int kThreads = Own::kThreads;
  const Problem<T>& p = task.p;
  const ConvShape& shape = p.shape;
  const Tiling& t = p.tiling;
  const int expert = block.z, across = (shape.in + kIn - 1) / kIn;
  const int out0 = block.y / across * kOut, in0 = block.y % across * kIn;
  const Window window = window_of(shape.kernel, shape.stride, false);
  const Own product{p, window, memory, {t, p.grad.y != nullptr}, expert, out0, in0};
  const int64_t filter0 = static_cast<int64_t>(expert) * shape.out + out0;
  float total[kTaps][kM][4] = {}, of_bias[kChannels] = {};
  for (int64_t tile = block.x; tile < t.tiles; tile += block.across) {
    const Place place(t, tile);
    if (tile == block.x) {
      fill_table(product.table(), t, place, window, shape.batch, shape.high, shape.wide,
                 shape.shared ? 1 : shape.experts, shape.in);
      __syncthreads();
      product.load(place);
    }
    wait_copies<0>();
    __syncthreads();  // this tile has arrived; the previous one is no longer needed
    product.pack_gradients(place, of_bias);
    product.pack_inputs(place);
    __syncthreads();
    if (tile + block.across < t.tiles) {
      const Place next(t, tile + block.across);
      fill_table(product.table(), t, next, window, shape.batch, shape.high, shape.wide,
                 shape.shared ? 1 : shape.experts, shape.in);
      __syncthreads();
      product.load(next);
    }
    product.multiply(total);
  }
  __syncthreads();

  // The warps with the other half of the pixels pass on their sums.
  float* sums = reinterpret_cast<float*>(memory + product.layout.grad);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int i = 0; i < kTaps * kM * 4; ++i) {
    if (warp >= kEights) sums[(i * kEights + warp % kEights) * kWarp + lane] = total[i / (4 * kM)][i / 4 % kM][i % 4];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTaps * kM * 4; ++i) {
    if (warp < kEights) sums[(i * kEights + warp) * kWarp + lane] += total[i / (4 * kM)][i / 4 % kM][i % 4];
  }
  __syncthreads();
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out, weights = filters * shape.in * kTaps;
  float* own = task.partials + block.x * weights + (filter0 * shape.in + in0) * kTaps;
#pragma unroll 2
  for (int i = threadIdx.x; i < kOut * kIn * kTaps; i += kThreads) {
    const int out = i / (kIn * kTaps), rest = i % (kIn * kTaps), in = rest / kTaps, tap = rest % kTaps;
    if (out0 + out >= shape.out || in0 + in >= shape.in) continue;
    const int word = tap * kM * 4 + out / 16 * 4 + out % 16 / 8 * 2 + in % 2, from = out % 8 * 4 + in % 8 / 2;
    own[static_cast<int64_t>(out) * shape.in * kTaps + rest] = sums[(word * kEights + in / 8) * kWarp + from];
  }
  __syncthreads();
  const bool with_bias = task.grad_bias && in0 == 0;
  float* partials = task.partials;
  float* biases = partials + block.across * weights;
  if (p.grad.grad_scale && in0 == 0 && block.x == 0 && threadIdx.x < kOut) {
    if (out0 + static_cast<int>(threadIdx.x) < shape.out) norm_grads(p.grad, filter0 + threadIdx.x);
  }
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
      biases[block.x * filters + filter0 + threadIdx.x] = bias;
    }
  }
  unsigned* ticket = task.tickets + (expert * block.down + block.y) * reduce_tickets<kShareGroup>(block.across);
  const auto reduce = [&](unsigned first, unsigned end, unsigned step, bool all) {
    for (int i = threadIdx.x; i < kOut * kIn * kTaps; i += kThreads) {
      const int out = i / (kIn * kTaps), rest = i % (kIn * kTaps);
      if (out0 + out >= shape.out || in0 + rest / kTaps >= shape.in) continue;
      const int64_t at = ((filter0 + out) * shape.in + in0) * kTaps + rest;
      float sum = 0;
#pragma unroll 4
      for (int64_t share = first; share < end; share += step) sum += fresh(partials + share * weights + at);
      if (!all) partials[first * weights + at] = sum;
      else if (task.grad_weight) narrow(sum, task.grad_weight + at);
    }
    if (!with_bias || threadIdx.x >= kOut || out0 + static_cast<int>(threadIdx.x) >= shape.out) return;
    float sum = 0;
    const float* part = biases + filter0 + threadIdx.x;
    for (int64_t share = first; share < end; share += step) sum += fresh(part + share * filters);
    if (!all) biases[first * filters + filter0 + threadIdx.x] = sum;
    else narrow(sum, task.grad_bias + filter0 + threadIdx.x);
  };
  reduce_in_order<kShareGroup>(ticket, block.x, block.across, reduce);
}

// Calls run(taps, pixels, tiles of 16 outputs) for a convolution. Inlined, or its argument would be in local memory.
#pragma nv_exec_check_disable  // run is host or device code, like the caller
template <int kSides, typename Run>
__attribute__((always_inline)) __host__ __device__ inline auto by_form(const ConvShape& shape, Run run) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Nine = std::integral_constant<int, 9>;
  using Usual = std::integral_constant<int, 64>;
  using Half = std::integral_constant<int, 32>;
  if constexpr (kSides == 1) {
    if (shape.out <= 16) {
      if (shape.kernel == 1) return run(One{}, Usual{}, One{});
      return half_tiles(shape) ? run(Nine{}, Half{}, One{}) : run(Nine{}, Usual{}, One{});
    }
  }
  if (shape.kernel == 1) return run(One{}, Usual{}, Two{});
  return half_tiles(shape) ? run(Nine{}, Half{}, Two{}) : run(Nine{}, Usual{}, Two{});
}

// Bytes of shared memory; for by_form.
template <typename T, int kSides>
struct Bytes {
  const Problem<T>& p;
  template <typename Taps, typename Pixels, typename Tiles>
  __host__ __device__ int operator()(Taps, Pixels, Tiles) const {
    using Own = WeightProduct<T, Taps::value, Pixels::value, Tiles::value, kSides>;
    return typename Own::Layout(p.tiling, p.grad.y != nullptr).end;
  }
};

template <typename T, int kSides>
__device__ void backward_weight_of(const Group<Task<T>>& group, unsigned char* memory) {
  const Task<T>& task = own_task(group);
  const Block block = block_of(task.share);
  by_form<kSides>(task.p.shape, [&](auto taps, auto pixels, auto tiles) {
    constexpr int kTaps = decltype(taps)::value, kPixels = decltype(pixels)::value;
    backward_weight<T, kTaps, kPixels, decltype(tiles)::value, kSides>(task, block, memory);
  });
}
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) backward_weight_kernel(const __grid_constant__ Group<Task<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  backward_weight_of<T, 1>(group, memory);
}
template <typename T>
__global__ void __launch_bounds__(2 * kThreads, 1)
    wide_backward_weight_kernel(const __grid_constant__ Group<Task<T>> group) {
  FASTMOD_DYNAMIC_SHARED(memory);
  backward_weight_of<T, 2>(group, memory);
}

// Whether blocks of 32 input channels leave few of them empty; with one tap, products are the smaller part of the work.
bool wide_inputs(const ConvShape& shape) {
  const int rest = shape.in % 32;
  return shape.out > 16 && shape.in > 16 && (rest == 0 || rest > 16 || shape.kernel == 1);
}

Tiling weight_tiling(const ConvShape& shape) {
  const bool half = half_tiles(shape);
  return tiling_of(shape, false, shape.out_high(), shape.out_wide(), half ? 5 : 6, half ? 162 : 112);
}
int weight_blocks(const ConvShape& shape, int sides) {
  const int each = 16 * sides;
  return (shape.out <= 16 ? 1 : (shape.out + 31) / 32) * ((shape.in + each - 1) / each);
}
// Enough blocks to fill a GPU, each with several tiles per partial result.
int64_t weight_shares(const ConvShape& shape, int sides) {
  const int64_t tiles = weight_tiling(shape).tiles;
  const int64_t blocks = static_cast<int64_t>(weight_blocks(shape, sides)) * shape.experts;
  const int64_t wanted = (256 / sides + blocks - 1) / blocks, most = (tiles + 1) / 2;
  return wanted < most ? wanted : most;
}

template <typename T, int kSides>
Grouped<Task<T>> grouped(const ConvBackwardWeight<T>* convs, int size, bool allow_tf32) {
  Grouped<Task<T>> group;
  for (int i = 0; i < size; ++i) {
    const auto& [grad, input, grad_weight, grad_bias, scratch, tickets, shape] = convs[i];
    const Tiling tiling = weight_tiling(shape);
    const bool vector = rows_aligned(grad.grad, shape.out) && (!grad.y || rows_aligned(grad.y, shape.out));
    const Problem<T> p{input, grad, nullptr, shape, shape.out_high(), shape.out_wide(), tiling, 0,
                       rows_aligned(input.x, shape.in), vector, !allow_tf32};
    group.add({p, grad_weight, grad_bias, scratch, tickets, {}}, weight_shares(shape, kSides),
              weight_blocks(shape, kSides), shape.experts, by_form<kSides>(shape, Bytes<T, kSides>{p}));
  }
  return group;
}

}  // namespace

template <typename T>
Scratch norm_conv_backward_weight_scratch(ConvShape shape) {
  if (!on_tensor_cores<T>(shape)) return plain::backward_weight_scratch<T>(shape);
  const int64_t filters = static_cast<int64_t>(shape.experts) * shape.out;
  const int64_t shares = std::max(weight_shares(shape, 1), weight_shares(shape, 2));
  return {shares * filters * (static_cast<int64_t>(shape.in) * shape.kernel * shape.kernel + 1),
          shape.experts * weight_blocks(shape, 1) * reduce_tickets<kShareGroup>(shares)};
}

template <typename T>
cudaError_t norm_conv_backward_weight(const ConvBackwardWeight<T>* convs, int count, bool allow_tf32,
                                      cudaStream_t stream) {
  return in_groups<T>(
      convs, count,
      [&](const ConvBackwardWeight<T>* own, int size) -> cudaError_t {
        if constexpr (sizeof(T) <= 4) {
          if (std::all_of(own, own + size, [](const auto& conv) { return wide_inputs(conv.shape); })) {
            const auto group = grouped<T, 2>(own, size, allow_tf32);
            if (group.bytes <= shared_limit() - kOwnShared) {
              const auto kernel = wide_backward_weight_kernel<T>;
              return FASTMOD_LAUNCH_LARGE(kernel, blocks_for(group.blocks, 1), 2 * kThreads,
                                          static_cast<size_t>(group.bytes), stream, group.group);
            }
          }
          const auto group = grouped<T, 1>(own, size, allow_tf32);
          if (!group.fits()) return cudaErrorInvalidValue;
          const auto kernel = backward_weight_kernel<T>;
          return FASTMOD_LAUNCH_DYNAMIC(kernel, blocks_for(group.blocks, 1), kThreads,
                                        static_cast<size_t>(group.bytes), stream, group.group);
        }
        return cudaErrorInvalidValue;
      },
      [&](const ConvBackwardWeight<T>& conv) { return plain::backward_weight<T>(conv, stream); });
}

#define FASTMOD_INSTANTIATE(T)                                                                                  \
  template Scratch norm_conv_backward_weight_scratch<T>(ConvShape);                                             \
  template cudaError_t norm_conv_backward_weight<T>(const ConvBackwardWeight<T>*, int, bool, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
