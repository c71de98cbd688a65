#include <ATen/ops/scalar_tensor.h>

#include "cpu/host.h"
#include "cpu/range_penalty_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kElementsEach = 16384;  // fixed, so that the sum does not depend on the number of threads

int64_t pieces(const Tensor& tensor) { return (tensor.numel() + kElementsEach - 1) / kElementsEach; }

Tensor range_penalty_forward(at::TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  double total = 0;
  for (const Tensor& value : logits) {
    const Tensor v = readable(value);
    std::vector<double> parts(pieces(v));
    with_compute_type(v, [&](auto zero) {
      using T = decltype(zero);
      const T* data = v.const_data_ptr<T>();
      for_each<T>(pieces(v), kElementsEach * 0.5, 0, v, [&](int64_t piece, T*) {
        const int64_t first = piece * kElementsEach;
        parts[piece] = kernels<RangePenaltyKernels<T>>().forward(data + first,
                                                                 std::min(kElementsEach, v.numel() - first), threshold);
      });
    });
    total += sum_in_order(parts);
  }
  return at::scalar_tensor(total, logits[0].options().dtype(compute_type(logits[0])));
}

std::vector<Tensor> range_penalty_backward(const Tensor& grad, at::TensorList logits, double threshold) {
  check_range_penalty(logits, threshold);
  TORCH_CHECK_VALUE(grad.numel() == 1, "grad: expected a scalar, got ", grad.sizes());
  const double scale = grad.item<double>();
  std::vector<Tensor> result;
  for (const Tensor& value : logits) {
    const Tensor v = readable(value), out = empty_wide(value.sizes(), value);
    with_compute_type(v, [&](auto zero) {
      using T = decltype(zero);
      const T* data = v.const_data_ptr<T>();
      T* target = out.data_ptr<T>();
      for_each<T>(pieces(v), kElementsEach * 0.5, 0, v, [&](int64_t piece, T*) {
        const int64_t first = piece * kElementsEach;
        kernels<RangePenaltyKernels<T>>().backward(data + first, std::min(kElementsEach, v.numel() - first), threshold,
                                                   scale, target + first);
      });
    });
    result.push_back(in_type(out, value.scalar_type()));
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("range_penalty_forward", range_penalty_forward);
  m.impl("range_penalty_backward", range_penalty_backward);
}

}  // namespace fastmod::cpu
