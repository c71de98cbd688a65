// The checks of an inverted residual block, in training and in inference.
#pragma once

#include "checks.h"

namespace fastmod {

// params: expand [T, M, C], depthwise [T, M, 3, 3], optionally squeeze [T, R, M] and excite [T, M, R], project
// [T, C, M], each followed by weight and bias of its batch norm.
inline void check_inverted_residual(const at::Tensor& x, at::TensorList params, bool training = true) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5 && x.size(1) > 0 && x.size(2) > 0 && x.size(3) > 0 && x.size(4) > 0,
                    "x: expected [B, T, C, H, W], only B may be 0, got ", x.sizes());
  TORCH_CHECK_VALUE(params.size() == 9 || params.size() == 15,
                    "params: expected 9 tensors, or 15 with squeeze-excite, got ", params.size());
  const bool wide = x.scalar_type() == at::kDouble;
  for (const at::Tensor& param : params) {
    check_float(param, "params");
    TORCH_CHECK(param.device() == x.device(), "params: expected device ", x.device(), ", got ", param.device());
    TORCH_CHECK_TYPE((param.scalar_type() == at::kDouble) == wide, "params: expected the precision of x, got ",
                     param.scalar_type());
    TORCH_CHECK_VALUE(param.dim() >= 2 && param.numel() > 0, "params: expected tensors [T, ...], got ", param.sizes());
  }
  const int64_t tasks = x.size(1), channels = x.size(2), expanded = params[0].size(1);
  TORCH_CHECK_VALUE(!training || x.size(0) != 1, "x: expected more than 1 value per channel, got ", x.sizes());
  const auto check = [&](size_t at, at::IntArrayRef sizes) {
    int64_t count = 1;  // compared by count, as convolution weights may have extra sizes of 1
    for (const int64_t size : sizes) count *= size;
    TORCH_CHECK_VALUE(params[at].dim() >= 3 && params[at].sizes().slice(0, 2) == sizes.slice(0, 2) &&
                          params[at].numel() == count,
                      "params[", at, "]: expected ", sizes, ", got ", params[at].sizes());
    for (size_t i = at + 1; i < at + 3; ++i)
      TORCH_CHECK_VALUE(params[i].sizes() == sizes.slice(0, 2), "params[", i, "]: expected ", sizes.slice(0, 2),
                        ", got ", params[i].sizes());
  };
  check(0, {tasks, expanded, channels});
  check(3, {tasks, expanded, 3, 3});
  if (params.size() == 15) {
    const int64_t squeezed = params[6].size(1);
    check(6, {tasks, squeezed, expanded});
    check(9, {tasks, expanded, squeezed});
  }
  check(params.size() - 3, {tasks, channels, expanded});
}

// stats: mean and variance [T, channels] of every batch norm.
inline void check_inverted_residual_stats(const at::Tensor& x, at::TensorList params, at::TensorList stats) {
  TORCH_CHECK_VALUE(3 * stats.size() == 2 * params.size(), "stats: expected ", 2 * params.size() / 3, " tensors, got ",
                    stats.size());
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (size_t i = 0; i < stats.size(); ++i) {
    const at::IntArrayRef sizes = params[i / 2 * 3 + 1].sizes();
    TORCH_CHECK_TYPE(stats[i].scalar_type() == type, "stats: expected ", type, ", got ", stats[i].scalar_type());
    TORCH_CHECK(stats[i].device() == x.device(), "stats: expected device ", x.device(), ", got ", stats[i].device());
    TORCH_CHECK_VALUE(stats[i].sizes() == sizes, "stats[", i, "]: expected ", sizes, ", got ", stats[i].sizes());
  }
}

inline void check_inverted_residual_saved(const at::Tensor& x, at::TensorList params, const at::Tensor& stats,
                                          at::TensorList saved) {
  const bool gated = params.size() == 15;
  const int64_t batch = x.size(0), tasks = x.size(1), channels = x.size(2), expanded = params[0].size(1);
  const int64_t squeezed = gated ? params[6].size(1) : 0;
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto check = [&](const at::Tensor& tensor, at::IntArrayRef sizes, const char* name) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, ": expected ", type, ", got ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, ": expected ", sizes, ", got ", tensor.sizes());
  };
  const int64_t norms = 2 * expanded + channels + (gated ? squeezed + expanded : 0);
  check(stats, {3, tasks, norms}, "stats");
  TORCH_CHECK_VALUE(stats.is_contiguous(), "stats: expected a contiguous tensor");
  TORCH_CHECK_VALUE(saved.size() == (gated ? 8 : 3), "saved: expected ", gated ? 8 : 3, " tensors, got ", saved.size());
  check(saved[0], {batch, tasks, expanded, x.size(3), x.size(4)}, "saved[0]");
  check(saved[1], x.sizes(), "saved[1]");
  check(saved[2], {tasks, 1 + channels, channels}, "saved[2]");
  if (gated) {
    check(saved[3], {3, tasks, batch, expanded}, "saved[3]");
    check(saved[4], {tasks, batch, squeezed}, "saved[4]");
    check(saved[5], {tasks, batch, expanded}, "saved[5]");
    check(saved[6], {tasks, batch, expanded}, "saved[6]");
    check(saved[7], {tasks, batch, squeezed}, "saved[7]");
  }
  for (size_t i = 2; i < saved.size(); ++i)
    TORCH_CHECK_VALUE(saved[i].is_contiguous(), "saved[", i, "]: expected a contiguous tensor");
}

}  // namespace fastmod
