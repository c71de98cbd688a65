// batch_affine: folds a batch norm into a scale and a shift per channel, and updates its running statistics.
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;

template <typename C>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const C* mean, const C* var, const __grid_constant__ BatchNorm<C> norm, int64_t count) {
  const int64_t i = global_thread();
  if (i < count) finish_norm(norm, i, mean[i], var[i]);
}

template <typename C>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const C* grad_scale, const C* grad_shift, const C* mean, const C* var, const C* weight,
                    C* grad_mean, C* grad_var, C* grad_weight, C* grad_bias, int64_t count, C eps) {
  const int64_t i = global_thread();
  if (i >= count) return;
  const C inverse = inverse_root(var[i] + eps), scale = weight ? inverse * weight[i] : inverse;
  const C of_shift = grad_shift[i], of_scale = grad_scale[i] - mean[i] * of_shift;
  grad_mean[i] = -scale * of_shift;
  grad_var[i] = C(-0.5) * of_scale * scale * inverse * inverse;
  grad_weight[i] = of_scale * inverse;
  grad_bias[i] = of_shift;
}

}  // namespace

template <typename C>
cudaError_t batch_affine_forward(const C* mean, const C* var, const C* weight, const C* bias, C* running_mean,
                                 C* running_var, C* scale, C* shift, int64_t count, C bessel, C momentum, C eps,
                                 cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(forward_kernel<C>, blocks_for(count, kThreads), kThreads, stream, mean, var,
                        BatchNorm<C>{weight, bias, running_mean, running_var, scale, shift, bessel, momentum, eps},
                        count);
}

template <typename C>
cudaError_t batch_affine_backward(const C* grad_scale, const C* grad_shift, const C* mean, const C* var,
                                  const C* weight, C* grad_mean, C* grad_var, C* grad_weight, C* grad_bias,
                                  int64_t count, C eps, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_kernel<C>, blocks_for(count, kThreads), kThreads, stream, grad_scale, grad_shift, mean,
                        var, weight, grad_mean, grad_var, grad_weight, grad_bias, count, eps);
}

#define FASTMOD_INSTANTIATE(C)                                                                                         \
  template cudaError_t batch_affine_forward<C>(const C*, const C*, const C*, const C*, C*, C*, C*, C*, int64_t, C, C,  \
                                               C, cudaStream_t);                                                       \
  template cudaError_t batch_affine_backward<C>(const C*, const C*, const C*, const C*, const C*, C*, C*, C*, C*,      \
                                                int64_t, C, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)

}  // namespace fastmod::cuda
