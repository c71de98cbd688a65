// norm_sum: relu(scale * x + shift + residual), with a gate summed over the experts; the backward in one pass.
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;

// Neighbouring channels, read and written at once.
template <typename T, int kMany>
struct alignas(sizeof(T) * kMany) Pack {
  T v[kMany];
};

template <typename C, int kMany>
__device__ inline void read(const C* from, C (&v)[kMany]) {
  const auto pack = *reinterpret_cast<const Pack<C, kMany>*>(from);
#pragma unroll
  for (int j = 0; j < kMany; ++j) v[j] = pack.v[j];
}
template <typename T, int kMany>
__device__ inline void read_wide(const T* from, Compute<T> (&v)[kMany]) {
  const auto pack = *reinterpret_cast<const Pack<T, kMany>*>(from);
#pragma unroll
  for (int j = 0; j < kMany; ++j) v[j] = widen(pack.v[j]);
}
template <typename T, int kMany>
__device__ inline void write(const Compute<T> (&v)[kMany], T* to) {
  Pack<T, kMany> pack;
#pragma unroll
  for (int j = 0; j < kMany; ++j) narrow(v[j], pack.v + j);
  *reinterpret_cast<Pack<T, kMany>*>(to) = pack;
}

// ---- forward: a block has a slice of channels and a tile of pixels of one image, with a gate of all its experts

constexpr int kSlice = 32;     // channels of a block at most
constexpr int kTimes = 4;      // pixels of a thread
constexpr int kFactors = 512;  // experts x channels whose factors a block keeps at a time
constexpr int kGates = kFactors / kSlice;

// How a launch is cut: channels of a slice; tiles of an image and the pixels of one, `rows` of them at a time.
struct Cut {
  int channels, tiles, pixels, rows;
};
template <int kMany>
Cut cut_of(const SumShape& shape) {
  const int units = shape.channels / kMany, most = kSlice / kMany, slices = (units + most - 1) / most;
  const int each = (units + slices - 1) / slices, rows = kThreads / each, fit = kTimes * rows;
  const int tiles = (shape.pixels + fit - 1) / fit;
  return {each * kMany, tiles, (shape.pixels + tiles - 1) / tiles, rows};
}

// What scales the images, for some experts at a time; aligned, as a thread reads four channels at once.
template <typename C>
struct alignas(4 * sizeof(C)) Factors {
  C scale[kFactors], shift[kFactors], residual_scale[kFactors], residual_shift[kFactors], gate[kGates];
};

// A block reads what scales its images once, not for every pixel.
template <typename T, int kMany>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ SumInput<T> input, T* out, const __grid_constant__ SumShape shape,
                   const __grid_constant__ Cut cut) {
  using C = Compute<T>;
  FASTMOD_SHARED(Factors<C>, factors, 1);
  const int64_t image = quotient(blockIdx.x, cut.tiles);  // of the result
  const int tile = static_cast<int>(blockIdx.x - image * cut.tiles), first_channel = blockIdx.y * cut.channels;
  const int left = shape.channels - first_channel, channels = left < cut.channels ? left : cut.channels;
  const int across = cut.channels / kMany, row = threadIdx.x / across;
  const int channel = static_cast<int>(threadIdx.x) % across * kMany;
  const bool there = row < cut.rows && channel < channels;
  const int64_t b = input.gate ? image : quotient(image, shape.experts);
  const int first_expert = input.gate ? 0 : static_cast<int>(image - b * shape.experts);
  const int end_expert = input.gate ? shape.experts : first_expert + 1;
  const int first_pixel = tile * cut.pixels + row;
  const int end_pixel = tile * cut.pixels + cut.pixels < shape.pixels ? tile * cut.pixels + cut.pixels : shape.pixels;
  const int64_t size = static_cast<int64_t>(shape.pixels) * shape.channels;
  const int64_t inner = static_cast<int64_t>(first_pixel) * shape.channels + first_channel + channel;
  const int64_t step = static_cast<int64_t>(cut.rows) * shape.channels;
  const int most = kFactors / cut.channels < kGates ? kFactors / cut.channels : kGates;
  C total[kTimes][kMany] = {};
#pragma unroll 1
  for (int begin = first_expert; begin < end_expert; begin += most) {
    const int held = end_expert - begin < most ? end_expert - begin : most;
    if (begin > first_expert) __syncthreads();  // the factors before have been read
    for (int i = threadIdx.x; i < held * channels; i += kThreads) {
      const int expert = i / channels, at_channel = i - expert * channels, to = expert * cut.channels + at_channel;
      const int64_t at = static_cast<int64_t>(begin + expert) * shape.channels + first_channel + at_channel;
      factors->scale[to] = input.scale[at];
      factors->shift[to] = input.shift[at];
      factors->residual_scale[to] = input.residual_scale ? input.residual_scale[at] : C(1);
      factors->residual_shift[to] = input.residual_scale ? input.residual_shift[at] : C(0);
    }
    if (static_cast<int>(threadIdx.x) < held) {
      factors->gate[threadIdx.x] = input.gate ? widen(input.gate[b * shape.experts + begin + threadIdx.x]) : C(1);
    }
    __syncthreads();
    if (!there) continue;
#pragma unroll 1
    for (int expert = 0; expert < held; ++expert) {
      const int64_t of = input.gate ? b * shape.experts + begin + expert : image;
      const T* x = input.x + of * size + inner;
      const T* residual = input.residual ? input.residual + (shape.shared ? b : of) * size + inner : nullptr;
      const int at = expert * cut.channels + channel;
      const C gate = factors->gate[expert];
      C scale[kMany], shift[kMany], residual_scale[kMany], residual_shift[kMany];
      read(factors->scale + at, scale);
      read(factors->shift + at, shift);
      read(factors->residual_scale + at, residual_scale);
      read(factors->residual_shift + at, residual_shift);
#pragma unroll
      for (int k = 0; k < kTimes; ++k) {
        if (first_pixel + k * cut.rows >= end_pixel) continue;
        C v[kMany], other[kMany] = {};
        read_wide(x + k * step, v);
        if (residual) read_wide(residual + k * step, other);
#pragma unroll
        for (int j = 0; j < kMany; ++j) {
          v[j] = scale[j] * v[j] + shift[j];
          if (residual) v[j] += residual_scale[j] * other[j] + residual_shift[j];
          total[k][j] += gate * (input.relu ? rectified(v[j]) : v[j]);
        }
      }
    }
  }
  if (!there) return;
  T* to = out + image * size + inner;
#pragma unroll
  for (int k = 0; k < kTimes; ++k) {
    if (first_pixel + k * cut.rows < end_pixel) write(total[k], to + k * step);
  }
}

// ---- backward: a block has kChannels channels and kPixels pixels of one image, and all its experts

constexpr int kChannels = kWarp;
constexpr int kRows = kThreads / kChannels;  // as many as a channel has factors
static_assert(kRows == 4);
constexpr int kPixels = 64;
constexpr int kEach = kPixels / kRows;

__host__ __device__ inline int tiles_of(int pixels) { return (pixels + kPixels - 1) / kPixels; }

// Scratch: sums for scale, shift and residual_scale [3, E, blocks along x, channels], then for the gate
// [E, blocks along x, blocks along y].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const T* grad, const __grid_constant__ SumInput<T> input, const __grid_constant__ SumGrads<T> grads,
                    Compute<T>* partials, unsigned* tickets, const __grid_constant__ SumShape shape) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kThreads);
  FASTMOD_SHARED(C, factors, 4 * kChannels);  // of one expert, and its gate
  FASTMOD_SHARED(C, gates, 1);
  const int tiles = tiles_of(shape.pixels);
  const int64_t b = blockIdx.x / tiles, size = static_cast<int64_t>(shape.pixels) * shape.channels;
  const int tile = blockIdx.x % tiles, row = threadIdx.x / kChannels;
  const int channel = blockIdx.y * kChannels + threadIdx.x % kChannels;
  const bool there = channel < shape.channels;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.channels, all = shape.experts * each;
  const int first_pixel = tile * kPixels + row, pixels = there ? shape.pixels - first_pixel : 0;
  const int64_t inner = static_cast<int64_t>(first_pixel) * shape.channels + channel;
  const int64_t step = static_cast<int64_t>(kRows) * shape.channels;
  C found[kEach] = {};             // for a residual that the experts share
  C of_out[kEach], shared[kEach];  // what they share is read once: the gradient of their sum, and such a residual
  for (int expert = 0; expert < shape.experts; ++expert) {
    const int64_t image = b * shape.experts + expert, at = static_cast<int64_t>(expert) * shape.channels + channel;
    const C* factor = row == 0 ? input.scale : input.shift;
    if (row > 1) factor = row == 2 ? input.residual_scale : input.residual_shift;
    factors[threadIdx.x] = there && factor ? factor[at] : row == 2 ? C(1) : C(0);
    if (threadIdx.x == 0) gates[0] = input.gate ? widen(input.gate[image]) : C(1);
    __syncthreads();  // the factors before have been read: sums of rows came in between
    const int lane = threadIdx.x % kChannels;
    const C scale = factors[lane], shift = factors[kChannels + lane], residual_scale = factors[2 * kChannels + lane];
    const C residual_shift = factors[3 * kChannels + lane], gate = gates[0];
    C of_scale = 0, of_shift = 0, of_residual_scale = 0, of_gate = 0;
    const bool read_shared = expert == 0 || !shape.shared, read_grad = expert == 0 || !input.gate;
    const int64_t alone = image * size + inner, common = b * size + inner;
    const T* x = input.x + alone;
    const T* residual = input.residual ? input.residual + (shape.shared ? common : alone) : nullptr;
    const T* grad_at = grad + (input.gate ? common : alone);
    T* grad_x = grads.x ? grads.x + alone : nullptr;
    T* grad_residual = grads.residual ? grads.residual + (shape.shared ? common : alone) : nullptr;
    const bool write_residual = grads.residual && (!shape.shared || expert + 1 == shape.experts);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (k * kRows >= pixels) continue;
      const int64_t at = k * step;
      if (read_shared) shared[k] = residual ? widen(residual[at]) : C(0);
      if (read_grad) of_out[k] = widen(grad_at[at]);
      const C read = widen(x[at]), other = shared[k];
      const C value = scale * read + shift + (residual_scale * other + residual_shift);
      C g = of_out[k];
      of_gate += g * (input.relu ? rectified(value) : value);
      g = input.relu && value <= C(0) ? C(0) : g * gate;
      of_scale += g * read;
      of_shift += g;
      of_residual_scale += g * other;
      if (grad_x) narrow(g * scale, grad_x + at);
      if (!grads.residual) continue;
      found[k] = g * residual_scale + (shape.shared ? found[k] : C(0));
      if (write_residual) narrow(found[k], grad_residual + at);
    }
    of_scale = sum_of_rows<kChannels>(of_scale, sums);
    of_shift = sum_of_rows<kChannels>(of_shift, sums);
    of_residual_scale = sum_of_rows<kChannels>(of_residual_scale, sums);
    if (there && row == 0) {
      C* own = partials + expert * each + static_cast<int64_t>(blockIdx.x) * shape.channels + channel;
      own[0] = of_scale;
      own[all] = of_shift;
      own[2 * all] = of_residual_scale;
    }
    if (grads.gate) {
      of_gate = block_sum(of_gate);
      C* own = partials + 3 * all + (static_cast<int64_t>(expert) * gridDim.x + blockIdx.x) * gridDim.y + blockIdx.y;
      if (threadIdx.x == 0) *own = of_gate;
    }
  }
  unsigned* ticket = tickets + blockIdx.y * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned end, unsigned step, bool last) {
    C* const results[] = {grads.scale, grads.shift, grads.residual_scale};
    for (int expert = 0; expert < shape.experts; ++expert) {
#pragma unroll
      for (int which = 0; which < 3; ++which) {
        C* part = partials + which * all + expert * each + channel;
        C total = 0;
#pragma unroll 4
        for (int64_t block = first + row * static_cast<int64_t>(step); there && block < end; block += kRows * step) {
          total += fresh(part + block * shape.channels);
        }
        total = sum_of_rows<kChannels>(total, sums);
        if (!there || row > 0) continue;
        const int64_t at = static_cast<int64_t>(expert) * shape.channels + channel;
        if (!last) part[first * shape.channels] = total;
        else if (results[which]) results[which][at] = total;
        if (last && which == 1 && grads.residual_shift) grads.residual_shift[at] = total;
      }
    }
  });
  if (!grads.gate) return;
  // The last block of an image finishes its gates.
  ticket = tickets + gridDim.y * reduce_tickets<kGroup>(gridDim.x) + b;
  if (!last_to_arrive(ticket, tiles * gridDim.y)) return;
  for (int expert = threadIdx.x; expert < shape.experts; expert += kThreads) {
    const C* part = partials + 3 * all + (static_cast<int64_t>(expert) * gridDim.x + b * tiles) * gridDim.y;
    C total = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(tiles) * gridDim.y; ++i) total += fresh(part + i);
    narrow(total, grads.gate + b * shape.experts + expert);
  }
}

template <typename T>
bool by_four(const SumInput<T>& input, const T* out, const SumShape& shape) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % (4 * sizeof(T)) == 0; };
  return shape.channels % 4 == 0 && aligned(input.x) && aligned(input.residual) && aligned(out);
}

template <typename T, int kMany>
cudaError_t forward(const SumInput<T>& input, T* out, const SumShape& shape, cudaStream_t stream) {
  const int64_t images = shape.batch * (input.gate ? 1 : shape.experts);
  if (images * shape.pixels * shape.channels == 0) return cudaSuccess;
  const Cut cut = cut_of<kMany>(shape);
  const unsigned slices = (shape.channels + cut.channels - 1) / cut.channels;
  const dim3 grid(blocks_for(images * cut.tiles, 1).x, slices);
  const auto kernel = forward_kernel<T, kMany>;
  return FASTMOD_LAUNCH(kernel, grid, kThreads, stream, input, out, shape, cut);
}

}  // namespace

template <typename T>
cudaError_t norm_sum_forward(SumInput<T> input, T* out, SumShape shape, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (by_four(input, out, shape)) return forward<T, 4>(input, out, shape, stream);
  }
  return forward<T, 1>(input, out, shape, stream);
}

template <typename T>
Scratch norm_sum_backward_scratch(SumShape shape) {
  const int64_t blocks = shape.batch * tiles_of(shape.pixels), across = (shape.channels + kChannels - 1) / kChannels;
  return {shape.experts * blocks * (3 * shape.channels + across),
          across * reduce_tickets<kGroup>(blocks) + shape.batch};
}

template <typename T>
cudaError_t norm_sum_backward(const T* grad, SumInput<T> input, SumGrads<T> grads, Compute<T>* scratch,
                              unsigned* tickets, SumShape shape, cudaStream_t stream) {
  const int64_t blocks = shape.batch * tiles_of(shape.pixels), across = (shape.channels + kChannels - 1) / kChannels;
  if (blocks * across * shape.experts == 0) return cudaSuccess;
  const dim3 grid(blocks_for(blocks, 1).x, static_cast<unsigned>(across));
  return FASTMOD_LAUNCH(backward_kernel<T>, grid, kThreads, stream, grad, input, grads, scratch, tickets, shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                          \
  template cudaError_t norm_sum_forward<T>(SumInput<T>, T*, SumShape, cudaStream_t);                    \
  template Scratch norm_sum_backward_scratch<T>(SumShape);                                              \
  template cudaError_t norm_sum_backward<T>(const T*, SumInput<T>, SumGrads<T>, Compute<T>*, unsigned*, \
                                            SumShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
