// entropy_penalty on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

Tensor entropy_penalty_forward(const Tensor& logits_) {
  check_logits(logits_);
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor logits = logits_.contiguous();
  const int64_t rows = leading_size(logits, 1);
  const auto wide = logits.options().dtype(compute_type(logits));
  if (rows == 0) return at::zeros({}, wide);
  const Tensor total = at::empty({}, wide);
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const Workspace space(logits, entropy_penalty_forward_scratch<T>(rows));
    C10_CUDA_CHECK(cuda::entropy_penalty_forward<T>(data<T>(logits), rows, logits.size(-1), data<C>(total),
                                                    data<C>(space.numbers), data<unsigned>(space.tickets), stream()));
  });
  return total;
}

Tensor entropy_penalty_backward(const Tensor& grad_, const Tensor& logits_) {
  check_logits(logits_);
  TORCH_CHECK_VALUE(grad_.numel() == 1, "grad: expected a scalar, got ", grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor logits = logits_.contiguous(), grad = grad_.to(logits.options().dtype(compute_type(logits)));
  const Tensor result = blank_like(logits);
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::entropy_penalty_backward<T>(data<Compute<T>>(grad), data<T>(logits), leading_size(logits, 1),
                                                     logits.size(-1), data<T>(result), stream()));
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("entropy_penalty_forward", entropy_penalty_forward);
  m.impl("entropy_penalty_backward", entropy_penalty_backward);
}

}  // namespace fastmod::cuda::bindings
