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

// kMany channels of the terms to add up. i: index of (image, pixel, channel) with the experts' images; at: index of
// (expert, channel).
template <typename T, int kMany>
__device__ inline void sum_at(const SumInput<T>& input, int64_t i, int64_t residual, int64_t at,
                              Compute<T> (&v)[kMany]) {
  using C = Compute<T>;
  C scale[kMany], shift[kMany];
  read_wide(input.x + i, v);
  read(input.scale + at, scale);
  read(input.shift + at, shift);
#pragma unroll
  for (int j = 0; j < kMany; ++j) v[j] = scale[j] * v[j] + shift[j];
  if (!input.residual) return;
  C other[kMany];
  read_wide(input.residual + residual, other);
  if (input.residual_scale) {
    read(input.residual_scale + at, scale);
    read(input.residual_shift + at, shift);
#pragma unroll
    for (int j = 0; j < kMany; ++j) other[j] = scale[j] * other[j] + shift[j];
  }
#pragma unroll
  for (int j = 0; j < kMany; ++j) v[j] += other[j];
}

// A thread has kMany channels of one pixel of the result.
template <typename T, int kMany>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ SumInput<T> input, T* out, const __grid_constant__ SumShape shape,
                   int64_t count) {
  using C = Compute<T>;
  const int64_t thread = global_thread();
  if (thread >= count) return;
  const int across = shape.channels / kMany;
  const int64_t pixel = quotient(thread, across);
  const int channel = static_cast<int>(thread - pixel * across) * kMany;
  const int64_t image = quotient(pixel, shape.pixels);
  C v[kMany];
  if (!input.gate) {
    const int64_t b = quotient(image, shape.experts), expert = image - b * shape.experts;
    const int64_t i = pixel * shape.channels + channel;
    const int64_t residual = shape.shared ? i - (image - b) * shape.pixels * shape.channels : i;
    sum_at(input, i, residual, expert * shape.channels + channel, v);
    if (input.relu) {
#pragma unroll
      for (int j = 0; j < kMany; ++j) v[j] = rectified(v[j]);
    }
    return write(v, out + i);
  }
  C total[kMany] = {};
  const int64_t inner = (pixel - image * shape.pixels) * shape.channels + channel;
  for (int expert = 0; expert < shape.experts; ++expert) {
    const int64_t of = image * shape.experts + expert, size = static_cast<int64_t>(shape.pixels) * shape.channels;
    const C gate = widen(input.gate[of]);
    sum_at(input, of * size + inner, (shape.shared ? image : of) * size + inner,
           static_cast<int64_t>(expert) * shape.channels + channel, v);
#pragma unroll
    for (int j = 0; j < kMany; ++j) total[j] += gate * (input.relu ? rectified(v[j]) : v[j]);
  }
  write(total, out + pixel * shape.channels + channel);
}

// ---- backward: a block has kChannels channels and kPixels pixels of one image, and all its experts

constexpr int kChannels = kWarp;
constexpr int kRows = kThreads / kChannels;
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
  const int tiles = tiles_of(shape.pixels);
  const int64_t b = blockIdx.x / tiles, size = static_cast<int64_t>(shape.pixels) * shape.channels;
  const int tile = blockIdx.x % tiles, row = threadIdx.x / kChannels;
  const int channel = blockIdx.y * kChannels + threadIdx.x % kChannels;
  const bool there = channel < shape.channels;
  const int64_t each = static_cast<int64_t>(gridDim.x) * shape.channels, all = shape.experts * each;
  C found[kEach] = {};  // for a residual that the experts share
  for (int expert = 0; expert < shape.experts; ++expert) {
    const int64_t image = b * shape.experts + expert, at = static_cast<int64_t>(expert) * shape.channels + channel;
    const C gate = input.gate ? widen(input.gate[image]) : C(1);
    const C scale = there ? input.scale[at] : C(0), shift = there ? input.shift[at] : C(0);
    const bool scaled = there && input.residual_scale;
    const C residual_scale = scaled ? input.residual_scale[at] : C(1);
    const C residual_shift = scaled ? input.residual_shift[at] : C(0);
    C of_scale = 0, of_shift = 0, of_residual_scale = 0, of_gate = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int pixel = tile * kPixels + row + k * kRows;
      if (!there || pixel >= shape.pixels) continue;
      const int64_t inner = static_cast<int64_t>(pixel) * shape.channels + channel, i = image * size + inner;
      const int64_t from = shape.shared ? b * size + inner : i;
      const C x = widen(input.x[i]), other = input.residual ? widen(input.residual[from]) : C(0);
      C value = scale * x + shift;
      if (input.residual) value += residual_scale * other + residual_shift;
      C g = widen(grad[input.gate ? b * size + inner : i]);
      of_gate += g * (input.relu ? rectified(value) : value);
      g = input.relu && value <= C(0) ? C(0) : g * gate;
      of_scale += g * x;
      of_shift += g;
      of_residual_scale += g * other;
      if (grads.x) narrow(g * scale, grads.x + i);
      if (!grads.residual) continue;
      found[k] = g * residual_scale + (shape.shared ? found[k] : C(0));
      if (!shape.shared || expert + 1 == shape.experts) narrow(found[k], grads.residual + from);
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
      of_gate = sum_of_rows<1>(of_gate, sums);  // over all threads
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
  using C = Compute<T>;
  const auto aligned = [](const void* pointer, size_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  const bool images = aligned(input.x, 4 * sizeof(T)) && aligned(input.residual, 4 * sizeof(T)) &&
                      aligned(out, 4 * sizeof(T));
  return shape.channels % 4 == 0 && sizeof(C) == 4 && images && aligned(input.scale, 16) && aligned(input.shift, 16) &&
         aligned(input.residual_scale, 16) && aligned(input.residual_shift, 16);
}

}  // namespace

template <typename T>
cudaError_t norm_sum_forward(SumInput<T> input, T* out, SumShape shape, cudaStream_t stream) {
  const int64_t images = shape.batch * (input.gate ? 1 : shape.experts);
  const int64_t count = images * shape.pixels * shape.channels;
  if (count == 0) return cudaSuccess;
  if constexpr (sizeof(T) <= 4) {
    if (by_four(input, out, shape)) {
      const auto kernel = forward_kernel<T, 4>;
      return FASTMOD_LAUNCH(kernel, blocks_for(count / 4, kThreads), kThreads, stream, input, out, shape, count / 4);
    }
  }
  const auto kernel = forward_kernel<T, 1>;
  return FASTMOD_LAUNCH(kernel, blocks_for(count, kThreads), kThreads, stream, input, out, shape, count);
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
