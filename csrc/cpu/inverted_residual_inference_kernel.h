// An inverted residual block with given statistics: every batch norm is a scale and a bias, so that an image passes
// through the whole block at once and no expanded tensor leaves the cache.
#pragma once

#include "cpu/inverted_residual_kernel.h"

namespace fastmod::cpu {

template <typename T>
struct InvertedResidualInferenceKernels {
  void (*forward)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

namespace fastmod::cpu::FASTMOD_ISA {

// values = act(scale * values + bias)
template <typename T, typename Act>
FASTMOD_INLINE void affine_row(int64_t count, const T* scale, const T* bias, T* values, const Act& act) {
  by_vectors<T>(count, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    store_lanes(values + c,
                act(load_lanes(scale + c, left) * load_lanes(values + c, left) + load_lanes(bias + c, left)), left);
  });
}

// Overwrites z [P, M] with relu(scale * z + bias) and computes its mean over the pixels.
template <typename T>
void normalise_and_pool(const InvertedResidualArgs<T>& args, int64_t task, T* z, T* mean) {
  const int64_t expanded = args.expanded, size = args.pixels() * expanded;
  by_vectors<T>(expanded, [&](int64_t m, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> scale = load_lanes(args.inner_scale + task * expanded + m, left);
    const Vec<T> bias = load_lanes(args.inner_bias + task * expanded + m, left);
    struct Sum {
      Vec<T> value{};
    };
    Sum total;
    by_pixels<4, Sum>(
        m, size, expanded,
        [&](int64_t p, Sum& sum) FASTMOD_INLINE_LAMBDA {
          const Vec<T> value = maximum<T>(scale * load_lanes(z + p, left) + bias, Vec<T>{});
          store_lanes(z + p, value, left);
          sum.value += value;
        },
        [&](const Sum& sum) FASTMOD_INLINE_LAMBDA { total.value += sum.value; });
    store_lanes(mean + m, total.value * (T(1) / T(args.pixels())), left);
  });
}

// z *= sigmoid(excite(relu(squeeze(mean)))); overwrites `mean`.
template <typename T>
void squeeze_excite(const InvertedResidualArgs<T>& args, int64_t task, T* z, T* mean, T* squeezed) {
  const int64_t expanded = args.expanded, size = args.pixels() * expanded, narrow = args.squeezed;
  multiply<T>(1, expanded, mean, args.squeeze + task * expanded * args.squeeze_columns, args.squeeze_columns, narrow,
              squeezed, narrow);
  affine_row(narrow, args.squeeze_scale + task * narrow, args.squeeze_bias + task * narrow, squeezed,
             [](Vec<T> v) FASTMOD_INLINE_LAMBDA { return maximum<T>(v, Vec<T>{}); });
  multiply<T>(1, narrow, squeezed, args.excite + task * narrow * args.columns, args.columns, expanded, mean, expanded);
  affine_row(expanded, args.excite_scale + task * expanded, args.excite_bias + task * expanded, mean,
             [](Vec<T> v) FASTMOD_INLINE_LAMBDA { return sigmoid<T>(v); });
  by_vectors<T>(expanded, [&](int64_t m, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> gate = load_lanes(mean + m, left);
    for (int64_t p = m; p < size; p += expanded) store_lanes(z + p, load_lanes(z + p, left) * gate, left);
  });
}

template <typename T>
void inverted_residual_inference(const InvertedResidualArgs<T>& args, int64_t image, int64_t task, T* scratch) {
  const InvertedResidualScratch<T> at(args);
  const int64_t channels = args.channels, expanded = args.expanded, size = args.pixels() * channels;
  const int64_t place = (image * args.tasks + task) * size;
  const T *x = args.x + place, *weight = args.taps + task * 9 * args.columns;
  T *y = args.y + place, *z = scratch + at.all, *padded = scratch + at.padded, *mean = scratch + at.row;
  std::fill(padded, padded + (args.high + 2) * at.line, T(0));
  by_groups(args, [&](int64_t m, int64_t width) {
    expand_group(args, task, x, m, width, scratch + at.wide, padded, at.line);
    Tap<T> taps[9];
    for (int64_t t = 0; t < 9; ++t) taps[t] = {t / 3 * at.line + t % 3 * kExpanded, weight + t * args.columns + m};
    for (int64_t oy = 0; oy < args.high; ++oy)
      depthwise_row<T>(args.wide, width, taps, 9, padded + oy * at.line, kExpanded, z + oy * args.wide * expanded + m,
                       expanded, nullptr);
  });
  normalise_and_pool(args, task, z, mean);
  if (args.squeeze) squeeze_excite(args, task, z, mean, mean + args.columns);
  multiply(args.pixels(), expanded, z, args.project + task * expanded * args.narrow_columns, args.narrow_columns,
           channels, y, channels);
  by_vectors<T>(channels, [&](int64_t c, auto left) FASTMOD_INLINE_LAMBDA {
    const Vec<T> scale = load_lanes(args.scale + task * channels + c, left);
    const Vec<T> bias = load_lanes(args.bias + task * channels + c, left);
    for (int64_t p = c; p < size; p += channels)
      store_lanes(y + p, load_lanes(x + p, left) + (scale * load_lanes(y + p, left) + bias), left);
  });
}

FASTMOD_KERNELS(InvertedResidualInferenceKernels, .forward = inverted_residual_inference<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
