// The torch-facing side of the spatial mean of a normalised activation; the work is in norm_pool_kernel.h.
#include "cpu/images.h"
#include "cpu/norm_pool_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

template <typename T>
struct Problem {
  Tensor x, scale, shift;  // kept alive: args point into them
  NormPoolArgs<T> args{};

  Problem(const Tensor& x_, const Tensor& scale_, const Tensor& shift_, bool relu)
      : x(channels_last(x_)), scale(readable(scale_)), shift(readable(shift_)) {
    args.experts = x_.size(1);
    args.pixels = x_.size(3) * x_.size(4);
    args.channels = x_.size(2);
    args.relu = relu;
    args.x = x.template const_data_ptr<T>();
    args.scale = scale.template const_data_ptr<T>();
    args.shift = shift.template const_data_ptr<T>();
  }
  double cycles() const { return 0.5 * args.pixels * args.channels; }
};

Tensor norm_pool_forward(const Tensor& x, const Tensor& scale, const Tensor& shift, bool relu) {
  check_norm_pool(x, scale, shift);
  const Tensor out = empty_wide(x.sizes().slice(0, 3), x);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(x, scale, shift, relu);
    problem.args.out = out.data_ptr<T>();
    const auto& kernel = kernels<NormPoolKernels<T>>();
    for_each<T>(x.size(0) * x.size(1), problem.cycles(), 0, x,
                [&](int64_t index, T*) { kernel.forward(problem.args, index); });
  });
  return in_type(out, x.scalar_type());
}

std::vector<Tensor> norm_pool_backward(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& shift,
                                       bool relu, std::array<bool, 3> needs) {
  check_norm_pool(x, scale, shift);
  check_like(x, grad, "grad");
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes().slice(0, 3), "grad: expected [B, E, C], got ", grad.sizes());
  std::vector<Tensor> result;  // empty where not needed; separate tensors, as results of an op must not share memory
  for (int i = 0; i < 3; ++i) result.push_back(at::empty({0}, x.options()));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(x, scale, shift, relu);
    auto& args = problem.args;
    const Tensor g = readable(grad);
    const Tensor grad_x = needs[0] ? empty_images(x.sizes(), x) : Tensor();
    const Tensor grad_scale = needs[1] ? empty_wide(grad.sizes(), x) : Tensor();
    const Tensor grad_shift = needs[2] ? empty_wide(grad.sizes(), x) : Tensor();
    args.grad = g.const_data_ptr<T>();
    args.grad_x = pointer<T>(grad_x);
    args.grad_scale = pointer<T>(grad_scale);
    args.grad_shift = pointer<T>(grad_shift);
    const auto& kernel = kernels<NormPoolKernels<T>>();
    for_each<T>(x.size(0) * x.size(1), 2 * problem.cycles(), 0, x,
                [&](int64_t index, T*) { kernel.backward(args, index); });
    if (needs[0]) result[0] = in_type(grad_x, x.scalar_type());
    if (needs[1]) result[1] = parameter_grad<T>(grad_scale, problem.scale);
    if (needs[2]) result[2] = parameter_grad<T>(grad_shift, problem.shift);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("norm_pool_forward", norm_pool_forward);
  m.impl("norm_pool_backward", norm_pool_backward);
}

}  // namespace fastmod::cpu
