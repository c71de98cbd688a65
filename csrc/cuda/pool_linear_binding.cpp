// pool_linear on CUDA tensors: arguments brought into layout, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

// The arguments; keeps tensors alive as long as the pointers to them.
struct Head {
  HeadShape shape;
  Tensor x, scale, shift, weight, bias;
  bool relu;

  Head(const Tensor& x_, const OptionalTensor& scale_, const OptionalTensor& shift_, const Tensor& weight_,
       const OptionalTensor& bias_, bool relu_, int64_t pooled, bool softmax)
      : relu(relu_) {
    check_float(x_, "x");
    check_like(x_, weight_, "weight");
    TORCH_CHECK_VALUE(x_.dim() == 4 && x_.size(2) * x_.size(3) > 0 && x_.size(1) > 0 && pooled > 0 &&
                          weight_.dim() == 2 && weight_.size(0) > 0 &&
                          weight_.size(1) == x_.size(1) * pooled * pooled,
                      "expected x [B, C, H, W] and weight [outputs, C * pooled * pooled], got ", x_.sizes(), " and ",
                      weight_.sizes());
    for (const OptionalTensor* each : {&scale_, &shift_}) {
      if (!*each) continue;
      TORCH_CHECK_VALUE((*each)->dim() == 1 && (*each)->size(0) == x_.size(1), "scale, shift: expected [C], got ",
                        (*each)->sizes());
      TORCH_CHECK_TYPE((*each)->scalar_type() == compute_type(x_), "scale, shift: expected ", compute_type(x_));
      TORCH_CHECK((*each)->device() == x_.device(), "scale, shift: expected device ", x_.device());
    }
    TORCH_CHECK_VALUE(scale_.has_value() == shift_.has_value(), "scale, shift: expected both or none");
    if (bias_) {
      check_like(x_, *bias_, "bias");
      TORCH_CHECK_VALUE(bias_->dim() == 1 && bias_->size(0) == weight_.size(0), "bias: expected [outputs], got ",
                        bias_->sizes());
    }
    small(x_.size(2) * x_.size(3), "pixels of x");
    small(weight_.numel(), "weights");
    shape = {x_.size(0),
             static_cast<int>(x_.size(2)),
             static_cast<int>(x_.size(3)),
             small(x_.size(1), "channels of x"),
             static_cast<int>(pooled),
             static_cast<int>(weight_.size(0)),
             softmax};
    x = inner(x_);
    scale = dense(scale_);
    shift = dense(shift_);
    weight = weight_.contiguous();
    bias = dense(bias_);
  }
  template <typename T>
  HeadInput<T> input() const {
    using C = Compute<T>;
    return {data<T>(x), data<C>(scale), data<C>(shift), data<T>(weight), data<T>(bias), relu};
  }
};

Tensor pool_linear_forward(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
                           const Tensor& weight, const OptionalTensor& bias, bool relu, int64_t pooled, bool softmax) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Head head(x, scale, shift, weight, bias, relu, pooled, softmax);
  const Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::pool_linear_forward<T>(head.input<T>(), data<T>(out), head.shape, stream()));
  });
  return out;
}

std::vector<Tensor> pool_linear_backward(const Tensor& grad_, const Tensor& x, const OptionalTensor& scale,
                                         const OptionalTensor& shift, const Tensor& weight, const OptionalTensor& bias,
                                         bool relu, int64_t pooled, bool softmax, std::array<bool, 5> needs) {
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const Head head(x, scale, shift, weight, bias, relu, pooled, softmax);
  check_like(x, grad_, "grad");
  TORCH_CHECK_VALUE(grad_.dim() == 2 && grad_.size(0) == x.size(0) && grad_.size(1) == weight.size(0),
                    "grad: expected [B, outputs], got ", grad_.sizes());
  const Tensor grad = grad_.contiguous();
  const bool affine = (needs[1] || needs[2]) && head.scale.defined();
  Tensor grad_x, grad_scale, grad_shift, grad_weight, grad_bias;
  if (needs[0]) grad_x = empty_images(x.sizes(), x.options());
  if (affine) grad_scale = blank_like(head.scale);
  if (affine) grad_shift = blank_like(head.shift);
  if (needs[3]) grad_weight = blank_like(head.weight);
  if (needs[4] && head.bias.defined()) grad_bias = blank_like(head.bias);
  if (x.size(0) == 0) zero_those_defined({grad_scale, grad_shift, grad_weight, grad_bias});
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const Workspace space(x, pool_linear_backward_scratch<T>(head.shape));
    const HeadGrads<T> grads{data<T>(grad_x), data<C>(grad_scale), data<C>(grad_shift), data<T>(grad_weight),
                             data<T>(grad_bias)};
    C10_CUDA_CHECK(cuda::pool_linear_backward<T>(data<T>(grad), head.input<T>(), grads, data<C>(space.numbers),
                                                 data<unsigned>(space.tickets), head.shape, stream()));
  });
  return all_defined(
      {grad_x, needs[1] ? grad_scale : Tensor(), needs[2] ? grad_shift : Tensor(), grad_weight, grad_bias},
      x.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("pool_linear_forward", pool_linear_forward);
  m.impl("pool_linear_backward", pool_linear_backward);
}

}  // namespace fastmod::cuda::bindings
