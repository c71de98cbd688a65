// The end of a residual block, for images [H, W, C], and the gated sum over experts.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// relu(scale * x + shift + residual), for images [B, E, H * W, C], and its gated sum over experts.
template <typename T>
struct NormSumArgs {
  int64_t experts, pixels, channels;
  bool shared, relu;  // shared: the residual is [B, H * W, C]
  const T *x, *scale, *shift, *residual, *residual_scale, *residual_shift, *gate;
  T* out;  // forward only
  const T* grad;
  T *grad_x, *grad_residual;
  T *grad_scale, *grad_shift, *grad_residual_scale;  // [B, E, C] or null
  T* grad_gate;                                      // [B, E] or null
};

template <typename T>
struct NormSumKernels {
  void (*forward)(const NormSumArgs<T>&, int64_t image);
  void (*backward)(const NormSumArgs<T>&, int64_t image);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

template <typename T, typename Lanes>
FASTMOD_INLINE Vec<T> residual_sum(const NormSumArgs<T>& args, int64_t expert, const T* x, const T* residual, int64_t c,
                                   Lanes left) {
  const int64_t at = expert * args.channels + c;
  Vec<T> sum = load_lanes(args.scale + at, left) * load_lanes(x + c, left) + load_lanes(args.shift + at, left);
  if (residual) {
    const Vec<T> other = load_lanes(residual + c, left);
    if (args.residual_scale)
      sum += load_lanes(args.residual_scale + at, left) * other + load_lanes(args.residual_shift + at, left);
    else
      sum += other;
  }
  return args.relu ? maximum<T>(sum, Vec<T>{}) : sum;
}

template <typename T>
void norm_sum_forward(const NormSumArgs<T>& args, int64_t image) {
  const int64_t channels = args.channels, size = args.pixels * channels, experts = args.experts;
  const T* x = args.x + image * experts * size;
  const T* residual = args.residual ? args.residual + image * (args.shared ? 1 : experts) * size : nullptr;
  const auto residual_of = [&](int64_t e) { return residual ? residual + (args.shared ? 0 : e) * size : nullptr; };
  if (!args.gate) {
    T* out = args.out + image * experts * size;
    for (int64_t e = 0; e < experts; ++e) {
      const T* other = residual_of(e);
      for (int64_t p = 0; p < size; p += channels)
        by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
          const T* beside = other ? other + p : nullptr;
          store_lanes(out + e * size + p + c, residual_sum(args, e, x + e * size + p, beside, c, left), left);
        });
    }
    return;
  }
  T* out = args.out + image * size;
  const T* gate = args.gate + image * experts;
  for (int64_t p = 0; p < size; p += channels)
    by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
      Vec<T> sum{};
      for (int64_t e = 0; e < experts; ++e) {
        const T* other = residual_of(e);
        sum += gate[e] * residual_sum(args, e, x + e * size + p, other ? other + p : nullptr, c, left);
      }
      store_lanes(out + p + c, sum, left);
    });
}

constexpr int64_t kSumPixels = 64;

template <typename T>
void norm_sum_backward(const NormSumArgs<T>& args, int64_t image) {
  const int64_t channels = args.channels, size = args.pixels * channels, experts = args.experts;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t index = image * experts + e, other_index = args.shared ? image : index;
    const T* x = args.x + index * size;
    const T* residual = args.residual ? args.residual + other_index * size : nullptr;
    const T* grad = args.grad + (args.gate ? image : index) * size;
    T* grad_x = args.grad_x ? args.grad_x + index * size : nullptr;
    T* grad_residual = args.grad_residual ? args.grad_residual + other_index * size : nullptr;
    const bool add = args.shared && e > 0;
    const T gate = args.gate ? args.gate[index] : T(1);
    T of_gate = 0;
    by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
      const int64_t at = e * channels + c;
      const Vec<T> scale = load_lanes(args.scale + at, left), shift = load_lanes(args.shift + at, left);
      const bool scaled = args.residual_scale != nullptr;
      const Vec<T> other_scale = scaled ? load_lanes(args.residual_scale + at, left) : splat(T(1));
      const Vec<T> other_shift = scaled ? load_lanes(args.residual_shift + at, left) : Vec<T>{};
      Vec<T> sums{}, of_scale{}, of_shift{}, of_other_scale{};
      for (int64_t first = c; first < size; first += kSumPixels * channels) {
        Vec<T> block{}, block_scale{}, block_shift{}, block_other{};  // short sums first: long ones would lose digits
        for (int64_t p = first; p < std::min(first + kSumPixels * channels, size); p += channels) {
          const Vec<T> in = load_lanes(x + p, left);
          const Vec<T> other = residual ? load_lanes(residual + p, left) : Vec<T>{};
          Vec<T> sum = scale * in + shift;
          if (residual) sum += other_scale * other + other_shift;
          Vec<T> g = load_lanes(grad + p, left);
          if (args.relu) sum = maximum<T>(sum, Vec<T>{});
          block += g * sum;
          g *= gate;
          if (args.relu) g = sum <= Vec<T>{} ? Vec<T>{} : g;
          block_shift += g;
          block_scale += g * in;
          block_other += g * other;
          if (grad_x) store_lanes(grad_x + p, g * scale, left);
          if (grad_residual) {
            const Vec<T> value = g * other_scale;
            store_lanes(grad_residual + p, add ? value + load_lanes(grad_residual + p, left) : value, left);
          }
        }
        sums += block;
        of_scale += block_scale;
        of_shift += block_shift;
        of_other_scale += block_other;
      }
      const int64_t place = index * channels + c;
      if (args.grad_scale) store_lanes(args.grad_scale + place, of_scale, left);
      if (args.grad_shift) store_lanes(args.grad_shift + place, of_shift, left);
      if (args.grad_residual_scale) store_lanes(args.grad_residual_scale + place, of_other_scale, left);
      of_gate += sum_lanes<T>(sums);
    });
    if (args.grad_gate) args.grad_gate[index] = of_gate;
  }
}

FASTMOD_KERNELS(NormSumKernels, .forward = norm_sum_forward<T>, .backward = norm_sum_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_norm_sum(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift,
                           const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& residual_scale,
                           const std::optional<at::Tensor>& residual_shift, const std::optional<at::Tensor>& gate) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5, "x: expected [B, E, C, H, W], got ", x.sizes());
  check_affine(x, scale, x.size(1), "scale");
  check_affine(x, shift, x.size(1), "shift");
  TORCH_CHECK_VALUE(residual_scale.has_value() == residual_shift.has_value() && (residual || !residual_scale),
                    "residual_scale, residual_shift: expected both or none, and a residual beside them");
  check_affine(x, residual_scale, x.size(1), "residual_scale");
  check_affine(x, residual_shift, x.size(1), "residual_shift");
  if (residual) {
    check_like(x, *residual, "residual");
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes() || (residual->dim() == 4 && residual->size(0) == x.size(0) &&
                                                         residual->sizes().slice(1) == x.sizes().slice(2)),
                      "residual: expected ", x.sizes(), " or that without E, got ", residual->sizes());
  }
  if (!gate) return;
  check_like(x, *gate, "gate");
  TORCH_CHECK_VALUE(gate->sizes() == x.sizes().slice(0, 2), "gate: expected [B, E], got ", gate->sizes());
}

}  // namespace fastmod

#endif
