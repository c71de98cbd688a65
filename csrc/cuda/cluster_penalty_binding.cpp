// cluster_penalty on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

Tensor cluster_penalty_forward(const Tensor& bank_) {
  check_bank(bank_);
  const c10::cuda::OptionalCUDAGuard guard(bank_.device());
  const Tensor bank = bank_.contiguous();
  const int64_t templates = bank.size(0), size = bank.size(1);
  const auto options = bank.options().dtype(at::kDouble);
  if (size == 0) return at::zeros({templates, templates}, options);
  const Tensor table = at::empty({templates, templates}, options);
  dispatch(bank.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    const Workspace space(bank, cluster_penalty_forward_scratch<T>(templates, size));
    C10_CUDA_CHECK(cuda::cluster_penalty_forward<T>(data<T>(bank), data<double>(table), data<Compute<T>>(space.numbers),
                                                    data<unsigned>(space.tickets), templates, size, stream()));
  });
  return table;
}

Tensor cluster_penalty_backward(const Tensor& grad_, const Tensor& bank_) {
  check_bank(bank_);
  TORCH_CHECK(grad_.device() == bank_.device(), "grad: expected device ", bank_.device(), ", got ", grad_.device());
  TORCH_CHECK_TYPE(grad_.scalar_type() == at::kDouble, "grad: expected float64, got ", grad_.scalar_type());
  const int64_t templates = bank_.size(0), size = bank_.size(1);
  TORCH_CHECK_VALUE(grad_.dim() == 2 && grad_.size(0) == templates && grad_.size(1) == templates,
                    "grad: expected [K, K], got ", grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(bank_.device());
  const Tensor grad = grad_.contiguous(), bank = bank_.contiguous(), result = blank_like(bank);
  dispatch(bank.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::cluster_penalty_backward<T>(data<double>(grad), data<T>(bank), data<T>(result), templates,
                                                     size, stream()));
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("cluster_penalty_forward", cluster_penalty_forward);
  m.impl("cluster_penalty_backward", cluster_penalty_backward);
}

}  // namespace fastmod::cuda::bindings
