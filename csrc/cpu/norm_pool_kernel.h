// The spatial mean of relu(scale * x + shift), for images [H, W, C].
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

// The spatial mean of relu(scale * x + shift), for images [B, E, H * W, C].
template <typename T>
struct NormPoolArgs {
  int64_t experts, pixels, channels;
  bool relu;
  const T *x, *scale, *shift;
  T* out;  // [B, E, C], forward only
  const T* grad;
  T* grad_x;
  T *grad_scale, *grad_shift;  // [B, E, C]; all three may be null
};

template <typename T>
struct NormPoolKernels {
  void (*forward)(const NormPoolArgs<T>&, int64_t index);  // image * experts + expert
  void (*backward)(const NormPoolArgs<T>&, int64_t index);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

// Calls step(p, sums) for the pixels at p = first, first + channels, .. below size, and add(sums) after every run of
// them. kWays sums in flight hide each other's latency, and short sums lose fewer digits than one long sum.
template <int kWays, typename Sums, typename Step, typename Add>
FASTMOD_INLINE void by_pixels(int64_t first, int64_t size, int64_t channels, const Step& step, const Add& add) {
  constexpr int64_t kRun = 128;
  for (int64_t begin = first; begin < size; begin += kRun * channels) {
    const int64_t end = std::min(size, begin + kRun * channels);
    Sums sums[kWays] = {};
    int64_t p = begin;
    for (; p + (kWays - 1) * channels < end; p += kWays * channels)
#pragma GCC unroll 4
      for (int i = 0; i < kWays; ++i) step(p + i * channels, sums[i]);
    for (; p < end; p += channels) step(p, sums[0]);
#pragma GCC unroll 4
    for (int i = 0; i < kWays; ++i) add(sums[i]);
  }
}

template <typename T>
void norm_pool_forward(const NormPoolArgs<T>& args, int64_t index) {
  const int64_t channels = args.channels, size = args.pixels * channels;
  const int64_t expert = index % args.experts;
  const T* x = args.x + index * size;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const int64_t at = expert * channels + c;
    const Vec<T> scale = load_lanes(args.scale + at, left), shift = load_lanes(args.shift + at, left);
    Vec<T> total{};
    by_pixels<4, Vec<T>>(
        c, size, channels,
        [&](int64_t p, Vec<T>& sum) FASTMOD_INLINE_LAMBDA {
          const Vec<T> value = scale * load_lanes(x + p, left) + shift;
          sum += args.relu ? maximum<T>(value, Vec<T>{}) : value;
        },
        [&](const Vec<T>& sum) FASTMOD_INLINE_LAMBDA { total += sum; });
    store_lanes(args.out + index * channels + c, total / T(args.pixels), left);
  });
}

template <typename T>
void norm_pool_backward(const NormPoolArgs<T>& args, int64_t index) {
  struct Sums {
    Vec<T> count, in;  // of the pixels that passed the relu
  };
  const int64_t channels = args.channels, size = args.pixels * channels;
  const int64_t expert = index % args.experts;
  const T* x = args.x + index * size;
  T* grad_x = args.grad_x ? args.grad_x + index * size : nullptr;
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const int64_t at = expert * channels + c, place = index * channels + c;
    const Vec<T> scale = load_lanes(args.scale + at, left), shift = load_lanes(args.shift + at, left);
    // Every pixel has the same gradient. Leaving it out of the sums makes them counts, which are exact, and sums of x.
    const Vec<T> grad = load_lanes(args.grad + place, left) / T(args.pixels);
    Sums total{};
    by_pixels<2, Sums>(
        c, size, channels,
        [&](int64_t p, Sums& sums) FASTMOD_INLINE_LAMBDA {
          const Vec<T> in = load_lanes(x + p, left);
          Vec<T> passed = splat(T(1)), g = grad;
          if (args.relu) {
            const auto cut = scale * in + shift <= Vec<T>{};  // not a NaN
            passed = cut ? Vec<T>{} : passed;
            g = cut ? Vec<T>{} : g;
          }
          sums.count += passed;
          sums.in += passed * in;
          if (grad_x) store_lanes(grad_x + p, g * scale, left);
        },
        [&](const Sums& sums) FASTMOD_INLINE_LAMBDA {
          total.count += sums.count;
          total.in += sums.in;
        });
    const Vec<T> factor = total.count > Vec<T>{} ? grad : Vec<T>{};  // 0 where none passed: NaNs count as passed
    if (args.grad_scale) store_lanes(args.grad_scale + place, total.in * factor, left);
    if (args.grad_shift) store_lanes(args.grad_shift + place, total.count * factor, left);
  });
}

FASTMOD_KERNELS(NormPoolKernels, .forward = norm_pool_forward<T>, .backward = norm_pool_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

inline void check_norm_pool(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 5 && x.size(3) > 0 && x.size(4) > 0, "x: expected [B, E, C, H, W] with pixels, got ",
                    x.sizes());
  check_affine(x, scale, x.size(1), "scale");
  check_affine(x, shift, x.size(1), "shift");
}

}  // namespace fastmod

#endif
