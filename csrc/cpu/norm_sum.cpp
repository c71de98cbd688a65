// The torch-facing side of the end of a residual block and the gated sum over experts; the work is in
// norm_sum_kernel.h.
#include "cpu/images.h"
#include "cpu/norm_sum_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

template <typename T>
struct Problem {
  Tensor x, scale, shift, residual, residual_scale, residual_shift, gate;  // kept alive: args point into them
  NormSumArgs<T> args{};

  Problem(const Tensor& x_, const Tensor& scale_, const Tensor& shift_, const OptionalTensor& residual_,
          const OptionalTensor& residual_scale_, const OptionalTensor& residual_shift_, const OptionalTensor& gate_,
          bool relu) {
    const auto read = [](const OptionalTensor& tensor) { return tensor ? readable(*tensor) : Tensor(); };
    x = channels_last(x_);
    scale = readable(scale_);
    shift = readable(shift_);
    residual = residual_ ? channels_last(*residual_) : Tensor();
    residual_scale = read(residual_scale_);
    residual_shift = read(residual_shift_);
    gate = read(gate_);
    args.experts = x_.size(1);
    args.pixels = x_.size(3) * x_.size(4);
    args.channels = x_.size(2);
    args.shared = residual_ && residual_->dim() == 4;
    args.relu = relu;
    args.x = x.const_data_ptr<T>();
    args.scale = scale.const_data_ptr<T>();
    args.shift = shift.const_data_ptr<T>();
    args.residual = pointer<T>(residual);
    args.residual_scale = pointer<T>(residual_scale);
    args.residual_shift = pointer<T>(residual_shift);
    args.gate = pointer<T>(gate);
  }
  double cycles() const { return 0.5 * args.experts * args.pixels * args.channels; }
};

Tensor norm_sum_forward(const Tensor& x, const Tensor& scale, const Tensor& shift, const OptionalTensor& residual,
                        const OptionalTensor& residual_scale, const OptionalTensor& residual_shift,
                        const OptionalTensor& gate, bool relu) {
  check_norm_sum(x, scale, shift, residual, residual_scale, residual_shift, gate);
  const at::DimVector whole(x.sizes()), mixed{x.size(0), x.size(2), x.size(3), x.size(4)};
  const Tensor out = empty_images(gate ? mixed : whole, x);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(x, scale, shift, residual, residual_scale, residual_shift, gate, relu);
    problem.args.out = out.data_ptr<T>();
    const auto& kernel = kernels<NormSumKernels<T>>();
    for_each<T>(x.size(0), problem.cycles(), 0, x, [&](int64_t image, T*) { kernel.forward(problem.args, image); });
  });
  return in_type(out, x.scalar_type());
}

std::vector<Tensor> norm_sum_backward(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& shift,
                                      const OptionalTensor& residual, const OptionalTensor& residual_scale,
                                      const OptionalTensor& residual_shift, const OptionalTensor& gate, bool relu,
                                      std::array<bool, 7> needs) {
  check_norm_sum(x, scale, shift, residual, residual_scale, residual_shift, gate);
  check_like(x, grad, "grad");
  TORCH_CHECK_VALUE(grad.dim() == (gate ? 4 : 5) && grad.numel() * (gate ? x.size(1) : 1) == x.numel(),
                    "grad: expected the shape of the output, got ", grad.sizes());
  const auto type = x.scalar_type();
  std::vector<Tensor> result;  // empty where not needed; separate tensors, as results of an op must not share memory
  for (int i = 0; i < 7; ++i) result.push_back(at::empty({0}, x.options()));
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    Problem<T> problem(x, scale, shift, residual, residual_scale, residual_shift, gate, relu);
    auto& args = problem.args;
    const Tensor g = channels_last(grad);
    const Tensor grad_x = needs[0] ? empty_images(x.sizes(), x) : Tensor();
    const Tensor grad_residual = needs[3] ? empty_images(residual->sizes(), x) : Tensor();
    const at::DimVector sums{x.size(0), x.size(1), x.size(2)};
    const auto wide = [&](bool needed) { return needed ? empty_wide(sums, x) : Tensor(); };
    const Tensor grad_scale = wide(needs[1]), grad_shift = wide(needs[2] || needs[5]), grad_other = wide(needs[4]);
    const Tensor grad_gate = needs[6] ? empty_wide(gate->sizes(), x) : Tensor();
    args.grad = g.const_data_ptr<T>();
    args.grad_x = pointer<T>(grad_x);
    args.grad_residual = pointer<T>(grad_residual);
    args.grad_scale = pointer<T>(grad_scale);
    args.grad_shift = pointer<T>(grad_shift);
    args.grad_residual_scale = pointer<T>(grad_other);
    args.grad_gate = pointer<T>(grad_gate);
    const auto& kernel = kernels<NormSumKernels<T>>();
    for_each<T>(x.size(0), 2 * problem.cycles(), 0, x, [&](int64_t image, T*) { kernel.backward(args, image); });
    if (needs[0]) result[0] = in_type(grad_x, type);
    if (needs[1]) result[1] = parameter_grad<T>(grad_scale, problem.scale);
    if (needs[2]) result[2] = parameter_grad<T>(grad_shift, problem.shift);
    if (needs[3]) result[3] = in_type(grad_residual, type);
    if (needs[4]) result[4] = parameter_grad<T>(grad_other, problem.residual_scale);
    if (needs[5]) result[5] = parameter_grad<T>(grad_shift, problem.residual_shift);  // both shifts have this gradient
    if (needs[6]) result[6] = in_type(grad_gate, type);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("norm_sum_forward", norm_sum_forward);
  m.impl("norm_sum_backward", norm_sum_backward);
}

}  // namespace fastmod::cpu
