// batch_affine on CUDA tensors: arguments made contiguous, outputs allocated, kernels launched and checked.
#include "binding.h"
#include "../cpu/batch_affine.h"

namespace fastmod::cuda::bindings {
namespace {

// A parameter or buffer of any dtype, converted to the dtype of the statistics; undefined if there is none.
Tensor like_mean(const OptionalTensor& tensor, const Tensor& mean) {
  return tensor && tensor->defined() ? tensor->to(mean.scalar_type()).contiguous() : Tensor();
}

std::tuple<Tensor, Tensor> batch_affine_forward(const Tensor& mean_, const Tensor& var_, const OptionalTensor& weight_,
                                                const OptionalTensor& bias_, const OptionalTensor& running_mean_,
                                                const OptionalTensor& running_var_, double count, double momentum,
                                                double eps) {
  check_batch_affine(mean_, var_, weight_, bias_, running_mean_, running_var_);
  const c10::cuda::OptionalCUDAGuard guard(mean_.device());
  const Tensor mean = mean_.contiguous(), var = var_.contiguous();
  const Tensor weight = like_mean(weight_, mean), bias = like_mean(bias_, mean);
  const bool moves = running_mean_ && running_mean_->defined() && count > 0;
  const Tensor running_mean = moves ? like_mean(running_mean_, mean) : Tensor();
  const Tensor running_var = moves ? like_mean(running_var_, mean) : Tensor();
  const Tensor scale = blank_like(mean), shift = blank_like(mean);
  dispatch_wide(mean.scalar_type(), [&](auto* type) {
    using C = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::batch_affine_forward<C>(
        data<C>(mean), data<C>(var), data<C>(weight), data<C>(bias), data<C>(running_mean), data<C>(running_var),
        data<C>(scale), data<C>(shift), mean.numel(), static_cast<C>(count / (count - 1)), static_cast<C>(momentum),
        static_cast<C>(eps), stream()));
  });
  if (moves && !running_mean.is_same(*running_mean_)) running_mean_->copy_(running_mean);
  if (moves && !running_var.is_same(*running_var_)) running_var_->copy_(running_var);
  return {scale, shift};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_affine_backward(const Tensor& grad_scale_, const Tensor& grad_shift_,
                                                                 const Tensor& mean_, const Tensor& var_,
                                                                 const OptionalTensor& weight_, double eps) {
  check_batch_affine(mean_, var_, weight_, std::nullopt, std::nullopt, std::nullopt);
  for (const Tensor* grad : {&grad_scale_, &grad_shift_}) {
    check_like(mean_, *grad, "grad");
    TORCH_CHECK_VALUE(grad->sizes() == mean_.sizes(), "grad: expected ", mean_.sizes(), ", got ", grad->sizes());
  }
  const c10::cuda::OptionalCUDAGuard guard(mean_.device());
  const Tensor grad_scale = grad_scale_.contiguous(), grad_shift = grad_shift_.contiguous();
  const Tensor mean = mean_.contiguous(), var = var_.contiguous(), weight = like_mean(weight_, mean);
  const Tensor of_mean = blank_like(mean), of_var = blank_like(mean);
  const Tensor of_weight = blank_like(mean), of_bias = blank_like(mean);
  dispatch_wide(mean.scalar_type(), [&](auto* type) {
    using C = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::batch_affine_backward<C>(data<C>(grad_scale), data<C>(grad_shift), data<C>(mean), data<C>(var),
                                                  data<C>(weight), data<C>(of_mean), data<C>(of_var),
                                                  data<C>(of_weight), data<C>(of_bias), mean.numel(),
                                                  static_cast<C>(eps), stream()));
  });
  return {of_mean, of_var, of_weight, of_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("batch_affine_forward", batch_affine_forward);
  m.impl("batch_affine_backward", batch_affine_backward);
}

}  // namespace fastmod::cuda::bindings
