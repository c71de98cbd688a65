// What both implementations of batch_affine check.
#pragma once

#include "checks.h"

namespace fastmod {

inline void check_batch_affine(const at::Tensor& mean, const at::Tensor& var, const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                               const std::optional<at::Tensor>& running_var) {
  TORCH_CHECK_TYPE(mean.scalar_type() == at::kFloat || mean.scalar_type() == at::kDouble,
                   "mean: expected float32 or float64, got ", mean.scalar_type());
  check_like(mean, var, "var");
  TORCH_CHECK_VALUE(var.sizes() == mean.sizes(), "var: expected ", mean.sizes(), ", got ", var.sizes());
  TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(),
                    "running_mean, running_var: expected both or none");
  for (const auto* tensor : {&weight, &bias, &running_mean, &running_var}) {
    if (!*tensor) continue;
    check_float(**tensor, "weight, bias or running statistics");
    TORCH_CHECK(tensor->value().device() == mean.device(), "expected all tensors on ", mean.device());
    TORCH_CHECK_VALUE(tensor->value().sizes() == mean.sizes(), "expected ", mean.sizes(), ", got ",
                      tensor->value().sizes());
  }
}

}  // namespace fastmod
