// Weights of layers as mixtures of templates.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// Mixtures of templates: weights [R, K] times bank [K, P].
template <typename T>
struct TemplateMixArgs {
  int64_t rows, templates, size;
  int64_t tile;  // columns of the bank taken at a time: they stay in cache for all rows
  const T *weights, *bank;
  T* out;         // [R, P], forward only
  const T* grad;  // [R, P], backward only
  T* grad_bank;   // or null
};

template <typename T>
struct TemplateMixKernels {
  void (*forward)(const TemplateMixArgs<T>&, int64_t first, int64_t columns);
  int64_t (*scratch)(const TemplateMixArgs<T>&);
  void (*backward)(const TemplateMixArgs<T>&, int64_t first, int64_t end, T* grad_weights, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/gemm.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T>
void template_mix_forward(const TemplateMixArgs<T>& args, int64_t first, int64_t columns) {
  gemm<T, Prefetch::kNone>(args.rows, columns, args.templates, {args.weights, args.templates, 1}, args.bank + first,
                          args.size, args.out + first, args.size, {});
}

// Room for a transposed tile of the bank, or for the sums of a tile.
template <typename T>
int64_t template_mix_scratch(const TemplateMixArgs<T>& args) {
  return args.templates * (args.templates >= kLanes<T> ? args.tile : args.rows);
}

// Columns first .. end - 1, a tile at a time: both gradients are computed while the tile's gradient is in cache.
template <typename T>
void template_mix_backward(const TemplateMixArgs<T>& args, int64_t first, int64_t end, T* grad_weights, T* scratch) {
  const int64_t rows = args.rows, templates = args.templates, size = args.size;
  for (int64_t at = first; at < end; at += args.tile) {
    const int64_t columns = std::min(args.tile, end - at);
    const T *grad = args.grad + at, *bank = args.bank + at;
    if (args.grad_bank)
      gemm<T, Prefetch::kNone>(templates, columns, rows, {args.weights, 1, templates}, grad, size, args.grad_bank + at,
                              size, {});
    if (!grad_weights) continue;
    if (templates >= kLanes<T>) {
      transpose(bank, size, templates, columns, scratch, templates);
      gemm<T, Prefetch::kNone>(rows, templates, columns, {grad, size, 1}, scratch, templates, grad_weights, templates,
                              {.accumulate = at > first});
    } else {  // too few templates to fill vectors
      const bool add = at > first;
      dots(rows, templates, columns, grad, size, bank, size, add ? scratch : grad_weights, templates);
      for (int64_t i = 0; add && i < rows * templates; ++i) grad_weights[i] += scratch[i];
    }
  }
}

FASTMOD_KERNELS(TemplateMixKernels, .forward = template_mix_forward<T>, .scratch = template_mix_scratch<T>,
                .backward = template_mix_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_template_mix(const at::Tensor& logits, const at::Tensor& bank, int64_t mixing) {
  check_bank(bank);
  check_logits(logits);
  check_like(bank, logits, "logits");
  TORCH_CHECK_VALUE(logits.size(-1) == bank.size(0), "logits: expected [..., ", bank.size(0), "], got ",
                    logits.sizes());
  TORCH_CHECK_VALUE(mixing >= 0 && mixing <= 2, "mixing: expected 0 (softmax), 1 (tanh) or 2 (none), got ", mixing);
}

}  // namespace fastmod

#endif
