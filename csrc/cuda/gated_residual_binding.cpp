// gated_residual on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "binding.h"
#include "../cpu/gated_residual_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

GateShape gate_shape(const Tensor& x) {
  const int64_t n = x.size(-2), d = x.size(-1);
  return {leading_size(x, 2), n, d, n * d, n};
}

Tensor gated_residual_forward(const Tensor& x_, const Tensor& fresh_, const Tensor& gate_, LowType low) {
  check_gated_residual(x_, fresh_, gate_, low);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const Tensor x = x_.contiguous(), fresh = fresh_.contiguous(), gate = gate_.contiguous();
  const Tensor out = at::empty(x.sizes(), x.options().dtype(low.value_or(x.scalar_type())));
  dispatch(out.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::gated_residual_forward<T>(mixed<const T>(x), mixed<const T>(fresh), mixed<const T>(gate),
                                                   data<T>(out), gate_shape(x), stream()));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_residual_backward(const Tensor& grad_, const Tensor& x_,
                                                           const Tensor& fresh_, const Tensor& gate_, LowType low) {
  check_gated_residual(x_, fresh_, gate_, low);
  check_grad(x_, grad_, low);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const Tensor grad = grad_.contiguous(), x = x_.contiguous(), fresh = fresh_.contiguous(), gate = gate_.contiguous();
  const Tensor grad_x = blank_like(x), grad_fresh = blank_like(fresh), grad_gate = blank_like(gate);
  dispatch(grad.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::gated_residual_backward<T>(data<T>(grad), mixed<const T>(x), mixed<const T>(fresh),
                                                    mixed<const T>(gate), mixed<T>(grad_x), mixed<T>(grad_fresh),
                                                    mixed<T>(grad_gate), gate_shape(x), stream()));
  });
  return {grad_x, grad_fresh, grad_gate};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("gated_residual_forward", gated_residual_forward);
  m.impl("gated_residual_backward", gated_residual_backward);
}

}  // namespace fastmod::cuda::bindings
