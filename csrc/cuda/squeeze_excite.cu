// squeeze_excite: the pool of norm_pool, then two small layers with batch norm over the batch, computed by the last
// block of each expert to finish; in the backward of the layers one block per expert.
#include "norm_pool.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = kPoolThreads;
constexpr int kEach = 4;  // rows of a product per thread: they share what it reads of the other factor

constexpr int kShort = 8;

// Calls to(i, j, sum over k of a(i, k) * b(k, j)). Neighbouring threads have neighbouring j.
template <typename C, typename A, typename B, typename To>
__device__ inline void products(int64_t rows, int columns, int64_t depth, A a, B b, To to) {
  const int64_t items = (rows + kEach - 1) / kEach * columns;
  for (int64_t item = threadIdx.x; item < items; item += kThreads) {
    const int64_t group = quotient(item, columns), i = group * kEach;
    const int j = static_cast<int>(item - group * columns);
    C sum[kEach] = {};
    for (int64_t begin = 0; begin < depth; begin += kShort) {  // short sums lose fewer digits
      const int64_t end = begin + kShort < depth ? begin + kShort : depth;
      C part[kEach] = {};
      for (int64_t k = begin; k < end; ++k) {
        const C factor = b(k, j);
#pragma unroll
        for (int m = 0; m < kEach; ++m) {
          if (i + m < rows) part[m] += a(i + m, k) * factor;
        }
      }
#pragma unroll
      for (int m = 0; m < kEach; ++m) sum[m] += part[m];
    }
#pragma unroll
    for (int m = 0; m < kEach; ++m) {
      if (i + m < rows) to(i + m, j, sum[m]);
    }
  }
  __syncthreads();
}

// Sum of value(b) over the batch, in short partial sums.
template <typename C, typename Value>
__device__ inline C sum_over(int64_t batch, Value value) {
  C total = 0;
  for (int64_t begin = 0; begin < batch; begin += kRun) {
    C part = 0;
#pragma unroll 4
    for (int i = 0; i < kRun; ++i) {
      if (begin + i < batch) part += value(begin + i);
    }
    total += part;
  }
  return total;
}

// Statistics over the batch of values [batch, columns] of one expert, with scale and shift. In fp64, here and in the
// backward: differences cancel before they are multiplied by a large scale, and it is little work.
template <typename C>
__device__ inline void normalise(const C* values, C* mean, C* var, const BatchNorm<C>& norm, int expert, int columns,
                                 int64_t batch) {
  for (int j = threadIdx.x; j < columns; j += kThreads) {
    const auto count = static_cast<double>(batch);
    const double middle = sum_over<double>(batch, [&](int64_t b) { return double(values[b * columns + j]); }) / count;
    const double spread = sum_over<double>(batch, [&](int64_t b) {
      const double apart = values[b * columns + j] - middle;
      return apart * apart;
    }) / count;
    const int64_t at = static_cast<int64_t>(expert) * columns + j;
    mean[at] = static_cast<C>(middle);
    var[at] = static_cast<C>(spread);
    finish_norm(norm, at, mean[at], var[at]);
  }
  __syncthreads();
}

// Loads a weight [rows, columns] into shared memory as [columns][pitch], without bank conflicts in either direction.
template <typename C>
__device__ inline void transpose(const C* weight, C* to, int rows, int columns, int pitch) {
  for (int i = threadIdx.x; i < rows * columns; i += kThreads) to[i % columns * pitch + i / columns] = weight[i];
  __syncthreads();
}
__host__ __device__ inline int pitch_of(int rows) { return rows | 1; }

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ PoolInput<T> input, const __grid_constant__ ExciteLayers<Compute<T>> layers,
                   const __grid_constant__ BatchNorm<Compute<T>> norm1,
                   const __grid_constant__ BatchNorm<Compute<T>> norm2,
                   const __grid_constant__ ExciteKept<Compute<T>> kept, T* gate, unsigned* tickets,
                   const __grid_constant__ SumShape shape) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  FASTMOD_SHARED(C, sums, kThreads);
  const PoolPlace<T> place(input, shape);
  const int expert = static_cast<int>(place.expert), channels = shape.channels, squeezed = layers.squeezed;
  const int64_t own = quotient(place.image, shape.experts);
  const C mean = pooled_mean(place, input, shape, sums);
  C* pooled = kept.pooled + expert * shape.batch * channels;
  if (place.there && place.row == 0) pooled[own * channels + place.channel] = mean;
  if (!last_to_arrive(tickets + expert, static_cast<unsigned>(shape.batch) * gridDim.y)) return;

  C* weight = reinterpret_cast<C*>(memory);
  C* first = kept.first + expert * shape.batch * squeezed;
  C* second = kept.second + expert * shape.batch * channels;
  int pitch = pitch_of(squeezed);
  transpose(layers.weight1 + expert * (layers.gap1 + static_cast<int64_t>(squeezed) * channels), weight, squeezed,
            channels, pitch);
  products<C>(
      shape.batch, squeezed, channels, [&](int64_t b, int64_t k) { return fresh(pooled + b * channels + k); },
      [&](int64_t k, int j) { return weight[k * pitch + j]; },
      [&](int64_t b, int j, C value) { first[b * squeezed + j] = value; });
  normalise(first, kept.mean1, kept.var1, norm1, expert, squeezed, shape.batch);
  pitch = pitch_of(channels);
  transpose(layers.weight2 + expert * (layers.gap2 + static_cast<int64_t>(squeezed) * channels), weight, channels,
            squeezed, pitch);
  const C *scale = norm1.scale + static_cast<int64_t>(expert) * squeezed;
  const C *shift = norm1.shift + static_cast<int64_t>(expert) * squeezed;
  products<C>(
      shape.batch, channels, squeezed,
      [&](int64_t b, int64_t k) { return rectified(scale[k] * first[b * squeezed + k] + shift[k]); },
      [&](int64_t k, int j) { return weight[k * pitch + j]; },
      [&](int64_t b, int j, C value) { second[b * channels + j] = value; });
  normalise(second, kept.mean2, kept.var2, norm2, expert, channels, shape.batch);
  scale = norm2.scale + static_cast<int64_t>(expert) * channels;
  shift = norm2.shift + static_cast<int64_t>(expert) * channels;
  for (int64_t i = threadIdx.x; i < shape.batch * channels; i += kThreads) {
    const int64_t b = quotient(i, channels), channel = i - b * channels;
    const C value = sigmoid(scale[channel] * second[i] + shift[channel]);
    narrow(value, gate + (b * shape.experts + expert) * channels + channel);
  }
}

// Turns the gradient of a batch norm's results, `values` [batch, columns], into that of its inputs, in place; also
// computes those of its parameters.
template <typename C>
__device__ inline void normalise_backward(C* values, const C* inputs, const C* var, const BatchNorm<C>& norm,
                                          C* grad_weight, C* grad_bias, int expert, int columns, int64_t batch) {
  for (int j = threadIdx.x; j < columns; j += kThreads) {
    const int64_t at = static_cast<int64_t>(expert) * columns + j;
    const auto count = static_cast<double>(batch);
    const double middle = sum_over<double>(batch, [&](int64_t b) { return double(inputs[b * columns + j]); }) / count;
    const double variance = double(var[at]) + norm.eps, scale = norm.scale[at];
    const double of_shift = sum_over<double>(batch, [&](int64_t b) { return double(values[b * columns + j]); });
    const double whole = sum_over<double>(
        batch, [&](int64_t b) { return values[b * columns + j] * (inputs[b * columns + j] - middle); });
    grad_bias[at] = static_cast<C>(of_shift);
    grad_weight[at] = static_cast<C>(whole * inverse_root(variance));
    const double offset = of_shift / count, slope = whole / (variance * count);
    for (int64_t b = 0; b < batch; ++b) {
      C& value = values[b * columns + j];
      value = static_cast<C>(scale * (value - offset - slope * (inputs[b * columns + j] - middle)));
    }
  }
  __syncthreads();
}

// Scratch: gradients of second [E, B, channels] and of first [E, B, squeezed].
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const T* grad, const __grid_constant__ ExciteLayers<Compute<T>> layers,
                    const __grid_constant__ BatchNorm<Compute<T>> norm1,
                    const __grid_constant__ BatchNorm<Compute<T>> norm2,
                    const __grid_constant__ ExciteKept<Compute<T>> kept,
                    const __grid_constant__ ExciteGrads<Compute<T>> grads, Compute<T>* grad_pooled, Compute<T>* scratch,
                    const __grid_constant__ SumShape shape) {
  using C = Compute<T>;
  const int expert = blockIdx.x, channels = shape.channels, squeezed = layers.squeezed;
  const int64_t batch = shape.batch, weights = static_cast<int64_t>(squeezed) * channels;
  const C* pooled = kept.pooled + expert * batch * channels;
  const C* first = kept.first + expert * batch * squeezed;
  const C* second = kept.second + expert * batch * channels;
  const C* weight1 = layers.weight1 + expert * (layers.gap1 + weights);
  const C* weight2 = layers.weight2 + expert * (layers.gap2 + weights);
  C* of_second = scratch + expert * batch * channels;
  C* of_first = scratch + shape.experts * batch * channels + expert * batch * squeezed;
  const C *scale = norm2.scale + static_cast<int64_t>(expert) * channels;
  const C *shift = norm2.shift + static_cast<int64_t>(expert) * channels;
  for (int64_t i = threadIdx.x; i < batch * channels; i += kThreads) {
    const int64_t b = quotient(i, channels), channel = i - b * channels;
    const C value = sigmoid(scale[channel] * second[i] + shift[channel]);
    of_second[i] = widen(grad[(b * shape.experts + expert) * channels + channel]) * value * (C(1) - value);
  }
  __syncthreads();
  normalise_backward(of_second, second, kept.var2, norm2, grads.norm_weight2, grads.norm_bias2, expert,
                     channels, batch);
  scale = norm1.scale + static_cast<int64_t>(expert) * squeezed;
  shift = norm1.shift + static_cast<int64_t>(expert) * squeezed;
  const auto before = [&](int64_t b, int64_t j) { return scale[j] * first[b * squeezed + j] + shift[j]; };
  products<C>(
      channels, squeezed, batch, [&](int64_t c, int64_t b) { return of_second[b * channels + c]; },
      [&](int64_t b, int j) { return rectified(before(b, j)); },
      [&](int64_t c, int j, C value) { grads.weight2[expert * weights + c * squeezed + j] = value; });
  products<C>(
      batch, squeezed, channels, [&](int64_t b, int64_t c) { return of_second[b * channels + c]; },
      [&](int64_t c, int j) { return weight2[c * squeezed + j]; },
      [&](int64_t b, int j, C value) { of_first[b * squeezed + j] = before(b, j) <= C(0) ? C(0) : value; });
  normalise_backward(of_first, first, kept.var1, norm1, grads.norm_weight1, grads.norm_bias1, expert,
                     squeezed, batch);
  products<C>(
      squeezed, channels, batch, [&](int64_t j, int64_t b) { return of_first[b * squeezed + j]; },
      [&](int64_t b, int c) { return pooled[b * channels + c]; },
      [&](int64_t j, int c, C value) { grads.weight1[expert * weights + j * channels + c] = value; });
  products<C>(
      batch, channels, squeezed, [&](int64_t b, int64_t j) { return of_first[b * squeezed + j]; },
      [&](int64_t j, int c) { return weight1[j * channels + c]; },
      [&](int64_t b, int c, C value) { grad_pooled[(b * shape.experts + expert) * channels + c] = value; });
}

template <typename T>
int64_t bytes_of(const SumShape& shape, int squeezed) {
  const int64_t one = static_cast<int64_t>(shape.channels) * pitch_of(squeezed);
  const int64_t two = static_cast<int64_t>(squeezed) * pitch_of(shape.channels);
  return (one > two ? one : two) * static_cast<int64_t>(sizeof(Compute<T>));
}

}  // namespace

template <typename T>
bool squeeze_excite_fits(SumShape shape, int squeezed) {
  return bytes_of<T>(shape, squeezed) <= 60 * 1024;
}

template <typename T>
cudaError_t squeeze_excite_forward(PoolInput<T> input, ExciteLayers<Compute<T>> layers, BatchNorm<Compute<T>> norm1,
                                   BatchNorm<Compute<T>> norm2, ExciteKept<Compute<T>> kept, T* gate,
                                   unsigned* tickets, SumShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  if (!squeeze_excite_fits<T>(shape, layers.squeezed)) return cudaErrorInvalidValue;
  const dim3 grid(blocks_for(shape.batch * shape.experts, 1).x, static_cast<unsigned>(pool_blocks_across(shape)));
  return FASTMOD_LAUNCH_DYNAMIC(forward_kernel<T>, grid, kThreads,
                                static_cast<size_t>(bytes_of<T>(shape, layers.squeezed)), stream, input, layers, norm1,
                                norm2, kept, gate, tickets, shape);
}

template <typename T>
int64_t squeeze_excite_backward_scratch(SumShape shape, int squeezed) {
  return shape.batch * shape.experts * (shape.channels + squeezed);
}

template <typename T>
cudaError_t squeeze_excite_backward(const T* grad, ExciteLayers<Compute<T>> layers, BatchNorm<Compute<T>> norm1,
                                    BatchNorm<Compute<T>> norm2, ExciteKept<Compute<T>> kept,
                                    ExciteGrads<Compute<T>> grads, Compute<T>* grad_pooled, Compute<T>* scratch,
                                    SumShape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_kernel<T>, blocks_for(shape.experts, 1), kThreads, stream, grad, layers, norm1, norm2,
                        kept, grads, grad_pooled, scratch, shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template bool squeeze_excite_fits<T>(SumShape, int);                                                               \
  template cudaError_t squeeze_excite_forward<T>(PoolInput<T>, ExciteLayers<Compute<T>>, BatchNorm<Compute<T>>,      \
                                                 BatchNorm<Compute<T>>, ExciteKept<Compute<T>>, T*, unsigned*,       \
                                                 SumShape, cudaStream_t);                                            \
  template int64_t squeeze_excite_backward_scratch<T>(SumShape, int);                                                \
  template cudaError_t squeeze_excite_backward<T>(const T*, ExciteLayers<Compute<T>>, BatchNorm<Compute<T>>,         \
                                                  BatchNorm<Compute<T>>, ExciteKept<Compute<T>>,                     \
                                                  ExciteGrads<Compute<T>>, Compute<T>*, Compute<T>*, SumShape,       \
                                                  cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
