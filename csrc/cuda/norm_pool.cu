// norm_pool: mean over the pixels of relu(scale * x + shift); the backward in one pass.
#include "norm_pool.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = kPoolThreads, kChannels = kPoolChannels, kRows = kPoolRows;

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ PoolInput<T> input, T* out, const __grid_constant__ SumShape shape) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kThreads);
  const PoolPlace<T> place(input, shape);
  const C mean = pooled_mean(place, input, shape, sums);
  if (!place.there || place.row > 0) return;
  narrow(mean, out + place.image * shape.channels + place.channel);
}

// Scratch: partial gradients of scale and shift, [2, E, B, channels].
template <typename T, typename G>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const G* grad, const __grid_constant__ PoolInput<T> input,
                    const __grid_constant__ PoolGrads<T> grads, Compute<T>* partials, unsigned* tickets,
                    const __grid_constant__ SumShape shape) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, sums, kThreads);
  const PoolPlace<T> place(input, shape);
  // Every pixel has the same gradient. Leaving it out of the sums makes them counts, which are exact, and sums of x.
  const C g = place.there ? widen(grad[place.image * shape.channels + place.channel]) / C(shape.pixels) : C(0);
  C count = 0, total = 0, part = 0;
  place.by_pixels(
      shape,
      [&](int64_t i) {
        const C x = widen(input.x[i]);
        const bool cut = input.relu && place.scale * x + place.shift <= C(0);  // not a NaN
        count += cut ? C(0) : C(1);
        part += (cut ? C(0) : C(1)) * x;
        if (grads.x) narrow((cut ? C(0) : g) * place.scale, grads.x + i);
      },
      [&] {
        total += part;
        part = 0;
      });
  if (!grads.scale && !grads.shift) return;
  total = sum_of_rows<kChannels>(total, sums);
  count = sum_of_rows<kChannels>(count, sums);
  const int64_t b = quotient(place.image, shape.experts), all = shape.experts * shape.batch * shape.channels;
  C* own = partials + place.expert * shape.batch * shape.channels + place.channel;
  if (place.there && place.row == 0) {
    const C factor = count > C(0) ? g : C(0);  // 0 where none passed: NaNs count as passed
    own[b * shape.channels] = total * factor;
    own[all + b * shape.channels] = count * factor;
  }
  unsigned* ticket = tickets + (place.expert * gridDim.y + blockIdx.y) * reduce_tickets<kGroup>(shape.batch);
  const auto blocks = static_cast<unsigned>(shape.batch);
  reduce_in_order<kGroup>(ticket, static_cast<unsigned>(b), blocks, [&](unsigned first, unsigned end, unsigned step,
                                                                        bool last) {
    C* const results[] = {grads.scale, grads.shift};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      C* from = own + which * all;
      C found = 0;
      for (int64_t i = first + place.row * static_cast<int64_t>(step); place.there && i < end; i += kRows * step) {
        found += fresh(from + i * shape.channels);
      }
      found = sum_of_rows<kChannels>(found, sums);
      if (!place.there || place.row > 0) continue;
      if (!last) from[static_cast<int64_t>(first) * shape.channels] = found;
      else if (results[which]) results[which][place.expert * shape.channels + place.channel] = found;
    }
  });
}

}  // namespace

template <typename T>
cudaError_t norm_pool_forward(PoolInput<T> input, T* out, SumShape shape, cudaStream_t stream) {
  const int64_t images = shape.batch * shape.experts;
  if (images * shape.channels == 0) return cudaSuccess;
  const dim3 grid(blocks_for(images, 1).x, static_cast<unsigned>(pool_blocks_across(shape)));
  return FASTMOD_LAUNCH(forward_kernel<T>, grid, kThreads, stream, input, out, shape);
}

template <typename T>
Scratch norm_pool_backward_scratch(SumShape shape) {
  return {2 * shape.experts * shape.batch * shape.channels,
          shape.experts * pool_blocks_across(shape) * reduce_tickets<kGroup>(shape.batch)};
}

namespace {

template <typename T, typename G>
cudaError_t run_backward(const G* grad, PoolInput<T> input, PoolGrads<T> grads, Compute<T>* scratch, unsigned* tickets,
                         SumShape shape, cudaStream_t stream) {
  const int64_t images = shape.batch * shape.experts;
  if (images * shape.channels == 0) return cudaSuccess;
  const dim3 grid(blocks_for(images, 1).x, static_cast<unsigned>(pool_blocks_across(shape)));
  const auto kernel = backward_kernel<T, G>;
  return FASTMOD_LAUNCH(kernel, grid, kThreads, stream, grad, input, grads, scratch, tickets, shape);
}

}  // namespace

template <typename T>
cudaError_t norm_pool_backward(const T* grad, PoolInput<T> input, PoolGrads<T> grads, Compute<T>* scratch,
                               unsigned* tickets, SumShape shape, cudaStream_t stream) {
  return run_backward<T, T>(grad, input, grads, scratch, tickets, shape, stream);
}
template <typename T>
cudaError_t norm_pool_backward_wide(const Compute<T>* grad, PoolInput<T> input, PoolGrads<T> grads,
                                    Compute<T>* scratch, unsigned* tickets, SumShape shape, cudaStream_t stream) {
  return run_backward<T, Compute<T>>(grad, input, grads, scratch, tickets, shape, stream);
}

#define FASTMOD_INSTANTIATE(T)                                                                             \
  template cudaError_t norm_pool_forward<T>(PoolInput<T>, T*, SumShape, cudaStream_t);                     \
  template Scratch norm_pool_backward_scratch<T>(SumShape);                                                \
  template cudaError_t norm_pool_backward<T>(const T*, PoolInput<T>, PoolGrads<T>, Compute<T>*, unsigned*, \
                                             SumShape, cudaStream_t);                                      \
  template cudaError_t norm_pool_backward_wide<T>(const Compute<T>*, PoolInput<T>, PoolGrads<T>,           \
                                                  Compute<T>*, unsigned*, SumShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
