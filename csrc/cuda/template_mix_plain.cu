// template_mix without tensor cores: for fp64, and for sizes that do not fit the kernels on tensor cores. Neighbouring
// threads take neighbouring columns.
#include "template_mix.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 8;        // results per thread
constexpr int kPart = 1024;     // columns that one warp sums up for the gradient of the weights
constexpr int kRun = 8;         // terms of a lane per partial sum: short sums lose fewer digits

template <typename T>
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const T* logits, Compute<T>* weights, const __grid_constant__ MixShape shape) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= shape.rows) return;  // all lanes of a warp
  const Mixture<T> mixture(logits + row * shape.templates, shape.templates, shape.mixing);
  for (int64_t k = threadIdx.x % kWarp; k < shape.templates; k += kWarp) {
    weights[row * shape.templates + k] = mixture.weight(k);
  }
}

// out [count, size] = sum over `depth` of weights[i * across + d * along] * from[d, size]; a thread has kRows rows of a
// column. Groups of rows are on grid axis x, which allows many.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const Compute<T>* weights, const T* from, T* out, int64_t count, int64_t depth, int64_t across,
                   int64_t along, int64_t size) {
  using C = Compute<T>;
  const int64_t tiles = (count + kRows - 1) / kRows, block = quotient(blockIdx.x, tiles);
  const int64_t first = (blockIdx.x - block * tiles) * kRows, column = block * kThreads + threadIdx.x;
  if (column >= size) return;
  C total[kRows] = {};
  for (int64_t d = 0; d < depth; ++d) {
    const C value = widen(from[d * size + column]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i < count) total[i] += weights[(first + i) * across + d * along] * value;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < count) narrow(total[i], out + (first + i) * size + column);
  }
}

// partials [parts, rows, templates]: one warp per number.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dots_kernel(const T* grad, const T* bank, Compute<T>* partials, const __grid_constant__ MixShape shape) {
  using C = Compute<T>;
  const int64_t all = shape.rows * shape.templates, index = global_thread() / kWarp, part = quotient(index, all);
  const int64_t begin = part * kPart, end = begin + kPart < shape.size ? begin + kPart : shape.size;
  if (begin >= shape.size) return;  // all lanes of a warp
  const int64_t row = quotient(index - part * all, shape.templates), k = index - part * all - row * shape.templates;
  const T *own = grad + row * shape.size, *other = bank + k * shape.size;
  C total = 0;
  for (int64_t first = begin + threadIdx.x % kWarp; first < end; first += kRun * kWarp) {
    C sum = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t at = first + i * kWarp;
      if (at < end) sum += widen(own[at]) * widen(other[at]);
    }
    total += sum;
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
  if (threadIdx.x % kWarp == 0) partials[index] = total;
}

template <typename T>
cudaError_t product(const Compute<T>* weights, const T* from, T* out, int64_t count, int64_t depth, int64_t across,
                    int64_t along, int64_t size, cudaStream_t stream) {
  const int64_t blocks = (count + kRows - 1) / kRows * ((size + kThreads - 1) / kThreads);
  return FASTMOD_LAUNCH(product_kernel<T>, blocks_for(blocks, 1), kThreads, stream, weights, from, out, count, depth,
                        across, along, size);
}

template <typename T>
cudaError_t make_weights(const T* logits, Compute<T>* weights, MixShape shape, cudaStream_t stream) {
  return FASTMOD_LAUNCH(weights_kernel<T>, blocks_for(shape.rows, kWarps), kThreads, stream, logits, weights, shape);
}

}  // namespace

template <typename T>
int64_t plain_mix_parts(MixShape shape) {
  return (shape.size + kPart - 1) / kPart;
}

template <typename T>
cudaError_t plain_mix_forward(const T* logits, const T* bank, T* out, Compute<T>* weights, MixShape shape,
                              cudaStream_t stream) {
  const cudaError_t error = make_weights(logits, weights, shape, stream);
  if (error != cudaSuccess) return error;
  return product(weights, bank, out, shape.rows, shape.templates, shape.templates, 1, shape.size, stream);
}

template <typename T>
cudaError_t plain_mix_backward(const T* grad, const T* logits, const T* bank, Compute<T>* weights,
                               Compute<T>* partials, T* grad_bank, MixShape shape, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (grad_bank) {
    error = make_weights(logits, weights, shape, stream);
    if (error != cudaSuccess) return error;
    error = product(weights, grad, grad_bank, shape.templates, shape.rows, 1, shape.templates, shape.size, stream);
  }
  if (error != cudaSuccess || !partials) return error;
  const int64_t warps = plain_mix_parts<T>(shape) * shape.rows * shape.templates;
  return FASTMOD_LAUNCH(dots_kernel<T>, blocks_for(warps, kWarps), kThreads, stream, grad, bank, partials, shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template int64_t plain_mix_parts<T>(MixShape);                                                                     \
  template cudaError_t plain_mix_forward<T>(const T*, const T*, T*, Compute<T>*, MixShape, cudaStream_t);            \
  template cudaError_t plain_mix_backward<T>(const T*, const T*, const T*, Compute<T>*, Compute<T>*, T*, MixShape,   \
                                             cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
