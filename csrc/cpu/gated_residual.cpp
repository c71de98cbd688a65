
#include "cpu/host.h"
#include "cpu/gated_residual_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kRowsEach = 1024;  // rows per call of the kernel

template <typename T, typename Kernel>
void over_rows(int64_t rows, int64_t d, const Tensor& like, Kernel kernel) {
  const int64_t chunks = (rows + kRowsEach - 1) / kRowsEach;
  for_each<T>(chunks, kRowsEach * (2.0 * d + 20), 0, like, [&](int64_t chunk, T*) {
    kernel(chunk * kRowsEach, std::min(rows, (chunk + 1) * kRowsEach));
  });
}

Tensor gated_residual_forward(const Tensor& x, const Tensor& fresh, const Tensor& gate, LowType low) {
  check_gated_residual(x, fresh, gate, low);
  const Tensor out = empty_wide(x.sizes(), x);
  const Tensor xr = readable(x, low), f = readable(fresh, low), g = readable(gate, low);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<GatedResidualKernels<T>>();
    GatedResidualArgs<T> args{x.size(-1), xr.const_data_ptr<T>(), f.const_data_ptr<T>(), g.const_data_ptr<T>(),
                              nullptr,    out.data_ptr<T>()};
    over_rows<T>(gate.numel(), args.d, x, [&](int64_t begin, int64_t end) { kernel.forward(args, begin, end); });
  });
  return in_type(out, low.value_or(x.scalar_type()));
}

std::tuple<Tensor, Tensor, Tensor> gated_residual_backward(const Tensor& grad, const Tensor& x, const Tensor& fresh,
                                                           const Tensor& gate, LowType low) {
  check_gated_residual(x, fresh, gate, low);
  check_grad(x, grad, low);
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes(), "grad: expected ", x.sizes(), ", got ", grad.sizes());
  const Tensor grad_x = empty_wide(x.sizes(), x), grad_fresh = empty_wide(x.sizes(), x);
  const Tensor grad_gate = empty_wide(gate.sizes(), gate);
  const Tensor gr = readable(grad), xr = readable(x, low), f = readable(fresh, low), g = readable(gate, low);
  with_compute_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& kernel = kernels<GatedResidualKernels<T>>();
    GatedResidualArgs<T> args{x.size(-1),
                              xr.const_data_ptr<T>(),
                              f.const_data_ptr<T>(),
                              g.const_data_ptr<T>(),
                              gr.const_data_ptr<T>(),
                              nullptr,
                              grad_x.data_ptr<T>(),
                              grad_fresh.data_ptr<T>(),
                              grad_gate.data_ptr<T>()};
    over_rows<T>(gate.numel(), args.d, x, [&](int64_t begin, int64_t end) { kernel.backward(args, begin, end); });
  });
  return {in_type(grad_x, x.scalar_type()), in_type(grad_fresh, fresh.scalar_type()),
          in_type(grad_gate, gate.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("gated_residual_forward", gated_residual_forward);
  m.impl("gated_residual_backward", gated_residual_backward);
}

}  // namespace fastmod::cpu
