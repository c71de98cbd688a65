// The torch-facing side of the table of squared distances between templates; the work is in cluster_penalty_kernel.h.
#include <ATen/Functions.h>

#include "cpu/host.h"
#include "cpu/cluster_penalty_kernel.h"

namespace fastmod::cpu {
namespace {

using at::Tensor;

constexpr int64_t kColumns = 512;  // columns of the bank taken at a time: they stay in cache for all pairs
constexpr int64_t kParts = 64;     // partial sums, however many threads there are

Tensor cluster_penalty_forward(const Tensor& bank) {
  check_bank(bank);
  const Tensor b = readable(bank);
  const int64_t templates = b.size(0), size = b.size(1), entries = templates * templates;
  const int64_t tiles_each = (size + kParts * kColumns - 1) / (kParts * kColumns), share = tiles_each * kColumns;
  const int64_t parts = share ? (size + share - 1) / share : 0;
  std::vector<double> sums(parts * entries, 0.0);
  with_compute_type(b, [&](auto zero) {
    using T = decltype(zero);
    const T* data = b.const_data_ptr<T>();
    const auto& kernel = kernels<ClusterPenaltyKernels<T>>();
    for_each<T>(parts, entries * share / 16.0, 0, b, [&](int64_t part, T*) {
      const int64_t end = std::min(size, (part + 1) * share);
      for (int64_t at = part * share; at < end; at += kColumns)
        kernel.forward(data + at, templates, size, std::min(kColumns, end - at), &sums[part * entries]);
    });
  });
  const Tensor out = at::zeros({templates, templates}, b.options().dtype(at::kDouble));
  double* to = out.data_ptr<double>();
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t i = 0; i < templates; ++i)
      for (int64_t j = i + 1; j < templates; ++j) to[i * templates + j] += sums[part * entries + i * templates + j];
  for (int64_t i = 0; i < templates; ++i)
    for (int64_t j = i + 1; j < templates; ++j) to[j * templates + i] = to[i * templates + j];
  return out;
}

Tensor cluster_penalty_backward(const Tensor& grad, const Tensor& bank) {
  check_bank(bank);
  TORCH_CHECK(grad.device() == bank.device(), "grad: expected device ", bank.device(), ", got ", grad.device());
  TORCH_CHECK_TYPE(grad.scalar_type() == at::kDouble, "grad: expected float64, got ", grad.scalar_type());
  const int64_t templates = bank.size(0), size = bank.size(1);
  TORCH_CHECK_VALUE(grad.dim() == 2 && grad.size(0) == templates && grad.size(1) == templates,
                    "grad: expected [K, K], got ", grad.sizes());
  const Tensor b = readable(bank), g = grad.contiguous(), out = empty_wide(bank.sizes(), bank);
  with_compute_type(b, [&](auto zero) {
    using T = decltype(zero);
    const double* from = g.const_data_ptr<double>();
    std::vector<T> weights(templates * templates);  // the table holds each pair twice
    for (int64_t i = 0; i < templates; ++i)
      for (int64_t j = 0; j < templates; ++j)
        weights[i * templates + j] = static_cast<T>(2 * (from[i * templates + j] + from[j * templates + i]));
    const T* data = b.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    const auto& kernel = kernels<ClusterPenaltyKernels<T>>();
    for_each<T>((size + kColumns - 1) / kColumns, templates * templates * kColumns / 8.0, 0, b, [&](int64_t i, T*) {
      const int64_t at = i * kColumns;
      kernel.backward(data + at, weights.data(), templates, size, std::min(kColumns, size - at), to + at);
    });
  });
  return in_type(out, bank.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastmod, CPU, m) {
  m.impl("cluster_penalty_forward", cluster_penalty_forward);
  m.impl("cluster_penalty_backward", cluster_penalty_backward);
}

}  // namespace fastmod::cpu
