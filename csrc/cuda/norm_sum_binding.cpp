// norm_sum on CUDA tensors: arguments brought into layout, outputs allocated, kernels launched and checked.
#include "image_binding.h"
#include "../cpu/norm_sum_kernel.h"

namespace fastmod::cuda::bindings {
namespace {

// Tensors in the layout that the kernels read, kept alive as long as the pointers.
struct Sum {
  Tensor x, scale, shift, residual, residual_scale, residual_shift, gate;
  bool relu;
  SumShape shape;

  Sum(const Tensor& x_, const Tensor& scale_, const Tensor& shift_, const OptionalTensor& residual_,
      const OptionalTensor& residual_scale_, const OptionalTensor& residual_shift_, const OptionalTensor& gate_,
      bool relu_)
      : x(inner(x_)),
        scale(scale_.contiguous()),
        shift(shift_.contiguous()),
        residual(inner(residual_)),
        residual_scale(dense(residual_scale_)),
        residual_shift(dense(residual_shift_)),
        gate(dense(gate_)),
        relu(relu_),
        shape{x_.size(0), small(x_.size(1), "experts"), small(x_.size(2), "channels"),
              small(x_.size(3) * x_.size(4), "pixels"), residual_ && residual_->dim() == 4} {}

  template <typename T>
  SumInput<T> as() const {
    using C = Compute<T>;
    return {data<T>(x),           data<C>(scale),          data<C>(shift), data<T>(residual), data<C>(residual_scale),
            data<C>(residual_shift), data<T>(gate), relu};
  }
};

Tensor norm_sum_forward(const Tensor& x, const Tensor& scale, const Tensor& shift, const OptionalTensor& residual,
                        const OptionalTensor& residual_scale, const OptionalTensor& residual_shift,
                        const OptionalTensor& gate, bool relu) {
  check_norm_sum(x, scale, shift, residual, residual_scale, residual_shift, gate);
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  std::vector<int64_t> sizes = x.sizes().vec();
  if (gate) sizes.erase(sizes.begin() + 1);
  const Tensor out = empty_images(sizes, x.options());
  const Sum sum(x, scale, shift, residual, residual_scale, residual_shift, gate, relu);
  dispatch(x.scalar_type(), [&](auto* type) {
    using T = Element<decltype(type)>;
    C10_CUDA_CHECK(cuda::norm_sum_forward<T>(sum.as<T>(), data<T>(out), sum.shape, stream()));
  });
  return out;
}

std::vector<Tensor> norm_sum_backward(const Tensor& grad_, const Tensor& x, const Tensor& scale, const Tensor& shift,
                                      const OptionalTensor& residual, const OptionalTensor& residual_scale,
                                      const OptionalTensor& residual_shift, const OptionalTensor& gate, bool relu,
                                      std::array<bool, 7> needs) {
  check_norm_sum(x, scale, shift, residual, residual_scale, residual_shift, gate);
  check_like(x, grad_, "grad");
  std::vector<int64_t> expected = x.sizes().vec();
  if (gate) expected.erase(expected.begin() + 1);
  const bool same = grad_.sizes() == at::IntArrayRef(expected);
  TORCH_CHECK_VALUE(same, "grad: expected the shape of the result, got ", grad_.sizes());
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const OptionalTensor tensors[] = {x, scale, shift, residual, residual_scale, residual_shift, gate};
  std::vector<Tensor> result;
  for (int i = 0; i < 7; ++i) {
    const bool wanted = needs[i] && tensors[i] && tensors[i]->defined(), image = i == 0 || i == 3;
    result.push_back(!wanted ? Tensor()
                     : image ? empty_images(tensors[i]->sizes(), x.options())
                             : at::empty(tensors[i]->sizes(), tensors[i]->options()));
  }
  const Sum sum(x, scale, shift, residual, residual_scale, residual_shift, gate, relu);
  const Tensor grad = inner(grad_);
  if (x.numel() == 0) {
    zero_those_defined(result);
  } else {
    dispatch(x.scalar_type(), [&](auto* type) {
      using T = Element<decltype(type)>;
      using C = Compute<T>;
      const Workspace space(x, norm_sum_backward_scratch<T>(sum.shape));
      const SumGrads<T> grads{data<T>(result[0]), data<C>(result[1]), data<C>(result[2]), data<T>(result[3]),
                              data<C>(result[4]), data<C>(result[5]), data<T>(result[6])};
      C10_CUDA_CHECK(cuda::norm_sum_backward<T>(data<T>(grad), sum.as<T>(), grads, data<C>(space.numbers),
                                                data<unsigned>(space.tickets), sum.shape, stream()));
    });
  }
  return all_defined(std::move(result), x.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CUDA, m) {
  m.impl("norm_sum_forward", norm_sum_forward);
  m.impl("norm_sum_backward", norm_sum_backward);
}

}  // namespace fastmod::cuda::bindings
