// norm_conv on CUDA tensors: arguments laid out, outputs allocated, kernels launched and checked.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

ConvShape conv_shape(const Tensor& x, const Tensor& weight, int64_t stride, bool depthwise) {
  small(x.size(-2) * x.size(-1), "pixels of x");
  return {x.size(0),
          small(weight.size(0), "experts"),
          small(x.size(-3), "channels of x"),
          small(weight.size(1), "outputs"),
          static_cast<int>(x.size(-2)),
          static_cast<int>(x.size(-1)),
          static_cast<int>(weight.size(3)),
          static_cast<int>(stride),
          x.dim() == 4,
          depthwise};
}

// What a convolution reads, alive as long as the pointers.
struct Input {
  Tensor x, scale, shift, gate;
  bool relu;

  Input(const Tensor& x_, const OptionalTensor& scale_, const OptionalTensor& shift_, const OptionalTensor& gate_,
        bool relu_)
      : x(inner(x_)), scale(dense(scale_)), shift(dense(shift_)), gate(dense(gate_)), relu(relu_) {}

  template <typename T>
  ConvInput<T> as() const {
    const int rows = scale.defined() ? static_cast<int>(scale.size(0)) : 1;
    return {data<T>(x), data<Compute<T>>(scale), data<Compute<T>>(shift), rows, data<T>(gate), relu};
  }
};

// As cuDNN's convolutions are allowed to.
bool allow_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

std::tuple<Tensor, Tensor, Tensor> norm_conv_forward(const Tensor& x, const Tensor& weight_,
                                                     const OptionalTensor& scale, const OptionalTensor& shift,
                                                     const OptionalTensor& channel_gate, const OptionalTensor& bias_,
                                                     bool relu, int64_t stride, bool depthwise, bool stats) {
  check_norm_conv(x, weight_, scale, shift, channel_gate, bias_, stride, depthwise);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const ConvShape shape = conv_shape(x, weight_, stride, depthwise);
  const auto wide = x.options().dtype(compute_type(x));
  const Tensor y =
      empty_images({shape.batch, shape.experts, shape.out, shape.out_high(), shape.out_wide()}, x.options());
  const Tensor none = at::empty({0}, wide);
  if (shape.batch == 0) {
    const auto zeros = [&] { return stats ? at::zeros({shape.experts, shape.out}, wide) : none; };
    return {y, zeros(), zeros()};
  }
  const Tensor mean = stats ? at::empty({shape.experts, shape.out}, wide) : Tensor();
  const Tensor var = stats ? at::empty({shape.experts, shape.out}, wide) : Tensor();
  const Input input(x, scale, shift, channel_gate, relu);
  const Tensor weight = weight_.contiguous(), bias = dense(bias_);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    using C = Compute<T>;
    const Workspace space(x, stats ? norm_conv_forward_scratch<T>(shape) : Scratch{0, 0});
    C10_CUDA_CHECK(cuda::norm_conv_forward<T>(input.as<T>(), data<T>(weight), data<T>(bias), data<T>(y), data<C>(mean),
                                              data<C>(var), data<C>(space.numbers), data<unsigned>(space.tickets),
                                              allow_tf32(), shape, stream()));
  });
  return {y, stats ? mean : none, stats ? var : none};
}

std::vector<Tensor> norm_conv_backward(const Tensor& grad_, const OptionalTensor& grad_mean_,
                                       const OptionalTensor& grad_var_, const OptionalTensor& y_,
                                       const OptionalTensor& mean_, const Tensor& x, const Tensor& weight_,
                                       const OptionalTensor& scale, const OptionalTensor& shift,
                                       const OptionalTensor& channel_gate, bool relu, int64_t stride, bool depthwise,
                                       std::array<bool, 6> needs) {
  check_norm_conv(x, weight_, scale, shift, channel_gate, std::nullopt, stride, depthwise);
  check_norm_conv_grad(grad_, grad_mean_, grad_var_, y_, mean_, x, weight_, stride);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const ConvShape shape = conv_shape(x, weight_, stride, depthwise);
  const auto [need_x, need_weight, need_scale, need_shift, need_gate, need_bias] = needs;
  const bool need_affine = (need_scale || need_shift) && scale;
  Tensor grad_x, grad_weight, grad_scale, grad_shift, grad_gate, grad_bias;
  if (need_x) grad_x = empty_images(x.sizes(), x.options());
  if (need_weight) grad_weight = at::empty(weight_.sizes(), x.options());
  if (need_affine) grad_scale = at::empty(scale->sizes(), scale->options());
  if (need_affine) grad_shift = at::empty(shift->sizes(), shift->options());
  if (need_gate && channel_gate) grad_gate = at::empty(channel_gate->sizes(), x.options());
  if (need_bias) grad_bias = at::empty({shape.experts, shape.out}, x.options());
  if (shape.batch == 0) {
    for (Tensor* sum : {&grad_weight, &grad_scale, &grad_shift, &grad_bias}) {
      if (sum->defined()) sum->zero_();
    }
  } else {
    const Input input(x, scale, shift, channel_gate, relu);
    const Tensor grad = inner(grad_), weight = weight_.contiguous(), grad_mean = dense(grad_mean_);
    const Tensor grad_var = dense(grad_var_), y = grad_var.defined() ? inner(y_) : Tensor();
    const Tensor mean = grad_var.defined() ? dense(mean_) : Tensor();
    dispatch(x.scalar_type(), [&](auto* type) {
      using T = Element<decltype(type)>;
      using C = Compute<T>;
      const C values = static_cast<C>(shape.batch * shape.out_high() * shape.out_wide());
      const ConvGrad<T> gradient{data<T>(grad),      data<T>(y),        data<C>(mean), data<C>(grad_mean),
                                 data<C>(grad_var), C(1) / values};
      if (need_x || grad_scale.defined() || grad_gate.defined()) {
        const Workspace space(x, norm_conv_backward_x_scratch<T>(shape));
        C10_CUDA_CHECK(norm_conv_backward_x<T>(gradient, input.as<T>(), data<T>(weight), data<T>(grad_x),
                                               data<C>(grad_scale), data<C>(grad_shift), data<T>(grad_gate),
                                               data<C>(space.numbers), data<unsigned>(space.tickets), allow_tf32(),
                                               shape, stream()));
      }
      if (need_weight || need_bias) {
        const Workspace space(x, norm_conv_backward_weight_scratch<T>(shape));
        C10_CUDA_CHECK(norm_conv_backward_weight<T>(gradient, input.as<T>(), data<T>(grad_weight), data<T>(grad_bias),
                                                    data<C>(space.numbers), data<unsigned>(space.tickets),
                                                    allow_tf32(), shape, stream()));
      }
    });
  }
  if (!need_scale) grad_scale = Tensor();
  if (!need_shift) grad_shift = Tensor();
  std::vector<Tensor> result{grad_x, grad_weight, grad_scale, grad_shift, grad_gate, grad_bias};
  for (Tensor& tensor : result)
    if (!tensor.defined()) tensor = at::empty({0}, x.options());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("norm_conv_forward", norm_conv_forward);
  m.impl("norm_conv_backward", norm_conv_backward);
}

}  // namespace fastmod::cuda::bindings
