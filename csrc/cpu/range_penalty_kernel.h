// Squared excess over a threshold.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct RangePenaltyKernels {
  double (*forward)(const T* logits, int64_t count, double threshold);
  void (*backward)(const T* logits, int64_t count, double threshold, double scale, T* grad);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T>
FASTMOD_INLINE Vec<T> excess(Vec<T> value, T threshold) {  // t - clamp(t); a NaN stays, as in torch
  const Vec<T> low = splat(-threshold), high = splat(threshold);
  Vec<T> inside = value < low ? low : value;
  inside = inside > high ? high : inside;
  return value - inside;
}

// An infinite t gives inf, as the threshold is finite.
template <typename T>
double range_penalty_forward(const T* logits, int64_t count, double threshold) {
  constexpr int64_t kRun = 16 * kLanes<T>;  // short sums in T, their sum in fp64: long ones would lose digits
  double total = 0;
  for (int64_t first = 0; first < count; first += kRun) {
    Vec<T> sum{};
    const int64_t end = std::min(count, first + kRun);
    for (int64_t i = first; i < end; i += kLanes<T>) {
      const int64_t left = end - i;
      const Vec<T> over =
          excess<T>(left < kLanes<T> ? load_first(logits + i, left) : load(logits + i), T(threshold));
      sum += over * over;
    }
    total += double(sum_lanes<T>(sum));
  }
  return total;
}

template <typename T>
void range_penalty_backward(const T* logits, int64_t count, double threshold, double scale, T* grad) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const int64_t left = std::min<int64_t>(kLanes<T>, count - i);
    store_first(grad + i, excess<T>(load_first(logits + i, left), T(threshold)) * T(2 * scale), left);
  }
}

FASTMOD_KERNELS(RangePenaltyKernels, .forward = range_penalty_forward<T>, .backward = range_penalty_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_range_penalty(at::TensorList logits, double threshold) {
  TORCH_CHECK_VALUE(!logits.empty(), "logits: expected at least one tensor, got none");
  TORCH_CHECK_VALUE(threshold >= 0, "threshold: expected a number >= 0, got ", threshold);
  for (const auto& value : logits) {
    check_float(value, "logits");
    check_like(logits[0], value, "logits");
  }
}

}  // namespace fastmod

#endif
