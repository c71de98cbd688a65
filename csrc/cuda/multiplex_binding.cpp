// multiplex on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "image_binding.h"
#include "../cpu/multiplex_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// copies: see check_multiplex.
Shape multiplex_shape(const Tensor& blocks, const Tensor& logits, int64_t copies) {
  const int64_t each = copies ? copies : 1;
  return {leading_size(blocks, 2) / each, blocks.size(-2), logits.size(-1), blocks.size(-1), each};
}

Tensor multiplex_forward(const Tensor& blocks_, const Tensor& logits_, const OptionalTensor& tau, double tau_value,
                         const OptionalTensor& seed, int64_t mode, LowType low) {
  const int64_t copies = check_multiplex(blocks_, logits_, tau, seed, low);
  const c10::cuda::OptionalCUDAGuard guard(blocks_.device());
  const RoutingArguments routing(blocks_, tau, tau_value, seed, mode, copies);
  const Tensor blocks = blocks_.contiguous(), logits = logits_.contiguous();
  std::vector<int64_t> sizes = blocks.sizes().vec();
  sizes[sizes.size() - 2] = logits.size(-1);
  const Tensor out = at::empty(sizes, blocks.options().dtype(low.value_or(blocks.scalar_type())));
  dispatch(out.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::multiplex_forward<T>(mixed<const T>(blocks), mixed<const T>(logits), data<T>(out),
                                              routing.as<Compute<T>>(), multiplex_shape(blocks, logits, copies),
                                              stream()));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> multiplex_backward(const Tensor& grad_, const Tensor& blocks_,
                                                      const Tensor& logits_, const OptionalTensor& tau,
                                                      double tau_value, const OptionalTensor& seed, int64_t mode,
                                                      LowType low) {
  const int64_t copies = check_multiplex(blocks_, logits_, tau, seed, low);
  check_grad(blocks_, grad_, low);
  const c10::cuda::OptionalCUDAGuard guard(blocks_.device());
  const RoutingArguments routing(blocks_, tau, tau_value, seed, mode, copies);
  const Tensor blocks = blocks_.contiguous(), logits = logits_.contiguous(), grad = grad_.contiguous();
  const Shape shape = multiplex_shape(blocks, logits, copies);
  const auto wide = blocks.options().dtype(tau_type(tau, blocks));
  const Tensor grad_blocks = blank_like(blocks), grad_logits = blank_like(logits);
  const at::IntArrayRef taus = copies ? at::IntArrayRef(copies) : at::IntArrayRef();
  const Tensor grad_tau = shape.batch == 0 ? at::zeros(taus, wide) : at::empty(taus, wide);
  dispatch(grad.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const Workspace space(blocks, multiplex_backward_scratch<T>(shape, tau.has_value()));
    C10_CUDA_CHECK(cuda::multiplex_backward<T>(data<T>(grad), mixed<const T>(blocks), mixed<const T>(logits),
                                               mixed<T>(grad_blocks), mixed<T>(grad_logits), data<C>(grad_tau),
                                               routing.as<C>(), data<C>(space.numbers), data<unsigned>(space.tickets),
                                               shape, stream()));
  });
  return {grad_blocks, grad_logits, grad_tau};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("multiplex_forward", multiplex_forward);
  m.impl("multiplex_backward", multiplex_backward);
}

}  // namespace fastmod::cuda::bindings
