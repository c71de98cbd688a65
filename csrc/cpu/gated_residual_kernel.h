// Gated rewriting of rows [R, D], one gate logit per row.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct GatedResidualArgs {
  int64_t d;
  const T *x, *fresh, *gate;  // [R, D], [R, D], [R]
  const T* grad;              // [R, D], backward only
  T* out;                     // [R, D], forward only
  T *grad_x, *grad_fresh, *grad_gate;
};

template <typename T>
struct GatedResidualKernels {
  void (*forward)(const GatedResidualArgs<T>&, int64_t begin, int64_t end);
  void (*backward)(const GatedResidualArgs<T>&, int64_t begin, int64_t end);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

constexpr int64_t kGateChunk = 256;
constexpr int64_t kGateTerms = 128;

// sigmoid(gate) and sigmoid(-gate) of up to kGateChunk rows: 1 - sigmoid(gate) would lose digits for open gates.
template <typename T>
void open_gates(const T* gate, int64_t count, T* open, T* shut) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> value = load_first(gate + i, std::min<int64_t>(kLanes<T>, count - i));
    store(open + i, sigmoid<T>(value));
    store(shut + i, sigmoid<T>(-value));
  }
}

template <typename T>
void gated_residual_forward(const GatedResidualArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) T open[kGateChunk], shut[kGateChunk];
  for (int64_t first = begin; first < end; first += kGateChunk) {
    const int64_t count = std::min(kGateChunk, end - first);
    open_gates(args.gate + first, count, open, shut);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (first + r) * args.d;
      for (int64_t i = 0; i < args.d; ++i) args.out[at + i] = open[r] * args.fresh[at + i] + shut[r] * args.x[at + i];
    }
  }
}

template <typename T>
void gated_residual_backward(const GatedResidualArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) T open[kGateChunk], shut[kGateChunk];
  for (int64_t first = begin; first < end; first += kGateChunk) {
    const int64_t count = std::min(kGateChunk, end - first);
    open_gates(args.gate + first, count, open, shut);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (first + r) * args.d;
      T sum = 0;
      for (int64_t block = 0; block < args.d; block += kGateTerms) {
        T part[8] = {};  // short sums side by side: a long one would lose digits
        for (int64_t i = block; i < std::min(block + kGateTerms, args.d); ++i) {
          const T grad = args.grad[at + i];
          args.grad_x[at + i] = shut[r] * grad;
          args.grad_fresh[at + i] = open[r] * grad;
          part[i % 8] += grad * (args.fresh[at + i] - args.x[at + i]);
        }
        sum += ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      }
      args.grad_gate[first + r] = sum * open[r] * shut[r];
    }
  }
}

FASTMOD_KERNELS(GatedResidualKernels, .forward = gated_residual_forward<T>, .backward = gated_residual_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_gated_residual(const at::Tensor& x, const at::Tensor& fresh, const at::Tensor& gate,
                                 const LowType& low) {
  check_float(x, "x");
  check_mixed(x, fresh, low, "new");
  check_mixed(x, gate, low, "gate");
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.sizes() == fresh.sizes() && gate.sizes() == x.sizes().slice(0, x.dim() - 1),
                    "expected x and new [..., N, D] and gate [..., N], got ", x.sizes(), ", ", fresh.sizes(), " and ",
                    gate.sizes());
}

}  // namespace fastmod

#endif
