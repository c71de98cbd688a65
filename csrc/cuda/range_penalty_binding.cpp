// range_penalty on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "binding.h"
#include "../cpu/range_penalty_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

Tensor range_penalty_forward(TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  const c10::cuda::OptionalCUDAGuard guard(logits[0].device());
  const auto wide = logits[0].options().dtype(compute_type(logits[0]));
  int64_t count = 0;
  for (const Tensor& value : logits) count += range_penalty_partials(value.numel());
  const Tensor partials = at::empty({count}, wide), total = at::empty({}, wide);
  dispatch(logits[0].scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    C* next = data<C>(partials);
    for (const Tensor& value_ : logits) {
      const Tensor value = value_.contiguous();
      C10_CUDA_CHECK(cuda::range_penalty_forward<T>(data<T>(value), value.numel(), static_cast<C>(threshold), next,
                                                    stream()));
      next += range_penalty_partials(value.numel());
    }
    C10_CUDA_CHECK(range_penalty_finish<C>(data<C>(partials), count, data<C>(total), stream()));
  });
  return total;
}

std::vector<Tensor> range_penalty_backward(const Tensor& grad_, TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  const c10::cuda::OptionalCUDAGuard guard(logits[0].device());
  const Tensor grad = grad_.to(logits[0].options().dtype(compute_type(logits[0])));
  std::vector<Tensor> grads;
  dispatch(logits[0].scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    for (const Tensor& value_ : logits) {
      const Tensor value = value_.contiguous();
      grads.push_back(blank_like(value));
      C10_CUDA_CHECK(cuda::range_penalty_backward<T>(data<C>(grad), data<T>(value), value.numel(),
                                                     static_cast<C>(threshold), data<T>(grads.back()), stream()));
    }
  });
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("range_penalty_forward", range_penalty_forward);
  m.impl("range_penalty_backward", range_penalty_backward);
}

}  // namespace fastmod::cuda::bindings
