// range_penalty: sum of (t - clamp(t, -threshold, threshold))^2 in two steps without atomics, so that it is
// reproducible.
#include "common.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPerThread = 8, kMaxBlocks = 1024;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* logits, int64_t count, Compute<T> threshold, Compute<T>* partials) {
  Compute<T> total = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = global_thread(); i < count; i += step) {
    const Compute<T> over = excess(widen(logits[i]), threshold);
    total += over * over;
  }
  total = block_sum(total);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

template <typename C>
__global__ void __launch_bounds__(kThreads) finish_kernel(const C* partials, int64_t count, C* result) {
  C total = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) total += partials[i];
  total = block_sum(total);
  if (threadIdx.x == 0) *result = total;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Compute<T>* grad, const T* logits, int64_t count, Compute<T> threshold, T* grad_logits) {
  const int64_t i = global_thread();
  if (i < count) narrow(Compute<T>(2) * *grad * excess(widen(logits[i]), threshold), grad_logits + i);
}

}  // namespace

int64_t range_penalty_partials(int64_t count) {
  const int64_t blocks = (count + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

template <typename T>
cudaError_t range_penalty_forward(const T* logits, int64_t count, Compute<T> threshold, Compute<T>* partials,
                                  cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(forward_kernel<T>, dim3(static_cast<unsigned>(range_penalty_partials(count))), kThreads,
                        stream, logits, count, threshold, partials);
}

template <typename C>
cudaError_t range_penalty_finish(const C* partials, int64_t count, C* total, cudaStream_t stream) {
  return FASTMOD_LAUNCH(finish_kernel<C>, dim3(1), kThreads, stream, partials, count, total);
}

template <typename T>
cudaError_t range_penalty_backward(const Compute<T>* grad, const T* logits, int64_t count, Compute<T> threshold,
                                   T* grad_logits, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_kernel<T>, blocks_for(count, kThreads), kThreads, stream, grad, logits, count,
                        threshold, grad_logits);
}

#define FASTMOD_INSTANTIATE(T)                                                                                  \
  template cudaError_t range_penalty_forward<T>(const T*, int64_t, Compute<T>, Compute<T>*, cudaStream_t);      \
  template cudaError_t range_penalty_backward<T>(const Compute<T>*, const T*, int64_t, Compute<T>, T*, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)
template cudaError_t range_penalty_finish<float>(const float*, int64_t, float*, cudaStream_t);
template cudaError_t range_penalty_finish<double>(const double*, int64_t, double*, cudaStream_t);

}  // namespace fastmod::cuda
