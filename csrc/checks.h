// Last line of defence for callers of torch.ops.fastmod; the friendly messages live in fastmod/ops/. This file holds
// what the checks of several ops share. An op's own check, for its CPU and its CUDA part, is in its
// csrc/cpu/*_kernel.h or in a csrc/cpu/foo.h; some ops need nothing beyond the functions below.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastmod {

inline int64_t leading_size(const at::Tensor& tensor, int64_t trailing_dims) {
  int64_t size = 1;
  for (int64_t i = 0; i < tensor.dim() - trailing_dims; ++i) size *= tensor.size(i);
  return size;
}

inline void check_like(const at::Tensor& first, const at::Tensor& other, const char* name) {
  TORCH_CHECK(other.device() == first.device(), name, ": expected device ", first.device(), ", got ", other.device());
  TORCH_CHECK_TYPE(other.scalar_type() == first.scalar_type(), name, ": expected ", first.scalar_type(), ", got ",
                   other.scalar_type());
}

// Under autocast, the dtype that a kernel rounds to as it reads. Then x has this dtype or fp32, and so do the
// parameters, which all have the same one.
using LowType = std::optional<at::ScalarType>;

inline void check_parameter(const at::Tensor& x, const at::Tensor& param, const at::Tensor& first, const LowType& low,
                            const char* name) {
  if (!low) return check_like(x, param, name);
  check_like(first, param, name);
  TORCH_CHECK(param.device() == x.device(), name, ": expected device ", x.device(), ", got ", param.device());
  for (const at::Tensor* tensor : {&x, &param}) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat || tensor->scalar_type() == *low, name, ": expected ",
                     at::kFloat, " or ", *low, ", got ", tensor->scalar_type());
  }
}

// For two tensors whose dtypes may differ under autocast.
inline void check_mixed(const at::Tensor& first, const at::Tensor& other, const LowType& low, const char* name) {
  TORCH_CHECK_TYPE(!low || *low == at::kBFloat16 || *low == at::kHalf, "low: expected bfloat16 or float16");
  check_parameter(first, other, other, low, name);
}

// The gradient of a result; the result has dtype `low` if that is given.
inline void check_grad(const at::Tensor& first, const at::Tensor& grad, const LowType& low) {
  if (!low) return check_like(first, grad, "grad");
  TORCH_CHECK(grad.device() == first.device(), "grad: expected device ", first.device(), ", got ", grad.device());
  TORCH_CHECK_TYPE(grad.scalar_type() == *low, "grad: expected ", *low, ", got ", grad.scalar_type());
}

inline void check_float(const at::Tensor& tensor, const char* name) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, name,
                   ": expected float32, float64, bfloat16 or float16, got ", type);
}

// The dtype of a temperature's gradient: that of the temperature if it has 16 bits, else the compute dtype.
inline at::ScalarType tau_type(const std::optional<at::Tensor>& tau, const at::Tensor& like) {
  if (tau && (tau->scalar_type() == at::kHalf || tau->scalar_type() == at::kBFloat16)) return tau->scalar_type();
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// One number, or one per net where several nets run at once: see MfnnrSizes.
inline bool is_number(const at::Tensor& tensor, int64_t copies) {
  return copies ? tensor.dim() == 1 && tensor.size(0) == copies : tensor.dim() == 0;
}

inline void check_routing(const std::optional<at::Tensor>& tau, double tau_value,
                          const std::optional<at::Tensor>& seed, int64_t mode, int64_t copies = 0) {
  TORCH_CHECK_VALUE(mode >= 0 && mode <= 2, "mode: expected 0 (softmax), 1 (gumbel) or 2 (argmax), got ", mode);
  TORCH_CHECK_VALUE(tau_value > 0, "tau: expected a number > 0, got ", tau_value);
  TORCH_CHECK_TYPE(!tau || (is_number(*tau, copies) && tau->is_floating_point()),
                   "tau: expected a floating-point 0-d tensor, or one per copy");
  TORCH_CHECK_VALUE(mode != 1 || seed, "seed: expected an int64 0-d tensor in mode gumbel, got none");
  TORCH_CHECK_TYPE(!seed || (is_number(*seed, copies) && seed->scalar_type() == at::kLong),
                   "seed: expected an int64 0-d tensor, or one per copy");
}

inline void check_mask_noise(const at::Tensor& seed, int64_t first, int64_t samples, int64_t stream) {
  TORCH_CHECK_TYPE(seed.dim() == 0 && seed.scalar_type() == at::kLong, "seed: expected an int64 0-d tensor");
  TORCH_CHECK_VALUE(first >= 0 && samples >= 1, "samples: expected at least 1, from sample 0 on, got ", samples,
                    " from ", first, " on");
  TORCH_CHECK_VALUE(stream >= 0, "stream: expected at least 0, got ", stream);
}

// ---- images of several experts

inline void check_affine(const at::Tensor& x, const std::optional<at::Tensor>& tensor, int64_t experts,
                         const char* name) {
  if (!tensor) return;
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(tensor->device() == x.device(), name, ": expected device ", x.device(), ", got ", tensor->device());
  TORCH_CHECK_TYPE(tensor->scalar_type() == wide, name, ": expected ", wide, ", got ", tensor->scalar_type());
  TORCH_CHECK_VALUE(tensor->dim() == 2 && (tensor->size(0) == experts || (x.dim() == 4 && tensor->size(0) == 1)) &&
                        tensor->size(1) == x.size(-3),
                    name, ": expected [", experts, ", ", x.size(-3), "], got ", tensor->sizes());
}

// ---- mixtures of templates

inline void check_bank(const at::Tensor& bank) {
  check_float(bank, "bank");
  TORCH_CHECK_VALUE(bank.dim() == 2 && bank.size(0) > 0, "bank: expected [K, P] with K >= 1, got ", bank.sizes());
}

inline void check_logits(const at::Tensor& logits) {
  check_float(logits, "logits");
  TORCH_CHECK_VALUE(logits.dim() >= 1 && logits.size(-1) > 0, "logits: expected [..., K] with K >= 1, got ",
                    logits.sizes());
}

}  // namespace fastmod
