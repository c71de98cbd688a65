// masked_conv2d on CUDA tensors: arguments checked, outputs allocated, kernels launched and checked. Images may have
// any layout. fastmod/ops/masked_conv2d.py says what the kernels support; everything else is refused here.
#include "image_binding.h"

namespace fastmod::cuda::bindings {
namespace {

using Pair = at::IntArrayRef;

// Whether tf32 is allowed, as for cuDNN's convolutions.
bool convolution_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

struct ConvArguments {
  MaskedConvShape shape;
  int64_t samples;

  ConvArguments(const Tensor& x, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples_, Pair stride, Pair padding,
                Pair dilation, int64_t first, const LowType& low)
      : samples(samples_) {
    TORCH_CHECK_TYPE(x.scalar_type() != at::kDouble, "x: expected float32, bfloat16 or float16, got ", x.scalar_type());
    check_float(x, "x");
    check_mixed(x, weight, low, "weight");
    check_mixed(x, logits, low, "logits");
    TORCH_CHECK_VALUE(x.dim() == 4 && weight.dim() == 4 && x.size(1) == weight.size(1) && x.numel() > 0 &&
                          weight.numel() > 0 && weight.size(2) <= kMaxKernel && weight.size(3) <= kMaxKernel,
                      "expected x [B, in, H, W] and weight [out, in, h, w] with filters of up to ", kMaxKernel,
                      " rows and columns, got ", x.sizes(), " and ", weight.sizes());
    TORCH_CHECK_VALUE(logits.sizes() == weight.sizes(), "logits: expected the shape of weight, ", weight.sizes(),
                      ", got ", logits.sizes());
    for (const OptionalTensor& each : {bias, bias_logits}) {
      if (!each) continue;
      check_mixed(x, *each, low, "bias");
      TORCH_CHECK_VALUE(each->dim() == 1 && each->size(0) == weight.size(0), "bias: expected [", weight.size(0),
                        "], got ", each->sizes());
    }
    TORCH_CHECK_VALUE(bias || !bias_logits, "bias_logits: expected none without a bias");
    TORCH_CHECK_VALUE(samples >= 1 && x.size(0) % samples == 0, "x: expected a batch that is a multiple of ", samples,
                      " samples, got ", x.size(0));
    check_mask_noise(seed, first, samples, 0);
    int64_t sizes[2], limit = std::max(x.size(1), weight.size(0));
    for (int d = 0; d < 2; ++d) {
      TORCH_CHECK_VALUE(stride.size() == 2 && padding.size() == 2 && dilation.size() == 2 && stride[d] >= 1 &&
                            padding[d] >= 0 && dilation[d] >= 1,
                        "stride, padding, dilation: expected two numbers each");
      small(stride[d], "stride"), small(padding[d], "padding"), small(dilation[d], "dilation");
      const int64_t room = x.size(2 + d) + 2 * padding[d] - dilation[d] * (weight.size(2 + d) - 1) - 1;
      TORCH_CHECK_VALUE(room >= 0, "weight: expected filters no larger than x, got ", weight.sizes(), " and ",
                        x.sizes());
      sizes[d] = room / stride[d] + 1;
      limit *= x.size(2 + d) + 4 * padding[d];
      small(limit, "an image");
      shape.kernel[d] = static_cast<int>(weight.size(2 + d));
      shape.stride[d] = static_cast<int>(stride[d]);
      shape.padding[d] = static_cast<int>(padding[d]);
      shape.dilation[d] = static_cast<int>(dilation[d]);
    }
    small(weight.numel(), "weight");
    shape.images = x.size(0) / samples;
    shape.in = static_cast<int>(x.size(1));
    shape.out = static_cast<int>(weight.size(0));
    shape.high = static_cast<int>(x.size(2));
    shape.wide = static_cast<int>(x.size(3));
    shape.out_high = static_cast<int>(sizes[0]);
    shape.out_wide = static_cast<int>(sizes[1]);
  }

  // The images themselves, or a copy if their strides exceed 32-bit offsets.
  Tensor near(const Tensor& images) const {
    int64_t apart = 0;
    for (int d = 1; d < 4; ++d) {
      const int64_t border = d == 1 ? 16 : 4 * shape.padding[d - 2];
      apart += (std::max(images.size(d), int64_t(d == 2 ? shape.high : d == 3 ? shape.wide : 1)) + border) *
               images.stride(d);
    }
    return apart <= std::numeric_limits<int>::max() ? images : images.contiguous();
  }
};

template <typename T>
Images<T> images_of(const Tensor& images) {
  const auto step = [&](int d) { return static_cast<int>(images.stride(d)); };
  return {mixed<T>(images), images.stride(0), step(1), step(2), step(3)};
}

// In the layout of x, if it is contiguous or channels-last.
Tensor empty_like_images(const Tensor& x, at::IntArrayRef sizes, at::ScalarType type) {
  const bool last = !x.is_contiguous() && x.is_contiguous(at::MemoryFormat::ChannelsLast);
  return at::empty(sizes, x.options().dtype(type),
                   last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
}

// Keeps the tensors alive as long as the pointers.
struct Filters {
  Tensor weight, logits, bias, bias_logits;
  Filters(const Tensor& weight_, const Tensor& logits_, const OptionalTensor& bias_, const OptionalTensor& bias_logits_)
      : weight(weight_.contiguous()), logits(logits_.contiguous()), bias(dense(bias_)),
        bias_logits(dense(bias_logits_)) {}
  template <typename T>
  MaskedFilters<T> as() const {
    return {mixed<const T>(weight), mixed<const T>(logits), mixed<const T>(bias), mixed<const T>(bias_logits)};
  }
};

Tensor masked_conv2d_forward(const Tensor& x_, const Tensor& weight, const Tensor& logits, const OptionalTensor& bias,
                              const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples, Pair stride,
                              Pair padding, Pair dilation, int64_t first, LowType low) {
  const ConvArguments own(x_, weight, logits, bias, bias_logits, seed, samples, stride, padding, dilation, first, low);
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const MaskedConvShape& shape = own.shape;
  const MaskNoise noise = mask_noise(x_, first, samples, seed, kStreamMask);
  const Tensor x = own.near(x_);
  const Filters filters(weight, logits, bias, bias_logits);
  const auto type = low.value_or(x.scalar_type());
  const Tensor out = empty_like_images(x_, {x.size(0), shape.out, shape.out_high, shape.out_wide}, type);
  dispatch(type, [&](auto* type) {
    using T = Element<decltype(type)>;
    if constexpr (sizeof(T) <= 4) {
      C10_CUDA_CHECK(cuda::masked_conv2d_forward<T>(images_of<const T>(x), filters.as<T>(), images_of<T>(out),
                                                    convolution_tf32(), shape, noise, kStreamMaskBias,
                                                    bindings::stream()));
    }
  });
  return out;
}

std::vector<Tensor> masked_conv2d_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight,
                                            const Tensor& logits, const OptionalTensor& bias,
                                            const OptionalTensor& bias_logits, const Tensor& seed, int64_t samples,
                                            Pair stride, Pair padding, Pair dilation, double tau,
                                            std::array<bool, 5> needs, int64_t first, LowType low) {
  const ConvArguments own(x_, weight, logits, bias, bias_logits, seed, samples, stride, padding, dilation, first, low);
  const MaskedConvShape& shape = own.shape;
  check_grad(x_, grad_, low);
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  const std::vector<int64_t> sizes{x_.size(0), shape.out, shape.out_high, shape.out_wide};
  TORCH_CHECK_VALUE(grad_.sizes() == at::IntArrayRef(sizes), "grad: expected ", at::IntArrayRef(sizes), ", got ",
                    grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(x_.device());
  const MaskNoise noise = mask_noise(x_, first, samples, seed, kStreamMask);
  const Tensor x = own.near(x_), grad = own.near(grad_);
  const Filters filters(weight, logits, bias, bias_logits);
  const auto wanted = [](bool needed, const Tensor& like) {
    return needed && like.defined() ? blank_like(like) : Tensor();
  };
  const auto [need_x, need_weight, need_logits, need_bias, need_bias_logits] = needs;
  const Tensor grad_x = need_x ? empty_like_images(x_, x.sizes(), x.scalar_type()) : Tensor();
  const Tensor grad_weight = wanted(need_weight, filters.weight), grad_logits = wanted(need_logits, filters.logits);
  const Tensor grad_bias = wanted(need_bias, filters.bias);
  const Tensor grad_bias_logits = wanted(need_bias_logits, filters.bias_logits);
  dispatch(low.value_or(x.scalar_type()), [&](auto* type) {
    using T = Element<decltype(type)>;
    if constexpr (sizeof(T) <= 4) {
      if (grad_x.defined()) {
        C10_CUDA_CHECK(masked_conv2d_backward_x<T>(images_of<const T>(grad), filters.as<T>(), images_of<T>(grad_x),
                                                   convolution_tf32(), shape, noise, bindings::stream()));
      }
      const MaskedFilterGrads<T> grads{mixed<T>(grad_weight), mixed<T>(grad_logits), mixed<T>(grad_bias),
                                       mixed<T>(grad_bias_logits)};
      if (!need_weight && !need_logits && !grad_bias.defined() && !grad_bias_logits.defined()) return;
      const Tensor partials = at::empty({masked_conv2d_partials(shape, samples)}, x.options().dtype(at::kFloat));
      C10_CUDA_CHECK(masked_conv2d_backward_weight<T>(images_of<const T>(grad), images_of<const T>(x),
                                                      data<float>(partials), convolution_tf32(), shape, samples,
                                                      bindings::stream()));
      C10_CUDA_CHECK(masked_conv2d_finish<T>(data<float>(partials), filters.as<T>(), grads, static_cast<float>(tau),
                                             shape, noise, kStreamMaskBias, bindings::stream()));
    }
  });
  return all_defined({grad_x, grad_weight, grad_logits, grad_bias, grad_bias_logits}, x.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("masked_conv2d_forward", masked_conv2d_forward);
  m.impl("masked_conv2d_backward", masked_conv2d_backward);
}

}  // namespace fastmod::cuda::bindings
