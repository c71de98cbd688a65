// sample_mask on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "binding.h"
#include "../cpu/sample_mask_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

Tensor sample_mask_forward(const Tensor& logits_, const OptionalTensor& weight_, int64_t first, int64_t samples,
                           const Tensor& seed, int64_t noise_stream) {
  check_sample_mask(logits_, weight_, seed, first, samples, noise_stream);
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor logits = logits_.contiguous(), weight = dense(weight_);
  const MaskNoise noise = mask_noise(logits, first, samples, seed, noise_stream);
  std::vector<int64_t> sizes = logits.sizes().vec();
  sizes.insert(sizes.begin(), samples);
  const Tensor out = at::empty(sizes, logits.options());
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::sample_mask_forward<T>(data<T>(logits), data<T>(weight), data<T>(out), logits.numel(), noise,
                                                stream()));
  });
  return out;
}

Tensor sample_mask_backward(const Tensor& grad_, const Tensor& logits_, const OptionalTensor& weight_, int64_t first,
                            int64_t samples, const Tensor& seed, int64_t noise_stream, double tau,
                            const OptionalTensor& base_) {
  check_sample_mask(logits_, weight_, seed, first, samples, noise_stream);
  check_like(logits_, grad_, "grad");
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  TORCH_CHECK_VALUE(grad_.dim() == logits_.dim() + 1 && grad_.size(0) == samples &&
                        grad_.sizes().slice(1) == logits_.sizes(),
                    "grad: expected [", samples, "] and the shape of logits, ", logits_.sizes(), ", got ",
                    grad_.sizes());
  if (base_) check_like(logits_, *base_, "base");
  TORCH_CHECK_VALUE(!base_ || base_->sizes() == logits_.sizes(), "base: expected the shape of logits, ",
                    logits_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(logits_.device());
  const Tensor grad = grad_.contiguous(), logits = logits_.contiguous(), weight = dense(weight_), base = dense(base_);
  const MaskNoise noise = mask_noise(logits, first, samples, seed, noise_stream);
  const Tensor grad_logits = blank_like(logits);
  dispatch(logits.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::sample_mask_backward<T>(data<T>(grad), data<T>(logits), data<T>(weight), data<T>(base),
                                                 data<T>(grad_logits), static_cast<Compute<T>>(tau), logits.numel(),
                                                 noise, stream()));
  });
  return grad_logits;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("sample_mask_forward", sample_mask_forward);
  m.impl("sample_mask_backward", sample_mask_backward);
}

}  // namespace fastmod::cuda::bindings
