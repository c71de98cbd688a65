// Folds a batch norm into scale and shift: only a few numbers per channel, where torch calls cost more than arithmetic.
#include <ATen/Functions.h>

#include "cpu/host.h"
#include "cpu/batch_affine.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

template <typename T>
const T* read(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// A parameter or buffer of any dtype, converted to the dtype of the statistics.
Tensor like_mean(const OptionalTensor& tensor, const Tensor& mean) {
  return tensor ? in_type(*tensor, mean.scalar_type()).contiguous() : Tensor();
}

// buffer += momentum * (value - buffer)
template <typename T>
void move_towards(const Tensor& buffer, const T* value, double factor, double momentum) {
  const bool direct = buffer.is_contiguous() && buffer.scalar_type() == c10::CppTypeToScalarType<T>::value;
  const Tensor own = direct ? buffer : buffer.to(c10::CppTypeToScalarType<T>::value).contiguous();
  T* data = own.data_ptr<T>();
  for (int64_t i = 0; i < own.numel(); ++i) data[i] += T(momentum) * (T(value[i] * factor) - data[i]);
  if (!direct) buffer.copy_(own);
}

std::tuple<Tensor, Tensor> batch_affine_forward(const Tensor& mean, const Tensor& var, const OptionalTensor& weight,
                                                const OptionalTensor& bias, const OptionalTensor& running_mean,
                                                const OptionalTensor& running_var, double count, double momentum,
                                                double eps) {
  check_batch_affine(mean, var, weight, bias, running_mean, running_var);
  const Tensor m = readable(mean), v = readable(var), w = like_mean(weight, mean), b = like_mean(bias, mean);
  const Tensor scale = empty_wide(mean.sizes(), mean), shift = empty_wide(mean.sizes(), mean);
  with_compute_type(mean, [&](auto zero) {
    using T = decltype(zero);
    const T *from_mean = m.const_data_ptr<T>(), *from_var = v.const_data_ptr<T>();
    const T *factor = read<T>(w), *added = read<T>(b);
    T *to_scale = scale.data_ptr<T>(), *to_shift = shift.data_ptr<T>();
    for (int64_t i = 0; i < mean.numel(); ++i) {
      to_scale[i] = (factor ? factor[i] : T(1)) / std::sqrt(from_var[i] + T(eps));
      to_shift[i] = (added ? added[i] : T(0)) - from_mean[i] * to_scale[i];
    }
    if (running_mean && count > 0) {
      move_towards(*running_mean, from_mean, 1.0, momentum);
      move_towards(*running_var, from_var, count / (count - 1), momentum);
    }
  });
  return {scale, shift};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_affine_backward(const Tensor& grad_scale, const Tensor& grad_shift,
                                                                 const Tensor& mean, const Tensor& var,
                                                                 const OptionalTensor& weight, double eps) {
  check_batch_affine(mean, var, weight, std::nullopt, std::nullopt, std::nullopt);
  for (const Tensor* grad : {&grad_scale, &grad_shift}) {
    check_like(mean, *grad, "grad");
    TORCH_CHECK_VALUE(grad->sizes() == mean.sizes(), "grad: expected ", mean.sizes(), ", got ", grad->sizes());
  }
  const Tensor gs = readable(grad_scale), gt = readable(grad_shift), m = readable(mean), v = readable(var);
  const Tensor w = like_mean(weight, mean);
  std::array<Tensor, 4> out;
  for (Tensor& tensor : out) tensor = empty_wide(mean.sizes(), mean);
  with_compute_type(mean, [&](auto zero) {
    using T = decltype(zero);
    const T *of_scale = gs.const_data_ptr<T>(), *of_shift = gt.const_data_ptr<T>();
    const T *from_mean = m.const_data_ptr<T>(), *from_var = v.const_data_ptr<T>(), *factor = read<T>(w);
    for (int64_t i = 0; i < mean.numel(); ++i) {
      const T inverse = T(1) / std::sqrt(from_var[i] + T(eps)), scale = factor ? factor[i] * inverse : inverse;
      const T whole = of_scale[i] - from_mean[i] * of_shift[i];  // the shift depends on the scale as well
      out[0].data_ptr<T>()[i] = -scale * of_shift[i];
      out[1].data_ptr<T>()[i] = T(-0.5) * whole * scale * inverse * inverse;
      out[2].data_ptr<T>()[i] = whole * inverse;
      out[3].data_ptr<T>()[i] = of_shift[i];
    }
  });
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("batch_affine_forward", batch_affine_forward);
  m.impl("batch_affine_backward", batch_affine_backward);
}

}  // namespace fastmod::cpu
